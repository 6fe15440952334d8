"""Layers shared by all decoders: the ops seam and rotary position tables."""

from __future__ import annotations

from minivllm.layers.ops import OPS, Ops, make_ops

__all__ = ["OPS", "Ops", "make_ops"]
