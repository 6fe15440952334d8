"""What an attention backend is given and what it must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from minivllm.attention.kv_cache import KVCache
from minivllm.config import ModelConfig
from minivllm.errors import InvariantError
from minivllm.request import ScheduledRequest

__all__ = ["AttentionBackend", "AttentionMetadata", "PagedBackend", "PlannedAttention"]


@dataclass(frozen=True, eq=False)
class AttentionMetadata:
    """Everything a backend needs to know of one batch; n requests packed into rows, no padding.

    Attributes:
        query_start_loc: [n + 1]; request i owns rows query_start_loc[i] … query_start_loc[i + 1] - 1.
        starts: [n]; position of each request's first row.
        seq_lens: [n]; tokens of each request in the cache once this batch is written.
        block_tables: [n]; blocks of positions 0 … seq_lens[i] - 1, in order.
        slot_mapping: [rows] int64; where each row's K and V go.
        block_size: tokens per block.
    """

    query_start_loc: tuple[int, ...]
    starts: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]
    slot_mapping: Tensor
    block_size: int

    @classmethod
    def from_requests(cls, requests: Sequence[ScheduledRequest], cache: KVCache) -> AttentionMetadata:
        """Pack requests in the given order.

        Raises:
            InvariantError: a block table is too short, or holds the null block.
        """
        offsets = [0]
        for r in requests:
            offsets.append(offsets[-1] + r.num_tokens)
            needed = -(-r.end // cache.block_size)
            used = r.block_table[:needed]
            if len(used) < needed or not all(0 < block < cache.num_blocks for block in used):
                raise InvariantError(
                    f"request {r.request_id!r} needs {needed} blocks of 1 … {cache.num_blocks - 1} for "
                    f"{r.end} tokens, got block table {r.block_table}"
                )
        return cls(
            query_start_loc=tuple(offsets),
            starts=tuple(r.start for r in requests),
            seq_lens=tuple(r.end for r in requests),
            block_tables=tuple(r.block_table for r in requests),
            slot_mapping=torch.cat([cache.slots(r.block_table, r.start, r.end) for r in requests]),
            block_size=cache.block_size,
        )


class PlannedAttention(Protocol):
    """A backend made ready for one batch; what a model's forward is given."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put k and v [rows, num_kv_heads, head_dim] (rope applied) into the cache."""
        ...

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Causal attention of q [rows, num_heads, head_dim] → [rows, num_heads * head_dim].

        Row r of a request sees the cached positions up to and including its own; write first.
        """
        ...


class AttentionBackend(Protocol):
    """A way to compute attention over one KV cache.

    Attributes:
        name: the registered name.
        bitwise: whether a row's result depends on nothing but its sequence: not on the batch, the
            chunk, the block size, the placement or the number of threads.
    """

    name: ClassVar[str]
    bitwise: ClassVar[bool]

    def __init__(self, cache: KVCache) -> None: ...

    @classmethod
    def supports(cls, model: ModelConfig, dtype: torch.dtype, device: torch.device) -> str | None:
        """None when it can run this model here, else the reason why not."""
        ...

    def plan(self, metadata: AttentionMetadata) -> PlannedAttention:
        """Prepare one batch; called once per step, before the first layer."""
        ...


class PagedBackend:
    """Common part of the backends that gather a request's KV by its block table, then compute.

    A subclass says how one request attends (`attend_request`) and what it can prepare once per
    batch (`mask`). Only slots of positions 0 … seq_len - 1 are read.
    """

    name: ClassVar[str]
    bitwise: ClassVar[bool] = False

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache

    @classmethod
    def supports(
        cls,
        model: ModelConfig,  # noqa: ARG003 - part of the protocol; most backends take any model
        dtype: torch.dtype,  # noqa: ARG003 - the same
        device: torch.device,  # noqa: ARG003 - the same
    ) -> str | None:
        return None

    def plan(self, metadata: AttentionMetadata) -> PlannedAttention:
        return _PagedPlan(self, metadata)

    def mask(self, start: int, num_tokens: int) -> Tensor | None:
        """What `attend_request` needs to hide later positions, for rows start … start + num_tokens - 1."""
        raise NotImplementedError

    def attend_request(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """One request: q [n, heads, dim], k and v [length, kv_heads, dim] → [n, heads, dim]."""
        raise NotImplementedError


class _PagedPlan:
    """Slots and masks of one batch, shared by all layers."""

    def __init__(self, backend: PagedBackend, metadata: AttentionMetadata) -> None:
        self._backend = backend
        self._cache = backend.cache
        self._slot_mapping = metadata.slot_mapping
        bounds = metadata.query_start_loc
        self._requests = [
            (
                slice(bounds[i], bounds[i + 1]),
                self._cache.slots(table, 0, length),
                backend.mask(start, bounds[i + 1] - bounds[i]),
            )
            for i, (table, start, length) in enumerate(
                zip(metadata.block_tables, metadata.starts, metadata.seq_lens, strict=True)
            )
        ]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._cache.write(layer, self._slot_mapping, k, v)

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for rows, slots, mask in self._requests:
            k, v = self._cache.gather(layer, slots)
            out[rows] = self._backend.attend_request(q[rows], k, v, mask, scale)
        return out.flatten(1)
