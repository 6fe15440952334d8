"""Block tables over one pool: room, hits, publishing, freeing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from minivllm.cache import BlockManager, PoolCounts, PrefixMatch, PrefixStats
from minivllm.errors import ConfigError, InvariantError
from minivllm.request import Request, SamplingParams
from minivllm.trace import Allocated, Event, Evicted, PrefixHit, Published


def request(name: str, token_ids: Sequence[int], *, prompt_logprobs: int | None = None) -> Request:
    return Request(name, list(token_ids), len(token_ids), SamplingParams(prompt_logprobs=prompt_logprobs))


def manager(
    num_blocks: int = 6,
    block_size: int = 2,
    *,
    caching: bool = True,
    seed: int = 0,
    trace: list[Event] | None = None,
) -> BlockManager:
    return BlockManager(
        num_blocks,
        block_size,
        enable_prefix_caching=caching,
        prefix_seed=seed,
        trace=(lambda _: None) if trace is None else trace.append,
    )


def compute(blocks: BlockManager, req: Request, num_tokens: int | None = None) -> None:
    """Let the first `num_tokens` tokens of an allocated request be computed."""
    req.num_computed_tokens = req.num_tokens if num_tokens is None else num_tokens
    blocks.publish(req)
    blocks.check_integrity()


def serve(blocks: BlockManager, req: Request) -> None:
    """Allocate a whole request, compute it, and free it."""
    assert blocks.allocate(req, req.num_tokens)
    compute(blocks, req)
    blocks.free(req.request_id)
    blocks.check_integrity()


def state(blocks: BlockManager) -> tuple[object, ...]:
    """Everything a refused call must leave alone."""
    pool = blocks.pool
    return (
        tuple(pool.free_blocks()),
        tuple(pool.cached_blocks()),
        tuple(pool.references(i) for i in range(pool.num_blocks)),
        {
            name: (tuple(t.blocks), t.ids, t.num_published, t.num_computed)
            for name, t in blocks._tables.items()
        },
        {block_id: blocks.index.content(block_id).key for block_id in range(99) if block_id in blocks.index},
        blocks.stats,
    )


# --- room ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_size_below_one_is_refused_with_the_number(block_size: int) -> None:
    with pytest.raises(
        ConfigError, match=f"block_size must be a positive number of tokens, got {block_size}"
    ):
        manager(block_size=block_size)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16, 256])
@pytest.mark.parametrize("off", [-1, 0, 1])
def test_a_table_has_exactly_the_blocks_its_tokens_need_around_a_block_boundary(
    block_size: int, off: int
) -> None:
    num_tokens = 2 * block_size + off
    blocks = manager(5, block_size)
    assert blocks.allocate(request("a", [1] * num_tokens), num_tokens)
    assert len(blocks.block_table("a")) == -(-num_tokens // block_size)
    blocks.check_integrity()


def test_appending_adds_a_block_only_when_the_last_one_is_full() -> None:
    blocks = manager(block_size=3)
    req = request("a", [1, 2])
    blocks.allocate(req, 2)
    tables = []
    for num_tokens in range(3, 8):
        assert blocks.append(req, num_tokens)
        tables.append(blocks.block_table("a"))
    assert tables == [(1,), (1, 2), (1, 2), (1, 2), (1, 2, 3)]


def test_a_request_may_take_the_whole_pool_but_the_null_block() -> None:
    blocks = manager(4, 2)
    req = request("a", [1] * 6)
    assert blocks.can_fit(req, 6)
    assert not blocks.can_fit(req, 7)
    assert blocks.allocate(req, 6)
    assert blocks.counts() == PoolCounts(total=3, free=0, cached=0, in_use=3)


def test_asking_for_room_changes_nothing_however_often() -> None:
    blocks = manager()
    serve(blocks, request("a", [1, 2, 3, 4]))
    waiting = request("b", [1, 2, 3, 4, 5])
    before = state(blocks)
    answers = [(blocks.can_fit(waiting, 5), blocks.can_fit(waiting, 99)) for _ in range(3)]
    assert answers == [(True, False)] * 3
    assert state(blocks) == before


def test_a_refused_allocation_changes_nothing_even_after_a_hit() -> None:
    blocks = manager(5, 2)
    serve(blocks, request("a", [1, 2, 3, 4]))
    blocks.allocate(request("b", [7, 7, 7]), 3)
    before = state(blocks)
    # Two hits, no block free, and the only other two blocks in use.
    late = request("c", [1, 2, 3, 4, 5])
    assert blocks.find_prefix(late).num_tokens == 4
    assert not blocks.allocate(late, 5)
    assert state(blocks) == before
    assert blocks.block_table("c") == ()


def test_a_refused_append_changes_nothing() -> None:
    blocks = manager(3, 2)
    req = request("a", [1] * 4)
    blocks.allocate(req, 3)
    before = state(blocks)
    assert not blocks.append(req, 5)
    assert state(blocks) == before


def test_hit_blocks_nobody_holds_count_against_the_room() -> None:
    blocks = manager(4, 2)
    serve(blocks, request("a", [1, 2, 3, 4, 5, 6]))
    again = request("b", [1, 2, 3, 4, 5, 6, 7])
    assert blocks.find_prefix(again).num_tokens == 6
    assert not blocks.can_fit(again, 7)
    assert blocks.can_fit(again, 6)


def test_hit_blocks_somebody_holds_are_free_of_charge() -> None:
    blocks = manager(4, 2)
    first, second = request("a", [1, 2, 3, 4]), request("b", [1, 2, 3, 4, 5])
    blocks.allocate(first, 4)
    compute(blocks, first)
    assert blocks.can_fit(second, 6)
    assert not blocks.can_fit(second, 7)
    assert blocks.allocate(second, 5)
    assert blocks.block_table("b")[:2] == blocks.block_table("a")
    blocks.check_integrity()


def test_the_hit_blocks_of_a_request_are_never_evicted_for_its_own_new_blocks() -> None:
    blocks = manager(5, 1)
    serve(blocks, request("a", [1, 2, 3, 4]))
    again = request("b", [1, 2, 9, 9])
    assert blocks.allocate(again, 4)
    table = blocks.block_table("b")
    assert table[:2] == (1, 2)
    assert len(set(table)) == 4
    blocks.check_integrity()


# --- hits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", range(1, 10))
def test_a_full_hit_leaves_at_least_one_token_to_compute(num_tokens: int) -> None:
    blocks = manager(9, 2)
    prompt = list(range(num_tokens))
    serve(blocks, request("a", prompt))
    hit = blocks.find_prefix(request("b", prompt)).num_tokens
    assert hit == (num_tokens - 1) // 2 * 2


def test_nothing_is_hit_before_it_is_published() -> None:
    blocks = manager(9, 2)
    first, second = request("a", [1, 2, 3, 4, 5]), request("b", [1, 2, 3, 4, 5])
    blocks.allocate(first, 5)
    assert blocks.find_prefix(second) == PrefixMatch()
    compute(blocks, first, 3)
    assert blocks.find_prefix(second).num_tokens == 2
    compute(blocks, first)
    assert blocks.find_prefix(second).num_tokens == 4


def test_a_block_that_fills_while_decoding_is_published_then() -> None:
    blocks = manager(9, 2)
    req = request("a", [1])
    blocks.allocate(req, 1)
    compute(blocks, req)
    req.token_ids.append(2)
    blocks.append(req, 2)
    assert blocks.find_prefix(request("b", [1, 2, 3])).num_tokens == 0
    compute(blocks, req)
    assert blocks.find_prefix(request("c", [1, 2, 3])).num_tokens == 2


def test_requests_for_prompt_logprobs_hit_nothing_but_fill_the_cache() -> None:
    blocks = manager()
    serve(blocks, request("a", [1, 2, 3, 4], prompt_logprobs=0))
    assert blocks.find_prefix(request("b", [1, 2, 3, 4], prompt_logprobs=1)) == PrefixMatch()
    assert blocks.find_prefix(request("c", [1, 2, 3, 4])).num_tokens == 2
    assert blocks.stats == PrefixStats()


def test_without_prefix_caching_nothing_is_published_found_or_kept() -> None:
    events: list[Event] = []
    blocks = manager(caching=False, trace=events)
    serve(blocks, request("a", [1, 2, 3, 4]))
    assert blocks.find_prefix(request("b", [1, 2, 3, 4])) == PrefixMatch()
    assert blocks.counts() == PoolCounts(total=5, free=5, cached=0, in_use=0)
    assert blocks.stats == PrefixStats()
    assert [type(event) for event in events] == [Allocated]


def test_the_seed_fixes_the_keys_of_blocks() -> None:
    def key(seed: int) -> bytes:
        serve(blocks := manager(seed=seed), request("a", [1, 2]))
        return blocks.index.content(1).key

    assert key(1) == key(1)
    assert key(1) != key(2)


def test_the_key_of_a_block_is_computed_once_however_often_it_is_looked_for(
    keys_made: list[tuple[int, ...]],
) -> None:
    blocks, req = manager(9, 2), request("a", [1, 2, 3, 4, 5, 6])
    for _ in range(3):
        blocks.find_prefix(req)
    blocks.allocate(req, 6)
    for req.num_computed_tokens in (3, 6):
        blocks.publish(req)
    assert keys_made == [(1, 2), (3, 4), (5, 6)]


def test_two_requests_that_compute_the_same_both_keep_their_own_blocks() -> None:
    blocks = manager(9, 2)
    one, other = request("a", [1, 2, 3]), request("b", [1, 2, 3])
    for req in (one, other):
        blocks.allocate(req, 3)
    for req in (one, other):
        compute(blocks, req)
    assert not set(blocks.block_table("a")) & set(blocks.block_table("b"))
    blocks.free("a")
    blocks.check_integrity()
    assert blocks.find_prefix(request("c", [1, 2, 3])).num_tokens == 2


def test_statistics_count_first_admissions_only() -> None:
    blocks = manager(9, 2)
    first = request("a", [1, 2, 3, 4, 5])
    blocks.allocate(first, 5)
    first.num_cached_tokens = 0
    compute(blocks, first)
    blocks.free("a")
    assert blocks.allocate(first, 5)  # resumed, with a hit
    assert blocks.stats == PrefixStats(num_requests=1, num_queried_tokens=5, num_hit_tokens=0)
    assert blocks.allocate(request("b", [1, 2, 3, 9]), 4)
    assert blocks.stats == PrefixStats(num_requests=2, num_queried_tokens=9, num_hit_tokens=2)


def test_looking_and_failing_to_allocate_count_nothing() -> None:
    blocks = manager(3, 2)
    req = request("a", [1] * 5)
    blocks.find_prefix(req)
    assert not blocks.allocate(req, 5)
    assert blocks.stats == PrefixStats()


# --- freeing and eviction ------------------------------------------------------------------------


def test_a_freed_prefix_is_evicted_from_its_tail() -> None:
    blocks = manager(5, 4)
    prompt = list(range(16))
    serve(blocks, request("a", prompt))
    other = request("b", [99] * 8)
    blocks.allocate(other, 8)
    assert blocks.find_prefix(request("c", [*prompt, 1])).num_tokens == 8


def test_partly_filled_blocks_are_reused_before_any_cached_one() -> None:
    blocks = manager(5, 2)
    serve(blocks, request("a", [1, 2, 3]))
    serve(blocks, request("b", [4, 5, 6]))
    blocks.allocate(request("c", [7] * 4), 4)
    assert blocks.find_prefix(request("d", [1, 2, 3])).num_tokens == 2
    assert blocks.find_prefix(request("e", [4, 5, 6])).num_tokens == 2


def test_a_finished_prompt_stays_hittable_until_its_room_is_needed() -> None:
    blocks = manager(7, 2)
    serve(blocks, request("a", [1, 2, 3, 4, 5]))
    for number in range(9):
        serve(blocks, request(f"short {number}", [9]))
    assert blocks.find_prefix(request("b", [1, 2, 3, 4, 5])).num_tokens == 4


def test_the_least_recently_used_prompt_is_evicted_first() -> None:
    blocks = manager(6, 2)
    for number in (1, 2, 3):
        serve(blocks, request(f"{number}", [number] * 2))
    serve(blocks, request("touch", [1, 1, 7]))  # hits [1, 1]
    blocks.allocate(request("big", [9] * 6), 6)  # takes the two blocks without content, and one more
    hits = {n: blocks.find_prefix(request(f"again {n}", [n] * 3)).num_tokens for n in (1, 2, 3)}
    assert hits == {1: 2, 2: 0, 3: 2}


def test_an_evicted_block_no_longer_answers_for_its_old_content() -> None:
    blocks = manager(4, 4)
    serve(blocks, request("x", range(12)))
    serve(blocks, request("y", range(20, 32)))
    assert blocks.find_prefix(request("z", range(13))) == PrefixMatch()


def test_freeing_twice_or_freeing_a_stranger_changes_nothing() -> None:
    blocks = manager()
    req = request("a", [1, 2, 3])
    blocks.allocate(req, 3)
    blocks.free("a")
    before = state(blocks)
    blocks.free("a")
    blocks.free("nobody")
    assert state(blocks) == before
    blocks.check_integrity()


def test_a_shared_prefix_outlives_the_one_who_computed_it() -> None:
    blocks = manager(9, 2)
    first, second = request("a", [1, 2, 3]), request("b", [1, 2, 9])
    blocks.allocate(first, 3)
    compute(blocks, first)
    blocks.allocate(second, 3)
    shared = blocks.block_table("a")[0]
    blocks.free("a")
    blocks.check_integrity()
    assert blocks.block_table("b")[0] == shared
    assert blocks.pool.references(shared) == 1


def test_discarded_blocks_are_never_hit_again_even_those_published_before() -> None:
    events: list[Event] = []
    blocks = manager(9, 2, trace=events)
    req = request("a", [1, 2, 3, 4, 5])
    blocks.allocate(req, 5)
    compute(blocks, req, 2)
    events.clear()
    blocks.discard("a")
    assert events == [Evicted(1)]
    blocks.check_integrity()
    assert blocks.find_prefix(request("b", [1, 2, 3, 4, 5])) == PrefixMatch()
    assert blocks.counts().free == 8


def test_resetting_forgets_every_cached_block_but_is_refused_while_one_is_held() -> None:
    blocks = manager(9, 2)
    serve(blocks, request("a", [1, 2, 3, 4]))
    holder = request("b", [9])
    blocks.allocate(holder, 1)
    before = state(blocks)
    assert blocks.reset_prefix_cache() is False
    assert state(blocks) == before
    blocks.free("b")
    assert blocks.reset_prefix_cache() is True
    assert blocks.counts() == PoolCounts(total=8, free=8, cached=0, in_use=0)
    assert blocks.find_prefix(request("c", [1, 2, 3, 4])) == PrefixMatch()
    blocks.check_integrity()


def test_the_same_calls_hand_out_the_same_blocks() -> None:
    def run() -> list[Event]:
        events: list[Event] = []
        blocks = manager(6, 2, trace=events)
        for number in range(12):
            serve(blocks, request(str(number), [number % 3] * (1 + number % 5)))
        return events

    assert run() == run()


# --- what it tells -------------------------------------------------------------------------------


def test_events_tell_hits_allocations_publishing_and_eviction_in_order() -> None:
    events: list[Event] = []
    blocks = manager(4, 2, trace=events)
    serve(blocks, request("a", [1, 2, 3, 4]))
    serve(blocks, request("b", [1, 2, 9, 9, 9]))
    assert events == [
        Allocated("a", (1, 2)),
        Published("a", 1),
        Published("a", 2),
        PrefixHit("b", 2, (1,), resumed=False),
        Evicted(2),
        Allocated("b", (3, 2)),
        Published("b", 3),
    ]


def test_an_append_tells_which_blocks_it_added() -> None:
    events: list[Event] = []
    blocks = manager(trace=events)
    req = request("a", [1, 2])
    blocks.allocate(req, 2)
    events.clear()
    assert blocks.append(req, 3)
    assert blocks.append(req, 4)
    assert events == [Allocated("a", (2,))]


def test_unused_slots_are_the_null_block_free_blocks_and_the_ends_of_written_ones() -> None:
    blocks = manager(9, 4)
    serve(blocks, request("cached", [5] * 4))
    req = request("a", [1] * 9)
    blocks.allocate(req, 9)
    table = blocks.block_table("a")
    free, partly = blocks.unused_slots()
    assert partly == dict.fromkeys(table, 0)
    compute(blocks, req, 6)
    free, partly = blocks.unused_slots()
    assert partly == {table[1]: 2, table[2]: 0}
    compute(blocks, req, 8)
    assert blocks.unused_slots()[1] == {table[2]: 0}
    cached = set(blocks.pool.cached_blocks())
    assert len(cached) == 1
    assert set(free) == set(range(9)) - set(table) - cached
    assert free[0] == 0


# --- misuse and damage ---------------------------------------------------------------------------


def test_misuse_raises_and_says_whose() -> None:
    blocks = manager(9, 2)
    req = request("a", [1, 2, 3])
    for misuse in (blocks.append, lambda r, _: blocks.publish(r)):
        with pytest.raises(InvariantError, match="request 'a' holds no blocks"):
            misuse(req, 3)
    blocks.allocate(req, 3)
    with pytest.raises(InvariantError, match="request 'a' is allocated twice"):
        blocks.allocate(req, 3)
    req.num_computed_tokens = 5
    with pytest.raises(InvariantError, match="computed 5 tokens in 2 blocks of 2"):
        blocks.publish(req)


def test_an_allocation_that_leaves_nothing_to_compute_raises() -> None:
    blocks = manager(9, 2)
    serve(blocks, request("a", [1, 2, 3]))
    with pytest.raises(InvariantError, match="allocated 2 tokens, all of them in its cached prefix of 2"):
        blocks.allocate(request("b", [1, 2, 3]), 2)


def _hold_without_table(blocks: BlockManager) -> None:
    blocks.pool.hold(blocks.block_table("a")[0])


def _repeat_a_block(blocks: BlockManager) -> None:
    table = blocks._tables["a"]
    blocks.pool.hold(table.blocks[0])
    table.blocks.append(table.blocks[0])
    table.ids = tuple(table.blocks)


def _unpublish_a_cached_block(blocks: BlockManager) -> None:
    blocks.index.remove(next(blocks.pool.cached_blocks()))


def _free_a_published_block(blocks: BlockManager) -> None:
    blocks.pool.forget(next(blocks.pool.cached_blocks()))


def _forget_to_renew_the_tuple(blocks: BlockManager) -> None:
    blocks._tables["a"].ids = ()


def _compute_beyond_the_table(blocks: BlockManager) -> None:
    blocks._tables["a"].num_computed = 99


def _publish_ahead(blocks: BlockManager) -> None:
    blocks._tables["a"].num_published = 2


@pytest.mark.parametrize(
    ("damage", "law"),
    [
        (_hold_without_table, "references equal holders"),
        (_repeat_a_block, "a table holds a block once"),
        (_unpublish_a_cached_block, "a cached block is published"),
        (_free_a_published_block, "a free block is not published"),
        (_forget_to_renew_the_tuple, "the block table is what was handed out"),
        (_compute_beyond_the_table, "computed tokens have a block"),
        (_publish_ahead, "published means computed"),
    ],
)
def test_the_integrity_check_names_the_broken_law(damage: Callable[[BlockManager], None], law: str) -> None:
    blocks = manager(9, 2)
    serve(blocks, request("cached", [8, 8]))
    req = request("a", [1, 2, 3])
    blocks.allocate(req, 3)
    compute(blocks, req)
    damage(blocks)
    with pytest.raises(InvariantError, match=law):
        blocks.check_integrity()
