"""Base of the vision-language models: a vision tower, a projector, and one of the decoders.

A family subclasses `VisionLanguageModel`, builds its tower in `__init__`, and writes `encode`. The
decoder is `language_model`, so its parameters are called "language_model.model.layers.0.…".
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from minivllm.attention.base import PlannedAttention
from minivllm.config import ModelConfig
from minivllm.layers.ops import Ops
from minivllm.models.base import LanguageModel, Observer
from minivllm.models.decoder import DecoderModel
from minivllm.request import MediaItem

__all__ = ["MediaEmbeddings", "VisionLanguageModel"]


@dataclass(frozen=True, eq=False, slots=True)
class MediaEmbeddings:
    """What the decoder sees of one image or video.

    Attributes:
        rows: [num_embeddings, hidden], in place of the embeddings of the placeholder tokens.
        deepstack: entry i, [num_embeddings, hidden], is added to the output of decoder layer i.
    """

    rows: Tensor
    deepstack: tuple[Tensor, ...] = ()


class VisionLanguageModel(LanguageModel):
    """A decoder that also takes the embeddings of pictures.

    Args: as `minivllm.models.DecoderModel`; `config.vision` is what `read_vision` returned.
    """

    text_prefix: ClassVar[str] = "language_model."
    #: `model_type` of text_config → the decoder.
    text_models: ClassVar[Mapping[str, type[DecoderModel]]] = {}
    #: Sections of multimodal rope if config.json has none; () if the family has ordinary rope.
    mrope_section: ClassVar[tuple[int, ...]] = ()
    #: Whether the axes of multimodal rope take turns.
    mrope_interleaved: ClassVar[bool] = False

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: Ops,
        max_model_len: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.ops = ops
        self.language_model = self.text_models[config.text_model_type](
            config, dtype=dtype, device=device, ops=ops, max_model_len=max_model_len
        )
        self.max_model_len = self.language_model.max_model_len
        self.eval()

    @classmethod
    def read_vision(cls, values: Mapping[str, Any]) -> Any:
        """What the family needs besides the decoder's shapes, as a frozen dataclass.

        Args:
            values: config.json with the defaults of its Transformers class.

        Raises:
            UnsupportedError, ConfigError: an option that the family does not implement.
        """
        raise NotImplementedError(f"{cls.__name__} does not say what it reads of its vision tower")

    @abstractmethod
    def encode(self, item: MediaItem) -> MediaEmbeddings:
        """Embeddings of one item, in the model's dtype, on its device.

        One at a time: so they do not depend on what else is in the batch.
        """

    @property
    def batched(self) -> nn.Module:
        """The decoder; the tower computes one item at a time."""
        return self.language_model

    @property
    def embedding_name(self) -> str:
        return self.text_prefix + self.language_model.embedding_name

    @property
    def num_deepstack_layers(self) -> int:
        """How many decoder layers get something added by `MediaEmbeddings.deepstack`."""
        return 0

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        return self.language_model.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.language_model.device

    def untie_lm_head(self) -> None:
        """Give the head a weight of its own, uninitialised."""
        self.language_model.untie_lm_head()

    def embed(self, token_ids: Tensor) -> Tensor:
        """[rows] int64 → [rows, hidden]; placeholder ids are looked up like any other."""
        return self.language_model.embed(token_ids)

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        attention: PlannedAttention,
        observe: Observer | None = None,
        deepstack: Sequence[Tensor] = (),
    ) -> Tensor:
        """Run the decoder; see `LanguageModel.forward`."""
        rows: Tensor = self.language_model(hidden, positions, attention, observe, deepstack)
        return rows

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] (normed) → [rows, vocab]."""
        return self.language_model.logits(hidden)
