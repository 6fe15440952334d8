"""The tensors behind the block tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.errors import ConfigError, InvariantError
from minivllm.request import BlockCopy

__all__ = ["KVCache", "slot_numbers"]


class KVCache:
    """Keys and values of all blocks, one pair of tensors per layer.

    `keys[layer]` and `values[layer]` are [num_blocks, block_size, num_kv_heads, head_dim]. A *slot*
    is one token's place, numbered block * block_size + offset. Slots that hold no token of a live
    or cached sequence may hold anything, NaN included: readers must not touch them.

    `host_keys` and `host_values` hold swapped-out blocks in the memory of the CPU, pinned when the
    device is CUDA: [num_host_blocks, block_size, num_kv_heads, head_dim] per layer. Host blocks are
    numbered from 0 and have no null block.

    Args:
        model: gives the number of layers and KV heads and the head size.
        num_blocks: blocks in the pool, the null block 0 included.
        block_size: tokens per block.
        dtype: the model's dtype; the cache is never kept in another.
        device: where the model lives.
        num_host_blocks: blocks to swap out to; 0: no swapping.

    Raises:
        ConfigError: fewer than 2 blocks, a block size below 1, or a negative number of host blocks.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        num_host_blocks: int = 0,
    ) -> None:
        if num_host_blocks < 0:
            raise ConfigError(f"the number of host blocks must not be negative, got {num_host_blocks}")
        if num_blocks < 2 or block_size < 1:
            raise ConfigError(
                "the KV cache needs at least 2 blocks (block 0 is the null block) of at least 1 token, "
                f"got {num_blocks} of {block_size}"
            )
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.num_layers = model.num_hidden_layers
        self.dtype = dtype
        self.device = device
        block = (block_size, model.num_key_value_heads, model.head_dim)
        layers = range(self.num_layers)
        self.keys = [torch.zeros((num_blocks, *block), dtype=dtype, device=device) for _ in layers]
        self.values = [torch.zeros((num_blocks, *block), dtype=dtype, device=device) for _ in layers]
        self._blocks = range(1, num_blocks)
        self._host_blocks = range(num_host_blocks)
        self._pinned = num_host_blocks > 0 and device.type == "cuda"

        def host() -> Tensor:
            return torch.zeros((num_host_blocks, *block), dtype=dtype, pin_memory=self._pinned)

        self.host_keys = [host() for _ in layers]
        self.host_values = [host() for _ in layers]

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

    def read_host(self, host_table: Sequence[int], num_tokens: int) -> list[tuple[Tensor, Tensor]]:
        """A swapped-out sequence's KV: as `read`, on the CPU."""
        blocks = torch.tensor(host_table, dtype=torch.int64)
        return [
            (k[blocks].flatten(0, 1)[:num_tokens], v[blocks].flatten(0, 1)[:num_tokens])
            for k, v in zip(self.host_keys, self.host_values, strict=True)
        ]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in every layer, as if all sources were read before any target is written.

        Raises:
            InvariantError: no such block, or the null block; nothing has been copied then.
        """
        if not copies:
            return
        self._check("copies", copies, self._blocks, self._blocks)
        sources = torch.tensor([c.source for c in copies], device=self.device)
        targets = torch.tensor([c.target for c in copies], device=self.device)
        for tensor in (*self.keys, *self.values):
            tensor[targets] = tensor[sources]

    def swap_out(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in every layer, from device blocks to host blocks.

        On CUDA they are in host memory when the call returns.

        Raises:
            InvariantError: no such block, or the null block; nothing has been copied then.
        """
        if not copies:
            return
        self._check("swap_out", copies, self._blocks, self._host_blocks)
        for device, host in self._layers():
            for copy in copies:
                host[copy.target].copy_(device[copy.source], non_blocking=self._pinned)
        if self._pinned:
            torch.cuda.current_stream(self.device).synchronize()

    def swap_in(self, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks in every layer, from host blocks to device blocks.

        On CUDA the copies are in order with what the stream does next. The host blocks may be
        written again only by `swap_out`, which is in the same order.

        Raises:
            InvariantError: no such block, or the null block; nothing has been copied then.
        """
        if not copies:
            return
        self._check("swap_in", copies, self._host_blocks, self._blocks)
        for device, host in self._layers():
            for copy in copies:
                device[copy.target].copy_(host[copy.source], non_blocking=self._pinned)

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

    def poison_host(self, blocks: Sequence[int]) -> int:
        """Fill unused host blocks with NaN; returns the number of slots filled."""
        if self._pinned:
            torch.cuda.current_stream(self.device).synchronize()  # a swap-in may still be reading
        whole = torch.tensor(blocks, dtype=torch.int64)
        for tensor in (*self.host_keys, *self.host_values):
            tensor[whole] = float("nan")
        return len(blocks) * self.block_size

    def _layers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Device and host tensor of each layer's keys, then of each layer's values."""
        yield from zip(self.keys, self.host_keys, strict=True)
        yield from zip(self.values, self.host_values, strict=True)

    @staticmethod
    def _check(what: str, copies: Sequence[BlockCopy], sources: range, targets: range) -> None:
        for copy in copies:
            if copy.source not in sources:
                raise InvariantError(f"{what} reads block {copy.source}, outside {_span(sources)}")
            if copy.target not in targets:
                raise InvariantError(f"{what} writes block {copy.target}, outside {_span(targets)}")


def slot_numbers(block_table: Sequence[int], start: int, end: int, block_size: int) -> NDArray[np.int64]:
    """Slots of positions start … end - 1, on the host: every step asks this of every request."""
    first = start // block_size
    blocks = np.array(block_table[first : -(-end // block_size)], dtype=np.int64)
    slots = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)
    return slots[start - first * block_size : end - first * block_size]


def _flat(tensor: Tensor) -> Tensor:
    """View [num_blocks, block_size, …] as [num_slots, …]."""
    return tensor.view(-1, *tensor.shape[2:])


def _span(blocks: range) -> str:
    return f"{blocks.start} … {blocks.stop - 1}" if blocks else "an empty pool"
