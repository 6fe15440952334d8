"""Hypothesis drives the shipped state machines over minivllm's control plane and the example."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from conformance.contracts import find_target
from conformance.contracts.targets import OWN_TARGETS
from conformance.fuzz.coverage import not_reached
from conformance.fuzz.machines import allocator_machine, engine_machine

EXAMPLE = "conformance.contracts.example:ExampleAllocator"


def run(machine: Any, max_examples: int) -> None:
    quick = settings(
        max_examples=max_examples,
        stateful_step_count=50,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=quick)


def run_until_all_is_reached(machine: Any) -> None:
    """Hypothesis draws from the constants of the code under test, so how soon a rare situation comes
    changes with every edit of it: more examples, if 200 lack one."""
    for max_examples in (200, 400, 800):
        run(machine, max_examples)
        if not not_reached(machine.target.can, machine.seen):
            return


@pytest.mark.parametrize("name", [OWN_TARGETS[0], EXAMPLE], ids=["minivllm", "example"])
def test_every_history_of_an_allocator_keeps_every_law(name: str) -> None:
    machine = allocator_machine(find_target(name))
    run_until_all_is_reached(machine)
    assert not_reached(machine.target.can, machine.seen) == []


def test_every_history_of_the_scheduler_keeps_every_law() -> None:
    machine = engine_machine(find_target(OWN_TARGETS[1]))
    run_until_all_is_reached(machine)
    assert not_reached(machine.target.can, machine.seen) == []
