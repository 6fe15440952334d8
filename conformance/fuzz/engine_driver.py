"""Chooses the next operations of an engine example, from what the model knows."""

from __future__ import annotations

from collections.abc import Iterator

from conformance.contracts.base import EngineCapabilities, Moves
from conformance.fuzz.chance import Chance
from conformance.fuzz.engine_jobs import EngineSetup, why_rejected
from conformance.fuzz.engine_world import EngineWorld
from conformance.fuzz.operations import (
    Abort,
    Add,
    BreakOff,
    Commit,
    Operation,
    PlanStep,
    Preempt,
    Reset,
    SpanFields,
)

__all__ = ["engine_operations", "engine_setup"]

_MOST_LIVE = 5


def engine_setup(chance: Chance, can: EngineCapabilities) -> EngineSetup:
    """Sizes and switches of one example."""
    block_size = chance.pick((1, 1, 2, 2, 2, 3, 4))
    chunked = not (can.chunked_prefill and chance.one_in(4))
    return EngineSetup(
        num_blocks=max(2, chance.between(6, 24) // block_size),
        block_size=block_size,
        vocabulary=chance.between(2, 3),
        max_num_seqs=chance.between(1, 4),
        max_num_batched_tokens=chance.between(1, 10) if chunked else chance.between(6, 14),
        max_model_len=chance.between(8, 18),
        prefix_caching=not (can.prefix_switch and chance.one_in(8)),
        chunked_prefill=chunked,
        policy="priority" if can.priority_policy and chance.one_in(3) else "fcfs",
        preemption=chance.pick(("recompute", "swap", "swap", "auto")) if can.swap else "recompute",
        num_host_blocks=chance.below(13) if can.swap else 0,
        oversized=chance.one_in(8),
        encoder_budget=chance.between(2, 9) if can.encoder else 0,
    )


def engine_operations(world: EngineWorld, chance: Chance) -> Iterator[Operation]:
    """Operations of one example; each is chosen after the ones before were applied."""
    setup, can = world.setup, world.can
    room = min(setup.num_blocks * setup.block_size + 1, setup.max_model_len)
    longest = room - 1 if setup.chunked_prefill else min(room - 1, setup.max_num_batched_tokens)
    stems = [chance.tokens(setup.vocabulary, 1, max(1, longest - 2)) for _ in range(chance.between(1, 2))]
    prompts: list[tuple[int, ...]] = []
    number = 0
    # As for an allocator, each example dwells on few things that disturb it.
    kinds = ["abort"] + ["preempt"] * (chance.pick((0, 1, 4)) if can.preempt else 0)
    calm = chance.pick((2, 4, 8))
    brittle = chance.pick((3, 12, 48)) if can.break_off else 1

    def prompt() -> tuple[int, ...]:
        kind = chance.below(8)
        if kind < 2 and prompts:
            return prompts[-1]  # the same again, so that equal prompts meet in one step
        if kind < 4 and world.jobs:  # the next turn of a conversation
            job = chance.pick(list(world.jobs.values()))
            made = (*job.story.tokens, *chance.tokens(setup.vocabulary, 0, 2))
        else:
            stem = chance.pick(stems)
            made = (*stem[: chance.between(1, len(stem))], *chance.tokens(setup.vocabulary, 0, 3))
        if setup.oversized and chance.one_in(4):
            made = (made * setup.max_model_len)[: setup.max_model_len + chance.between(-1, 1)]
        prompts.append(made if setup.oversized else made[:longest])
        return prompts[-1]

    def images(length: int) -> SpanFields:
        """One or two images; how long one is, is part of its name."""
        room = length if setup.oversized or not can.encoder else min(length, setup.encoder_budget)
        made: list[tuple[int, int, str]] = []
        start = 0
        for _ in range(chance.between(1, 2)):
            start += chance.below(3)
            if start >= length or room < 1:
                break
            size = chance.between(1, min(length - start, room))
            made.append((start, size, f"{chance.pick('ab')}{size}"))
            start += size
            room -= 0 if setup.chunked_prefill else size
        return tuple(made)

    def arrival() -> Operation:
        nonlocal number
        number += 1
        tokens, options = prompt(), can.options
        max_tokens = chance.between(1, 9)
        n = chance.between(2, 3) if "n" in options and chance.one_in(4) else 1
        spans: SpanFields = ()
        if "spans" in options and chance.one_in(3 if can.encoder else 8):
            spans = images(len(tokens))
        add = Add(
            f"r{number}",
            tokens,
            max_tokens,
            ignore_eos=not chance.one_in(3),
            salt="s" if "salt" in options and chance.one_in(8) else None,
            spans=spans,
            priority=chance.below(2) if "priority" in options else 0,
            min_tokens=chance.below(max_tokens + 1) if "min_tokens" in options and chance.one_in(4) else 0,
            stop_ids=(1,) if "stop_ids" in options and chance.one_in(8) else (),
            n=n,
            prompt_logprobs="prompt_logprobs" in options and n == 1 and chance.one_in(12),
        )
        while not setup.oversized and add.max_tokens > 1 and why_rejected(add, setup, whole_prompts=False):
            add = add._replace(max_tokens=add.max_tokens - 1, min_tokens=0)
        return add

    def disturb() -> Iterator[Operation]:
        live = world.live()
        if not live:
            return
        job = chance.pick(live)
        name = (job.family[0] if chance.one_in(3) else job).name
        if chance.pick(kinds) == "preempt":
            yield Preempt(name)
        elif can.abort if world.planned is None else can.abort_inside_step:
            yield Abort(name)

    for _ in range(chance.between(3, 14)):
        while len(world.live()) < _MOST_LIVE and not chance.one_in(2):
            yield arrival()
        if chance.one_in(calm):
            yield from disturb()
        yield PlanStep(ship=can.ship and chance.one_in(32))
        if can.replan and chance.one_in(32):
            yield PlanStep()
        if chance.one_in(calm):
            yield from disturb()  # inside the step
        moving = world.planned is not None and world.planned.moves != Moves()
        if can.break_off and chance.one_in(3 if moving else brittle):
            yield BreakOff(chance.below(5), chance.below(4))
            continue
        rows = world.rows()
        fail = chance.pick(rows).name if can.fail and rows and chance.one_in(24) else None
        yield Commit(fail)
        if can.reset and chance.one_in(16):
            yield Reset()
