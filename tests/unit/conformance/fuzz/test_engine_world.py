"""The model of an engine: what a step that breaks off leaves behind, and what must not happen then."""

from __future__ import annotations

from collections import Counter

import pytest

from conformance.contracts.base import EngineShape
from conformance.contracts.minivllm import MiniVLLMEngine
from conformance.fuzz.engine_jobs import EngineSetup
from conformance.fuzz.engine_world import EngineWorld
from conformance.fuzz.laws import LawBroken
from conformance.fuzz.operations import Add, BreakOff, Commit, Operation, PlanStep, Preempt

SETUP = EngineSetup(
    num_blocks=7,
    block_size=2,
    vocabulary=3,
    max_num_seqs=2,
    max_num_batched_tokens=8,
    max_model_len=8,
    prefix_caching=False,
    preemption="swap",
    num_host_blocks=4,
    policy="priority",
)

#: Computes three tokens in two blocks, which the next plan swaps out and in again.
SWAPPING: tuple[Operation, ...] = (
    Add("r0", (1, 2, 1), 4, ignore_eos=True, priority=1),
    PlanStep(),
    Commit(),
    Preempt("r0"),
    PlanStep(),
)


def world(*operations: Operation, target: type[MiniVLLMEngine] = MiniVLLMEngine) -> EngineWorld:
    made = EngineWorld(target, SETUP, Counter(), strict=True)
    for operation in operations:
        made.apply(operation)
    return made


def moves_after(*operations: Operation) -> tuple[int, int]:
    """Swap-outs and swap-ins of the step that is planned after these operations; it ends well."""
    made = world(*SWAPPING, *operations, PlanStep())
    assert made.planned is not None
    moves = made.planned.moves
    made.finish()
    return len(moves.swap_out), len(moves.swap_in)


@pytest.mark.parametrize(
    ("broken", "planned_again"),
    [
        (BreakOff(0), (2, 2)),
        (BreakOff(1), (2, 2)),
        (BreakOff(2), (0, 2)),
        (BreakOff(3), (0, 2)),
        (BreakOff(4), (0, 0)),
        (BreakOff(9, rows=1), (0, 0)),
    ],
)
def test_only_whole_lists_of_copies_count_as_made(broken: BreakOff, planned_again: tuple[int, int]) -> None:
    assert moves_after(broken) == planned_again


def test_steps_that_break_off_are_counted_by_how_far_they_came() -> None:
    made = world(*SWAPPING, BreakOff(3), PlanStep(), BreakOff(9), PlanStep(), BreakOff(0))
    made.finish()
    names = ("broken steps", "broken between copies", "broken after copies")
    assert [made.seen[name] for name in names] == [3, 1, 1]


def test_outside_of_a_step_nothing_breaks_off() -> None:
    made = world(*SWAPPING[:3], BreakOff(0))
    made.finish()
    assert not made.seen["broken steps"]


class CopiesAgain(MiniVLLMEngine):
    """Takes no notice of what was copied before the step broke off."""

    def break_off(self, done: int) -> None:  # noqa: ARG002  (the contract's signature)
        super().break_off(0)


def test_copies_made_twice_are_seen_where_the_first_time_made_room() -> None:
    """The better request writes blocks of the preempted one, which are then swapped out once more."""
    operations = (
        *SWAPPING[:3],
        Add("r1", (2, 2, 2, 2, 2, 2, 2), 1, ignore_eos=True),
        Preempt("r0"),
        PlanStep(),
        BreakOff(9, rows=2),
    )
    world(*operations).finish()
    with pytest.raises(LawBroken, match="context"):
        world(*operations, target=CopiesAgain).finish()


def test_an_engine_that_cannot_break_off_is_not_asked_to() -> None:
    class Steady(MiniVLLMEngine):
        capabilities = MiniVLLMEngine.capabilities.__class__(pool=True)

        def __init__(self, shape: EngineShape) -> None:
            super().__init__(shape)
            self.break_off = None  # type: ignore[assignment, method-assign]

    made = world(Add("r0", (1, 2), 3), PlanStep(), BreakOff(0), target=Steady)
    assert made.planned is not None
    made.finish()
