"""SmolVLM and SmolVLM2, and Idefics3, which is the same computation under another name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.errors import BadMedia, ConfigError, InvariantError
from minivllm.layers.ops import Ops
from minivllm.models.decoder import DecoderModel
from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.modules import Linear
from minivllm.models.vision.siglip import SiglipTower
from minivllm.models.vision.vit import ViTConfig, pixel_shuffle
from minivllm.models.vlm import MediaEmbeddings, VisionLanguageModel
from minivllm.request import MediaItem

__all__ = [
    "Idefics3ForConditionalGeneration",
    "SmolVLMConfig",
    "SmolVLMForConditionalGeneration",
    "position_ids",
]

#: Where checkpoints have what we call otherwise.
_RENAMED = (
    ("model.text_model.", "language_model.model."),
    ("model.vision_model.", "vision."),
    ("model.connector.modality_projection.proj.", "projection."),
    ("lm_head.", "language_model.lm_head."),
)


@dataclass(frozen=True, kw_only=True)
class SmolVLMConfig:
    """What the model has beside its decoder.

    Attributes:
        tower: shape of the vision tower.
        scale: patches along one side of what becomes one token.
        image_token_id: the placeholder.
    """

    tower: ViTConfig
    scale: int
    image_token_id: int

    def rows_per_crop(self, side: int) -> int:
        """Embedding rows of a square crop of `side` pixels.

        Raises:
            ConfigError: its patches cannot be put together `scale` by `scale`.
        """
        patches = side // self.tower.patch_size
        if patches < 1 or patches % self.scale:
            raise ConfigError(
                f"crops of {side} pixels have {patches} patches of {self.tower.patch_size} along a side, "
                f"which scale_factor {self.scale} does not divide"
            )
        return int((patches // self.scale) ** 2)


def position_ids(high: int, wide: int, grid: int) -> Tensor:
    """[high × wide] int64: the row of a position table of grid × grid that each patch takes.

    Patch i of n lies at i / n of the picture, and takes the position whose interval holds that. All
    in float32 as in Transformers, so that ties fall as there.
    """
    boundaries = torch.arange(1 / grid, 1.0, 1 / grid)

    def along(count: int) -> Tensor:
        places = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
        return torch.bucketize(places.clamp(max=1.0 - 1e-6), boundaries, right=True)

    return (along(high)[:, None] * grid + along(wide)).flatten()


class SmolVLMForConditionalGeneration(VisionLanguageModel):
    """Crops of a picture through SigLIP; scale × scale patches become one row for a Llama decoder."""

    model_type: ClassVar[str] = "smolvlm"
    text_models: ClassVar[Mapping[str, type[DecoderModel]]] = {"llama": LlamaForCausalLM}

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
        vision: SmolVLMConfig = config.vision
        kw: dict[str, Any] = {"ops": ops, "dtype": dtype, "device": torch.device(device)}
        self.vision = SiglipTower(vision.tower, **kw)
        width = vision.tower.hidden_size * vision.scale**2
        self.projection = Linear(width, config.hidden_size, bias=False, **kw)
        self.eval()

    @classmethod
    def read_vision(cls, values: Mapping[str, Any]) -> SmolVLMConfig:
        """Tower, scale and placeholder.

        Raises:
            ConfigError: a scale below 1.
        """
        scale = values["scale_factor"]
        if scale < 1:
            raise ConfigError(f"scale_factor must be at least 1, got {scale}")
        return SmolVLMConfig(
            tower=ViTConfig.read(values["vision_config"]),
            scale=scale,
            image_token_id=values["image_token_id"],
        )

    @classmethod
    def rename(cls, name: str) -> str | None:
        """Published checkpoints and those of `save_pretrained` have one spelling."""
        for theirs, ours in _RENAMED:
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name

    def encode(self, item: MediaItem) -> MediaEmbeddings:
        """Rows of all crops of one picture, one crop after the other.

        Args:
            item: its data holds pixel_values [crops, 3, side, side].

        Raises:
            BadMedia: crops that are not square, or of a size the model cannot take.
        """
        if "pixel_values" not in item.data:
            raise InvariantError(
                f"an item of modality {item.modality!r} holds {sorted(item.data)}, no pixels"
            )
        pixels: Tensor = item.data["pixel_values"].to(self.device)
        vision: SmolVLMConfig = self.config.vision
        high, wide = (size // vision.tower.patch_size for size in pixels.shape[-2:])
        if high != wide or high < 1 or high % vision.scale:
            raise BadMedia(
                f"crops of {pixels.shape[-2]} × {pixels.shape[-1]} pixels cannot be encoded: patches of "
                f"{vision.tower.patch_size} must make a square that scale_factor {vision.scale} divides"
            )
        places = position_ids(high, wide, vision.tower.grid).to(self.device)
        (patches,) = self.vision(pixels, position_ids=places)
        seen = self.vision.post_layernorm(patches).unflatten(1, (high, wide))
        rows: Tensor = self.projection(pixel_shuffle(seen, vision.scale))
        return MediaEmbeddings(rows.flatten(0, 2))


class Idefics3ForConditionalGeneration(SmolVLMForConditionalGeneration):
    """The model SmolVLM comes from."""

    model_type: ClassVar[str] = "idefics3"
