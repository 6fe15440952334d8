"""Which tokens may be drawn, and the draw. One row at a time, in float64.

Ties are always broken towards the lower id: sorts are stable, and nothing here uses a top-k
primitive, whose order among equals is unspecified.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minivllm.request import SamplingParams

__all__ = ["draw", "filter_tokens", "most_likely"]


def most_likely(values: NDArray[np.floating], k: int) -> NDArray[np.intp]:
    """Indices of the k largest values (all, if there are fewer), largest first, ties by index."""
    if k >= len(values):
        return np.argsort(-values, kind="stable")
    if k == 0:
        return np.empty(0, dtype=np.intp)
    smallest_kept = np.partition(values, -k)[-k]
    candidates = np.flatnonzero(values >= smallest_kept)
    return candidates[np.argsort(-values[candidates], kind="stable")[:k]]


def filter_tokens(
    logits: NDArray[np.float64], sampling: SamplingParams
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Apply temperature, min_p, top_k and top_p, in this order (vLLM's).

    Args:
        logits: [vocab], adjusted, with a finite maximum; -inf for tokens that are ruled out.
        sampling: temperature must be positive.

    Returns:
        ids: the kept token ids, ascending; never empty.
        weights: their unnormalised probabilities (the most likely token's is 1).

    top_p is measured on what top_k left: the smallest set of most likely tokens whose share of
    the remaining probability reaches top_p.
    """
    # Relative to the maximum, so that any temperature is safe: the largest weight is exactly 1.
    with np.errstate(over="ignore"):  # beyond the range the quotient is -inf and the weight 0, rightly
        weights = np.exp((logits - logits.max()) / sampling.temperature)
    ids: NDArray[np.intp] = np.arange(len(logits))
    if sampling.min_p > 0:
        ids = np.flatnonzero(weights >= sampling.min_p)
    if sampling.top_k > 0:
        ids = ids[most_likely(logits[ids], sampling.top_k)]
    if sampling.top_p < 1:
        total = weights[ids].sum()
        # Tokens below this weight hold less than half of the mass that top_p leaves out, so they
        # are never needed; leaving them out first makes the sort cheap.
        ids = np.sort(ids[weights[ids] >= (1 - sampling.top_p) * total / (2 * len(ids))])
        ids = ids[most_likely(logits[ids], len(ids))]
        mass = np.cumsum(weights[ids])
        mass_before = np.concatenate(([0.0], mass[:-1]))
        ids = ids[mass_before < sampling.top_p * total]
    ids = np.sort(ids)
    return ids, weights[ids]


def draw(ids: NDArray[np.intp], weights: NDArray[np.float64], number: float) -> int:
    """The token at quantile `number` in [0, 1) of the distribution, in order of ids."""
    mass = np.cumsum(weights)
    # number < 1 keeps the target below the last sum; "right" passes over tokens of weight 0.
    return int(ids[np.searchsorted(mass, number * mass[-1], side="right")])
