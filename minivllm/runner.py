"""Runs one StepPlan on the model: encode media, pack, embed, forward, logits, sample.

All scheduled tokens of a step form one flat batch of rows without padding; the attention backend
keeps the requests apart. The runner keeps nothing by request: a plan says everything.

Stages a request may ask for (`Request.capture`), and what the result then holds for the rows of
this step, as numpy arrays (float32, positions int64):

    positions      "positions"       [rows], or [rows, 3] where the request has multimodal positions
    embeddings     "embeddings"      [rows, hidden], those of media in their places
    deepstack      "deepstack.i"     [rows, hidden], added after layer i; 0 at text
    pixel_values   "pixel_values.j"  what the encoder saw of the request's item j, in a step that
                                     computes a token of it
    vision         "vision.j"        [num_embeddings, hidden] of that item, in such a step
    hidden         "hidden.i"        [rows, hidden], after layer i
    logits         "logits"          [1, vocab], in a step that samples
    prompt_logits  "prompt_logits"   [prompt rows, vocab]
    kv             "k.i", "v.i"      [end, kv_heads, head_dim], positions 0 … end - 1 from the cache
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minivllm.attention.base import AttentionBackend, AttentionMetadata, PlannedAttention
from minivllm.attention.kv_cache import KVCache
from minivllm.cache import PendingCopies
from minivllm.errors import InvariantError
from minivllm.media import MediaStore
from minivllm.request import Logprob, SampledToken, ScheduledRequest, StepPlan, StepResult

__all__ = ["CAPTURES", "ModelRunner"]

CAPTURES = (
    "positions",
    "embeddings",
    "deepstack",
    "pixel_values",
    "vision",
    "hidden",
    "logits",
    "prompt_logits",
    "kv",
)
"""Names a request may put in `capture`."""

Stages = dict[str, dict[str, NDArray[np.generic]]]


class Decoder(Protocol):
    """What the runner needs of a model; see `minivllm.models.DecoderModel`."""

    def embed(self, token_ids: Tensor) -> Tensor: ...

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        attention: PlannedAttention,
        observe: Callable[[str, Tensor], None] | None,
        deepstack: Sequence[Tensor],
    ) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class TokenSampler(Protocol):
    """What the runner needs of a sampler; see `minivllm.sampling.Sampler`."""

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[ScheduledRequest],
        sequence_indices: Sequence[int] | None = None,
    ) -> list[SampledToken | str]: ...

    def prompt_logprobs(
        self, logits: Tensor, next_ids: Sequence[int], top: int
    ) -> list[dict[int, Logprob]]: ...


class ModelRunner:
    """Turns plans into results.

    Args:
        model: the decoder, loaded.
        kv_cache: its KV cache, of the model's dtype.
        backend: attention over that cache.
        sampler: chooses tokens from logits.
        device: where model and cache live.
    """

    def __init__(
        self,
        model: Decoder,
        kv_cache: KVCache,
        backend: AttentionBackend,
        sampler: TokenSampler,
        device: torch.device,
    ) -> None:
        self._model = model
        self._cache = kv_cache
        self._backend = backend
        self._sampler = sampler
        self._device = device
        self._media = MediaStore(model)
        self._carried_out = PendingCopies()  # by the latest run

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step: swap_out, swap_in and copies, in this order, evict and encode media,
        then one forward pass.

        A request whose numbers are not finite, or whose media cannot be encoded, is named in
        `failures` and gets no token, nor do its forks; the others are not touched by it.

        Raises:
            InvariantError: the plan contradicts itself.
        """
        self._carried_out = PendingCopies()
        self._cache.swap_out(plan.swap_out)
        self._carried_out = PendingCopies(plan.swap_out)
        self._cache.swap_in(plan.swap_in)
        self._carried_out = PendingCopies(plan.swap_out, plan.swap_in)
        self._cache.copy(plan.copies)
        self._carried_out = PendingCopies(plan.swap_out, plan.swap_in, plan.copies)
        self._media.update(plan.evict_media, plan.encode)
        if not plan.requests:
            return StepResult(samples={})
        batch = _Batch(plan.requests, self._device)
        attention = self._backend.plan(AttentionMetadata.from_requests(plan.requests, self._cache))
        stages: Stages = {r.request_id: {} for r in plan.requests if r.request.capture}

        embeddings = self._model.embed(batch.token_ids)
        embeddings, deepstack, failures = self._media.merge(embeddings, plan.requests, batch.first_row)
        batch.record_positions(stages)
        batch.record(stages, "embeddings", "embeddings", embeddings)
        for layer, rows in enumerate(deepstack):
            batch.record(stages, "deepstack", f"deepstack.{layer}", rows)
        for r in plan.requests:
            if not r.request.capture.isdisjoint(("pixel_values", "vision")):
                stages[r.request_id].update(self._media.stages(r))
        hidden = self._model.forward(
            embeddings,
            batch.positions,
            attention,
            lambda name, rows: batch.record(stages, "hidden", name, rows),
            deepstack,
        )
        failures = {**batch.not_finite(hidden), **failures}
        samples, prompt_logprobs = self._read_logits(batch, hidden, stages, failures)
        for r in plan.requests:
            if "kv" in r.request.capture:
                for layer, (k, v) in enumerate(self.read_kv(r.block_table, r.end)):
                    stages[r.request_id][f"k.{layer}"] = _to_numpy(k)
                    stages[r.request_id][f"v.{layer}"] = _to_numpy(v)
        return StepResult(samples=samples, prompt_logprobs=prompt_logprobs, stages=stages, failures=failures)

    def break_off(self) -> PendingCopies:
        """The latest run will not be committed. Forgets all media; returns the copies it had finished.

        Those must not be done again: what a swap-out read may be overwritten by now.
        """
        self._media.clear()
        return self._carried_out

    @torch.inference_mode()
    def read_kv(self, block_table: Sequence[int], num_tokens: int) -> list[tuple[Tensor, Tensor]]:
        """Per layer k and v of a sequence in logical order, each [num_tokens, kv_heads, head_dim]."""
        return self._cache.read(block_table, num_tokens)

    @torch.inference_mode()
    def read_host_kv(self, host_table: Sequence[int], num_tokens: int) -> list[tuple[Tensor, Tensor]]:
        """The same of a swapped-out sequence, on the CPU."""
        return self._cache.read_host(host_table, num_tokens)

    @torch.inference_mode()
    def poison(self, blocks: Sequence[int], partial: Mapping[int, int]) -> int:
        """Fill unused slots with NaN; see `KVCache.poison`. Returns the number of slots filled."""
        return self._cache.poison(blocks, partial)

    @torch.inference_mode()
    def poison_host(self, blocks: Sequence[int]) -> int:
        """Fill unused host blocks with NaN. Returns the number of slots filled."""
        return self._cache.poison_host(blocks)

    def _read_logits(
        self, batch: _Batch, hidden: Tensor, stages: Stages, failures: dict[str, str]
    ) -> tuple[dict[str, SampledToken], dict[str, list[dict[int, Logprob]]]]:
        """Logits of the rows that need them, in one product, and what follows from them.

        Adds to `stages` and `failures`.
        """
        wanted = {i: _logit_rows(r) for i, r in enumerate(batch.requests)}
        rows = [batch.first_row[i] + offset for i, offsets in wanted.items() for offset in offsets]
        if not rows:
            return {}, {}
        logits = self._model.logits(hidden[torch.tensor(rows, device=self._device)]).to(torch.float32)
        place = {row: index for index, row in enumerate(rows)}

        sampling: list[tuple[ScheduledRequest, int]] = []
        prompt_logprobs: dict[str, list[dict[int, Logprob]]] = {}
        for i, r in enumerate(batch.requests):
            if not wanted[i]:
                continue
            prompt = [place[batch.first_row[i] + offset] for offset in _prompt_rows(r)]
            last = place.get(batch.first_row[i] + r.num_tokens - 1)
            if r.sample and last is None:
                raise InvariantError(f"request {r.request_id!r} samples, yet its last row has no logits")
            mine = [*prompt, last] if last is not None else prompt
            if r.request_id not in failures and not bool(torch.isfinite(logits[mine]).all()):
                failures[r.request_id] = f"logits are not finite (NaN or infinite) before position {r.end}"
            if "prompt_logits" in r.request.capture and prompt:
                stages[r.request_id]["prompt_logits"] = _to_numpy(logits[prompt])
            if r.sample and last is not None:
                if "logits" in r.request.capture:
                    stages[r.request_id]["logits"] = _to_numpy(logits[last : last + 1])
                sampling.append((r, last))
            if r.request_id in failures:
                continue
            next_ids = r.tokens[r.start + 1 : min(r.end + 1, r.num_prompt_tokens)]
            if r.sampling.prompt_logprobs is not None and next_ids:
                prompt_logprobs[r.request_id] = self._sampler.prompt_logprobs(
                    logits[prompt[: len(next_ids)]], next_ids, r.sampling.prompt_logprobs
                )
        return self._sample(logits, sampling, failures), prompt_logprobs

    def _sample(
        self, logits: Tensor, sampling: list[tuple[ScheduledRequest, int]], failures: dict[str, str]
    ) -> dict[str, SampledToken]:
        """Draw a token for each healthy request and each of its forks, from the same row of logits.

        The sampler's refusals join `failures`; a request that is refused has no forks.
        """
        draws = [
            (r, row, name, index)
            for r, row in sampling
            if r.request_id not in failures
            for name, index in _sequences(r)
        ]
        if not draws:
            return {}
        rows, indices = [row for _, row, _, _ in draws], [index for _, _, _, index in draws]
        drawn = self._sampler.sample(logits[rows], [r for r, _, _, _ in draws], indices)
        refused = {
            r.request_id: token
            for (r, _, _, _), token in zip(draws, drawn, strict=True)
            if isinstance(token, str)
        }
        failures.update(refused)
        return {
            name: token
            for (r, _, name, _), token in zip(draws, drawn, strict=True)
            if r.request_id not in refused and not isinstance(token, str)
        }


class _Batch:
    """The packed rows of one step."""

    def __init__(self, requests: Sequence[ScheduledRequest], device: torch.device) -> None:
        self.requests = requests
        self.first_row: list[int] = []
        token_ids: list[int] = []
        for r in requests:
            self.first_row.append(len(token_ids))
            token_ids += r.tokens[r.start : r.end]
        if len(token_ids) != sum(r.num_tokens for r in requests):
            raise InvariantError("the plan schedules tokens that are not known yet")
        self.token_ids = torch.tensor(token_ids, dtype=torch.int64, device=device)
        positions = [_positions(r) for r in requests]
        if any(rows.ndim == 2 for rows in positions):
            packed = np.concatenate(
                [np.broadcast_to(rows, (3, rows.shape[-1])) for rows in positions], axis=1
            )
        else:
            packed = np.concatenate(positions)
        self.positions = torch.from_numpy(packed).to(device)

    def per_request(self, rows: Tensor) -> Iterator[tuple[ScheduledRequest, Tensor]]:
        for r, first in zip(self.requests, self.first_row, strict=True):
            yield r, rows[first : first + r.num_tokens]

    def record_positions(self, stages: Stages) -> None:
        """Keep each request's positions, rows first, where it asked for them."""
        for r in self.requests if stages else ():
            if "positions" in r.request.capture:
                stages[r.request_id]["positions"] = _positions(r).T.copy()

    def record(self, stages: Stages, capture: str, name: str, rows: Tensor) -> None:
        """Keep a copy of each request's rows under `name`, where it asked for `capture`."""
        for r, mine in self.per_request(rows) if stages else ():
            if capture in r.request.capture:
                stages[r.request_id][name] = _to_numpy(mine)

    def not_finite(self, hidden: Tensor) -> dict[str, str]:
        """Request id → message for requests with a row that is not finite.

        Checked at every step, not only before sampling: blocks of such a request must not enter
        the prefix cache.
        """
        finite = torch.isfinite(hidden).all(dim=-1)
        if bool(finite.all()):
            return {}
        failures = {}
        for r, mine in self.per_request(finite):
            if not bool(mine.all()):
                position = r.start + int((~mine).nonzero()[0])
                failures[r.request_id] = (
                    f"hidden state is not finite (NaN or infinite) at position {position}"
                )
        return failures


def _positions(r: ScheduledRequest) -> NDArray[np.int64]:
    """Positions of the rows of a request in this step: [rows], or [3, rows] for multimodal rope."""
    request = r.request
    if request.positions is None:
        return np.arange(r.start, r.end, dtype=np.int64)
    prompt: NDArray[np.int64] = request.positions[:, r.start : min(r.end, r.num_prompt_tokens)]
    generated = np.arange(max(r.start, r.num_prompt_tokens), r.end, dtype=np.int64) + request.position_delta
    return np.concatenate([prompt, np.broadcast_to(generated, (3, len(generated)))], axis=1)


def _sequences(r: ScheduledRequest) -> list[tuple[str, int]]:
    """(request id, sequence index) of whoever gets a token from the last row of `r`."""
    return [(r.request_id, r.request.sequence_index), *((name, i) for i, name in enumerate(r.fork_ids, 1))]


def _prompt_rows(r: ScheduledRequest) -> range:
    """Offsets of the rows at prompt positions whose logits are asked for."""
    asked = r.sampling.prompt_logprobs is not None or "prompt_logits" in r.request.capture
    return range(max(0, min(r.num_tokens, r.num_prompt_tokens - r.start)) if asked else 0)


def _logit_rows(r: ScheduledRequest) -> list[int]:
    """Offsets of all rows of a request that need logits, ascending."""
    return sorted({*_prompt_rows(r), *([r.num_tokens - 1] if r.sample else [])})


def _to_numpy(rows: Tensor) -> NDArray[np.generic]:
    """A copy on the host: integers as they are, everything else as float32 (exact from bfloat16)."""
    wide = rows if rows.dtype == torch.int64 else rows.to(torch.float32)
    array: NDArray[np.generic] = wide.to("cpu", copy=True).numpy()
    return array
