"""Chooses the next operations of an allocator example, from what the model knows.

Everything is tiny on purpose: faults of sharing and reuse take thousands of times longer to meet
with big blocks, big pools or many token ids.
"""

from __future__ import annotations

from collections.abc import Iterator

from conformance.contracts.base import AllocatorCapabilities
from conformance.fuzz.allocator_world import AllocatorSetup, AllocatorWorld, Holder
from conformance.fuzz.chance import Chance
from conformance.fuzz.operations import (
    Fork,
    Grant,
    More,
    Operation,
    Preempt,
    Probe,
    Release,
    Reset,
    Resume,
    Run,
    SpanFields,
    SwapIn,
    SwapOut,
)

__all__ = ["allocator_operations", "allocator_setup"]

_MOST_HOLDERS = 4


def allocator_setup(chance: Chance, can: AllocatorCapabilities) -> AllocatorSetup:
    """Sizes of one example."""
    block_size = chance.pick((1, 1, 2, 2, 2, 3, 4))
    return AllocatorSetup(
        num_blocks=max(2, chance.between(6, 24) // block_size),
        block_size=block_size,
        vocabulary=chance.between(2, 3),
        max_len=chance.between(5, 16),
        prefix_caching=not (can.prefix_switch and chance.one_in(12)),
        num_host_blocks=chance.below(9) if can.swap else 0,
    )


def allocator_operations(world: AllocatorWorld, chance: Chance) -> Iterator[Operation]:
    """Operations of one example; each is chosen after the ones before were applied."""
    setup, can = world.setup, world.can
    stems = [chance.tokens(setup.vocabulary, 1, setup.max_len - 2) for _ in range(chance.between(1, 2))]
    prompts: list[tuple[int, ...]] = []
    number = 0
    kinds = _emphasis(can, chance)

    def prompt() -> tuple[int, ...]:
        kind = chance.below(8)
        if kind < 2 and prompts:
            return prompts[-1]  # the same again, so that equal prompts meet in one step
        if kind < 4 and world.holders:  # the next turn of a conversation
            holder = chance.pick(list(world.holders.values()))
            made = (*holder.story.tokens, *chance.tokens(setup.vocabulary, 0, 2))
        else:
            stem = chance.pick(stems)
            made = (*stem[: chance.between(1, len(stem))], *chance.tokens(setup.vocabulary, 0, 3))
        prompts.append(made[: setup.max_len])
        return prompts[-1]

    def amount(remaining: int) -> int:
        return remaining if chance.one_in(2) else chance.between(1, 2 * setup.block_size + 1)

    def ask(holder: Holder) -> Operation | None:
        remaining = len(holder.story) - holder.computed
        if holder.state == "running":
            return More(holder.name, amount(remaining)) if remaining and not chance.one_in(8) else None
        if chance.one_in(2):
            return None
        if holder.state == "swapped":
            return SwapIn(holder.name, amount(remaining))
        return Resume(holder.name, amount(remaining))

    def arrival() -> Operation:
        nonlocal number
        number += 1
        tokens = prompt()
        salt = "s" if can.tags and chance.one_in(8) else None
        spans: SpanFields = ()
        if can.tags and chance.one_in(8):
            start = chance.below(len(tokens))
            spans = ((start, chance.between(1, len(tokens) - start), chance.pick("ab")),)
        return Grant(f"r{number}", tokens, amount(len(tokens)), salt, spans)

    def disturb() -> Iterator[Operation]:
        holders = list(world.holders.values())
        if not holders:
            return
        name = chance.pick(holders).name
        match chance.pick(kinds):
            case "release":
                yield Release(name, again=chance.one_in(3))
            case "preempt":
                yield Preempt(name)
            case "fork":
                yield Fork(name, f"f{len(world.holders)}.{name}", chance.below(setup.vocabulary))
            case "swap":
                yield SwapOut(name)
            case "probe":
                yield Probe(f"p{number}", prompt(), amount(4))

    for _ in range(chance.between(2, 6)):
        while len(world.holders) < _MOST_HOLDERS and not chance.one_in(3):
            yield arrival()
        if chance.one_in(2):
            yield from disturb()
        for holder in list(world.holders.values()):
            if not holder.granted and (asked := ask(holder)) is not None:
                yield asked
        if chance.one_in(4):
            yield from disturb()  # inside the step
        yield Run()
        for holder in list(world.holders.values()):
            if holder.computed == setup.max_len and not chance.one_in(4):
                yield Release(holder.name)
        if can.reset and chance.one_in(24):
            if chance.one_in(2):
                for name in list(world.holders):
                    yield Release(name)
            yield Reset()


def _emphasis(can: AllocatorCapabilities, chance: Chance) -> list[str]:
    """What disturbs the steps of this example, some of it often and some of it never.

    Examples that each dwell on few features meet rare combinations sooner than examples that are
    all alike (Groce et al., Swarm Testing, ISSTA 2012).
    """
    offered = {"release": True, "preempt": True, "fork": can.fork, "swap": can.swap, "probe": can.probe}
    kinds = [kind for kind, offers in offered.items() if offers for _ in range(chance.pick((0, 1, 1, 4)))]
    return kinds or ["release"]
