"""LLaVA: a tower, two matrices, a decoder (https://arxiv.org/abs/2310.03744)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minivllm.errors import ConfigError, UnsupportedError
from minivllm.models.decoder import DecoderModel
from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.modules import Activation, Linear
from minivllm.models.qwen2 import Qwen2ForCausalLM
from minivllm.models.qwen3 import Qwen3ForCausalLM
from minivllm.models.vision.clip import CLIPTower
from minivllm.models.vision.names import llava_name
from minivllm.models.vision.siglip import SiglipTower
from minivllm.models.vision.vit import ViTConfig, layer_index
from minivllm.models.vlm import MediaEmbeddings, VisionLanguageModel
from minivllm.request import MediaItem

__all__ = ["LlavaForConditionalGeneration", "LlavaVision", "Projector", "TowerFeatures"]

_TOWERS: Mapping[str, type[CLIPTower] | type[SiglipTower]] = {
    "clip_vision_model": CLIPTower,
    "siglip_vision_model": SiglipTower,
}


@dataclass(frozen=True, kw_only=True)
class LlavaVision:
    """What LLaVA and its descendants have beside the decoder; names follow the Transformers config.

    Attributes:
        tower_type: `model_type` of the tower.
        feature_layers: hidden states that are read, side by side; 0 is the embeddings.
        drop_first: whether the first row of the features is dropped (select strategy "default").
        image_token_id: the placeholder.
    """

    tower: ViTConfig
    tower_type: str
    feature_layers: tuple[int, ...]
    drop_first: bool
    projector_hidden_act: str
    projector_bias: bool
    image_token_id: int

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> LlavaVision:
        """From config.json with the defaults of its Transformers class.

        Raises:
            ConfigError: a feature layer or select strategy that does not exist.
            UnsupportedError: another tower; pictures that are not square.
        """
        vision = values["vision_config"]
        if vision["model_type"] not in _TOWERS:
            raise UnsupportedError(
                f"vision tower {vision['model_type']!r} is not implemented; known: {', '.join(_TOWERS)}"
            )
        strategy = values["vision_feature_select_strategy"]
        if strategy not in ("default", "full"):
            raise ConfigError(f"vision_feature_select_strategy must be default or full, got {strategy!r}")
        tower = ViTConfig.read(vision)
        layers = values["vision_feature_layer"]
        layers = tuple(layers) if isinstance(layers, list | tuple) else (layers,)
        return cls(
            tower=tower,
            tower_type=vision["model_type"],
            feature_layers=tuple(layer_index(layer, tower.num_hidden_layers) for layer in layers),
            drop_first=strategy == "default",
            projector_hidden_act=values["projector_hidden_act"],
            projector_bias=values["multimodal_projector_bias"],
            image_token_id=values["image_token_index"],
        )

    @property
    def has_class_token(self) -> bool:
        """Whether the tower puts a row of its own before those of the patches."""
        return self.tower_type == "clip_vision_model"

    @property
    def rows_per_square(self) -> int:
        """Features of one square picture."""
        return self.tower.grid**2 + self.has_class_token - self.drop_first


class Projector(nn.Module):
    """From the tower's width to the decoder's: two matrices with an activation between."""

    def __init__(self, vision: LlavaVision, hidden_size: int, **kw: Any) -> None:
        super().__init__()
        width = vision.tower.hidden_size * len(vision.feature_layers)
        self.linear_1 = Linear(width, hidden_size, bias=vision.projector_bias, **kw)
        self.act = Activation(vision.projector_hidden_act, ops=kw["ops"])
        self.linear_2 = Linear(hidden_size, hidden_size, bias=vision.projector_bias, **kw)

    def forward(self, features: Tensor) -> Tensor:
        """[…, tower hidden × feature layers] → […, hidden]."""
        rows: Tensor = self.linear_2(self.act(self.linear_1(features)))
        return rows


class TowerFeatures(VisionLanguageModel):
    """What LLaVA and LLaVA-OneVision share: features of squares, projected to the decoder's width."""

    text_models: ClassVar[Mapping[str, type[DecoderModel]]] = {
        "llama": LlamaForCausalLM,
        "qwen2": Qwen2ForCausalLM,
        "qwen3": Qwen3ForCausalLM,
    }

    def __init__(self, config: Any, **kw: Any) -> None:
        super().__init__(config, **kw)
        place = {"dtype": kw["dtype"], "device": torch.device(kw["device"]), "ops": kw["ops"]}
        self._features: LlavaVision = config.vision
        self.vision = _TOWERS[self._features.tower_type](self._features.tower, **place)
        self.multi_modal_projector = Projector(self._features, config.hidden_size, **place)

    @classmethod
    def read_vision(cls, values: Mapping[str, Any]) -> LlavaVision:
        return LlavaVision.read(values)

    @classmethod
    def rename(cls, name: str) -> str | None:
        return llava_name(name)

    def project(self, pixels: Tensor) -> Tensor:
        """Squares [n, 3, side, side] → [n, rows_per_square, hidden]."""
        states = self.vision(pixels.to(self.device), self._features.feature_layers)
        features = torch.cat([s[:, 1:] if self._features.drop_first else s for s in states], dim=-1)
        rows: Tensor = self.multi_modal_projector(features)
        return rows


class LlavaForConditionalGeneration(TowerFeatures):
    """One square per picture."""

    model_type: ClassVar[str] = "llava"

    def encode(self, item: MediaItem) -> MediaEmbeddings:
        """`item.data["pixel_values"]`: [1, 3, side, side]."""
        return MediaEmbeddings(self.project(item.data["pixel_values"]).flatten(0, 1))
