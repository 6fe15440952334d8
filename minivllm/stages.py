"""Collects what requests captured, across steps."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minivllm.request import ScheduledRequest, StepPlan, StepResult

__all__ = ["StageStore"]

Array = NDArray[np.generic]

#: Stages that are not about the rows of one step: KV read back from the cache, whole media items.
_WHOLE = ("k.", "v.", "pixel_values.", "vision.")


class StageStore:
    """Captured stages by request, joined over chunks, decode steps and recomputation.

    Rows are placed by the position they belong to, so what is computed again after a preemption
    replaces what was there. Rows that were never computed (their tokens came from the prefix
    cache) are NaN, or -1 in integer stages.
    """

    def __init__(self) -> None:
        self._pieces: dict[str, dict[str, list[tuple[int, Array]]]] = {}
        self._forks: dict[str, tuple[str, ...]] = {}

    def collect(self, plan: StepPlan, result: StepResult) -> None:
        """Take the stages of one step. Stage arrays have their rows on axis 0.

        Sequences forked in this step begin with all that was captured before they parted.
        """
        for row in plan.requests:
            for name, array in result.stages.get(row.request_id, {}).items():
                stages = self._pieces.setdefault(row.request_id, {})
                if name.startswith(_WHOLE):  # all of it, whatever the rows of this step
                    stages[name] = [(0, array)]
                else:
                    stages.setdefault(name, []).append((_first_row(name, row), array))
            if row.fork_ids and row.request_id in self._pieces:
                self._forks[row.request_id] = row.fork_ids
                for fork in row.fork_ids:
                    shared = self._pieces[row.request_id]
                    self._pieces[fork] = {name: list(pieces) for name, pieces in shared.items()}

    def get(self, request_id: str) -> dict[str, Array]:
        """Stage name → array over positions from 0 ("logits": over generated positions).

        Empty if nothing was captured. The arrays are the caller's to keep.
        """
        return {name: _join(pieces) for name, pieces in self._pieces.get(request_id, {}).items()}

    def drop(self, request_id: str) -> None:
        """Forget a request's stages and those of its forks, if there are any."""
        for name in (request_id, *self._forks.pop(request_id, ())):
            self._pieces.pop(name, None)


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
