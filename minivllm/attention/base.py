"""What an attention backend is given and what it must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minivllm.attention.kv_cache import KVCache, slot_numbers
from minivllm.config import ModelConfig
from minivllm.errors import InvariantError
from minivllm.request import ScheduledRequest

__all__ = ["AttentionBackend", "AttentionMetadata", "PagedBackend", "PlannedAttention"]

MAX_GROUP_KEYS = 2**16
"""Most keys gathered for one group of requests: bounds the memory of a step."""

MAX_WASTE = 64
"""Keys of padding that a request may cost in a group, if a quarter of the longest is less."""


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
        last_seen: [n]; per request the last position that each of its rows sees, or None where that
            is the row's own. A later one is computed in the same batch.
    """

    query_start_loc: tuple[int, ...]
    starts: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_tables: tuple[tuple[int, ...], ...]
    slot_mapping: Tensor
    block_size: int
    last_seen: tuple[NDArray[np.int64] | None, ...] = ()

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
            slot_mapping=torch.from_numpy(
                np.concatenate(
                    [slot_numbers(r.block_table, r.start, r.end, cache.block_size) for r in requests]
                )
            ).to(cache.device),
            block_size=cache.block_size,
            last_seen=tuple(_last_seen(r) for r in requests),
        )


def _last_seen(r: ScheduledRequest) -> NDArray[np.int64] | None:
    """[rows] the last position that each row sees; None: its own, as rows of text do."""
    seen = np.arange(r.start, r.end, dtype=np.int64)
    for span in r.request.media:
        if span.whole and span.start < r.end and span.end > r.start:
            if span.end > r.end:
                raise InvariantError(f"request {r.request_id!r}: {span} is cut at {r.end}")
            seen[max(span.start - r.start, 0) : span.end - r.start] = span.end - 1
    return seen if (seen != np.arange(r.start, r.end)).any() else None


class PlannedAttention(Protocol):
    """A backend made ready for one batch; what a model's forward is given."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put k and v [rows, num_kv_heads, head_dim] (rope applied) into the cache."""
        ...

    def attend(self, layer: int, q: Tensor, scale: float, window: int | None = None) -> Tensor:
        """Causal attention of q [rows, num_heads, head_dim] → [rows, num_heads * head_dim].

        The row of position p sees the cached positions p - window + 1 … p, or 0 … p without a
        window; a row of `AttentionMetadata.last_seen` sees on to that position. Write first.
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
    """Common part of the backends that gather KV by block table, then compute with torch.

    A subclass computes one *group*: requests with the same number of rows and about the same
    length. Keys past a request's own length (in a group, or `padded`) are its first key once more,
    and hidden: finite, as every gathered slot has been written.
    """

    name: ClassVar[str]
    bitwise: ClassVar[bool] = False
    batches_decode: ClassVar[bool] = False
    """Whether decode rows of several requests may form one group."""

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

    def padded(self, length: int) -> int:
        """How many keys to gather for a sequence of this length."""
        return length

    def mask(self, hidden: Tensor, *, causal: bool) -> Tensor | None:
        """What `attend_group` wants to know of who may look where; once per batch and window.

        Args:
            hidden: [n, rows, keys], true where a row may not look.
            causal: whether just the positions after each row's own are hidden, and padding.
        """
        raise NotImplementedError

    def attend_group(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """q [n, rows, heads, dim], k and v [n, keys, kv_heads, dim] → [n, rows, heads, dim]."""
        raise NotImplementedError


class _PagedPlan:
    """Slots and masks of one batch, shared by all layers."""

    def __init__(self, backend: PagedBackend, metadata: AttentionMetadata) -> None:
        self._backend = backend
        self._slot_mapping = metadata.slot_mapping
        self._groups = [_Group(backend, metadata, members) for members in _grouped(backend, metadata)]

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        self._backend.cache.write(layer, self._slot_mapping, k, v)

    def attend(self, layer: int, q: Tensor, scale: float, window: int | None = None) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in self._groups:
            query, (k, v) = q[group.rows], self._backend.cache.gather(layer, group.slots)
            # [size * rows, …] → [size, rows, …], and the same for the keys
            q_, k_, v_ = (part.view(group.size, -1, *part.shape[1:]) for part in (query, k, v))
            part = self._backend.attend_group(q_, k_, v_, group.mask(window), scale)
            out[group.rows] = part.flatten(0, 1)
        return out.flatten(1)


class _Group:
    """One request, or several of one row each.

    Attributes:
        size: number of requests.
        rows: which rows of the batch are theirs.
        slots: [size * keys], the gathered slots of each request in logical order.
    """

    def __init__(self, backend: PagedBackend, metadata: AttentionMetadata, members: Sequence[int]) -> None:
        cache, bounds = backend.cache, metadata.query_start_loc
        self.size = len(members)
        self.rows: slice | Tensor = slice(bounds[members[0]], bounds[members[0] + 1])
        if self.size > 1:
            self.rows = torch.tensor([bounds[i] for i in members], device=cache.device)
        self._backend = backend
        self._longest = max(metadata.seq_lens[i] for i in members)
        self._masks: dict[int | None, Tensor | None] = {}
        keys = backend.padded(self._longest)
        slots = np.empty((self.size, keys), dtype=np.int64)
        for row, i in zip(slots, members, strict=True):
            length = metadata.seq_lens[i]
            row[:length] = slot_numbers(metadata.block_tables[i], 0, length, cache.block_size)
            row[length:] = row[0]
        self.slots = torch.from_numpy(slots.reshape(-1)).to(cache.device)
        starts = torch.tensor([metadata.starts[i] for i in members], device=cache.device)
        offsets = torch.arange(bounds[members[0] + 1] - bounds[members[0]], device=cache.device)
        self._positions = (starts[:, None] + offsets)[..., None]
        self._last_seen = self._positions
        # Rows that see more than themselves and what is before come as a group of one request.
        if self.size == 1 and metadata.last_seen and (seen := metadata.last_seen[members[0]]) is not None:
            self._last_seen = torch.from_numpy(seen).to(cache.device)[None, :, None]
        self._keys = torch.arange(keys, device=cache.device)

    def mask(self, window: int | None) -> Tensor | None:
        """What the backend made of the positions that are hidden under this window."""
        if window is not None and window >= self._longest:
            window = None  # it reaches back to position 0 from every row
        if window not in self._masks:
            hidden = self._keys > self._last_seen
            causal = window is None and self._last_seen is self._positions
            if window is not None:
                hidden |= self._keys <= self._positions - window
            self._masks[window] = self._backend.mask(hidden, causal=causal)
        return self._masks[window]


def _grouped(backend: PagedBackend, metadata: AttentionMetadata) -> list[list[int]]:
    """Partition the requests of a batch: decode rows of like length together, the others alone."""
    bounds, lengths = metadata.query_start_loc, metadata.seq_lens
    groups: list[list[int]] = []
    decode: list[int] = []
    for i in range(len(lengths)):
        if backend.batches_decode and bounds[i + 1] - bounds[i] == 1:
            decode.append(i)
        else:
            groups.append([i])
    current: list[int] = []
    for i in sorted(decode, key=lambda i: -lengths[i]):
        longest = backend.padded(lengths[current[0]]) if current else 0
        waste = longest - backend.padded(lengths[i])
        fits = current and (len(current) + 1) * longest <= MAX_GROUP_KEYS
        if fits and waste <= max(MAX_WASTE, longest // 4):
            current.append(i)
        else:
            current = [i]
            groups.append(current)
    return groups
