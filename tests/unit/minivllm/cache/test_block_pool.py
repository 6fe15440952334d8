"""Reference counts and the order of reuse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.cache import NULL_BLOCK, BlockPool, PoolCounts
from minivllm.errors import ConfigError, InvariantError


def counts(pool: BlockPool) -> tuple[int, int, int]:
    standing = pool.counts()
    assert standing.free + standing.cached + standing.in_use == standing.total
    pool.check_integrity()
    return standing.free, standing.cached, standing.in_use


@pytest.mark.parametrize("num_blocks", [1, 0, -3])
def test_a_pool_without_a_usable_block_is_refused_with_the_number(num_blocks: int) -> None:
    with pytest.raises(
        ConfigError, match=f"at least 2 blocks.*num_blocks={num_blocks};.*raise num_kv_blocks"
    ):
        BlockPool(num_blocks)


def test_the_null_block_is_not_among_the_usable_ones() -> None:
    pool = BlockPool(4)
    assert pool.counts() == PoolCounts(total=3, free=3, cached=0, in_use=0)
    assert NULL_BLOCK not in pool.take(3)


def test_fresh_blocks_come_in_ascending_order() -> None:
    assert BlockPool(6).take(5) == [1, 2, 3, 4, 5]


def test_the_free_blocks_can_be_shuffled_and_nothing_else_is() -> None:
    pool = BlockPool(40)
    held = pool.take(3)
    pool.release(held[1], cached=True)
    pool.shuffle_free(7)
    assert counts(pool) == (36, 1, 2)
    orders = []
    for seed in (7, 7, 8):
        other = BlockPool(40)
        other.shuffle_free(seed)
        orders.append(other.take(39))
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == list(range(1, 40)) != orders[0]


def test_free_blocks_are_reused_before_cached_ones_and_the_last_freed_first() -> None:
    pool = BlockPool(6)
    pool.take(5)
    pool.release(2, cached=True)
    pool.release(4, cached=False)
    pool.release(3, cached=False)
    assert counts(pool) == (2, 1, 2)
    assert pool.take(3) == [3, 4, 2]


def test_cached_blocks_are_reused_in_the_order_they_were_released() -> None:
    pool = BlockPool(4)
    pool.take(3)
    for block_id in (3, 1, 2):
        pool.release(block_id, cached=True)
    assert list(pool.cached_blocks()) == [3, 1, 2]
    assert pool.take(3) == [3, 1, 2]


def test_a_hit_saves_a_cached_block_and_its_next_release_makes_it_the_most_recent() -> None:
    pool = BlockPool(4)
    pool.take(3)
    for block_id in (1, 2, 3):
        pool.release(block_id, cached=True)
    pool.hold(1)
    assert counts(pool) == (0, 2, 1)
    pool.release(1, cached=True)
    assert list(pool.cached_blocks()) == [2, 3, 1]


def test_a_shared_block_stays_in_use_until_its_last_holder_lets_go() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.take(1)
    pool.hold(block_id)
    assert pool.references(block_id) == 2
    pool.release(block_id, cached=False)
    assert counts(pool) == (0, 0, 1)
    pool.release(block_id, cached=False)
    assert counts(pool) == (1, 0, 0)


def test_taking_more_than_there_is_raises_and_changes_nothing() -> None:
    pool = BlockPool(4)
    pool.take(1)
    with pytest.raises(InvariantError, match="3 blocks taken from a pool with 2 available"):
        pool.take(3)
    assert counts(pool) == (2, 0, 1)
    assert pool.take(2) == [2, 3]


def test_releasing_more_often_than_holding_raises() -> None:
    pool = BlockPool(3)
    (block_id,) = pool.take(1)
    pool.release(block_id, cached=False)
    with pytest.raises(InvariantError, match=f"block {block_id} is released more often"):
        pool.release(block_id, cached=False)


@pytest.mark.parametrize("block_id", [NULL_BLOCK, 1])
def test_holding_a_block_that_holds_nothing_raises(block_id: int) -> None:
    with pytest.raises(InvariantError, match=f"block {block_id} is held although"):
        BlockPool(3).hold(block_id)


def test_forgetting_makes_a_cached_block_free_and_leaves_others_alone() -> None:
    pool = BlockPool(4)
    pool.take(2)
    pool.release(1, cached=True)
    for block_id in (1, 2, 3):
        pool.forget(block_id)
    assert counts(pool) == (2, 0, 1)
    assert set(pool.free_blocks()) == {1, 3}


@pytest.mark.parametrize(
    ("damage", "law"),
    [
        (lambda pool: pool._free.append(pool._free[0]), "listed once"),
        (lambda pool: pool._free.append(NULL_BLOCK), "null block"),
        (lambda pool: pool._free.pop(), "listed or referenced"),
        (lambda pool: pool._references.__setitem__(2, 1), "listed or referenced"),
    ],
)
def test_the_integrity_check_names_the_broken_law(damage: object, law: str) -> None:
    pool = BlockPool(4)
    assert callable(damage)
    damage(pool)
    with pytest.raises(InvariantError, match=law):
        pool.check_integrity()


@given(st.integers(2, 6), st.lists(st.tuples(st.sampled_from("thr"), st.integers(0, 9)), max_size=40))
def test_any_sequence_of_uses_conserves_the_pool(num_blocks: int, uses: list[tuple[str, int]]) -> None:
    pool = BlockPool(num_blocks)
    held: list[int] = []
    for use, number in uses:
        if use == "t" and pool.num_available:
            held += pool.take(1)
        elif use == "h" and held:
            held.append(held[number % len(held)])
            pool.hold(held[-1])
        elif use == "r" and held:
            block_id = held.pop(number % len(held))
            pool.release(block_id, cached=number % 2 == 0)
        pool.check_integrity()
        assert pool.counts().in_use == len(set(held))
        assert all(pool.references(block_id) == held.count(block_id) for block_id in range(num_blocks))
