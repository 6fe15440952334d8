"""Parameter holders that compute only through the ops seam."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from minivllm.errors import UnsupportedError
from minivllm.layers.ops import Ops

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "Embedding",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "RMSNormPlusOne",
    "new_parameter",
]

#: `hidden_act` of a Transformers config → the operation of `Ops`.
ACTIVATIONS: Mapping[str, str] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
    "silu": "silu",
}


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
        """[…, in_features] → […, out_features]; the ops see plain rows."""
        rows = self.ops.linear(x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        return rows.view(*x.shape[:-1], rows.shape[-1])


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


class RMSNormPlusOne(RMSNorm):
    """Root-mean-square norm that multiplies by 1 + weight, float32 until after the product."""

    def forward(self, x: Tensor) -> Tensor:
        """[…, size] → […, size]."""
        return self.ops.rms_norm_plus_one(x, self.weight, self.eps)


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


class Activation(nn.Module):
    """An element-wise function by the name a Transformers config gives it ("gelu_pytorch_tanh").

    Raises:
        UnsupportedError: a name that is not in `ACTIVATIONS`.
    """

    def __init__(self, name: str, *, ops: Ops) -> None:
        super().__init__()
        if name not in ACTIVATIONS:
            raise UnsupportedError(f"activation {name!r} is not implemented; known: {', '.join(ACTIVATIONS)}")
        self.ops = ops
        self._operation = ACTIVATIONS[name]

    def forward(self, x: Tensor) -> Tensor:
        """Any shape, kept."""
        function: Callable[[Tensor], Tensor] = getattr(self.ops, self._operation)
        return function(x)


class Embedding(nn.Module):
    """Rows of a table by id."""

    def __init__(self, count: int, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = new_parameter(count, size, dtype=dtype, device=device)

    def forward(self, ids: Tensor) -> Tensor:
        """[rows] int64 → [rows, size]."""
        return nn.functional.embedding(ids, self.weight)
