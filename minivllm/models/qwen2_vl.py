"""Qwen2-VL, and what the later Qwen vision-language models share with it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minivllm.config import ModelConfig
from minivllm.errors import ConfigError, InvariantError
from minivllm.layers.ops import Ops
from minivllm.models.decoder import DecoderModel
from minivllm.models.qwen2 import Qwen2ForCausalLM
from minivllm.models.vision.qwen import QwenTowerConfig
from minivllm.models.vision.qwen2_vl import Qwen2VLTower, read_qwen2_vl_tower
from minivllm.models.vlm import MediaEmbeddings, VisionLanguageModel
from minivllm.request import MediaItem

__all__ = ["Qwen2VLForConditionalGeneration", "QwenVisionLanguageModel", "QwenVLConfig"]


@dataclass(frozen=True, kw_only=True)
class QwenVLConfig:
    """What a Qwen vision-language model has beside its decoder.

    Attributes:
        tower: shape of the vision tower.
        image_token_id, video_token_id: the placeholders.
        vision_start_token_id, vision_end_token_id: what stands around them.
        tokens_per_second: positions that a second of video takes on the axis of time; 0 where a
            frame pair takes one position however long it lasts.
    """

    tower: QwenTowerConfig
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int
    tokens_per_second: int = 0

    @classmethod
    def read(cls, values: Mapping[str, Any], tower: QwenTowerConfig, **more: int) -> QwenVLConfig:
        """From a config.json with defaults filled in.

        Raises:
            ConfigError: rows of the tower that are not as wide as the decoder.
        """
        hidden = values["text_config"]["hidden_size"]
        if tower.out_hidden_size != hidden:
            raise ConfigError(
                f"the vision tower gives rows of width {tower.out_hidden_size}, the decoder needs {hidden}"
            )
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        return cls(tower=tower, **{name: values[name] for name in names}, **more)


class QwenVisionLanguageModel(VisionLanguageModel):
    """A decoder with multimodal rope, and a tower that takes pictures and videos of any size.

    Subclasses name tower and decoder. Checkpoints call the decoder "model." or
    "model.language_model.", and the tower "visual." or "model.visual.".
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: Ops,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__(config, dtype=dtype, device=device, ops=ops, max_model_len=max_model_len)
        vision: QwenVLConfig = config.vision
        self.vision = self.make_tower(vision.tower, ops=ops, dtype=dtype, device=torch.device(device))
        self.eval()

    @classmethod
    @abstractmethod
    def make_tower(cls, config: Any, **kw: Any) -> nn.Module:
        """The tower; called with pixels and grid it gives rows and deepstack features."""

    @classmethod
    def rename(cls, name: str) -> str | None:
        """Both spellings of checkpoints, and the one Transformers has in memory."""
        for theirs, ours in (
            ("model.language_model.", "language_model.model."),
            ("model.visual.", "vision."),
            ("visual.", "vision."),
            ("model.", "language_model.model."),
            ("lm_head.", "language_model.lm_head."),
        ):
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name

    def encode(self, item: MediaItem) -> MediaEmbeddings:
        """Rows of one image or video.

        Args:
            item: its data holds pixel_values and image_grid_thw, or pixel_values_videos and
                video_grid_thw, as Transformers' processors make them for one item.

        Raises:
            BadMedia: grid and pixels do not belong together.
        """
        data: Mapping[str, Tensor] = item.data
        if "pixel_values" in data:
            pixels, grid = data["pixel_values"], data["image_grid_thw"]
        elif "pixel_values_videos" in data:
            pixels, grid = data["pixel_values_videos"], data["video_grid_thw"]
        else:
            raise InvariantError(f"an item of modality {item.modality!r} holds {sorted(data)}, and no pixels")
        rows, deepstack = self.vision(pixels.to(self.device), grid)
        return MediaEmbeddings(rows, deepstack)


class Qwen2VLForConditionalGeneration(QwenVisionLanguageModel):
    """Qwen2 with multimodal rope in sections."""

    model_type: ClassVar[str] = "qwen2_vl"
    text_models: ClassVar[Mapping[str, type[DecoderModel]]] = {"qwen2_vl_text": Qwen2ForCausalLM}
    mrope_section: ClassVar[tuple[int, ...]] = (16, 24, 24)

    @classmethod
    def read_vision(cls, values: Mapping[str, Any]) -> QwenVLConfig:
        """Tower and placeholders."""
        return QwenVLConfig.read(values, read_qwen2_vl_tower(values["vision_config"]))

    @classmethod
    def make_tower(cls, config: Any, **kw: Any) -> nn.Module:
        """A `Qwen2VLTower`."""
        return Qwen2VLTower(config, **kw)
