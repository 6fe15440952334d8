"""A run over several targets: shares, ends, coverage."""

from __future__ import annotations

import itertools

import pytest

from conformance.contracts import find_target
from conformance.contracts.targets import OWN_TARGETS
from conformance.fuzz.coverage import not_reached, required
from conformance.fuzz.session import PROFILES, Limits, run_session

RIGHT, WRONG = (
    find_target(f"conformance.contracts.example:{name}") for name in ("ExampleAllocator", "SharedPageFreed")
)


def test_a_number_of_examples_is_the_same_everywhere() -> None:
    first, again = (run_session([RIGHT], 0, Limits(None, 150))[0] for _ in range(2))
    assert first.fuzzer.num_examples == 150
    assert first.fuzzer.seen == again.fuzzer.seen


def test_a_failure_ends_its_own_targets_part_only() -> None:
    wrong, right = run_session([WRONG, RIGHT], 0, Limits(None, 400))
    assert wrong.failure is not None
    assert wrong.original is not None
    assert len(wrong.failure.operations) <= len(wrong.original.operations)
    assert not wrong.passed
    assert wrong.fuzzer.num_examples < 400
    assert (right.failure, right.fuzzer.num_examples) == (None, 400)
    assert right.passed


def test_a_counter_at_zero_fails_the_run() -> None:
    [report] = run_session([RIGHT], 0, Limits(None, 1))
    assert report.failure is None
    assert "resumed with a hit" in report.not_reached
    assert not report.passed


def test_time_ends_a_run_and_is_told_as_progress() -> None:
    clock = itertools.count(0, 1).__next__
    shares: list[float] = []
    [report] = run_session(
        [RIGHT], 0, Limits(20, 0), lambda share, _: shares.append(share), lambda: float(clock())
    )
    assert report.fuzzer.num_examples > 0
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_targets_with_tensors_get_their_share_of_the_examples() -> None:
    slow, quick = find_target(OWN_TARGETS[2]), find_target(OWN_TARGETS[1])
    assert PROFILES["ci"].examples_of(quick) == PROFILES["ci"].examples
    assert PROFILES["ci"].examples_of(slow) < PROFILES["ci"].examples
    assert Limits(None, 1, 0.001).examples_of(slow) == 1


@pytest.mark.parametrize("name", OWN_TARGETS)
def test_our_own_targets_must_reach_forks_copies_and_swaps(name: str) -> None:
    target = find_target(name)
    assert {"forked", "copy on write", "swapped out", "swapped in"} <= set(required(target.can))


def test_what_a_target_cannot_do_is_not_asked_of_it() -> None:
    names = required(RIGHT.can)
    assert "forked" not in names
    assert not_reached(RIGHT.can, run_session([RIGHT], 0, Limits(None, 400))[0].fuzzer.seen) == []
