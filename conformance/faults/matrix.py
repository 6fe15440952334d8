"""Judges many faults, in several processes."""

from __future__ import annotations

import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache

import torch

from conformance.faults import FAULTS
from conformance.faults.base import Fault
from conformance.faults.laboratory import Laboratory
from conformance.kill_matrix import Row

__all__ = ["choose", "judge_all"]


def choose(words: Sequence[str]) -> tuple[Fault, ...]:
    """The faults with one of these areas or ids; all of them for none.

    Raises:
        LookupError: a word is neither.
    """
    for word in words:
        if not any(word in (fault.area, fault.id) for fault in FAULTS):
            areas = ", ".join(sorted({fault.area for fault in FAULTS}))
            raise LookupError(f"{word!r} is neither the id of a fault nor an area ({areas})")
    return tuple(fault for fault in FAULTS if not words or {fault.area, fault.id} & set(words))


def judge_all(
    faults: Sequence[Fault], jobs: int, progress: Callable[[Row], object] | None = None
) -> list[Row]:
    """A row per fault, in order of id.

    Args:
        jobs: processes; 1 judges in this one.
        progress: called with each row when it is there.

    Raises:
        FaultError: see `Laboratory.judge`.
    """
    rows: list[Row] = []

    def take(found: Sequence[Row]) -> None:
        for row in found:
            rows.append(row)
            if progress is not None:
                progress(row)

    groups = _groups(faults)
    if jobs == 1:
        for group in groups:
            take(_judge(group))
    else:
        # Not forked: a fork would copy the locks of torch's threads.
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(
            jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            futures = [pool.submit(_judge, group) for group in groups]
            try:
                for future in as_completed(futures):
                    take(future.result())
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return sorted(rows, key=lambda row: row.id)


def _groups(faults: Sequence[Fault]) -> list[list[str]]:
    """Ids of faults that are shown by the same scenario together, the largest group first."""
    groups: dict[str, list[str]] = defaultdict(list)
    for fault in faults:
        groups[fault.shown_by[0]].append(fault.id)
    return sorted(groups.values(), key=len, reverse=True)


def _judge(ids: Sequence[str]) -> list[Row]:
    by_id = {fault.id: fault for fault in FAULTS}
    return [_laboratory().judge(by_id[fault_id]) for fault_id in ids]


@cache
def _laboratory() -> Laboratory:
    """One per process: what was run without a fault is not run again."""
    return Laboratory()
