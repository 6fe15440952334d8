"""Which requests are refused, and what they are told."""

from __future__ import annotations

import pytest

from minivllm.admission import Room, blocks_needed, check_capacity, check_prompt, most_tokens, seats
from minivllm.cache import BlockManager
from minivllm.errors import CapacityError, PromptTooLong, RequestError
from minivllm.request import Request, RequestStatus, SamplingParams


def request(
    prompt: int, max_tokens: int | None = 4, max_total_tokens: int = 2**31, *, n: int = 1, name: str = "a"
) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, n=n)
    return Request(name, [1] * prompt, prompt, sampling, max_total_tokens=max_total_tokens)


def blocks(usable: int, block_size: int = 4) -> BlockManager:
    return BlockManager(usable + 1, block_size, enable_prefix_caching=True)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "max_total_tokens", "max_model_len", "most"),
    [
        (5, 3, 99, 99, 8),
        (5, 3, 99, 7, 7),
        (5, 3, 6, 99, 6),
        (5, None, 99, 20, 20),
        (5, None, 9, 20, 9),
    ],
)
def test_the_tightest_limit_decides_how_far_a_request_may_grow(
    prompt: int, max_tokens: int | None, max_total_tokens: int, max_model_len: int, most: int
) -> None:
    assert most_tokens(request(prompt, max_tokens, max_total_tokens), max_model_len) == most


@pytest.mark.parametrize("prompt", [1, 14, 15])
def test_a_prompt_that_leaves_room_for_one_token_is_taken(prompt: int) -> None:
    check_prompt(request(prompt), 16, None)


@pytest.mark.parametrize("prompt", [16, 17, 400])
def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(prompt: int) -> None:
    with pytest.raises(
        PromptTooLong, match=f"'a' has {prompt} tokens, but at most 15 .*max_model_len 16.*; shorten"
    ):
        check_prompt(request(prompt), 16, None)


def test_a_request_s_own_total_limit_counts_too() -> None:
    with pytest.raises(PromptTooLong, match="at most 4 leave room"):
        check_prompt(request(5, max_total_tokens=5), 16, None)


def test_a_prompt_that_must_be_computed_at_once_but_cannot_is_refused_by_name() -> None:
    check_prompt(request(8), 16, 8)
    with pytest.raises(
        PromptTooLong, match="9 tokens, more than max_num_batched_tokens 8, and enable_chunked_prefill is off"
    ):
        check_prompt(request(9), 16, 8)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="'a' has an empty prompt"):
        check_prompt(request(0), 16, None)


def test_a_request_that_was_served_already_is_refused() -> None:
    finished, grown = request(3), request(3)
    finished.status = RequestStatus.FINISHED
    grown.token_ids.append(1)
    for used in (finished, grown):
        with pytest.raises(RequestError, match="served already"):
            check_prompt(used, 16, None)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_a_request_that_exactly_fills_the_pool_is_taken_and_one_token_more_is_refused(
    block_size: int,
) -> None:
    pool = blocks(3, block_size)
    room = 3 * block_size  # the last token generated needs no room
    check_capacity(request(2, room - 1), 99, pool)
    with pytest.raises(CapacityError):
        check_capacity(request(2, room), 99, pool)


def test_a_request_that_outgrows_the_pool_is_told_the_numbers_and_what_would_do() -> None:
    with pytest.raises(CapacityError) as caught:
        check_capacity(request(10, 8), 99, blocks(3))
    assert str(caught.value) == (
        "request 'a' can need 5 KV blocks (10 prompt tokens and up to 8 generated ones, block size 4), but"
        " the whole pool has 3; lower max_tokens to at most 3 or raise num_kv_blocks to at least 6"
    )
    check_capacity(request(10, 3), 99, blocks(3))
    check_capacity(request(10, 8), 99, blocks(5))


def test_a_prompt_that_alone_exceeds_the_pool_is_not_advised_to_lower_max_tokens() -> None:
    with pytest.raises(CapacityError, match="pool has 3; raise num_kv_blocks to at least 6"):
        check_capacity(request(20, 1), 99, blocks(3))


# --- several sequences ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "n", "next_step", "to_the_end"),
    [
        (4, 1, 3, 1, 1),  # nothing is written after the prompt
        (5, 1, 3, 2, 2),
        (4, 2, 3, 1 + 3, 1 + 3),  # a full prompt block is shared, and each writes one of its own
        (5, 2, 3, 1 + 3, 1 + 3),  # the unfinished block is everybody's own
        (5, 9, 3, 1 + 3, 1 + 3 * 3),
        (5, 9, 1, 2, 4),
        (3, 2, 3, 3, 3),
    ],
)
def test_sequences_to_be_forked_share_the_full_blocks_of_their_prompt_and_nothing_else(
    prompt: int, max_tokens: int, n: int, next_step: int, to_the_end: int
) -> None:
    req, pool = request(prompt, max_tokens, n=n), blocks(99)
    assert blocks_needed(req, 99, pool, to_the_end=False) == next_step
    assert blocks_needed(req, 99, pool, to_the_end=True) == to_the_end


def test_a_forked_request_needs_blocks_for_itself_alone() -> None:
    req = request(5, 9, n=3)
    req.token_ids.append(1)
    assert blocks_needed(req, 99, blocks(99), to_the_end=True) == 4


@pytest.mark.parametrize(("prompt", "n"), [(5, 1), (5, 2), (4, 3), (5, 3), (12, 2), (13, 5)])
def test_the_advised_max_tokens_fits_and_one_more_does_not(prompt: int, n: int) -> None:
    pool = blocks(7)
    with pytest.raises(CapacityError, match="lower max_tokens to at most") as caught:
        check_capacity(request(prompt, 90, n=n), 999, pool)
    advised = int(str(caught.value).partition("at most ")[2].split()[0])
    check_capacity(request(prompt, advised, n=n), 999, pool)
    with pytest.raises(CapacityError):
        check_capacity(request(prompt, advised + 1, n=n), 999, pool)


def test_the_advised_pool_holds_all_sequences() -> None:
    with pytest.raises(CapacityError, match=r"in each of n=3 sequences.*num_kv_blocks to at least 11"):
        check_capacity(request(5, 9, n=3), 99, blocks(9))
    check_capacity(request(5, 9, n=3), 99, blocks(10))


def test_a_request_counts_as_the_sequences_it_is_about_to_become_at_most_all_seats() -> None:
    req = request(2, n=3)
    assert [seats(req, most) for most in (1, 2, 8)] == [1, 2, 3]
    req.token_ids.append(1)
    assert seats(req, 8) == 1


# --- room beside others --------------------------------------------------------------------------


def run(pool: BlockManager, req: Request) -> Request:
    assert pool.allocate(req, req.num_tokens)
    return req


@pytest.mark.parametrize(("usable", "fits"), [(2, False), (3, True)])
def test_room_counts_what_the_newcomer_and_the_running_ones_need_in_the_step_after(
    usable: int, fits: bool
) -> None:
    pool = blocks(usable)
    running = run(pool, request(4, name="running"))  # its next token needs a second block
    room = Room([running], 99, pool, 3)
    newcomer = request(3)
    assert room.has(newcomer, pool.find_prefix(newcomer)) is fits


def test_whoever_was_let_in_claims_room_too() -> None:
    pool = blocks(4)
    room = Room([], 99, pool, 3)
    first, second = request(4, name="first"), request(7, name="second")
    assert room.has(first, pool.find_prefix(first))
    assert room.has(second, pool.find_prefix(second))
    run(pool, first)
    room.admitted(first)
    assert room.has(second, pool.find_prefix(second))
    third = request(8, name="third")  # two now and one in the step after, but first needs one as well
    assert not room.has(third, pool.find_prefix(third))


@pytest.mark.parametrize("who", ["newcomer", "running", "admitted"])
def test_with_a_request_at_the_bound_there_must_be_room_for_everyone_s_end(who: str) -> None:
    pool = blocks(7)
    running, admitted = request(3, 6, name="running"), request(1, 2, name="admitted")
    newcomer = request(3, 6)  # each of the two long ones needs 2 blocks in the end
    requests = {"newcomer": newcomer, "running": running, "admitted": admitted}
    run(pool, running)
    relaxed = Room([running], 14, pool, 3)
    newcomer.sampling = running.sampling = SamplingParams(max_tokens=11)  # now 4
    assert relaxed.has(newcomer, pool.find_prefix(newcomer))
    requests[who].num_preemptions = 3
    strict = Room([running], 14, pool, 3)
    if who == "admitted":
        run(pool, admitted)
        strict.admitted(admitted)
    assert not strict.has(newcomer, pool.find_prefix(newcomer))
