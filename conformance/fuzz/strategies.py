"""Hypothesis strategies for the sizes, prompts and requests of both levels."""

from __future__ import annotations

from typing import Literal

from hypothesis import strategies as st

from conformance.contracts.base import AllocatorCapabilities, EngineCapabilities
from conformance.fuzz.allocator_world import AllocatorSetup
from conformance.fuzz.engine_world import EngineSetup
from conformance.fuzz.operations import SpanFields

__all__ = ["allocator_setups", "engine_setups", "prompts", "salts", "spans"]


@st.composite
def allocator_setups(draw: st.DrawFn, can: AllocatorCapabilities) -> AllocatorSetup:
    """Tiny pools and blocks: that is where faults of sharing and reuse are met."""
    block_size = draw(st.integers(1, 4))
    return AllocatorSetup(
        num_blocks=max(2, draw(st.integers(6, 24)) // block_size),
        block_size=block_size,
        vocabulary=draw(st.integers(2, 3)),
        max_len=draw(st.integers(5, 16)),
        prefix_caching=not can.prefix_switch or draw(st.integers(0, 9)) > 0,
        num_host_blocks=draw(st.integers(0, 8)) if can.swap else 0,
    )


@st.composite
def engine_setups(draw: st.DrawFn, can: EngineCapabilities) -> EngineSetup:
    """Tiny pools, blocks and budgets, and every switch the engine has."""
    block_size = draw(st.integers(1, 4))
    chunked = not can.chunked_prefill or draw(st.integers(0, 3)) > 0
    modes: list[Literal["recompute", "swap", "auto"]] = ["recompute", "swap", "auto"]
    preemption = draw(st.sampled_from(modes[: 3 if can.swap else 1]))
    return EngineSetup(
        num_blocks=max(2, draw(st.integers(6, 24)) // block_size),
        block_size=block_size,
        vocabulary=draw(st.integers(2, 3)),
        max_num_seqs=draw(st.integers(1, 4)),
        max_num_batched_tokens=draw(st.integers(1, 10) if chunked else st.integers(6, 14)),
        max_model_len=draw(st.integers(8, 18)),
        prefix_caching=not can.prefix_switch or draw(st.integers(0, 7)) > 0,
        chunked_prefill=chunked,
        policy=draw(st.sampled_from(["fcfs", "priority"])) if can.priority_policy else "fcfs",
        preemption=preemption,
        num_host_blocks=draw(st.integers(0, 12)) if preemption != "recompute" else 0,
        oversized=draw(st.integers(0, 3)) == 3,
    )


def prompts(longest: int = 10) -> st.SearchStrategy[tuple[int, ...]]:
    """Prompts over three token ids."""
    return st.lists(st.integers(0, 2), min_size=1, max_size=longest).map(tuple)


def salts() -> st.SearchStrategy[str | None]:
    """Mostly none."""
    return st.sampled_from([None, None, "s"])


@st.composite
def spans(draw: st.DrawFn, length: int) -> SpanFields:
    """At most one image within a prompt of this length."""
    if draw(st.integers(0, 2)):
        return ()
    start = draw(st.integers(0, length - 1))
    return ((start, draw(st.integers(1, length - start)), draw(st.sampled_from("ab"))),)
