"""Matrix products and activations whose bits do not depend on how many rows are computed.

A BLAS picks its order of summation by the shape of the product, so the shape is kept in one class:
rows padded with zeros to a multiple of a *tile*, columns to a least number per thread. Measured
with oneMKL and oneDNN on x86; `minivllm.layers.probe` repeats the measurement at start-up.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F  # noqa: N812 - the name every PyTorch reader knows
from torch import Tensor

__all__ = [
    "MIN_COLUMNS_PER_THREAD",
    "TILES",
    "padded_linear",
    "padded_rows",
    "stable_gelu",
    "stable_gelu_tanh",
    "stable_quick_gelu",
    "stable_silu",
]

TILES = (4, 8, 16, 32)
"""Tile candidates, the cheapest first."""

MIN_COLUMNS_PER_THREAD = 12
"""With fewer output columns per thread MKL leaves its main kernel (seen at 8 to 32 threads)."""

_SMALL_PRODUCT = 4096
"""Up to this rows × columns × depth, reduced-precision products leave oneDNN for a plain loop."""


def padded_linear(x: Tensor, weight: Tensor, bias: Tensor | None, tile: int) -> Tensor:
    """x [rows, in] @ weight [out, in] transposed (+ bias), the rows padded to a multiple of tile."""
    rows, depth = x.shape
    columns = weight.shape[0]
    missing = max(0, MIN_COLUMNS_PER_THREAD * torch.get_num_threads() - columns)
    if missing:
        weight = F.pad(weight, (0, 0, 0, missing))
        bias = None if bias is None else F.pad(bias, (0, missing))
    wanted = padded_rows(rows, (columns + missing) * depth, x.dtype, tile)
    padded = F.pad(x, (0, 0, 0, wanted - rows)) if wanted > rows else x.contiguous()
    return F.linear(padded, weight, bias)[:rows, :columns]


def padded_rows(rows: int, size_per_row: int, dtype: torch.dtype, tile: int) -> int:
    """Rows to compute for a product of `size_per_row` = columns × depth multiplications per row."""
    least = max(rows, 1)
    if dtype != torch.float32:
        least = max(least, _SMALL_PRODUCT // size_per_row + 1)
    return -(-least // tile) * tile


def stable_silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) as x / (1 + exp(-x)), in float32 inside.

    F.silu's vector body and scalar tail round differently, and the tail moves with the number of
    elements per thread. exp and division agree in both.
    """
    wide = x.to(torch.float32)
    return (wide / (1.0 + torch.exp(-wide))).to(x.dtype)


def stable_gelu(x: Tensor) -> Tensor:
    """x * (1 + erf(x / √2)) / 2 in float32 inside; torch.erf rounds the same in vectors and tails."""
    wide = x.to(torch.float32)
    return (0.5 * wide * (1.0 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)


def stable_gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of gelu as x / (1 + exp(-2u)), u = √(2/π) (x + 0.044715 x³).

    It is the same function: (1 + tanh u) / 2 = 1 / (1 + exp(-2u)).
    """
    wide = x.to(torch.float32)
    inner = math.sqrt(2.0 / math.pi) * (wide + 0.044715 * (wide * wide * wide))
    return (wide / (1.0 + torch.exp(-2.0 * inner))).to(x.dtype)


def stable_quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x) as x / (1 + exp(-1.702 x)), in float32 inside."""
    wide = x.to(torch.float32)
    return (wide / (1.0 + torch.exp(-1.702 * wide))).to(x.dtype)
