"""Qwen2.5-VL: Qwen2-VL with attention in windows and time in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from minivllm.models.decoder import DecoderModel
from minivllm.models.qwen2 import Qwen2ForCausalLM
from minivllm.models.qwen2_vl import QwenVisionLanguageModel, QwenVLConfig
from minivllm.models.vision.qwen2_5_vl import Qwen25VLTower, WindowTowerConfig

__all__ = ["Qwen2_5_VLForConditionalGeneration"]


class Qwen2_5_VLForConditionalGeneration(QwenVisionLanguageModel):  # noqa: N801 (Transformers' name)
    """Qwen2 with multimodal rope in sections; a video's time axis counts seconds, not frames."""

    model_type: ClassVar[str] = "qwen2_5_vl"
    text_models: ClassVar[Mapping[str, type[DecoderModel]]] = {"qwen2_5_vl_text": Qwen2ForCausalLM}
    mrope_section: ClassVar[tuple[int, ...]] = (16, 24, 24)

    @classmethod
    def read_vision(cls, values: Mapping[str, Any]) -> QwenVLConfig:
        """Tower, placeholders, and how fast time goes."""
        vision = values["vision_config"]
        return QwenVLConfig.read(
            values, WindowTowerConfig.read(vision), tokens_per_second=vision["tokens_per_second"]
        )

    @classmethod
    def make_tower(cls, config: Any, **kw: Any) -> nn.Module:
        """A `Qwen25VLTower`."""
        return Qwen25VLTower(config, **kw)
