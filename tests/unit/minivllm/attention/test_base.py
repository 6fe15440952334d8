"""Metadata of a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minivllm.attention import AttentionMetadata, KVCache
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
