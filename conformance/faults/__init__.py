"""Faults put into minivllm on purpose, to show that the suite finds them; see docs/faults.md."""

from __future__ import annotations

from conformance.faults.answers import LOGPROBS, SAMPLING, STOPPING, TEXT
from conformance.faults.base import Fault, Seam, planted
from conformance.faults.blocks import KV_CACHE, PREFIX_CACHE
from conformance.faults.families import ATTENTION, LOADING, MODELS
from conformance.faults.pictures import ENCODER_CACHE, IDENTITY, PICTURES, PLACES, TOWERS
from conformance.faults.schedule import BATCHING, PREEMPTION, SCHEDULING

__all__ = ["FAULTS", "Fault", "Seam", "planted"]

_CONTROL = (PREFIX_CACHE, KV_CACHE, PREEMPTION, SCHEDULING, BATCHING)
_ANSWERS = (SAMPLING, LOGPROBS, STOPPING, TEXT)
_FAMILIES = (ATTENTION, MODELS, LOADING)
_PICTURES = (IDENTITY, PICTURES, TOWERS, PLACES, ENCODER_CACHE)

#: Every fault, by area.
FAULTS: tuple[Fault, ...] = tuple(
    fault for table in (*_CONTROL, *_ANSWERS, *_FAMILIES, *_PICTURES) for fault in table.faults
)
