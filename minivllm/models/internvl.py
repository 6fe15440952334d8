"""InternVL 3 and 3.5: tiles, each shrunk by a pixel shuffle (https://arxiv.org/abs/2504.10479)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minivllm.errors import ConfigError, UnsupportedError
from minivllm.models.decoder import DecoderModel
from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.modules import Activation, LayerNorm, Linear
from minivllm.models.qwen2 import Qwen2ForCausalLM
from minivllm.models.qwen3 import Qwen3ForCausalLM
from minivllm.models.vision.internvit import InternViT, InternViTConfig
from minivllm.models.vision.names import llava_name
from minivllm.models.vision.vit import pixel_shuffle
from minivllm.models.vlm import MediaEmbeddings, VisionLanguageModel
from minivllm.request import MediaItem

__all__ = ["InternVLForConditionalGeneration", "InternVLVision"]

#: Transformers gives the projector's norm no eps of the config's.
_NORM_EPS = 1e-5


@dataclass(frozen=True, kw_only=True)
class InternVLVision:
    """What InternVL has beside the decoder; names follow the Transformers config.

    Attributes:
        shuffle: patches along one side that become one row.
        feature_layer: hidden state that is read; 0 is the embeddings, -1 the tower's output.
        image_token_id: the placeholder.
    """

    tower: InternViTConfig
    shuffle: int
    feature_layer: int
    projector_hidden_act: str
    image_token_id: int

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> InternVLVision:
        """From config.json with the defaults of its Transformers class.

        Raises:
            ConfigError: patches that the shuffle does not divide.
            UnsupportedError: another tower, several feature layers, or the class token among the
                features, which then make no square.
        """
        vision = values["vision_config"]
        if vision["model_type"] != "internvl_vision":
            raise UnsupportedError(f"vision tower {vision['model_type']!r} is not implemented in InternVL")
        if not isinstance(values["vision_feature_layer"], int):
            raise UnsupportedError(
                f"vision_feature_layer {values['vision_feature_layer']} is not implemented; one layer is"
            )
        if values["vision_feature_select_strategy"] != "default":
            raise UnsupportedError(
                f"vision_feature_select_strategy {values['vision_feature_select_strategy']!r} is not "
                "implemented in InternVL; 'default' is"
            )
        tower = InternViTConfig.read(vision)
        shuffle = round(1 / values["downsample_ratio"])
        if shuffle * values["downsample_ratio"] != 1 or tower.grid % shuffle:
            raise ConfigError(
                f"downsample_ratio {values['downsample_ratio']} must divide {tower.grid} patches a side"
            )
        return cls(
            tower=tower,
            shuffle=shuffle,
            feature_layer=values["vision_feature_layer"],
            projector_hidden_act=values["projector_hidden_act"],
            image_token_id=values["image_token_id"],
        )

    @property
    def rows_per_tile(self) -> int:
        """Embeddings of one tile."""
        return (self.tower.grid // self.shuffle) ** 2


class Projector(nn.Module):
    """A norm over the shuffled features, then two matrices with an activation between."""

    def __init__(self, vision: InternVLVision, hidden_size: int, **kw: Any) -> None:
        super().__init__()
        width = vision.tower.hidden_size * vision.shuffle**2
        self.layer_norm = LayerNorm(width, _NORM_EPS, **kw)
        self.linear_1 = Linear(width, hidden_size, bias=True, **kw)
        self.act = Activation(vision.projector_hidden_act, ops=kw["ops"])
        self.linear_2 = Linear(hidden_size, hidden_size, bias=True, **kw)

    def forward(self, features: Tensor) -> Tensor:
        """[…, tower hidden × shuffle²] → […, hidden]."""
        rows: Tensor = self.linear_2(self.act(self.linear_1(self.layer_norm(features))))
        return rows


class InternVLForConditionalGeneration(VisionLanguageModel):
    """A picture is as many tiles as suit its shape, and a squashed overview if there are several."""

    model_type: ClassVar[str] = "internvl"
    text_models: ClassVar[Mapping[str, type[DecoderModel]]] = {
        "llama": LlamaForCausalLM,
        "qwen2": Qwen2ForCausalLM,
        "qwen3": Qwen3ForCausalLM,
    }

    def __init__(self, config: Any, **kw: Any) -> None:
        super().__init__(config, **kw)
        place = {"dtype": kw["dtype"], "device": torch.device(kw["device"]), "ops": kw["ops"]}
        self._features: InternVLVision = config.vision
        self.vision = InternViT(self._features.tower, **place)
        self.multi_modal_projector = Projector(self._features, config.hidden_size, **place)

    @classmethod
    def read_vision(cls, values: Mapping[str, Any]) -> InternVLVision:
        return InternVLVision.read(values)

    @classmethod
    def rename(cls, name: str) -> str | None:
        return llava_name(name)

    def encode(self, item: MediaItem) -> MediaEmbeddings:
        """`item.data["pixel_values"]`: [tiles, 3, side, side], the overview last."""
        (state,) = self.vision(item.data["pixel_values"].to(self.device), (self._features.feature_layer,))
        patches = state[:, 1:].unflatten(1, (self._features.tower.grid, self._features.tower.grid))
        shuffled = pixel_shuffle(patches, self._features.shuffle)
        return MediaEmbeddings(self.multi_modal_projector(shuffled).flatten(0, 2))
