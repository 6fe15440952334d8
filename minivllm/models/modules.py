"""Parameter holders that compute only through the ops seam."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minivllm.layers.ops import Ops

__all__ = ["Embedding", "LayerNorm", "Linear", "RMSNorm", "new_parameter"]


def new_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter without gradient; the weight loader fills it."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """y = x Wᵀ + b with weight [out_features, in_features]."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.weight = new_parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = new_parameter(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[rows, in_features] → [rows, out_features]."""
        return self.ops.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, float32 inside."""

    def __init__(self, size: int, eps: float, *, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.ops = ops
        self.eps = eps
        self.weight = new_parameter(size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[…, size] → […, size]."""
        return self.ops.rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """Mean-and-variance norm over the last dimension, with weight and bias."""

    def __init__(self, size: int, eps: float, *, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.ops = ops
        self.eps = eps
        self.weight = new_parameter(size, dtype=dtype, device=device)
        self.bias = new_parameter(size, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        """[…, size] → […, size]."""
        return self.ops.layer_norm(x, self.weight, self.bias, self.eps)


class Embedding(nn.Module):
    """Rows of a table by id."""

    def __init__(self, count: int, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = new_parameter(count, size, dtype=dtype, device=device)

    def forward(self, ids: Tensor) -> Tensor:
        """[rows] int64 → [rows, size]."""
        return nn.functional.embedding(ids, self.weight)
