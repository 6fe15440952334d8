"""Host blocks: handed out, taken back, never shared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.cache import HostPool, PoolCounts
from minivllm.errors import ConfigError, InvariantError


def test_a_negative_size_is_refused_with_the_number() -> None:
    with pytest.raises(ConfigError, match="got num_host_blocks=-1"):
        HostPool(-1)


def test_every_block_can_be_used_from_number_0_on() -> None:
    pool = HostPool(3)
    assert pool.take(3) == [0, 1, 2]
    assert pool.counts() == PoolCounts(total=3, free=0, cached=0, in_use=3)
    assert pool.num_available == 0


def test_an_empty_pool_is_a_pool() -> None:
    pool = HostPool(0)
    assert pool.take(0) == []
    assert pool.counts() == PoolCounts(total=0, free=0, cached=0, in_use=0)
    pool.check_integrity()


def test_taking_too_many_raises_and_changes_nothing() -> None:
    pool = HostPool(2)
    pool.take(1)
    with pytest.raises(InvariantError, match="2 blocks taken from a host pool with 1 available"):
        pool.take(2)
    assert pool.num_available == 1
    pool.check_integrity()


def test_the_block_released_last_is_handed_out_first() -> None:
    pool = HostPool(4)
    pool.take(3)
    pool.release([1, 0])
    assert pool.take(3) == [0, 1, 3]


@pytest.mark.parametrize("block_id", [0, 2, 9])
def test_releasing_what_is_not_in_use_raises(block_id: int) -> None:
    pool = HostPool(3)
    pool.take(2)
    pool.release([0])
    with pytest.raises(InvariantError, match=f"host block {block_id} is released, but it is not in use"):
        pool.release([block_id])


@given(st.lists(st.integers(-3, 3)))
def test_a_block_is_free_or_in_use_whatever_happens(changes: list[int]) -> None:
    pool, held = HostPool(5), []
    for change in changes:
        if 0 <= change <= pool.num_available:
            held += pool.take(change)
        elif change < 0:
            released, held = held[change:], held[:change]
            pool.release(released)
        pool.check_integrity()
        assert list(pool.used_blocks()) == sorted(held)
        assert pool.counts() == PoolCounts(total=5, free=5 - len(held), cached=0, in_use=len(held))


def _lose_a_block(pool: HostPool) -> None:
    pool._free.pop()


def _free_a_used_block(pool: HostPool) -> None:
    pool._free.append(0)


@pytest.mark.parametrize("damage", [_lose_a_block, _free_a_used_block])
def test_the_integrity_check_names_the_broken_law(damage: Callable[[HostPool], None]) -> None:
    pool = HostPool(3)
    pool.take(1)
    damage(pool)
    with pytest.raises(InvariantError, match="a host block is either free or in use"):
        pool.check_integrity()
