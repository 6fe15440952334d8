"""Metadata of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm.attention import AttentionMetadata, KVCache, base
from minivllm.attention.base import PagedBackend
from minivllm.errors import InvariantError


@pytest.fixture
def cache(config: Any) -> KVCache:
    return KVCache(config(), num_blocks=9, block_size=3, dtype=torch.float32, device=torch.device("cpu"))


def test_requests_are_packed_without_padding_in_their_order(cache: KVCache, schedule: Any) -> None:
    requests = [schedule("a", 2, 7, (4, 1, 8)), schedule("b", 0, 1, (2,)), schedule("c", 5, 6, (7, 3))]
    m = AttentionMetadata.from_requests(requests, cache)
    assert m.query_start_loc == (0, 5, 6, 7)
    assert m.starts == (2, 0, 5)
    assert m.seq_lens == (7, 1, 6)
    assert m.block_tables == ((4, 1, 8), (2,), (7, 3))
    assert m.block_size == 3
    assert m.slot_mapping.tolist() == [14, 3, 4, 5, 24, 6, 11]
    assert m.slot_mapping.dtype == torch.int64


def test_blocks_beyond_the_tokens_of_this_step_are_not_looked_at(cache: KVCache, schedule: Any) -> None:
    m = AttentionMetadata.from_requests([schedule("a", 0, 3, (4, 0))], cache)
    assert m.slot_mapping.tolist() == [12, 13, 14]


@pytest.mark.parametrize("table", [(4,), (4, 0), (4, 9), (0, 4), (4, -1), ()])
def test_a_table_that_cannot_hold_the_tokens_is_a_bug_and_says_so(
    cache: KVCache, schedule: Any, table: tuple[int, ...]
) -> None:
    with pytest.raises(InvariantError, match=r"'a' needs 2 blocks of 1 … 8 for 4 tokens"):
        AttentionMetadata.from_requests([schedule("a", 3, 4, table)], cache)


class Recorder(PagedBackend):
    """Remembers the shapes of the groups; attention is a sum of what it may look at."""

    name = "recorder"
    batches_decode = True

    def __init__(self, cache: KVCache) -> None:
        super().__init__(cache)
        self.groups: list[tuple[int, ...]] = []
        self.masks: list[bool] = []

    def mask(self, hidden: Tensor, *, causal: bool) -> Tensor | None:
        self.masks.append(causal)
        return hidden

    def attend_group(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        assert mask is not None
        self.groups.append((q.shape[0], q.shape[1], k.shape[1]))
        seen = (~mask).to(v.dtype)[..., None, None] * v[:, None]
        return scale * seen.sum(2).repeat_interleave(q.shape[2] // v.shape[2], dim=2)


def test_decode_rows_of_like_length_are_grouped_and_chunks_are_not(config: Any, schedule: Any) -> None:
    cache = KVCache(config(), num_blocks=400, block_size=3, dtype=torch.float32, device=torch.device("cpu"))
    cache.poison(range(400), {})
    spans = [(299, 300), (0, 5), (9, 10), (239, 240), (0, 1), (4, 6), (89, 90), (69, 70)]
    tables, free = [], iter(range(399, 0, -1))
    for _, end in spans:
        tables.append(tuple(next(free) for _ in range(-(-end // 3))))
    for table, (_, end) in zip(tables, spans, strict=True):
        rows = torch.ones(end, 2, 32)
        cache.write(0, cache.slots(table, 0, end), rows, rows)
    backend = Recorder(cache)
    requests = [schedule(str(i), s, e, tables[i]) for i, (s, e) in enumerate(spans)]
    plan = backend.plan(AttentionMetadata.from_requests(requests, cache))
    out = plan.attend(0, torch.zeros(sum(e - s for s, e in spans), 4, 32), 0.5)
    assert sorted(backend.groups) == sorted([(1, 5, 5), (1, 2, 6), (2, 1, 300), (2, 1, 90), (2, 1, 10)])
    expected = [0.5 * (position + 1) for start, end in spans for position in range(start, end)]
    assert out[:, 0].tolist() == expected
    assert torch.equal(out, out[:, :1].expand(-1, 128))


def test_the_memory_of_a_group_is_bounded(
    config: Any, schedule: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "MAX_GROUP_KEYS", 25)
    cache = KVCache(config(), num_blocks=9, block_size=12, dtype=torch.float32, device=torch.device("cpu"))
    backend = Recorder(cache)
    requests = [schedule(str(i), 9, 10, (i + 1,)) for i in range(5)]
    backend.plan(AttentionMetadata.from_requests(requests, cache)).attend(0, torch.zeros(5, 4, 32), 1.0)
    assert backend.groups == [(2, 1, 10), (2, 1, 10), (1, 1, 10)]


def test_a_window_s_mask_is_made_once_and_a_wide_one_is_the_causal_one(config: Any, schedule: Any) -> None:
    cache = KVCache(config(), num_blocks=9, block_size=12, dtype=torch.float32, device=torch.device("cpu"))
    cache.write(0, torch.arange(12, 24), torch.ones(12, 2, 32), torch.ones(12, 2, 32))
    backend = Recorder(cache)
    plan = backend.plan(AttentionMetadata.from_requests([schedule("a", 4, 9, (1,))], cache))
    seen = [plan.attend(0, torch.zeros(5, 4, 32), 1.0, w)[:, 0].tolist() for w in (None, 9, 3, 1000, 3, 1)]
    assert seen == [[5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [3] * 5, [5, 6, 7, 8, 9], [3] * 5, [1] * 5]
    assert backend.masks == [True, False, False]


def test_only_rows_that_see_further_than_themselves_are_told_apart(cache: KVCache, schedule: Any) -> None:
    requests = [
        schedule("text", 0, 5, (1, 2), [(7, 9)]),
        schedule("picture", 1, 7, (3, 4, 5), [(2, 5), (6, 7)]),
        schedule("after a hit", 3, 6, (6, 7), [(2, 5)]),
        schedule("its last row", 4, 5, (8, 1), [(2, 5)]),
    ]
    text, picture, hit, last = AttentionMetadata.from_requests(requests, cache).last_seen
    assert text is None
    assert picture is not None
    assert picture.tolist() == [1, 4, 4, 4, 5, 6]
    assert hit is not None
    assert hit.tolist() == [4, 4, 5]
    assert last is None


def test_a_whole_span_that_is_cut_is_a_bug_and_says_so(cache: KVCache, schedule: Any) -> None:
    with pytest.raises(InvariantError, match=r"'a': MediaSpan\(start=2, .* is cut at 4"):
        AttentionMetadata.from_requests([schedule("a", 0, 4, (1, 2), [(2, 5)])], cache)
