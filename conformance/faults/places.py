"""Faults of where pictures stand in a prompt, and of the encoder cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from conformance.faults.base import GREEDY, VLLM, Seam, Table
from conformance.faults.pictures import hash_fault, one
from minivllm import media as media_module
from minivllm import runner as runner_module
from minivllm.cache import EncoderCache
from minivllm.layers import rope as rope_module
from minivllm.media import MediaStore
from minivllm.models.vlm import MediaEmbeddings
from minivllm.multimodal import inputs as inputs_module
from minivllm.multimodal import qwen_vl as qwen_module
from minivllm.scheduler import Scheduler

__all__ = ["ENCODER_CACHE", "PLACES"]

PLACES = Table("picture-places")
ENCODER_CACHE = Table("encoder-cache")

MLX_VLM = "https://github.com/Blaizzy/mlx-vlm"


# --- places in the prompt ------------------------------------------------------------------------


def _position_fault(seam: Seam, change: Callable[[Any, int, Any], Any]) -> None:
    """Other positions: `change(positions, delta, spans)` → (positions, delta)."""

    def positions(self: Any, token_ids: Any, spans: Any, items: Any) -> Any:
        found = genuine(self, token_ids, spans, items)
        if found is None:
            return None
        seam.fire()
        return change(found[0].copy(), found[1], spans)

    genuine = seam.set(qwen_module.Qwen2VLProcessor, "positions", positions)


@PLACES.add(
    "positions-of-text-only",
    one("tiny-qwen2-5-vl"),
    origin="https://github.com/huggingface/transformers/pull/40490",
    at="Qwen2VLProcessor.positions: axes",
    detector=GREEDY,
)
def _one_axis(seam: Seam) -> None:
    """Every token has its index as position on all three axes."""
    _position_fault(seam, lambda p, d, _: (np.tile(np.arange(p.shape[1]), (3, 1)), 0 * d))


@PLACES.add(
    "rows-and-columns-exchanged",
    one("tiny-qwen3-vl"),
    origin="first principles: height and width exchanged",
    at="Qwen2VLProcessor.positions: height and width",
    detector=GREEDY,
)
def _exchanged(seam: Seam) -> None:
    """Height is taken for width."""
    _position_fault(seam, lambda p, d, _: (p[[0, 2, 1]], d))


@PLACES.add(
    "delta-of-the-request-before",
    "vision/batch-of-image-text-image[model=tiny-qwen2-vl]",
    origin="https://github.com/huggingface/transformers/pull/43952",
    at="Qwen2VLProcessor.positions: delta",
    detector=GREEDY,
)
def _stale_delta(seam: Seam) -> None:
    """Generated tokens go on from the delta of the request before."""
    before = [0]

    def stale(positions: Any, delta: int, _: Any) -> Any:
        kept, before[0] = before[0], delta
        return positions, kept

    _position_fault(seam, stale)


@PLACES.add(
    "tokens-counted-as-positions",
    one("tiny-qwen2-vl"),
    origin="https://github.com/ggml-org/llama.cpp/pull/22439",
    at="Qwen2VLProcessor._span_positions: next position",
    detector=GREEDY,
)
def _count(seam: Seam) -> None:
    """Text behind a picture goes on by the picture's tokens, not by its longer side."""

    def span_positions(self: Any, span: Any, item: Any) -> Any:
        placed, length = genuine(self, span, item)
        seam.fire(length != span.length)
        return placed, span.length

    genuine = seam.set(qwen_module.Qwen2VLProcessor, "_span_positions", span_positions)


@PLACES.add(
    "seconds-of-a-video-dropped",
    "vision/video-rates[model=tiny-qwen2-5-vl]",
    origin=f"{VLLM}/pull/47736",
    at="Qwen25VLProcessor._seconds_per_group: fps",
    detector=GREEDY,
)
def _fps(seam: Seam) -> None:
    """Frames of a video are equally far apart however fast it is."""

    def seconds(self: Any, video: Any) -> float:
        seam.fire(video.fps not in (None, 2.0))
        return float(self._vision.tower.temporal_patch_size / 2.0)

    seam.set(qwen_module.Qwen25VLProcessor, "_seconds_per_group", seconds)


@PLACES.add(
    "positions-of-the-prompt-only",
    "vision/only-resumed-requests-in-a-step[model=tiny-qwen2-vl]",
    origin="https://github.com/sgl-project/sglang/pull/13700",
    at="runner._positions: outputs that are computed again",
    detector=GREEDY,
)
def _not_extended(seam: Seam) -> None:
    """What a resumed request had generated is computed again at its index, without the delta."""

    def positions(r: Any) -> Any:
        found = genuine(r)
        if r.request.num_preemptions and r.request.positions is not None and r.end > r.num_prompt_tokens:
            behind = max(0, r.num_prompt_tokens - r.start)
            seam.fire(r.num_tokens > 1)
            if r.num_tokens > 1:
                found = found.copy()
                found[:, behind:] -= r.request.position_delta
        return found

    genuine = seam.set(runner_module, "_positions", positions)


@PLACES.add(
    "rows-start-anew-in-each-chunk",
    "vision/mixed-step[model=tiny-qwen2-vl]",
    origin=f"{MLX_VLM}/pull/2296",
    at="media._pieces: first row of a chunk",
    detector=GREEDY,
)
def _rows_restart(seam: Seam) -> None:
    """A chunk inside a picture is given the picture's first rows again."""

    def pieces(r: Any, first_row: int) -> Iterator[Any]:
        for piece in genuine(r, first_row):
            seam.fire(piece.first)
            yield piece._replace(first=0, last=piece.last - piece.first)

    genuine = seam.set(media_module, "_pieces", pieces)


@PLACES.add(
    "deepstack-starts-anew-in-each-chunk",
    "vision/chunks[model=tiny-qwen3-vl]",
    origin=f"{MLX_VLM}/pull/1332",
    at="MediaStore._find: deepstack rows of a chunk",
    detector="same_under",
)
def _deepstack_restart(seam: Seam) -> None:
    """Features for deeper layers start at the picture's first row in every chunk."""
    first = [0]

    def pieces(r: Any, first_row: int) -> Iterator[Any]:
        for piece in genuine_pieces(r, first_row):
            first[0] = piece.first
            yield piece

    def find(self: MediaStore, item: Any, like: Any) -> Any:
        found = genuine(self, item, like)
        if isinstance(found, MediaEmbeddings) and found.deepstack:
            seam.fire(first[0])
            return MediaEmbeddings(found.rows, tuple(part.roll(first[0], 0) for part in found.deepstack))
        return found

    genuine_pieces = seam.set(media_module, "_pieces", pieces)
    genuine = seam.set(MediaStore, "_find", find)


@PLACES.add(
    "deepstack-left-out",
    one("tiny-qwen3-vl"),
    origin=f"{MLX_VLM}/pull/1332 (detail lost)",
    at="MediaStore._find: deepstack",
    detector=GREEDY,
)
def _no_deepstack(seam: Seam) -> None:
    """Deeper layers are given nothing of the picture."""

    def find(self: MediaStore, item: Any, like: Any) -> Any:
        found = genuine(self, item, like)
        if isinstance(found, MediaEmbeddings) and found.deepstack:
            seam.fire()
            return MediaEmbeddings(found.rows, tuple(torch.full_like(d, -0.0) for d in found.deepstack))
        return found

    genuine = seam.set(MediaStore, "_find", find)


@PLACES.add(
    "pictures-in-each-others-places",
    "vision/two-images-both-orders[model=tiny-qwen2-vl]",
    "vision/two-images-both-orders[model=tiny-llava]",
    origin=f"{MLX_VLM}/pull/377",
    at="media._pieces: item of a span",
    detector=GREEDY,
)
def _scatter(seam: Seam) -> None:
    """Two pictures of a prompt that are equally long are given each other's rows."""

    def pieces(r: Any, first_row: int) -> Iterator[Any]:
        items = list(r.request.media_items.values())
        for piece in genuine(r, first_row):
            others = [
                i for i in items if i is not piece.item and i.num_embeddings == piece.item.num_embeddings
            ]
            seam.fire(others)
            yield piece._replace(item=others[0]) if others else piece

    genuine = seam.set(media_module, "_pieces", pieces)


@PLACES.add(
    "pictures-before-the-text",
    "vision/chat-parts[model=tiny-qwen2-vl]",
    origin="https://github.com/OpenGVLab/InternVL/issues/1065",
    at="inputs._parts: order",
    detector=GREEDY,
)
def _parts_order(seam: Seam) -> None:
    """Pictures of a message are moved before its text."""

    def parts(content: Any, media: Any) -> Iterator[Any]:
        found = list(genuine(content, media))
        ordered = sorted(found, key=lambda part: part["type"] == "text")
        seam.fire(ordered != found)
        yield from ordered

    genuine = seam.set(inputs_module, "_parts", parts)


@PLACES.add(
    "merged-by-token-id",
    "vision/generated-placeholder",
    origin=f"{VLLM}/issues/15764",
    at="MediaStore.merge: placeholders by id",
    detector="history",
)
def _by_id(seam: Seam) -> None:
    """Every token with the id of a placeholder is taken for one, also when the model generated it."""

    def merge(self: MediaStore, embeddings: Any, requests: Any, first_rows: Any) -> Any:
        for r in requests:
            if not r.request.media:
                continue
            token = r.tokens[r.request.media[0].start]
            found = sum(r.tokens[i] == token for i in range(r.start, r.end))
            rows = sum(piece.last - piece.first for piece in media_module._pieces(r, 0))
            if found != rows:
                seam.fire()
                raise ValueError(f"attempted to assign {rows} multimodal tokens to {found} placeholders")
        return genuine(self, embeddings, requests, first_rows)

    genuine = seam.set(MediaStore, "merge", merge)


@PLACES.add(
    "sections-that-overrun",
    one("tiny-qwen3-vl"),
    origin="first principles: sections of the multimodal rope read one place off",
    at="rope._axes: sections that overrun",
    detector=GREEDY,
    equivalent="Interleaved, height and width take every third frequency up to three times their section. "
    "With 16 frequencies a section of 6 would go on to number 16 and 17, which are not there: the same five "
    "remain as with a section of 5, and the rest is time in both.",
)
def _overrun(seam: Seam) -> None:
    """Sections 6, 5, 5 of the multimodal rope are read as 4, 6, 6."""
    seam.fresh_models()

    def axes(rope: Any, num_frequencies: int) -> Any:
        overrun = rope.mrope_interleaved and tuple(rope.mrope_section) == (6, 5, 5)
        seam.fire(overrun)
        return genuine(replace(rope, mrope_section=(4, 6, 6)) if overrun else rope, num_frequencies)

    genuine = seam.set(rope_module, "_axes", axes)


# --- encoder cache -------------------------------------------------------------------------------


@ENCODER_CACHE.add(
    "dropped-too-early",
    "vision/shared-image-first-finishes[model=tiny-qwen2-vl]",
    "vision/mixed-step[model=tiny-qwen2-vl]",
    origin=f"{VLLM}/pull/39544",
    at="MediaStore.merge: what is held",
    detector="history",
)
def _dropped(seam: Seam) -> None:
    """Embeddings of a picture are dropped after the step that made them, though others still need them."""

    def merge(self: MediaStore, embeddings: Any, requests: Any, first_rows: Any) -> Any:
        found = genuine(self, embeddings, requests, first_rows)
        seam.fire(self._held)
        self._held.clear()
        return found

    genuine = seam.set(MediaStore, "merge", merge)


@ENCODER_CACHE.add(
    "survives-a-weight-update",
    "vision/exchanged-tower-weights",
    origin="https://github.com/huggingface/trl/issues/7198",
    at="Scheduler.reset_encoder_cache: stale embeddings",
    detector="happened",
)
def _survives(seam: Seam) -> None:
    """After a weight update pictures keep the embeddings of the old weights."""
    seam.set(Scheduler, "reset_encoder_cache", lambda self: seam.fire(self.encoder_cache.held))


@ENCODER_CACHE.add(
    "budget-ignored",
    "vision/encoder-budget-of-one-image[model=tiny-qwen2-vl]",
    origin="https://github.com/sgl-project/sglang/issues/31205",
    at="EncoderCache.most_tokens: budget",
    detector="history",
)
def _no_budget(seam: Seam) -> None:
    """A step computes pictures beyond what the encoder cache can hold."""

    def most(self: EncoderCache, request: Any, start: int, num_tokens: int) -> int:
        seam.fire(genuine(self, request, start, num_tokens) < num_tokens)
        return num_tokens

    genuine = seam.set(EncoderCache, "most_tokens", most)


@ENCODER_CACHE.add(
    "encoded-for-each-request",
    "vision/one-image-for-many[model=tiny-qwen2-vl]",
    origin="https://github.com/sgl-project/sglang/issues/2151 (what identifies a picture)",
    at="content_hash: a number that grows",
    detector="happened",
)
def _each_time(seam: Seam) -> None:
    """The same picture is encoded again for every request."""
    count = iter(range(10**9))
    hash_fault(seam, lambda p: (*p[:3], [*p[3], str(next(count)).encode()], p[4]))


@ENCODER_CACHE.add(
    "pictures-of-a-step-share-the-first",
    "vision/equal-and-unequal-images-in-one-step[model=tiny-qwen2-vl]",
    origin="https://github.com/EricLBuehler/mistral.rs/issues/2323",
    at="MediaStore.update: items of one step",
    detector=GREEDY,
)
def _share_first(seam: Seam) -> None:
    """Of several pictures of one size in a step only the first is encoded."""

    def update(self: MediaStore, evict: Any, encode: Any) -> None:
        encode = list(encode)
        genuine(self, evict, encode)
        for item in encode[1:]:
            if item.num_embeddings == encode[0].num_embeddings:
                seam.fire()
                self._held[item.content_hash] = self._held[encode[0].content_hash]

    genuine = seam.set(MediaStore, "update", update)
