"""What a run must have reached: a counter at zero means that a law was never put to the test."""

from __future__ import annotations

from collections import Counter

from conformance.contracts.base import AllocatorCapabilities, EngineCapabilities

__all__ = ["not_reached", "required"]


def required(can: AllocatorCapabilities | EngineCapabilities) -> tuple[str, ...]:
    """Counters that must be above zero for a target that can do this."""
    names = _allocator(can) if isinstance(can, AllocatorCapabilities) else _engine(can)
    return tuple(name for name, asked in names.items() if asked)


def not_reached(can: AllocatorCapabilities | EngineCapabilities, seen: Counter[str]) -> list[str]:
    """Required counters at zero."""
    return [name for name in required(can) if not seen[name]]


def _allocator(can: AllocatorCapabilities) -> dict[str, bool]:
    return {
        "requests in one step": True,
        "chunk over several blocks": True,
        "shared beginning in one step": can.prefix_sharing,
        "refused": True,
        "preempted": True,
        "resumed": True,
        "hit": can.prefix_sharing,
        "resumed with a hit": can.prefix_sharing,
        "hit with salt or image": can.prefix_sharing and can.tags,
        "cancelled inside a step": can.cancel_granted,
        "released twice": can.repeat_release,
        "asked twice": can.probe,
        "reset": can.reset,
        "forked": can.fork,
        "forked inside a block": can.fork,
        "copy on write": can.fork,
        "swapped out": can.swap,
        "swapped in": can.swap,
        "swap-out refused": can.swap,
        "swap-in refused": can.swap,
        "released while swapped": can.swap,
        "swapped out inside a step": can.swap and can.cancel_granted,
    }


def _engine(can: EngineCapabilities) -> dict[str, bool]:
    salted = bool(can.options & {"salt", "spans"})
    return {
        "chunk over several blocks": True,
        "chunk beside a decode": True,
        "equal prompts in one step": True,
        "finished on the first token": True,
        "resumed": True,
        "hit": can.prefix_sharing,
        "resumed with a hit": can.prefix_sharing,
        "hit with salt or image": can.prefix_sharing and salted,
        "refused: never fits": can.never_fit == "refused",
        "refused: too long": True,
        "image encoded": can.encoder,
        "image encoded again": can.encoder,
        "image evicted": can.encoder,
        "image shared in a step": can.encoder,
        "chunk inside an image": can.encoder,
        "aborted while waiting": can.abort,
        "aborted while running": can.abort,
        "aborted while preempted": can.abort and can.preempt,
        "aborted inside a step": can.abort_inside_step,
        "preempted on demand": can.preempt,
        "preempted inside a step": can.preempt,
        "failed": can.fail,
        "planned again": can.replan,
        "broken steps": can.break_off,
        "plan shipped": can.ship,
        "reset": can.reset,
        "forked": "n" in can.options,
        "copy on write": "n" in can.options,
        "swapped out": can.swap,
        "swapped in": can.swap,
    }
