"""The paged tensors: slots, copies, poison, size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minivllm.attention import KVCache
from minivllm.errors import ConfigError
from minivllm.request import BlockCopy

CPU = torch.device("cpu")


@pytest.fixture
def cache(config: Any) -> KVCache:
    """Every element holds its own number, so that any misplaced copy shows."""
    cache = KVCache(config(), num_blocks=5, block_size=3, dtype=torch.float32, device=CPU)
    for i, tensor in enumerate((*cache.keys, *cache.values)):
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + 10_000 * i)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_bytes_per_block_times_blocks_is_what_the_tensors_take(
    config: Any, dtype: torch.dtype, block_size: int
) -> None:
    model = config(heads=6, kv_heads=3, dim=24, layers=4)
    cache = KVCache(model, num_blocks=7, block_size=block_size, dtype=dtype, device=CPU)
    assert cache.keys[0].shape == (7, block_size, 3, 24)
    taken = sum(t.nbytes for t in (*cache.keys, *cache.values))
    assert taken == 7 * KVCache.bytes_per_block(model, block_size, dtype)


@pytest.mark.parametrize(("blocks", "size"), [(1, 4), (0, 4), (4, 0)])
def test_a_pool_without_a_usable_block_is_refused(config: Any, blocks: int, size: int) -> None:
    with pytest.raises(ConfigError, match=f"got {blocks} of {size}"):
        KVCache(config(), num_blocks=blocks, block_size=size, dtype=torch.float32, device=CPU)


def test_slots_follow_the_block_table(cache: KVCache) -> None:
    assert cache.slots((4, 1, 2), 0, 7).tolist() == [12, 13, 14, 3, 4, 5, 6]
    assert cache.slots((4, 1, 2), 4, 6).tolist() == [4, 5]
    assert cache.slots((4,), 2, 2).tolist() == []


def test_what_is_written_is_read_back_in_logical_order_and_nothing_else_changes(cache: KVCache) -> None:
    before = [t.clone() for t in (*cache.keys, *cache.values)]
    k, v = torch.randn(4, 2, 32), torch.randn(4, 2, 32)
    cache.write(1, cache.slots((4, 2), 1, 5), k, v)
    (k0, _), (k1, v1) = cache.read((4, 2), 5)
    assert torch.equal(k1[1:], k)
    assert torch.equal(v1[1:], v)
    assert torch.equal(k1[0], before[1][4, 0])
    assert torch.equal(k0, torch.cat([before[0][4], before[0][2, :2]]))
    changed = [
        int((a != b).any(-1).any(-1).sum()) for a, b in zip(before, (*cache.keys, *cache.values), strict=True)
    ]
    assert changed == [0, 4, 0, 4]


def test_copies_move_whole_blocks_of_k_and_v_in_every_layer(cache: KVCache) -> None:
    before = [t.clone() for t in (*cache.keys, *cache.values)]
    cache.copy([BlockCopy(source=3, target=1)])
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        assert torch.equal(new[1], old[3])
        assert torch.equal(new[[0, 2, 3, 4]], old[[0, 2, 3, 4]])


def test_copies_of_one_step_do_not_see_each_other(cache: KVCache) -> None:
    before = [t.clone() for t in (*cache.keys, *cache.values)]
    cache.copy([BlockCopy(1, 2), BlockCopy(2, 3), BlockCopy(3, 1)])
    for old, new in zip(before, (*cache.keys, *cache.values), strict=True):
        assert torch.equal(new[[2, 3, 1]], old[[1, 2, 3]])


def test_no_copies_do_nothing(cache: KVCache) -> None:
    before = cache.keys[0].clone()
    cache.copy([])
    assert torch.equal(cache.keys[0], before)


@pytest.mark.parametrize(
    ("blocks", "partial", "filled"), [((0, 3), {1: 2}, 7), ((), {}, 0), ((), {2: 0, 4: 1}, 5), ((0,), {}, 3)]
)
def test_poison_fills_exactly_the_unused_slots_of_every_layer(
    cache: KVCache, blocks: tuple[int, ...], partial: dict[int, int], filled: int
) -> None:
    assert cache.poison(blocks, partial) == filled
    for tensor in (*cache.keys, *cache.values):
        nan = torch.isnan(tensor).all(-1).all(-1)
        assert torch.equal(nan, torch.isnan(tensor).any(-1).any(-1))
        for block in range(5):
            first = 0 if block in blocks else partial.get(block, 3)
            assert nan[block].tolist() == [offset >= first for offset in range(3)]
