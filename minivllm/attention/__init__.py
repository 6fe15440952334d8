"""Attention over the paged KV cache, behind one seam with several backends.

A backend is made once for a cache, plans once per batch (`plan(metadata)`), and the plan it
returns is handed to the model, which writes and attends layer by layer.
"""

from __future__ import annotations

from minivllm.attention.base import AttentionBackend, AttentionMetadata, PlannedAttention
from minivllm.attention.kv_cache import KVCache
from minivllm.registry import Registry

__all__ = [
    "ATTENTION_BACKENDS",
    "AUTO_ORDER",
    "AttentionBackend",
    "AttentionMetadata",
    "KVCache",
    "PlannedAttention",
]

ATTENTION_BACKENDS: Registry[type[AttentionBackend]] = Registry(
    "attention backend", entry_point_group="minivllm.attention_backends"
)
ATTENTION_BACKENDS.register("dense", "minivllm.attention.dense:DenseBackend")
ATTENTION_BACKENDS.register("sdpa", "minivllm.attention.sdpa:SdpaBackend")
ATTENTION_BACKENDS.register("tiled", "minivllm.attention.tiled:TiledBackend")

AUTO_ORDER = ("sdpa", "dense")
"""What "auto" tries, first to last; a batch-invariant engine takes "tiled" instead."""
