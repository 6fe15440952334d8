"""Log-probabilities of one row, with ranks."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from minivllm.request import Logprob
from minivllm.sampling.filters import most_likely

__all__ = ["describe"]


def describe(
    logits: NDArray[np.float32], logprobs: NDArray[np.float32], chosen: Iterable[int], top: int
) -> dict[int, Logprob]:
    """Logprobs of the `chosen` ids, then of the `top` most likely ones (-1: the whole vocabulary).

    Ranks come from `logits`: rounding in log-softmax can make tokens equal that are not. Rank 1
    is the most likely; equal logits rank by id.
    """
    found = {
        token_id: Logprob(float(logprobs[token_id]), rank=_rank(logits, token_id)) for token_id in chosen
    }
    count = len(logits) if top == -1 else top
    for rank, token_id in enumerate(most_likely(logits, count).tolist(), start=1):
        if token_id not in found:
            found[token_id] = Logprob(float(logprobs[token_id]), rank=rank)
    return found


def _rank(logits: NDArray[np.float32], token_id: int) -> int:
    value = logits[token_id]
    above = int(np.count_nonzero(logits > value))
    equal_before = int(np.count_nonzero(logits[:token_id] == value))
    return above + equal_before + 1
