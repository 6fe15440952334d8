"""The tensors behind the block tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.errors import ConfigError
from minivllm.request import BlockCopy

__all__ = ["KVCache", "slot_numbers"]


class KVCache:
    """Keys and values of all blocks, one pair of tensors per layer.

    `keys[layer]` and `values[layer]` are [num_blocks, block_size, num_kv_heads, head_dim]. A *slot*
    is one token's place, numbered block * block_size + offset. Slots that hold no token of a live
    or cached sequence may hold anything, NaN included: readers must not touch them.

    Args:
        model: gives the number of layers and KV heads and the head size.
        num_blocks: blocks in the pool, the null block 0 included.
        block_size: tokens per block.
        dtype: the model's dtype; the cache is never kept in another.
        device: where the model lives.

    Raises:
        ConfigError: fewer than 2 blocks, or a block size below 1.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ConfigError(
                "the KV cache needs at least 2 blocks (block 0 is the null block) of at least 1 token, "
                f"got {num_blocks} of {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_layers = model.num_hidden_layers
        self.dtype = dtype
        self.device = device
        shape = (num_blocks, block_size, model.num_key_value_heads, model.head_dim)
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(self.num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(self.num_layers)]

    @staticmethod
    def bytes_per_block(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block over all layers: 2 (K and V) × layers × block × KV heads × head size."""
        per_token = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim
        return per_token * block_size * dtype.itemsize

    def slots(self, block_table: Sequence[int], start: int, end: int) -> Tensor:
        """Slots of positions start … end - 1 of the sequence with this block table; [n] int64."""
        return torch.from_numpy(slot_numbers(block_table, start, end, self.block_size)).to(self.device)

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k and v [n, num_kv_heads, head_dim] at these slots [n]."""
        _flat(self.keys[layer]).index_copy_(0, slots, k)
        _flat(self.values[layer]).index_copy_(0, slots, v)

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of k and v at these slots, each [n, num_kv_heads, head_dim]."""
        return _flat(self.keys[layer]).index_select(0, slots), _flat(self.values[layer]).index_select(
            0, slots
        )

    def read(self, block_table: Sequence[int], num_tokens: int) -> list[tuple[Tensor, Tensor]]:
        """A sequence's KV in logical order: per layer k and v, [num_tokens, num_kv_heads, head_dim]."""
        slots = self.slots(block_table, 0, num_tokens)
        return [self.gather(layer, slots) for layer in range(self.num_layers)]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in every layer, as if all sources were read before any target is written."""
        if not copies:
            return
        sources = torch.tensor([c.source for c in copies], device=self.device)
        targets = torch.tensor([c.target for c in copies], device=self.device)
        for tensor in (*self.keys, *self.values):
            tensor[targets] = tensor[sources]

    def poison(self, blocks: Sequence[int], partial: Mapping[int, int]) -> int:
        """Fill unused slots with NaN, so that a later read of one cannot go unnoticed.

        Args:
            blocks: blocks with no slot in use.
            partial: block in use → its first unused slot.

        Returns:
            The number of slots filled.
        """
        whole = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for tensor in (*self.keys, *self.values):
            tensor[whole] = float("nan")
            for block, first in partial.items():
                tensor[block, first:] = float("nan")
        return len(blocks) * self.block_size + sum(self.block_size - first for first in partial.values())


def slot_numbers(block_table: Sequence[int], start: int, end: int, block_size: int) -> NDArray[np.int64]:
    """Slots of positions start … end - 1, on the host: every step asks this of every request."""
    first = start // block_size
    blocks = np.array(block_table[first : -(-end // block_size)], dtype=np.int64)
    slots = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)
    return slots[start - first * block_size : end - first * block_size]


def _flat(tensor: Tensor) -> Tensor:
    """View [num_blocks, block_size, …] as [num_slots, …]."""
    return tensor.view(-1, *tensor.shape[2:])
