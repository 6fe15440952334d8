"""Qwen3-VL (dense): interleaved multimodal rope, deepstack, timestamps between the frames of a video."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from minivllm.errors import ConfigError
from minivllm.models.decoder import DecoderModel
from minivllm.models.qwen2_vl import QwenVisionLanguageModel, QwenVLConfig
from minivllm.models.qwen3 import Qwen3ForCausalLM
from minivllm.models.vision.qwen3_vl import DeepstackTowerConfig, Qwen3VLTower

__all__ = ["Qwen3VLForConditionalGeneration"]


class Qwen3VLForConditionalGeneration(QwenVisionLanguageModel):
    """Qwen3 whose first layers are given features of several depths of the tower."""

    model_type: ClassVar[str] = "qwen3_vl"
    text_models: ClassVar[Mapping[str, type[DecoderModel]]] = {"qwen3_vl_text": Qwen3ForCausalLM}
    mrope_section: ClassVar[tuple[int, ...]] = (24, 20, 20)
    mrope_interleaved: ClassVar[bool] = True

    @classmethod
    def read_vision(cls, values: Mapping[str, Any]) -> QwenVLConfig:
        """Tower and placeholders.

        Raises:
            ConfigError: more deepstack features than the decoder has layers.
        """
        tower = DeepstackTowerConfig.read(values["vision_config"])
        layers = values["text_config"]["num_hidden_layers"]
        if len(tower.deepstack_blocks) > layers:
            raise ConfigError(
                f"vision_config: {len(tower.deepstack_blocks)} deepstack_visual_indexes, "
                f"but the decoder has {layers} layers"
            )
        return QwenVLConfig.read(values, tower)

    @property
    def num_deepstack_layers(self) -> int:
        """One per feature of the tower."""
        return len(self.config.vision.tower.deepstack_blocks)

    @classmethod
    def make_tower(cls, config: Any, **kw: Any) -> nn.Module:
        """A `Qwen3VLTower`."""
        return Qwen3VLTower(config, **kw)
