"""Which requests are refused, and what they are told."""

from __future__ import annotations

import pytest

from minivllm.admission import check_capacity, check_prompt, most_tokens
from minivllm.cache import BlockManager
from minivllm.errors import CapacityError, PromptTooLong, RequestError
from minivllm.request import Request, RequestStatus, SamplingParams


def request(prompt: int, max_tokens: int | None = 4, max_total_tokens: int = 2**31) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens)
    return Request("a", [1] * prompt, prompt, sampling, max_total_tokens=max_total_tokens)


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
