"""BLIP-2 (https://arxiv.org/abs/2301.12597): a Q-Former between a ViT and OPT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.errors import InvariantError, UnsupportedError
from minivllm.layers.ops import Ops
from minivllm.models.decoder import DecoderModel
from minivllm.models.modules import Linear, new_parameter
from minivllm.models.opt import OPTForCausalLM
from minivllm.models.vision.blip2 import Blip2Tower
from minivllm.models.vision.qformer import QFormer, QFormerConfig
from minivllm.models.vision.vit import ViTConfig
from minivllm.models.vlm import MediaEmbeddings, VisionLanguageModel
from minivllm.request import MediaItem

__all__ = ["Blip2Config", "Blip2ForConditionalGeneration"]


@dataclass(frozen=True, kw_only=True)
class Blip2Config:
    """What the model has beside its decoder.

    Attributes:
        tower: shape of the vision tower.
        qkv_bias: whether its queries and values have a bias.
        qformer: shape of the Q-Former.
        num_query_tokens: rows that every picture becomes.
        image_token_id: the placeholder.
    """

    tower: ViTConfig
    qkv_bias: bool
    qformer: QFormerConfig
    num_query_tokens: int
    image_token_id: int


class Blip2ForConditionalGeneration(VisionLanguageModel):
    """A fixed number of learned queries look at a picture; what they found goes before the text."""

    model_type: ClassVar[str] = "blip-2"
    text_models: ClassVar[Mapping[str, type[DecoderModel]]] = {"opt": OPTForCausalLM}

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
        vision: Blip2Config = config.vision
        kw: dict[str, Any] = {"ops": ops, "dtype": dtype, "device": torch.device(device)}
        # Transformers keeps queries and Q-Former out of float16, and of nothing else.
        exact = {**kw, "dtype": torch.float32 if dtype == torch.float16 else dtype}
        self.vision = Blip2Tower(vision.tower, qkv_bias=vision.qkv_bias, **kw)
        self.query_tokens = new_parameter(
            1,
            vision.num_query_tokens,
            vision.qformer.hidden_size,
            dtype=exact["dtype"],
            device=exact["device"],
        )
        self.qformer = QFormer(vision.qformer, **exact)
        self.projection = Linear(vision.qformer.hidden_size, config.hidden_size, bias=True, **kw)
        self.eval()

    @classmethod
    def read_vision(cls, values: Mapping[str, Any]) -> Blip2Config:
        """Tower, Q-Former and placeholder.

        Raises:
            UnsupportedError: no placeholder token (checkpoints from before Transformers 4.46), or
                a Q-Former that reads text.
        """
        image_token_id = values["image_token_index"]
        if image_token_id is None:
            raise UnsupportedError(
                "config.json has no image_token_index, so a prompt cannot say where its picture goes; take a "
                "revision of the checkpoint that has one"
            )
        vision = values["vision_config"]
        return Blip2Config(
            tower=ViTConfig.read({"num_channels": 3, **vision}),
            qkv_bias=bool(vision["qkv_bias"]),
            qformer=QFormerConfig.read(values["qformer_config"]),
            num_query_tokens=values["num_query_tokens"],
            image_token_id=image_token_id,
        )

    @classmethod
    def rename(cls, name: str) -> str | None:
        """Published checkpoints and those of `save_pretrained` have one spelling."""
        for theirs, ours in (("vision_model.", "vision."), ("language_projection.", "projection.")):
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name

    def encode(self, item: MediaItem) -> MediaEmbeddings:
        """Rows of one picture.

        Args:
            item: its data holds pixel_values [1, 3, side, side].

        Raises:
            BadMedia: a picture of another size than the tower's.
        """
        if "pixel_values" not in item.data:
            raise InvariantError(
                f"an item of modality {item.modality!r} holds {sorted(item.data)}, no pixels"
            )
        pixels: Tensor = item.data["pixel_values"].to(self.device)
        seen = self.vision(pixels)
        found: Tensor = self.qformer(self.query_tokens, seen.to(self.query_tokens.dtype)).to(seen.dtype)
        return MediaEmbeddings(self.projection(found).flatten(0, 1))
