"""Gemma 3 with its SigLIP tower: pooled patches, and image tokens that see one another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - the name every PyTorch reader knows
from torch import Tensor, nn

from minivllm.errors import ConfigError, UnsupportedError
from minivllm.layers.ops import Ops
from minivllm.models.decoder import DecoderModel
from minivllm.models.gemma3 import Gemma3ForCausalLM
from minivllm.models.modules import RMSNormPlusOne, new_parameter
from minivllm.models.vision.names import llava_name
from minivllm.models.vision.siglip import SiglipTower
from minivllm.models.vision.vit import ViTConfig
from minivllm.models.vlm import MediaEmbeddings, VisionLanguageModel
from minivllm.request import MediaItem

__all__ = ["Gemma3ForConditionalGeneration", "Gemma3Vision"]


@dataclass(frozen=True, kw_only=True)
class Gemma3Vision:
    """What Gemma 3 has beside the decoder.

    Attributes:
        side: a picture becomes side × side rows.
        image_token_id: stands for one row.
        begin_token_id, end_token_id: stand before and after a picture's rows; the first is also
            the placeholder of a whole picture.
    """

    tower: ViTConfig
    side: int
    image_token_id: int
    begin_token_id: int
    end_token_id: int

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Gemma3Vision:
        """From config.json with the defaults of its Transformers class.

        Raises:
            ConfigError: patches that do not pool into mm_tokens_per_image rows.
            UnsupportedError: a tower other than SigLIP.
        """
        vision = values["vision_config"]
        if vision["model_type"] != "siglip_vision_model":
            raise UnsupportedError(
                f"vision tower {vision['model_type']!r} is not implemented; known: siglip_vision_model"
            )
        tower, rows = ViTConfig.read(vision), values["mm_tokens_per_image"]
        side = int(rows**0.5)
        if side < 1 or side**2 != rows or tower.grid % side:
            raise ConfigError(
                f"mm_tokens_per_image must be a square whose side divides the {tower.grid} patches of a "
                f"picture's, got {rows}"
            )
        return cls(
            tower=tower,
            side=side,
            image_token_id=values["image_token_index"],
            begin_token_id=values["boi_token_index"],
            end_token_id=values["eoi_token_index"],
        )


class Projector(nn.Module):
    """Mean over squares of patches, norm, and a matrix to the decoder's width."""

    def __init__(self, vision: Gemma3Vision, hidden_size: int, **kw: Any) -> None:
        super().__init__()
        self.ops: Ops = kw["ops"]
        self.kernel = vision.tower.grid // vision.side
        width, place = vision.tower.hidden_size, {"dtype": kw["dtype"], "device": kw["device"]}
        # [in, out], the other way round than a Linear
        self.mm_input_projection_weight = new_parameter(width, hidden_size, **place)
        self.mm_soft_emb_norm = RMSNormPlusOne(width, vision.tower.layer_norm_eps, **kw)

    def forward(self, patches: Tensor) -> Tensor:
        """[pictures, patches, tower hidden] → [pictures * rows, hidden]."""
        grid = int(patches.shape[1] ** 0.5)
        picture = patches.transpose(1, 2).reshape(*patches.shape[::2], grid, grid).contiguous()
        pooled = F.avg_pool2d(picture, self.kernel, self.kernel).flatten(2).transpose(1, 2)
        return self.ops.linear(self.mm_soft_emb_norm(pooled).flatten(0, 1), self.mm_input_projection_weight.T)


class Gemma3ForConditionalGeneration(VisionLanguageModel):
    """One square per picture, whatever its shape. Its rows are not scaled as embeddings of tokens are."""

    model_type: ClassVar[str] = "gemma3"
    text_models: ClassVar[Mapping[str, type[DecoderModel]]] = {"gemma3_text": Gemma3ForCausalLM}

    def __init__(self, config: Any, **kw: Any) -> None:
        super().__init__(config, **kw)
        place = {"dtype": kw["dtype"], "device": torch.device(kw["device"]), "ops": kw["ops"]}
        self.vision = SiglipTower(config.vision.tower, **place)
        self.multi_modal_projector = Projector(config.vision, config.hidden_size, **place)

    @classmethod
    def read_vision(cls, values: Mapping[str, Any]) -> Gemma3Vision:
        return Gemma3Vision.read(values)

    @classmethod
    def rename(cls, name: str) -> str | None:
        return llava_name(name)

    def encode(self, item: MediaItem) -> MediaEmbeddings:
        """`item.data["pixel_values"]`: [1, 3, side, side]."""
        (patches,) = self.vision(item.data["pixel_values"].to(self.device))
        rows: Tensor = self.multi_modal_projector(self.vision.post_layernorm(patches))
        return MediaEmbeddings(rows)
