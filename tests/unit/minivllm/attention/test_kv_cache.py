"""The paged tensors: slots, copies, swapping, poison, size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minivllm.attention import KVCache
from minivllm.errors import ConfigError, InvariantError
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


@pytest.fixture
def swapping(config: Any) -> KVCache:
    """5 device blocks and 4 host blocks, every element of either with a number of its own."""
    cache = KVCache(config(), num_blocks=5, block_size=3, dtype=torch.float32, device=CPU, num_host_blocks=4)
    for i, tensor in enumerate(everything(cache)):
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + 10_000 * (i + 1))
    return cache


def everything(cache: KVCache) -> list[torch.Tensor]:
    return [*cache.keys, *cache.values, *cache.host_keys, *cache.host_values]


def pairs(cache: KVCache) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(device, host) tensors of the same layer and kind."""
    return [
        *zip(cache.keys, cache.host_keys, strict=True),
        *zip(cache.values, cache.host_values, strict=True),
    ]


def test_host_blocks_are_as_large_as_device_blocks(config: Any) -> None:
    model = config(heads=6, kv_heads=3, dim=24, layers=4)
    cache = KVCache(model, num_blocks=3, block_size=5, dtype=torch.bfloat16, device=CPU, num_host_blocks=7)
    taken = sum(t.nbytes for t in (*cache.host_keys, *cache.host_values))
    assert taken == 7 * KVCache.bytes_per_block(model, 5, torch.bfloat16)
    assert cache.host_keys[0].device == CPU


def test_a_negative_number_of_host_blocks_is_refused(config: Any) -> None:
    with pytest.raises(ConfigError, match="got -1"):
        KVCache(config(), num_blocks=3, block_size=3, dtype=torch.float32, device=CPU, num_host_blocks=-1)


def test_swap_out_moves_whole_blocks_of_k_and_v_in_every_layer(swapping: KVCache) -> None:
    before = [(d.clone(), h.clone()) for d, h in pairs(swapping)]
    swapping.swap_out([BlockCopy(4, 0), BlockCopy(1, 3)])
    for (old_device, old_host), (device, host) in zip(before, pairs(swapping), strict=True):
        assert torch.equal(device, old_device)
        assert torch.equal(host[[0, 3]], old_device[[4, 1]])
        assert torch.equal(host[[1, 2]], old_host[[1, 2]])


def test_swap_in_moves_whole_blocks_of_k_and_v_in_every_layer(swapping: KVCache) -> None:
    before = [(d.clone(), h.clone()) for d, h in pairs(swapping)]
    swapping.swap_in([BlockCopy(0, 2), BlockCopy(3, 1)])
    for (old_device, old_host), (device, host) in zip(before, pairs(swapping), strict=True):
        assert torch.equal(host, old_host)
        assert torch.equal(device[[2, 1]], old_host[[0, 3]])
        assert torch.equal(device[[0, 3, 4]], old_device[[0, 3, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_survives_the_way_to_the_host_and_back_although_its_blocks_were_poisoned(
    config: Any, dtype: torch.dtype
) -> None:
    cache = KVCache(config(), num_blocks=8, block_size=3, dtype=dtype, device=CPU, num_host_blocks=3)
    for layer in range(cache.num_layers):
        k, v = torch.randn(7, 2, 32).to(dtype), torch.randn(7, 2, 32).to(dtype)
        cache.write(layer, cache.slots((5, 2, 7), 0, 7), k, v)
    before = cache.read((5, 2, 7), 7)
    cache.swap_out([BlockCopy(5, 2), BlockCopy(2, 0), BlockCopy(7, 1)])
    assert cache.poison(range(8), {}) == 24
    cache.swap_in([BlockCopy(2, 1), BlockCopy(0, 6), BlockCopy(1, 3)])
    cache.poison_host(range(3))
    for (k, v), (new_k, new_v) in zip(before, cache.read((1, 6, 3), 7), strict=True):
        assert torch.equal(k, new_k)
        assert torch.equal(v, new_v)


def test_a_swapped_out_sequence_reads_as_it_did_on_the_device(swapping: KVCache) -> None:
    before = swapping.read((4, 1), 5)
    swapping.swap_out([BlockCopy(4, 2), BlockCopy(1, 0)])
    for (k, v), (host_k, host_v) in zip(before, swapping.read_host((2, 0), 5), strict=True):
        assert torch.equal(k, host_k)
        assert torch.equal(v, host_v)


def test_poison_of_host_blocks_fills_them_and_no_others(swapping: KVCache) -> None:
    before = [(d.clone(), h.clone()) for d, h in pairs(swapping)]
    assert swapping.poison_host((1, 3)) == 6
    for (old_device, old_host), (device, host) in zip(before, pairs(swapping), strict=True):
        assert torch.isnan(host[[1, 3]]).all()
        assert torch.equal(host[[0, 2]], old_host[[0, 2]])
        assert torch.equal(device, old_device)


@pytest.mark.parametrize(
    ("call", "copy", "message"),
    [
        ("swap_out", BlockCopy(0, 1), r"swap_out reads block 0, outside 1 … 4"),
        ("swap_out", BlockCopy(5, 1), r"swap_out reads block 5, outside 1 … 4"),
        ("swap_out", BlockCopy(2, 4), r"swap_out writes block 4, outside 0 … 3"),
        ("swap_out", BlockCopy(2, -1), r"swap_out writes block -1"),
        ("swap_in", BlockCopy(4, 1), r"swap_in reads block 4, outside 0 … 3"),
        ("swap_in", BlockCopy(1, 0), r"swap_in writes block 0, outside 1 … 4"),
        ("copy", BlockCopy(0, 1), r"copies reads block 0"),
        ("copy", BlockCopy(1, 5), r"copies writes block 5"),
    ],
)
def test_a_copy_of_a_block_that_is_not_there_is_a_bug_and_nothing_is_copied(
    swapping: KVCache, call: str, copy: BlockCopy, message: str
) -> None:
    before = [t.clone() for t in everything(swapping)]
    with pytest.raises(InvariantError, match=message):
        getattr(swapping, call)([BlockCopy(1, 2), copy])
    assert all(torch.equal(a, b) for a, b in zip(before, everything(swapping), strict=True))


def test_without_host_blocks_swapping_is_a_bug_that_says_so(cache: KVCache) -> None:
    with pytest.raises(InvariantError, match="an empty pool"):
        cache.swap_out([BlockCopy(1, 0)])
    cache.swap_out([])
    cache.swap_in([])
    assert cache.poison_host(()) == 0
