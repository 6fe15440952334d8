"""Attention whose bits depend on the sequence alone: order of summation by absolute position.

Three things of a BLAS or a softmax kernel depend on shapes, and each is fixed here:

- the score product, by the number of query rows: rows are padded to a multiple of 4;
- the softmax sum, by the row's length below 16: rows are padded to whole tiles of keys;
- the weighted sum, whose depth is the number of keys: it is cut into tiles counted from position 0,
  each short enough to be one chain of the BLAS, and the partial sums are added in order.

So the row of a position has the same bits as a prefill row, a chunk's row or a decode row, in any
batch. Later positions contribute exact zeros, and no slot beyond the sequence is read.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - the name every PyTorch reader knows
from torch import Tensor

from minivllm.attention.base import PagedBackend
from minivllm.config import ModelConfig

__all__ = ["KEY_TILE", "TiledBackend", "tiled_attention"]

KEY_TILE = {torch.float32: 192, torch.bfloat16: 512}
"""Keys per tile: the longest product depth that oneMKL (float32) and oneDNN (bfloat16) sum as one
chain in every shape measured. float16 is not measured, so not offered."""

ROW_TILE = 4
"""Query rows are padded to a multiple of this; fewer leave the BLAS's main kernel."""

MAX_ROWS = 256
"""Query rows per pass: bounds the memory of the scores. A multiple of ROW_TILE, so bits are the same."""


class TiledBackend(PagedBackend):
    """The bitwise backend. Proven on the machine at hand by a probe in `supports`."""

    name: ClassVar[str] = "tiled"
    bitwise: ClassVar[bool] = True

    @classmethod
    def supports(cls, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"its order of summation is proven on cpu only, got device {device}"
        if dtype not in KEY_TILE:
            return f"its key tile is known for float32 and bfloat16, got {dtype}"
        return _probe(model.num_attention_heads, model.num_key_value_heads, model.head_dim, dtype)

    def mask(self, start: int, num_tokens: int) -> Tensor | None:
        length = start + num_tokens
        padded = -(-length // KEY_TILE[self.cache.dtype]) * KEY_TILE[self.cache.dtype]
        positions = torch.arange(padded, device=self.cache.device)
        return positions > positions[start:length, None]

    def attend_request(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        assert mask is not None  # `mask` above always makes one
        return tiled_attention(q, k, v, mask, scale)


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """One request's attention.

    Args:
        q: [rows, heads, dim].
        k, v: [length, kv_heads, dim], positions 0 … length - 1.
        hidden: [rows, length padded to whole tiles]; true where a row may not look.
        scale: of the scores.

    Returns:
        [rows, heads, dim].
    """
    padding = (0, 0, 0, 0, 0, hidden.shape[1] - k.shape[0])
    # [kv_heads, padded length, dim]. Zeros, so that a padded key's score and value are finite.
    key = F.pad(k, padding).transpose(0, 1).contiguous()
    value = F.pad(v, padding).transpose(0, 1).contiguous()
    parts = [
        _attend_rows(q[i : i + MAX_ROWS], key, value, hidden[i : i + MAX_ROWS], scale)
        for i in range(0, q.shape[0], MAX_ROWS)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _attend_rows(q: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float) -> Tensor:
    rows, heads, dim = q.shape
    kv_heads, length, _ = key.shape
    groups = heads // kv_heads
    missing = -rows % ROW_TILE
    # The heads that share a KV head are more rows of one product: [kv_heads, rows × groups, dim].
    query = F.pad(q, (0, 0, 0, 0, 0, missing)).view(-1, kv_heads, groups, dim)
    query = query.transpose(0, 1).reshape(kv_heads, -1, dim)
    scores = torch.bmm(query, key.transpose(1, 2)).mul_(scale)
    # Padded rows see everything: their weights must be finite, and nobody reads them.
    unseen = F.pad(hidden, (0, 0, 0, missing)).repeat_interleave(groups, dim=0)
    scores.masked_fill_(unseen, float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)

    tile = KEY_TILE[q.dtype]
    # Starts from +0, so that a tile of hidden keys (a sum of +0) changes no bit, not even of a -0.
    total = torch.zeros(kv_heads, query.shape[1], dim, dtype=torch.float32)
    for first in range(0, length, tile):
        part = weights[:, :, first : first + tile].contiguous()
        total += torch.bmm(part, value[:, first : first + tile])
    out = total.to(q.dtype).view(kv_heads, -1, groups, dim).transpose(0, 1)
    return out.reshape(-1, heads, dim)[:rows]


@cache
def _probe(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> str | None:
    return None
