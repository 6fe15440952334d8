"""Collects what requests captured, across steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minivllm.request import ScheduledRequest, StepPlan, StepResult

__all__ = ["StageStore"]

Array = NDArray[np.generic]


class StageStore:
    """Captured stages by request, joined over chunks, decode steps and recomputation.

    Rows are placed by the position they belong to, so what is computed again after a preemption
    replaces what was there. Rows that were never computed (their tokens came from the prefix
    cache) are NaN, or -1 in integer stages.
    """

    def __init__(self) -> None:
        self._pieces: dict[str, dict[str, list[tuple[int, Array]]]] = {}

    def collect(self, plan: StepPlan, result: StepResult) -> None:
        """Take the stages of one step. Stage arrays have their rows on axis 0."""
        for row in plan.requests:
            for name, array in result.stages.get(row.request_id, {}).items():
                stages = self._pieces.setdefault(row.request_id, {})
                if name.startswith(("k.", "v.")):  # all positions, read back from the cache
                    stages[name] = [(0, array)]
                else:
                    stages.setdefault(name, []).append((_first_row(name, row), array))

    def get(self, request_id: str) -> dict[str, Array]:
        """Stage name → array over positions from 0 ("logits": over generated positions).

        Empty if nothing was captured. The arrays are the caller's to keep.
        """
        return {name: _join(pieces) for name, pieces in self._pieces.get(request_id, {}).items()}

    def drop(self, request_id: str) -> None:
        """Forget a request's stages, if there are any."""
        self._pieces.pop(request_id, None)


def _first_row(name: str, row: ScheduledRequest) -> int:
    return len(row.tokens) - row.num_prompt_tokens if name == "logits" else row.start


def _join(pieces: list[tuple[int, Array]]) -> Array:
    first = pieces[0][1]
    length = max(start + len(array) for start, array in pieces)
    unknown = np.nan if np.issubdtype(first.dtype, np.floating) else -1
    joined: Array = np.full((length, *first.shape[1:]), unknown, dtype=first.dtype)
    for start, array in pieces:
        joined[start : start + len(array)] = array
    return joined
