"""Contracts through which a block manager, with or without its scheduler, is fuzzed alone."""

from __future__ import annotations

from conformance.contracts.base import (
    Allocator,
    AllocatorCapabilities,
    AllocatorShape,
    Copy,
    Engine,
    EngineCapabilities,
    EngineShape,
    Moves,
    Plan,
    Rejected,
    Row,
    Span,
    Tags,
)
from conformance.contracts.targets import Target, TargetNotFound, find_target

__all__ = [
    "Allocator",
    "AllocatorCapabilities",
    "AllocatorShape",
    "Copy",
    "Engine",
    "EngineCapabilities",
    "EngineShape",
    "Moves",
    "Plan",
    "Rejected",
    "Row",
    "Span",
    "Tags",
    "Target",
    "TargetNotFound",
    "find_target",
]
