"""The seeded random driver: example after example, as fast as the target allows.

Example i of a seed is always the same, and its operation log replays it without the driver.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, TypeAlias

from conformance.contracts.targets import Target
from conformance.fuzz.allocator_driver import allocator_operations, allocator_setup
from conformance.fuzz.allocator_world import AllocatorSetup, AllocatorWorld
from conformance.fuzz.chance import Chance
from conformance.fuzz.engine_driver import engine_operations, engine_setup
from conformance.fuzz.engine_jobs import EngineSetup
from conformance.fuzz.engine_world import EngineWorld
from conformance.fuzz.laws import LawBroken, broken
from conformance.fuzz.operations import Operation
from conformance.outside import FROM_OUTSIDE

__all__ = ["Failure", "Fuzzer", "Setup", "World", "make_world", "replay", "signature_of"]

World: TypeAlias = AllocatorWorld | EngineWorld
Setup: TypeAlias = AllocatorSetup | EngineSetup


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong, and all it takes to see it again.

    Attributes:
        target: name of the adapter.
        signature: law or exception, and where it showed; shrinking keeps it.
        message: what the error says.
        setup: sizes of the example.
        operations: up to and including the one that failed.
        seed, example: where the driver met it.
    """

    target: str
    signature: str
    message: str
    setup: Setup
    operations: tuple[Operation, ...]
    seed: int
    example: int


def make_world(target: Target, setup: Setup, seen: Counter[str], *, strict: bool = False) -> World:
    """A fresh target of these sizes with its model."""
    if isinstance(setup, AllocatorSetup):
        return AllocatorWorld(target.factory, setup, seen, strict=strict)
    return EngineWorld(target.factory, setup, seen, strict=strict)


def replay(target: Target, setup: Setup, operations: Iterable[Operation]) -> tuple[str, str] | None:
    """Apply a log to a fresh target. (signature, message) of what broke, None if nothing did."""
    return _try(target, setup, operations, strict=False) or _try(target, setup, operations, strict=True)


def _try(
    target: Target, setup: Setup, operations: Iterable[Operation], *, strict: bool
) -> tuple[str, str] | None:
    try:
        world = make_world(target, setup, Counter(), strict=strict)
        for operation in operations:
            world.apply(operation)
        world.finish()
    except FROM_OUTSIDE:
        raise
    except BaseException as error:  # whatever the code under test raises is what was looked for
        return signature_of(error), f"{type(error).__name__}: {error}"
    return None


def signature_of(error: BaseException) -> str:
    """Law or exception, and the place: two faults rarely share both.

    A law of the model is placed where the model judged it; anything else where the target raised.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, LawBroken):
        frame = next(f for f in reversed(frames) if PurePath(f.filename).name != "laws.py")
        return f"{error.law} @ {PurePath(frame.filename).name}:{frame.name}"
    frame = frames[-1]
    return f"{type(error).__name__} @ {PurePath(frame.filename).name}:{frame.name}:{frame.lineno}"


@dataclass
class Fuzzer:
    """Runs examples against one target and keeps count.

    Attributes:
        seen: coverage counters over all examples.
        num_examples, num_operations: how much was run.
    """

    target: Target
    seed: int
    seen: Counter[str] = field(default_factory=Counter)
    num_examples: int = 0
    num_operations: int = 0
    #: Every so many examples one is run twice, to see that it happens in the same way.
    repeat_every: int = 64
    #: Every so many examples the target's own check runs after every operation.
    strict_every: int = 16

    def run(self, count: int) -> Failure | None:
        """The next `count` examples, or fewer: the first failure ends it."""
        for _ in range(count):
            failure = self.run_one(self.num_examples)
            self.num_examples += 1
            if failure is not None:
                return failure
        return None

    def run_one(self, example: int) -> Failure | None:
        """Example `example` of this seed."""
        chance = Chance(self.seed * 1_000_003 + example)
        setup = self._setup(chance)
        log: list[Operation] = []
        try:
            strict = example % self.strict_every == 0
            world = make_world(self.target, setup, self.seen, strict=strict)
            for operation in self._operations(world, chance):
                log.append(operation)
                world.apply(operation)
            world.finish()
            if example % self.repeat_every == 0:
                self._repeat(setup, log, world.transcript)
        except FROM_OUTSIDE:
            raise
        except BaseException as error:  # whatever the code under test raises is what was looked for
            message = f"{type(error).__name__}: {error}"
            return Failure(
                self.target.name, signature_of(error), message, setup, tuple(log), self.seed, example
            )
        self.num_operations += len(log)
        return None

    def _setup(self, chance: Chance) -> Setup:
        choose: Any = allocator_setup if self.target.level == "allocator" else engine_setup
        setup: Setup = choose(chance, self.target.can)
        return setup

    def _operations(self, world: World, chance: Chance) -> Iterator[Operation]:
        if isinstance(world, AllocatorWorld):
            return allocator_operations(world, chance)
        return engine_operations(world, chance)

    def _repeat(self, setup: Setup, log: Sequence[Operation], transcript: list[object]) -> None:
        again = make_world(self.target, setup, Counter())
        for operation in log:
            again.apply(operation)
        again.finish()
        if again.transcript != transcript:
            at = next(
                (i for i, (a, b) in enumerate(zip(transcript, again.transcript, strict=False)) if a != b),
                min(len(transcript), len(again.transcript)),
            )
            broken("same twice", f"answer {at} of {len(transcript)} differs: {transcript[at : at + 1]}")
