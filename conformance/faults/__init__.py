"""Faults put into minivllm on purpose, to show that the suite finds them; see docs/faults.md."""

from __future__ import annotations

from conformance.faults.answers import LOGPROBS, SAMPLING, STOPPING, TEXT
from conformance.faults.base import Fault, Seam, planted
from conformance.faults.blocks import KV_CACHE, PREFIX_CACHE
from conformance.faults.schedule import BATCHING, PREEMPTION, SCHEDULING

__all__ = ["FAULTS", "Fault", "Seam", "planted"]

_TABLES = (PREFIX_CACHE, KV_CACHE, PREEMPTION, SCHEDULING, BATCHING, SAMPLING, LOGPROBS, STOPPING, TEXT)

#: Every fault, by area.
FAULTS: tuple[Fault, ...] = tuple(fault for table in _TABLES for fault in table.faults)
