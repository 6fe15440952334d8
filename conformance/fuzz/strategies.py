"""Hypothesis strategies for the sizes, prompts and requests of both levels."""

from __future__ import annotations

from typing import Any, Literal

from hypothesis import strategies as st

from conformance.contracts.base import AllocatorCapabilities, EngineCapabilities
from conformance.fuzz.allocator_world import AllocatorSetup
from conformance.fuzz.engine_jobs import EngineSetup
from conformance.fuzz.operations import SpanFields
from conformance.fuzz.workload import ACTIONS, Job, Workload

__all__ = ["allocator_setups", "engine_setups", "prompts", "salts", "spans", "workloads"]


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
        encoder_budget=draw(st.integers(2, 9)) if can.encoder else 0,
    )


def prompts(longest: int = 10) -> st.SearchStrategy[tuple[int, ...]]:
    """Prompts over three token ids."""
    return st.lists(st.integers(0, 2), min_size=1, max_size=longest).map(tuple)


def salts() -> st.SearchStrategy[str | None]:
    """Mostly none."""
    return st.sampled_from([None, None, "s"])


@st.composite
def spans(draw: st.DrawFn, length: int) -> SpanFields:
    """At most two images within a prompt of this length; how long one is, is part of its name."""
    made: list[tuple[int, int, str]] = []
    start = 0
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        start += draw(st.integers(0, 2))
        if start >= length:
            break
        # Few images, or no two requests would ever have the same one.
        size = min(length - start, draw(st.sampled_from([2, 2, 2, 1, 3, 6])))
        made.append((start, size, f"{draw(st.sampled_from('aaab'))}{size}"))
        start += size
    return tuple(made)


@st.composite
def workloads(draw: st.DrawFn, fixed: dict[str, Any]) -> Workload:
    """Requests that begin alike, on an engine that has too little room for them.

    Args:
        fixed: options of every workload.
    """
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    mode = draw(st.sampled_from(["recompute", "swap", "swap", "auto"]))
    options = {
        "block_size": block_size,
        "num_kv_blocks": 2 + draw(st.integers(24, 72)) // block_size,
        "max_num_batched_tokens": draw(st.integers(2, 16)),
        "max_num_seqs": draw(st.integers(1, 6)),
        "enable_prefix_caching": draw(st.integers(0, 4)) > 0,
        "preemption_mode": mode,
        "num_host_blocks": 0 if mode == "recompute" else draw(st.integers(1, 48)) // block_size + 1,
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        **fixed,
    }
    stem = draw(st.lists(st.integers(3, 5), min_size=1, max_size=8))
    jobs = tuple(draw(_jobs(number, stem)) for number in range(draw(st.integers(2, 5))))
    actions = ["step"] * 6 + ["submit"] * 2 + list(ACTIONS[2:])
    lines = st.tuples(st.sampled_from(actions), st.integers(0, 5))
    script = draw(st.lists(lines, min_size=4, max_size=30))
    return Workload(options, jobs, (("submit", 0), *script))


@st.composite
def _jobs(draw: st.DrawFn, number: int, stem: list[int]) -> Job:
    sampling: dict[str, Any] = {"temperature": 0.0, "max_tokens": draw(st.integers(1, 8))}
    if draw(st.booleans()):
        sampling |= {"temperature": 1.0, "seed": draw(st.integers(0, 3)), "n": draw(st.integers(1, 3))}
    if not draw(st.integers(0, 3)):
        sampling |= {"presence_penalty": 1.5, "repetition_penalty": 1.3}
    if not draw(st.integers(0, 3)):
        sampling |= {"stop": ["e"]}
    if draw(st.booleans()):
        sampling |= {"logprobs": 2}
    prompt = (*stem[: draw(st.integers(1, len(stem)))], *draw(st.lists(st.integers(3, 5), max_size=4)))
    return Job(
        prompt=prompt,
        sampling=sampling,
        cache_salt=draw(salts()),
        priority=draw(st.integers(0, 1)),
        follows=draw(st.integers(0, number - 1)) if number and not draw(st.integers(0, 3)) else None,
    )
