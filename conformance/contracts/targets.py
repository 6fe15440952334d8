"""Finds what to fuzz, and checks before anything runs that it offers what it declares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any, Literal

from conformance.contracts.base import AllocatorCapabilities, EngineCapabilities
from conformance.outside import FROM_OUTSIDE

__all__ = ["OWN_TARGETS", "Target", "TargetNotFound", "find_target"]

#: What is fuzzed unless something else is named.
OWN_TARGETS = (
    "conformance.contracts.minivllm:MiniVLLMAllocator",
    "conformance.contracts.minivllm:MiniVLLMEngine",
    "conformance.contracts.minivllm:MiniVLLMTensors",
)

_ALLOCATOR = ("grant_new", "grant_more", "append", "commit", "release", "table", "num_free")
_ENGINE = ("add", "plan", "commit", "output", "finished", "idle")
_OPTIONAL: Mapping[str, tuple[str, ...]] = {
    "fork": ("fork", "moves", "moved"),
    "probe": ("can_grant",),
    "snapshot": ("snapshot",),
    "white_box": ("check",),
    "reset": ("reset",),
    "abort": ("abort",),
    "abort_inside_step": ("abort",),
    "preempt": ("preempt",),
    "break_off": ("break_off",),
    "ship": ("ship",),
    "pool": ("num_free",),
    "unused": ("unused_slots",),
    "memory": ("memory",),
    "bound": ("bound",),
}
_OPTIONS = frozenset({"salt", "spans", "priority", "min_tokens", "stop_ids", "n", "prompt_logprobs"})


class TargetNotFound(LookupError):
    """No adapter has this name, it cannot be imported, or it lacks what it declares."""


@dataclass(frozen=True, slots=True)
class Target:
    """An adapter class and the name it was found by."""

    name: str
    level: Literal["allocator", "engine"]
    factory: Any

    @property
    def can(self) -> Any:
        """Its declared capabilities."""
        return self.factory.capabilities


def find_target(name: str) -> Target:
    """The adapter class called `package.module:Class`.

    Raises:
        TargetNotFound: it is no such name, cannot be imported, or misses methods it declares.
    """
    module, colon, attribute = name.partition(":")
    if not colon:
        raise TargetNotFound(f"{name!r} is no adapter: give package.module:Class")
    try:
        factory = getattr(import_module(module), attribute)
    except FROM_OUTSIDE:
        raise
    except BaseException as error:  # code of others: it may raise anything, or leave
        told = f"{type(error).__name__}: {error}"
        raise TargetNotFound(f"adapter {name!r} cannot be imported: {told}") from error
    capabilities = getattr(factory, "capabilities", None)
    if isinstance(capabilities, AllocatorCapabilities):
        target = Target(name, "allocator", factory)
    elif isinstance(capabilities, EngineCapabilities):
        target = Target(name, "engine", factory)
    else:
        raise TargetNotFound(
            f"adapter {name!r} must have a class attribute `capabilities`, an AllocatorCapabilities or an"
            f" EngineCapabilities; got {capabilities!r}"
        )
    if missing := _missing(target):
        raise TargetNotFound(f"adapter {name!r} declares more than it has: {'; '.join(missing)}")
    return target


def _missing(target: Target) -> list[str]:
    capabilities = target.can
    basic = _ALLOCATOR if target.level == "allocator" else _ENGINE
    needed: dict[str, tuple[str, ...]] = {"the contract": basic}
    needed |= {
        field.name: _OPTIONAL[field.name]
        for field in fields(capabilities)
        if field.name in _OPTIONAL and getattr(capabilities, field.name)
    }
    if capabilities.swap and target.level == "allocator":
        needed["swap"] = ("swap_out", "swap_in", "num_host_free", "moves", "moved")
    elif capabilities.swap:
        needed["swap"] = ("num_host_free",)
    problems = [
        f"{why} needs {', '.join(absent)}"
        for why, names in needed.items()
        if (absent := [name for name in names if not callable(getattr(target.factory, name, None))])
    ]
    unknown = sorted(getattr(capabilities, "options", frozenset()) - _OPTIONS)
    if unknown:
        problems.append(f"options {unknown} do not exist; known: {sorted(_OPTIONS)}")
    return problems
