"""Pictures and videos: loading them, and what each model family makes of them."""

from __future__ import annotations

from minivllm.multimodal.processor import MULTIMODAL, Expansion, MultiModalProcessor

__all__ = ["MULTIMODAL", "Expansion", "MultiModalProcessor"]
