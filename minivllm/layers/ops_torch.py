"""Ops "torch": the operations of Transformers' modules, in their order, on the packed rows."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - the name every PyTorch reader knows
from torch import Tensor, nn

__all__ = ["TorchOps"]


class TorchOps:
    """Follows Transformers bit for bit when the rows are the same rows.

    Not bitwise across batches: the BLAS chooses another order of summation for other row counts.
    """

    name: ClassVar[str] = "torch"
    bitwise: ClassVar[bool] = False

    @classmethod
    def supports(cls, device: torch.device) -> str | None:  # noqa: ARG003 - any device will do
        """None when these ops can run on this device, else the reason why not."""
        return None

    def prepare(self, model: nn.Module, *, max_rows: int) -> None:
        """Nothing is promised across batches, so there is nothing to check."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        # The formula of arXiv:1910.07467 with the casts where Transformers' LlamaRMSNorm has them.
        wide = x.to(torch.float32)
        variance = wide.pow(2).mean(-1, keepdim=True)
        return weight * (wide * torch.rsqrt(variance + eps)).to(x.dtype)

    def rms_norm_plus_one(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (normed * (1.0 + weight.to(torch.float32))).to(x.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def gelu(self, x: Tensor) -> Tensor:
        return F.gelu(x)

    def gelu_tanh(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")

    def quick_gelu(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)

    def relu(self, x: Tensor) -> Tensor:
        return F.relu(x)

    def tanh(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def log_softmax(self, logits: Tensor) -> Tensor:
        return torch.log_softmax(logits.to(torch.float32), dim=-1)
