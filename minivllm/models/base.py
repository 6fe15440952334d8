"""What the engine needs of a model, with or without a vision tower."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from minivllm.attention.base import PlannedAttention
from minivllm.config import ModelConfig
from minivllm.layers.ops import Ops

__all__ = ["LanguageModel", "Observer"]

#: Called with a stage name ("hidden.3") and its rows; must not change them.
Observer = Callable[[str, Tensor], None]


class LanguageModel(nn.Module, ABC):
    """Rows of token embeddings in, logits out.

    Attributes:
        config: shapes and flags of the decoder.
        ops: what it computes with.
        max_model_len: positions it is prepared for.
    """

    config: ModelConfig
    ops: Ops
    max_model_len: int

    #: `model_type` in config.json.
    model_type: ClassVar[str] = ""
    #: What the names of the decoder's parameters begin with.
    text_prefix: ClassVar[str] = ""

    @property
    @abstractmethod
    def embedding_name(self) -> str:
        """Our name of the table of token embeddings, which a tied head shares."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the parameters are."""

    @classmethod
    def rename(cls, name: str) -> str | None:
        """Our parameter's name for a checkpoint's tensor; None if the tensor is not needed.

        A name that belongs to no parameter is refused by the loader.
        """
        return name

    @property
    def batched(self) -> nn.Module:
        """The part that computes rows of several requests together: all of it, without a tower."""
        return self

    def use_ops(self, ops: Ops) -> None:
        """Compute with other ops from now on; the weights stay."""
        for module in self.modules():
            if hasattr(module, "ops"):
                module.ops = ops  # type: ignore[assignment]  # of a module that has it

    @abstractmethod
    def untie_lm_head(self) -> None:
        """Give the head a weight of its own, uninitialised."""

    @abstractmethod
    def embed(self, token_ids: Tensor) -> Tensor:
        """[rows] int64 → [rows, hidden]."""

    @abstractmethod
    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        attention: PlannedAttention,
        observe: Observer | None = None,
        deepstack: Sequence[Tensor] = (),
    ) -> Tensor:
        """Run the layers and the final norm.

        Args:
            hidden: [rows, hidden], the embeddings.
            positions: [rows] int64, each row's index in its own sequence; for multimodal rope
                also [3, rows].
            attention: a backend that has planned this batch.
            observe: called with ("hidden.i", rows) after layer i.
            deepstack: entry i, [rows, hidden], is added to the output of layer i. -0.0 leaves a
                row as it is, by bits.

        Returns:
            [rows, hidden], normed.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden] (normed) → [rows, vocab]."""
