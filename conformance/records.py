"""Golden records: what Hugging Face answered, how exact that answer is, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["ArmError", "GoldenRecord", "LogitTable", "Yardstick"]


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
        stages: stage name → array, for traced cases: "positions" [n], "embeddings" [n, hidden],
            "hidden.i" after layer i, "final" after the last norm, "k.i" and "v.i" [n, kv heads,
            head_dim], "logits" [generated, vocab]; n = prompt + generated - 1 positions.
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
