"""A fuzz run over one or more targets: share the time, shrink what fails, judge the coverage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.contracts.targets import Target
from conformance.fuzz.coverage import not_reached
from conformance.fuzz.driver import Failure, Fuzzer
from conformance.fuzz.shrink import shrink

__all__ = ["PROFILES", "Limits", "TargetReport", "run_session"]

_BATCH_SECONDS = 0.5
_FIRST_BATCH = 8


@dataclass(frozen=True, slots=True)
class Limits:
    """When a run ends: after `seconds` in all, or after so many examples of each target.

    With `seconds` None the run is the same on every machine. `relative` is the share of examples
    of targets that keep their KV in tensors, which are many times slower.
    """

    seconds: float | None
    examples: int
    relative: float = 1.0

    def examples_of(self, target: Target) -> int:
        """Examples of one target, if not ended by time."""
        return max(1, round(self.examples * (self.relative if target.can.memory else 1.0)))


#: "ci" is a fixed number of examples.
PROFILES = {"ci": Limits(None, 3000, 0.1)}


@dataclass(frozen=True, slots=True)
class TargetReport:
    """What came of one target.

    Attributes:
        seconds: time spent on its examples, shrinking apart.
        not_reached: required coverage counters at zero.
        failure: the first one, shrunk; `original` is how the driver met it.
    """

    target: Target
    fuzzer: Fuzzer
    seconds: float
    not_reached: tuple[str, ...]
    failure: Failure | None
    original: Failure | None

    @property
    def passed(self) -> bool:
        return self.failure is None and not self.not_reached


def run_session(
    targets: Sequence[Target],
    seed: int,
    limits: Limits,
    progress: Callable[[float, str], Any] = lambda _done, _text: None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[TargetReport]:
    """Fuzz all targets in turn, a batch at a time; a target's first failure ends its part.

    Args:
        progress: is told the share of the run that is done, and what is going on.
    """
    fuzzers = [Fuzzer(target, seed) for target in targets]
    spent = [0.0] * len(targets)
    failures: list[Failure | None] = [None] * len(targets)
    batch = [_FIRST_BATCH] * len(targets)
    began = clock()
    active = list(range(len(targets)))
    while active:
        for i in list(active):
            fuzzer, target = fuzzers[i], targets[i]
            count = batch[i]
            if limits.seconds is None:
                count = min(count, limits.examples_of(target) - fuzzer.num_examples)
            before = clock()
            failures[i] = fuzzer.run(count)
            took = clock() - before
            spent[i] += took
            batch[i] = _next_batch(count, took)
            over = (
                clock() - began >= limits.seconds
                if limits.seconds is not None
                else fuzzer.num_examples >= limits.examples_of(target)
            )
            if failures[i] is not None or over:
                active.remove(i)
            progress(_done(limits, fuzzers, clock() - began), _describe(target, fuzzer, spent[i]))
    reports = []
    for target, fuzzer, seconds, failure in zip(targets, fuzzers, spent, failures, strict=True):
        if failure is not None:
            progress(1.0, f"{_short(target)}: shrinking {len(failure.operations)} operations")
        shrunk = shrink(target, failure) if failure is not None else None
        missing = () if failure is not None else tuple(not_reached(target.can, fuzzer.seen))
        reports.append(TargetReport(target, fuzzer, seconds, missing, shrunk, failure))
    return reports


def _next_batch(count: int, took: float) -> int:
    """About half a second's worth."""
    wanted = int(count * _BATCH_SECONDS / max(took, 1e-6))
    return max(1, min(wanted, 4 * max(count, 1)))


def _done(limits: Limits, fuzzers: Sequence[Fuzzer], elapsed: float) -> float:
    if limits.seconds is not None:
        return min(1.0, elapsed / limits.seconds)
    total = sum(limits.examples_of(fuzzer.target) for fuzzer in fuzzers)
    return sum(fuzzer.num_examples for fuzzer in fuzzers) / total


def _short(target: Target) -> str:
    return target.name.partition(":")[2]


def _describe(target: Target, fuzzer: Fuzzer, seconds: float) -> str:
    rate = fuzzer.num_examples / seconds if seconds else 0.0
    return f"{_short(target)}: {fuzzer.num_examples} examples, {rate:.0f}/s"
