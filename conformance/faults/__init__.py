"""Faults put into minivllm on purpose, to show that the suite finds them; see docs/faults.md."""

from __future__ import annotations

from conformance.faults.attention import ATTENTION
from conformance.faults.base import Fault, Seam, planted
from conformance.faults.blocks import KV_CACHE
from conformance.faults.families import LOADING, MODELS
from conformance.faults.pictures import IDENTITY, PICTURES, TOWERS
from conformance.faults.places import ENCODER_CACHE, PLACES
from conformance.faults.preemption import PREEMPTION
from conformance.faults.prefixes import PREFIX_CACHE
from conformance.faults.sampling import LOGPROBS, SAMPLING
from conformance.faults.schedule import BATCHING, SCHEDULING
from conformance.faults.text import STOPPING, TEXT

__all__ = ["FAULTS", "Fault", "Seam", "planted"]

_CONTROL = (PREFIX_CACHE, KV_CACHE, PREEMPTION, SCHEDULING, BATCHING)
_ANSWERS = (SAMPLING, LOGPROBS, STOPPING, TEXT)
_FAMILIES = (ATTENTION, MODELS, LOADING)
_PICTURES = (IDENTITY, PICTURES, TOWERS, PLACES, ENCODER_CACHE)

#: Every fault, by area.
FAULTS: tuple[Fault, ...] = tuple(
    fault for table in (*_CONTROL, *_ANSWERS, *_FAMILIES, *_PICTURES) for fault in table.faults
)
