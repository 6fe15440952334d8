"""Sharing after a fork, copying on write, and moving to host memory and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from minivllm.cache import BlockManager, PendingCopies, PoolCounts, PrefixMatch
from minivllm.errors import InvariantError
from minivllm.request import BlockCopy, Request, SamplingParams
from minivllm.trace import Allocated, Copied, Event, Evicted, Forked, Published, SwappedIn, SwappedOut


def request(name: str, token_ids: Sequence[int]) -> Request:
    return Request(name, list(token_ids), len(token_ids), SamplingParams())


def manager(
    usable: int = 8,
    block_size: int = 2,
    *,
    host: int = 4,
    caching: bool = True,
    trace: list[Event] | None = None,
) -> BlockManager:
    return BlockManager(
        usable + 1,
        block_size,
        enable_prefix_caching=caching,
        prefix_seed=0,
        num_host_blocks=host,
        trace=(lambda _: None) if trace is None else trace.append,
    )


def compute(blocks: BlockManager, req: Request, num_tokens: int | None = None) -> None:
    """Let a request compute its first tokens, in a step that carries out what is pending."""
    num_tokens = req.num_tokens if num_tokens is None else num_tokens
    if blocks.has_table(req.request_id):
        assert blocks.append(req, num_tokens)
    else:
        assert blocks.allocate(req, num_tokens)
    step(blocks)
    req.num_computed_tokens = num_tokens
    blocks.publish(req)
    blocks.check_integrity()


def step(blocks: BlockManager) -> PendingCopies:
    pending = blocks.pending_copies()
    blocks.copies_done(pending)
    blocks.check_integrity()
    return pending


def forked(blocks: BlockManager, tokens: Sequence[int]) -> tuple[Request, Request]:
    """A computed request and its fork, each about to compute one token more."""
    parent, child = request("p", tokens), request("c", tokens)
    compute(blocks, parent)
    child.num_computed_tokens = parent.num_computed_tokens
    blocks.fork("p", child)
    blocks.check_integrity()
    parent.token_ids.append(50)
    child.token_ids.append(60)
    return parent, child


def state(blocks: BlockManager) -> tuple[object, ...]:
    """Everything a refused call must leave alone."""
    pool = blocks.pool
    return (
        tuple(pool.free_blocks()),
        tuple(pool.cached_blocks()),
        tuple(pool.references(i) for i in range(pool.num_blocks)),
        {name: (t.ids, t.num_published, t.num_computed) for name, t in blocks._tables.items()},
        dict(blocks._host_tables),
        tuple(blocks.host_pool.used_blocks()),
        blocks.pending_copies(),
    )


# --- fork and copy on write ----------------------------------------------------------------------


def test_a_fork_takes_no_block_and_shares_exactly_the_computed_ones() -> None:
    blocks = manager()
    parent = request("p", range(7))
    blocks.allocate(parent, 7)
    compute(blocks, parent, 3)
    before = blocks.counts()
    blocks.fork("p", request("c", range(3)))
    assert blocks.counts() == before
    assert blocks.block_table("c") == blocks.block_table("p")[:2]
    assert [blocks.pool.references(b) for b in blocks.block_table("p")] == [2, 2, 1, 1]


def test_the_first_writer_of_a_shared_block_gets_a_copy_and_the_last_writes_in_place() -> None:
    events: list[Event] = []
    blocks = manager(trace=events)
    parent, child = forked(blocks, [1, 2, 3])
    events.clear()
    assert blocks.append(parent, 4)
    assert blocks.append(child, 4)
    assert blocks.pending_copies() == PendingCopies(copies=(BlockCopy(2, 3),))
    assert (blocks.block_table("p"), blocks.block_table("c")) == ((1, 3), (1, 2))
    assert events == [Copied("p", 2, 3)]
    step(blocks)
    assert blocks.append(parent, 4)
    assert blocks.pending_copies() == PendingCopies()


def test_the_source_of_a_copy_is_kept_until_the_copy_is_done() -> None:
    blocks = manager(usable=3)
    parent, _ = forked(blocks, [1, 2, 3])
    blocks.append(parent, 4)
    blocks.free("c")
    assert blocks.pool.references(2) == 1
    assert not blocks.can_fit(request("x", [9]), 1)
    blocks.check_integrity()
    step(blocks)
    assert blocks.counts() == PoolCounts(total=3, free=1, cached=0, in_use=2)


def test_a_writer_that_goes_before_its_copy_is_made_takes_the_copy_with_it() -> None:
    blocks = manager()
    parent, _ = forked(blocks, [1, 2, 3])
    blocks.append(parent, 4)
    planned = blocks.pending_copies()
    blocks.free("p")
    assert blocks.pending_copies() == PendingCopies()
    assert [blocks.pool.references(b) for b in (1, 2, 3)] == [1, 1, 0]
    blocks.copies_done(planned)
    blocks.check_integrity()
    assert [blocks.pool.references(b) for b in (1, 2, 3)] == [1, 1, 0]


def test_a_full_shared_block_is_never_copied() -> None:
    blocks = manager()
    parent, child = forked(blocks, [1, 2])
    assert blocks.append(parent, 3)
    assert blocks.append(child, 3)
    assert blocks.pending_copies() == PendingCopies()
    assert blocks.block_table("p")[0] == blocks.block_table("c")[0] == 1


def test_the_copy_counts_against_the_room() -> None:
    blocks = manager(usable=2)
    parent, child = forked(blocks, [1, 2, 3])
    before = state(blocks)
    assert blocks.num_missing(parent, 2) == 1
    assert not blocks.can_fit(parent, 4)
    assert not blocks.append(parent, 4)
    assert state(blocks) == before
    blocks.free("p")
    assert blocks.num_missing(child, 2) == 0
    assert blocks.append(child, 4)


def test_a_copy_and_new_blocks_are_taken_together_or_not_at_all() -> None:
    blocks = manager(usable=3)
    parent, _ = forked(blocks, [1, 2, 3])
    parent.token_ids += [51, 52]
    before = state(blocks)
    assert not blocks.append(parent, 6)  # a copy and a third block, but one is left
    assert state(blocks) == before
    assert blocks.append(parent, 4)


def test_forks_publish_what_each_of_them_computed() -> None:
    events: list[Event] = []
    blocks = manager(trace=events)
    parent, child = forked(blocks, [1, 2, 3])
    for req in (parent, child):
        assert blocks.append(req, 4)
    step(blocks)
    for req in (parent, child):
        req.num_computed_tokens = 4
        blocks.publish(req)
    blocks.check_integrity()
    assert [e for e in events if isinstance(e, Published)] == [
        Published("p", 1),
        Published("p", 3),
        Published("c", 2),
    ]
    assert blocks.find_prefix(request("x", [1, 2, 3, 50, 0])) == PrefixMatch((1, 3), 4)
    assert blocks.find_prefix(request("y", [1, 2, 3, 60, 0])) == PrefixMatch((1, 2), 4)


def test_a_fork_publishes_its_own_text_however_far_its_parent_looked_ahead() -> None:
    blocks = manager()
    compute(blocks, request("p", [1, 2, 3]), 1)  # looked for [1, 2] before
    blocks.fork("p", child := request("c", [1]))
    child.token_ids.append(9)
    compute(blocks, child)
    assert blocks.find_prefix(request("x", [1, 9, 0])).num_tokens == 2
    assert blocks.find_prefix(request("y", [1, 2, 0])).num_tokens == 0


def test_a_fork_computes_the_keys_of_its_own_blocks_only(keys_made: list[tuple[int, ...]]) -> None:
    blocks = manager()
    _, child = forked(blocks, [1, 2, 3, 4, 5])
    keys_made.clear()
    assert blocks.append(child, 6)
    blocks.copies_done(blocks.pending_copies())
    child.num_computed_tokens = 6
    blocks.publish(child)
    assert keys_made == [(5, 60)]


def test_a_fork_outlives_its_parent() -> None:
    blocks = manager()
    _, child = forked(blocks, [1, 2, 3])
    blocks.free("p")
    blocks.check_integrity()
    assert blocks.append(child, 4)
    assert blocks.pending_copies() == PendingCopies()
    blocks.free("c")
    assert blocks.counts().in_use == 0


def test_a_fork_is_told_with_its_blocks() -> None:
    events: list[Event] = []
    forked(manager(trace=events), [1, 2, 3])
    assert events[-1] == Forked("c", "p", (1, 2))


@pytest.mark.parametrize("pending", ["copy", "swap-in"])
def test_what_is_not_in_the_blocks_yet_is_neither_forked_nor_published(pending: str) -> None:
    blocks = manager()
    parent, _ = forked(blocks, [1, 2, 3])
    if pending == "swap-in":
        blocks.swap_out("p")
        blocks.swap_in(parent, 4)
    else:
        blocks.append(parent, 4)
    advice = "request 'p' wait for copies; run the plan that has them and report copies_done first"
    with pytest.raises(InvariantError, match=advice):
        blocks.fork("p", request("d", [1, 2, 3]))
    with pytest.raises(InvariantError, match=advice):
        blocks.publish(parent)
    step(blocks)
    blocks.fork("p", request("d", [1, 2, 3]))


def test_forking_onto_a_holder_or_from_a_stranger_raises() -> None:
    blocks = manager()
    forked(blocks, [1, 2, 3])
    with pytest.raises(InvariantError, match="'c' is allocated twice"):
        blocks.fork("p", request("c", [1, 2, 3]))
    with pytest.raises(InvariantError, match="'nobody' holds no blocks"):
        blocks.fork("nobody", request("d", [1]))


# --- swapping ------------------------------------------------------------------------------------


def test_swapping_out_saves_the_computed_blocks_and_frees_all() -> None:
    events: list[Event] = []
    blocks = manager(trace=events)
    req = request("a", range(7))
    blocks.allocate(req, 7)
    compute(blocks, req, 3)
    assert blocks.swap_out("a")
    assert blocks.pending_copies() == PendingCopies(swap_out=(BlockCopy(1, 0), BlockCopy(2, 1)))
    assert (blocks.block_table("a"), blocks.host_table("a")) == ((), (0, 1))
    assert blocks.counts() == PoolCounts(total=8, free=7, cached=1, in_use=0)
    assert blocks.host_counts() == PoolCounts(total=4, free=2, cached=0, in_use=2)
    assert events[-1] == SwappedOut("a", 2)
    blocks.check_integrity()


def test_swapping_in_gives_new_blocks_with_room_for_more_and_keeps_the_host_s_until_it_is_done() -> None:
    events: list[Event] = []
    blocks = manager(trace=events)
    compute(blocks, req := request("a", range(3)))
    blocks.swap_out("a")
    step(blocks)
    req.token_ids += [7, 8]
    events.clear()
    assert blocks.swap_in(req, 5)
    table = blocks.block_table("a")
    assert blocks.pending_copies() == PendingCopies(swap_in=(BlockCopy(0, table[0]), BlockCopy(1, table[1])))
    assert blocks.host_counts().in_use == 2
    assert blocks.host_table("a") == ()
    assert [e for e in events if not isinstance(e, Evicted)] == [Allocated("a", table), SwappedIn("a", 2)]
    step(blocks)
    assert blocks.host_counts().in_use == 0


def test_what_was_swapped_in_is_published_again_with_the_next_commit() -> None:
    blocks = manager(usable=3)
    compute(blocks, req := request("a", [1, 2, 3]))
    blocks.swap_out("a")
    compute(blocks, request("x", [7] * 6))  # evicts
    blocks.free("x")
    req.token_ids.append(4)
    assert blocks.swap_in(req, 4)
    assert blocks.find_prefix(request("b", [1, 2, 9])).num_tokens == 0
    step(blocks)
    req.num_computed_tokens = 4
    blocks.publish(req)
    blocks.check_integrity()
    assert blocks.find_prefix(request("c", [1, 2, 3, 4, 5])).num_tokens == 4


def test_a_swap_out_without_room_on_the_host_changes_nothing() -> None:
    blocks = manager(host=1)
    compute(blocks, request("a", [1, 2, 3]))
    before = state(blocks)
    assert not blocks.swap_out("a")
    assert state(blocks) == before


def test_by_default_there_is_no_room_on_the_host() -> None:
    blocks = BlockManager(4, 2, enable_prefix_caching=False)
    compute(blocks, request("a", [1]))
    assert not blocks.swap_out("a")


def test_a_swap_in_without_room_on_the_device_changes_nothing() -> None:
    blocks = manager(usable=3)
    compute(blocks, req := request("a", [1, 2, 3]))
    blocks.swap_out("a")
    other = request("b", [9, 9, 9])
    blocks.allocate(other, 3)
    req.token_ids.append(4)
    before = state(blocks)
    assert not blocks.can_fit(req, 4)
    assert not blocks.swap_in(req, 4)
    assert state(blocks) == before
    blocks.free("b")
    assert blocks.swap_in(req, 4)


def test_cached_leftovers_of_a_swapped_request_give_it_no_extra_room() -> None:
    # vLLM pull request 6849: the leftovers were counted as if they were its own and as free.
    blocks = manager(usable=3)
    compute(blocks, req := request("a", [1, 2, 3, 4]))
    blocks.swap_out("a")
    compute(blocks, request("b", [9]))
    req.token_ids.append(5)
    assert blocks.counts() == PoolCounts(total=3, free=0, cached=2, in_use=1)
    assert blocks.find_prefix(req) == PrefixMatch()
    assert not blocks.can_fit(req, 5)
    assert not blocks.swap_in(req, 5)


def test_blocks_freed_by_a_swap_out_are_at_once_somebody_else_s() -> None:
    blocks = manager(usable=2, caching=False)
    compute(blocks, request("a", [1, 2, 3]))
    assert blocks.swap_out("a")
    assert blocks.allocate(request("b", [9] * 4), 4)
    assert {c.source for c in blocks.pending_copies().swap_out} == set(blocks.block_table("b"))


def test_out_and_in_again_within_one_step() -> None:
    blocks = manager()
    compute(blocks, req := request("a", [1, 2, 3]))
    blocks.swap_out("a")
    req.token_ids.append(4)
    blocks.swap_in(req, 4)
    pending = step(blocks)
    assert [c.target for c in pending.swap_out] == [c.source for c in pending.swap_in] == [0, 1]
    assert blocks.host_counts().in_use == 0


def test_swapping_out_again_before_the_swap_in_is_done_needs_no_room_and_no_copy() -> None:
    blocks = manager(host=2)
    compute(blocks, req := request("a", [1, 2, 3]))
    blocks.swap_out("a")
    step(blocks)
    compute(blocks, other := request("b", [9]))
    req.token_ids.append(4)
    blocks.swap_in(req, 4)
    planned = blocks.pending_copies()
    assert blocks.swap_out("a")
    assert blocks.pending_copies() == PendingCopies()
    assert blocks.host_table("a") == (0, 1)
    assert not blocks.swap_out("b")
    blocks.copies_done(planned)
    blocks.check_integrity()
    assert blocks.host_counts().in_use == 2
    assert other.num_computed_tokens == 1


def test_a_shared_block_is_saved_for_the_one_that_leaves_and_stays_for_the_other() -> None:
    blocks = manager()
    parent, _ = forked(blocks, [1, 2, 3])
    assert blocks.swap_out("p")
    assert blocks.block_table("c") == (1, 2)
    step(blocks)
    assert blocks.swap_in(parent, 4)
    assert not set(blocks.block_table("p")) & set(blocks.block_table("c"))


def test_swapping_out_before_a_copy_is_made_saves_its_source() -> None:
    blocks = manager()
    parent, _ = forked(blocks, [1, 2, 3])
    blocks.append(parent, 4)
    assert blocks.block_table("p") == (1, 3)
    blocks.swap_out("p")
    assert blocks.pending_copies() == PendingCopies(swap_out=(BlockCopy(1, 0), BlockCopy(2, 1)))
    blocks.check_integrity()


@pytest.mark.parametrize("when", ["out", "on the host", "in", "out and in"])
def test_freeing_a_swapped_request_gives_back_everything_in_any_state(when: str) -> None:
    blocks = manager()
    compute(blocks, req := request("a", [1, 2, 3]))
    blocks.swap_out("a")
    planned = blocks.pending_copies()
    if "out" not in when:
        step(blocks)
    if when.endswith("in"):
        req.token_ids.append(4)
        blocks.swap_in(req, 4)
        planned = blocks.pending_copies()
    blocks.free("a")
    assert blocks.pending_copies() == PendingCopies()
    blocks.copies_done(planned)
    blocks.check_integrity()
    assert blocks.counts().in_use == blocks.host_counts().in_use == 0
    blocks.free("a")


def test_host_blocks_held_by_anyone_keep_the_cache_from_being_reset() -> None:
    blocks = manager()
    compute(blocks, request("a", [1, 2, 3]))
    blocks.swap_out("a")
    before = state(blocks)
    assert blocks.reset_prefix_cache() is False
    assert state(blocks) == before
    blocks.free("a")
    assert blocks.reset_prefix_cache() is True


def test_misuse_of_swapping_raises_and_says_whose() -> None:
    blocks = manager()
    req = request("a", [1, 2, 3])
    blocks.allocate(req, 3)
    with pytest.raises(InvariantError, match="'a' is swapped out, but has computed nothing"):
        blocks.swap_out("a")
    with pytest.raises(InvariantError, match="'a' is swapped in, but holds no host blocks"):
        blocks.swap_in(req, 3)
    compute(blocks, req)
    blocks.swap_out("a")
    with pytest.raises(InvariantError, match="'a' holds no blocks"):
        blocks.swap_out("a")
    with pytest.raises(InvariantError, match="'a' is allocated twice"):
        blocks.allocate(req, 3)
    with pytest.raises(InvariantError, match="room for 3 tokens, but has computed 3; at least one"):
        blocks.swap_in(req, 3)


# --- slots that may be poisoned ------------------------------------------------------------------


def test_blocks_that_are_still_to_be_saved_do_not_count_as_unused() -> None:
    blocks = manager(usable=3, caching=False)
    compute(blocks, request("a", [1, 2, 3]))
    blocks.swap_out("a")
    assert blocks.unused_slots() == ((0, 3), {})
    blocks.allocate(request("b", [9] * 5), 5)
    assert blocks.unused_slots() == ((0,), {3: 0})
    step(blocks)
    assert blocks.unused_slots() == ((0,), {1: 0, 2: 0, 3: 0})


def test_the_written_slots_of_a_shared_block_are_in_use() -> None:
    blocks = manager(block_size=4)
    parent, _ = forked(blocks, [1, 2, 3])
    assert blocks.unused_slots()[1] == {1: 3}
    blocks.append(parent, 4)
    assert blocks.unused_slots()[1] == {1: 3, 2: 3}


# --- damage --------------------------------------------------------------------------------------


def _advance_one_of_two_sharers(blocks: BlockManager) -> None:
    blocks._tables["p"].num_computed += 1


def _forget_a_host_table(blocks: BlockManager) -> None:
    del blocks._host_tables["s"]


def _keep_device_blocks_too(blocks: BlockManager) -> None:
    blocks._host_tables["c"] = blocks._host_tables.pop("s")


def _claim_more_on_the_host(blocks: BlockManager) -> None:
    table = blocks._host_tables["s"]
    blocks._host_tables["s"] = type(table)(table.blocks, 9)


def _save_to_a_free_host_block(blocks: BlockManager) -> None:
    blocks._transfers.swap_out([BlockCopy(1, 3)])


def _swap_into_a_stranger_s_blocks(blocks: BlockManager) -> None:
    host_table = blocks._host_tables.pop("s")
    blocks._transfers.swap_in("p", [BlockCopy(b, 8) for b in host_table.blocks])


@pytest.mark.parametrize(
    ("damage", "law"),
    [
        (_advance_one_of_two_sharers, "a block is not written while others hold it"),
        (_forget_a_host_table, "a used host block has one holder"),
        (_keep_device_blocks_too, "blocks are on the device or on the host"),
        (_claim_more_on_the_host, "a host table holds computed tokens"),
        (_save_to_a_free_host_block, "a swap-out ends in a block in use"),
        (_swap_into_a_stranger_s_blocks, "a swap-in ends in the request's blocks"),
    ],
)
def test_the_integrity_check_names_the_broken_law(damage: Callable[[BlockManager], None], law: str) -> None:
    blocks = manager(block_size=4, caching=False)
    forked(blocks, [1, 2, 3])
    compute(blocks, request("s", [7]))
    blocks.swap_out("s")
    step(blocks)
    damage(blocks)
    with pytest.raises(InvariantError, match=law):
        blocks.check_integrity()


def test_the_integrity_check_finds_a_copy_onto_a_shared_block() -> None:
    blocks = manager(block_size=4, caching=False)
    parent, _ = forked(blocks, [1, 2, 3])
    blocks.append(parent, 4)
    blocks.pool.hold(2)
    blocks._tables["x"] = type(blocks._tables["p"])([2], (2,), 0, 3)
    with pytest.raises(InvariantError, match="a copy on write has one owner"):
        blocks.check_integrity()


def test_host_blocks_are_unused_until_somebody_is_swapped_out_and_after_the_copies_back() -> None:
    blocks, a = manager(host=3), request("a", [1, 2, 3])
    assert blocks.unused_host_blocks() == (0, 1, 2)
    compute(blocks, a)
    assert blocks.swap_out("a")
    assert blocks.unused_host_blocks() == (2,)
    a.token_ids.append(4)
    assert blocks.swap_in(a, 4)
    assert blocks.unused_host_blocks() == (2,), "the copies back are still to be made"
    blocks.copies_done(blocks.pending_copies())
    assert blocks.unused_host_blocks() == (0, 1, 2)
