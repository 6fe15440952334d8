"""Golden records: what Hugging Face answered, how exact that answer is, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ArmError",
    "GoldenRecord",
    "LogitTable",
    "MediaRecord",
    "SpanRecord",
    "Yardstick",
    "media_embeddings",
    "prompt_embeddings",
]


@dataclass(frozen=True, slots=True)
class ArmError:
    """Error of one correct way to compute, against the truth, over positions × top-20 ids."""

    rms: float
    max: float


@dataclass(frozen=True, slots=True)
class Yardstick:
    """How far correct float32 (or bfloat16) computations of this case lie from the truth.

    `arms` maps "eager_cached", "eager_full", "sdpa", "eager_rope64" to their errors.
    """

    arms: Mapping[str, ArmError]

    @property
    def R(self) -> float:  # noqa: N802  (the letter used in every report and in the docs)
        """Largest rms error of the arms, in logits."""
        return max(a.rms for a in self.arms.values())

    @property
    def M(self) -> float:  # noqa: N802  (the letter used in every report and in the docs)
        """Largest single error of the arms, in logits."""
        return max(a.max for a in self.arms.values())


@dataclass(frozen=True, slots=True)
class LogitTable:
    """The truth's logits at some positions, cut to each position's top ids.

    Attributes:
        top_ids: [positions, k] int64, most likely first.
        top_logits: [positions, k] float64, raw logits.
        logsumexp: [positions] float64 over the whole vocabulary, so logprob = logit - logsumexp.
    """

    top_ids: NDArray[np.int64]
    top_logits: NDArray[np.float64]
    logsumexp: NDArray[np.float64]

    @property
    def margins(self) -> NDArray[np.float64]:
        """[positions] top-1 minus top-2 logit."""
        return self.top_logits[:, 0] - self.top_logits[:, 1]

    def __len__(self) -> int:
        return len(self.logsumexp)


@dataclass(frozen=True, slots=True)
class SpanRecord:
    """A run of placeholder tokens in the prompt.

    Attributes:
        start, length: in prompt token ids.
        item: which picture or video of the prompt it belongs to.
        first_row: which of the item's embeddings its first token takes.
    """

    start: int
    length: int
    item: int
    first_row: int


@dataclass(frozen=True, slots=True)
class MediaRecord:
    """What Hugging Face made of a prompt's pictures and videos.

    Attributes:
        items: per picture or video, in the order of the prompt: "modality", "digests" of its files,
            "names" they had when recorded, "rows" (embeddings), and per family "grid_thw",
            "fps", "size" of the picture.
        spans: where their embeddings stand.
        processor, image_processor: the classes that made the model's inputs; the latter's name
            tells the backend.
        positions: [prompt tokens, 3] int64 (time, height, width) under M-RoPE, else None.
        position_delta: what is added to the index of a generated token to get its position.
    """

    items: tuple[Mapping[str, Any], ...]
    spans: tuple[SpanRecord, ...]
    processor: str
    image_processor: str
    positions: NDArray[np.int64] | None = None
    position_delta: int = 0


@dataclass(frozen=True, slots=True)
class GoldenRecord:
    """One request and the truth about it.

    Attributes:
        key: SHA-256 of the canonical request; what a scenario's request is looked up by.
        model: model name, as in `conformance models list`.
        case: file name of the record below golden/records/<model>/.
        request: the canonical request (model, dtype, prompt source, max_tokens, ignore_eos, …).
        provenance: versions, weights SHA-256, recipe, platform, recorded date.
        dtype: "float32" or "bfloat16": which weights the truth used, which arms the yardstick.
        prompt_token_ids, token_ids, text, finish_reason, stop_reason: the truth's answer.
        output: logits that chose each generated token; row i chose token_ids[i].
        prompt: logits at prompt positions, when prompt logprobs are asked; row i predicts
            prompt token i + 1.
        stages: stage name → array, for traced cases: "positions" [n] (or [n, 3] under M-RoPE),
            "embeddings" [n, hidden] with those of pictures in their places, "deepstack.i"
            [n, hidden] added after layer i, "hidden.i" after layer i, "final" after the last norm,
            "k.i" and "v.i" [n, kv heads, head_dim], "logits" [generated, vocab]; n = prompt +
            generated - 1 positions. "pixels" is what the image processor made of the pictures.
        stage_bands: stage name → error of correct full forward passes in the record's dtype
            (largest of eager and sdpa) against the truth, over all values of the stage.
    """

    schema: int
    edition: str
    key: str
    model: str
    case: str
    request: Mapping[str, Any]
    provenance: Mapping[str, Any]
    dtype: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stop_reason: int | str | None
    output: LogitTable
    yardstick: Yardstick
    prompt: LogitTable | None = None
    stages: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    stage_bands: Mapping[str, ArmError] = field(default_factory=dict)
    media: MediaRecord | None = None


def media_embeddings(record: GoldenRecord, item: int) -> tuple[NDArray[np.float32], ...]:
    """What the vision side makes of one picture or video, from a traced record.

    Returns:
        [rows, hidden], and as much again per layer with deepstack rows.

    Raises:
        ValueError: the record is not traced, or has no such item.
    """
    name = f"{record.model}/{record.case}"
    if record.media is None or item >= len(record.media.items) or "embeddings" not in record.stages:
        raise ValueError(f"{name} holds no embeddings of picture {item}: record it traced")
    stages = ["embeddings", *sorted(name for name in record.stages if name.startswith("deepstack."))]
    return tuple(_rows_of(record.stages[stage], record.media, item) for stage in stages)


def _rows_of(stage: NDArray[Any], media: MediaRecord, item: int) -> NDArray[np.float32]:
    rows = np.zeros((media.items[item]["rows"], stage.shape[1]), np.float32)
    for span in media.spans:
        if span.item == item:
            rows[span.first_row : span.first_row + span.length] = stage[span.start : span.start + span.length]
    return rows


def prompt_embeddings(record: GoldenRecord) -> NDArray[np.float32]:
    """[prompt tokens, hidden] of a traced record.

    Raises:
        ValueError: the record is not traced.
    """
    if "embeddings" not in record.stages:
        raise ValueError(f"{record.model}/{record.case} holds no embeddings: record it traced")
    rows: NDArray[np.float32] = record.stages["embeddings"][: len(record.prompt_token_ids)]
    return rows
