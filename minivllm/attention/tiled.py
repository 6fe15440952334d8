"""Attention whose bits depend on the sequence alone: order of summation by absolute position.

Three things of a BLAS or a softmax kernel depend on shapes, and each is fixed here:

- the score product, by the number of rows: heads × query rows are padded to a multiple of 4;
- the softmax sum, by the row's length below 16: rows are padded to whole tiles of keys;
- the weighted sum, whose depth is the number of keys: it is cut into tiles counted from position 0,
  each short enough to be one chain of the BLAS, and the partial sums are added in order.

So the row of a position has the same bits as a prefill row, a chunk's row or a decode row, in any
batch. Later positions, positions before the window and padding contribute exact zeros, and no slot
beyond the sequence is read.
"""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - the name every PyTorch reader knows
from torch import Tensor

from minivllm.attention.base import PagedBackend
from minivllm.config import ModelConfig
from minivllm.layers.probe import threads

__all__ = ["KEY_TILE", "TiledBackend", "tiled_attention"]

KEY_TILE = {torch.float32: 192, torch.bfloat16: 512}
"""Keys per tile: the longest product depth that oneMKL (float32) and oneDNN (bfloat16) sum as one
chain in every shape measured. float16 is not measured, so not offered."""

ROW_TILE = 4
"""Rows of a product are padded to a multiple of this; fewer leave the BLAS's main kernel."""

MAX_ROWS = 256
"""Query rows per pass: bounds the memory of the scores. A multiple of ROW_TILE, so bits are the same."""


class TiledBackend(PagedBackend):
    """The bitwise backend. Proven on the machine at hand by a probe in `supports`."""

    name: ClassVar[str] = "tiled"
    bitwise: ClassVar[bool] = True
    batches_decode: ClassVar[bool] = True

    @classmethod
    def supports(cls, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
        if device.type != "cpu":
            return f"its order of summation is proven on cpu only, got device {device}"
        if dtype not in KEY_TILE:
            return f"its key tile is known for float32 and bfloat16, got {dtype}"
        heads, kv_heads = model.num_attention_heads, model.num_key_value_heads
        return _probe(heads, kv_heads, model.head_dim, dtype, torch.get_num_threads())

    def padded(self, length: int) -> int:
        tile = KEY_TILE[self.cache.dtype]
        return -(-length // tile) * tile

    def mask(self, hidden: Tensor, *, causal: bool) -> Tensor | None:  # noqa: ARG002 - all are masks to it
        return hidden

    def attend_group(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        assert mask is not None  # `mask` above always gives one
        return tiled_attention(q, k, v, mask, scale)


def tiled_attention(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Attention of n requests of equal shape, each over its own keys.

    Args:
        q: [n, rows, heads, dim].
        k, v: [n, keys, kv_heads, dim] from position 0 on; keys is a multiple of the key tile, and
            keys past the sequence hold anything finite.
        hidden: [n, rows, keys]; true where a row may not look. Padding is hidden from all rows.
        scale: of the scores.

    Returns:
        [n, rows, heads, dim].
    """
    # [n * kv_heads, keys, dim]: one product per request and KV head.
    key = k.transpose(1, 2).flatten(0, 1).contiguous()
    value = v.transpose(1, 2).flatten(0, 1).contiguous()
    parts = [
        _attend_rows(q[:, i : i + MAX_ROWS], key, value, hidden[:, i : i + MAX_ROWS], scale)
        for i in range(0, q.shape[1], MAX_ROWS)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _attend_rows(q: Tensor, key: Tensor, value: Tensor, hidden: Tensor, scale: float) -> Tensor:
    size, rows, heads, dim = q.shape
    kv_heads, keys = key.shape[0] // size, key.shape[1]
    groups = heads // kv_heads
    # The heads that share a KV head are more rows of one product: [n * kv_heads, rows * groups, dim].
    query = q.reshape(size, rows, kv_heads, groups, dim).transpose(1, 2).reshape(-1, rows * groups, dim)
    missing = -query.shape[1] % ROW_TILE
    scores = torch.bmm(F.pad(query, (0, 0, 0, missing)), key.transpose(1, 2)).mul_(scale)
    # Padding rows hide nothing: their weights must be finite, and nobody reads them.
    unseen = F.pad(hidden.repeat_interleave(groups, dim=1), (0, 0, 0, missing))
    scores.view(size, kv_heads, *scores.shape[1:]).masked_fill_(unseen[:, None], float("-inf"))
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)

    tile = KEY_TILE[q.dtype]
    # Starts from +0, so that a tile of hidden keys (a sum of +0) changes no bit, not even of a -0.
    total = torch.zeros(weights.shape[0], weights.shape[1], dim, dtype=torch.float32)
    for first in range(0, keys, tile):
        part = weights[:, :, first : first + tile].contiguous()
        total += torch.bmm(part, value[:, first : first + tile])
    out = total[:, : rows * groups].to(q.dtype).view(size, kv_heads, rows, groups, dim)
    return out.transpose(1, 2).reshape(size, rows, heads, dim)


@cache
def _probe(heads: int, kv_heads: int, dim: int, dtype: torch.dtype, most_threads: int) -> str | None:
    """Why rows depend on their chunk or on threads here, or None when they do not.

    Keys come in equal pairs with opposite values, so that the exact result is near 0 and a changed
    order of summation shows. Windows of rows around 0, one tile and two tiles are computed whole,
    and again in chunks and as decode rows. Of many KV heads two are enough: they are a batch of
    equal products.
    """
    heads, kv_heads = heads // kv_heads * min(kv_heads, 2), min(kv_heads, 2)
    tile = KEY_TILE[dtype]
    generator = torch.Generator().manual_seed(0)
    half = tile + 20
    q = torch.randn(2 * half, heads, dim, generator=generator).to(dtype)
    k = torch.randn(half, kv_heads, dim, generator=generator).repeat_interleave(2, 0).to(dtype)
    v = torch.randn(half, kv_heads, dim, generator=generator).repeat_interleave(2, 0).to(dtype)
    v[1::2] *= -1

    def rows(start: int, end: int) -> Tensor:
        keys = -(-end // tile) * tile
        hidden = torch.arange(keys) > torch.arange(start, end)[:, None]
        key, value = (F.pad(part[:end], (0, 0, 0, 0, 0, keys - end))[None] for part in (k, v))
        return tiled_attention(q[None, start:end], key, value, hidden[None], dim**-0.5)[0]

    for first, last in ((0, 20), (tile - 9, tile + 9), (2 * tile - 9, 2 * tile + 40)):
        with threads(1):
            expected = rows(first, last)
        for count in sorted({1, most_threads}):
            with threads(count):
                for chunk, stride in ((1, 5), (3, 3), (16, 16)):
                    for start in range(first, last, stride):
                        end = min(start + chunk, last)
                        if not torch.equal(rows(start, end), expected[start - first : end - first]):
                            return (
                                f"the row of a position in {start} … {end - 1} depends on its chunk or on "
                                f"threads for {heads} heads, {kv_heads} KV heads of {dim}, {dtype}, "
                                f"{count} threads"
                            )
    return None
