"""The random driver on the example: right it passes, each of its bugs is met, replayed and shrunk."""

from __future__ import annotations

import pytest

from conformance.contracts import Target, find_target
from conformance.contracts.base import AllocatorShape
from conformance.contracts.example import ExampleAllocator
from conformance.fuzz.driver import Failure, Fuzzer, replay
from conformance.fuzz.shrink import shrink

EXAMPLE = "conformance.contracts.example:"
BUGS = ("StaleDirectory", "SharedPageFreed", "WholePromptHit")


def failure_of(name: str) -> tuple[Target, Failure]:
    target = find_target(EXAMPLE + name)
    failure = Fuzzer(target, 0).run(2000)
    assert failure is not None
    return target, failure


def test_the_right_manager_keeps_every_law() -> None:
    fuzzer = Fuzzer(find_target(EXAMPLE + "ExampleAllocator"), 0)
    assert fuzzer.run(300) is None
    assert fuzzer.num_examples == 300
    assert fuzzer.num_operations > 1000
    assert fuzzer.seen["hit"] > 0


def test_an_example_of_a_seed_is_always_the_same() -> None:
    def seen(seed: int) -> tuple[object, int]:
        fuzzer = Fuzzer(find_target(EXAMPLE + "ExampleAllocator"), seed)
        fuzzer.run(20)
        return fuzzer.seen, fuzzer.num_operations

    assert seen(3) == seen(3)
    assert seen(3) != seen(4)


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_met_and_its_log_shows_it_again(name: str) -> None:
    target, failure = failure_of(name)
    assert replay(target, failure.setup, failure.operations) == (failure.signature, failure.message)
    right = find_target(EXAMPLE + "ExampleAllocator")
    assert replay(right, failure.setup, failure.operations) is None


@pytest.mark.parametrize("name", BUGS)
def test_a_log_shrinks_to_a_few_operations_with_the_same_signature(name: str) -> None:
    target, failure = failure_of(name)
    small = shrink(target, failure)
    assert small.signature == failure.signature
    assert len(small.operations) <= min(8, len(failure.operations))
    assert replay(target, small.setup, small.operations) == (small.signature, small.message)
    for index in range(len(small.operations)):
        fewer = (*small.operations[:index], *small.operations[index + 1 :])
        found = replay(target, small.setup, fewer)
        assert found is None or found[0] != small.signature, f"operation {index} is not needed"


def test_shrinking_stops_at_its_limit() -> None:
    target, failure = failure_of("SharedPageFreed")
    assert shrink(target, failure, limit=0) == failure
    assert len(shrink(target, failure, limit=3).operations) >= len(shrink(target, failure).operations)


class Fickle(ExampleAllocator):
    """Answers otherwise each time an example is run."""

    runs = 0

    def __init__(self, shape: AllocatorShape) -> None:
        type(self).runs += 1
        super().__init__(shape)
        if type(self).runs % 2:
            self.pages.spare.reverse()


def test_what_happens_otherwise_the_second_time_breaks_a_law() -> None:
    target = Target("fickle", "allocator", Fickle)
    failure = Fuzzer(target, 0, repeat_every=1).run(50)
    assert failure is not None
    assert failure.signature.startswith("same twice @ driver.py")


class Leaving(ExampleAllocator):
    def commit(self, rid: str, n: int) -> None:  # noqa: ARG002  (the contract's signature)
        raise SystemExit(0)


def test_a_target_that_leaves_is_what_was_looked_for() -> None:
    target = Target("leaving", "allocator", Leaving)
    failure = Fuzzer(target, 0).run(2000)
    assert failure is not None
    assert failure.message == "SystemExit: 0"
    assert replay(target, failure.setup, failure.operations) == (failure.signature, failure.message)


class Crashing(ExampleAllocator):
    def commit(self, rid: str, n: int) -> None:  # noqa: ARG002  (the contract's signature)
        raise ZeroDivisionError("in the target")


def test_a_crash_is_placed_where_the_target_raised() -> None:
    failure = Fuzzer(Target("crashing", "allocator", Crashing), 0).run(50)
    assert failure is not None
    assert failure.signature.startswith("ZeroDivisionError @ test_driver.py:commit:")
    assert failure.message == "ZeroDivisionError: in the target"
