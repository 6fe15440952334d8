"""Chunks, admission and progress of requests with pictures, over a tiny encoder budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from minivllm.errors import CapacityError, ConfigError
from minivllm.request import FinishReason, MediaItem, MediaSpan, Request
from minivllm.trace import Encoded, MediaEvicted

MakeBench = Callable[..., Any]
MakeRequest = Callable[..., Request]


def with_media(request: Request, *spans: tuple[int, int, str]) -> Request:
    """Give a request spans (start, length, content hash), each item with as many rows."""
    request.media = tuple(MediaSpan(start, length, "image", name) for start, length, name in spans)
    request.media_items = {name: MediaItem(name, "image", length, {}) for _, length, name in spans}
    return request


def encoded(bench: Any) -> list[str]:
    return [event.content_hash for event in bench.of(Encoded)]


def test_a_chunk_may_end_inside_a_picture_which_is_encoded_once(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(max_num_batched_tokens=3)
    bench.add(with_media(make_request("r", 10), (2, 6, "a")))
    plans = []
    for _ in range(4):
        plan = bench.plan()
        plans.append(([i.content_hash for i in plan.encode], plan.requests[0].num_tokens))
        bench.commit(plan, bench.run(plan))
    assert plans == [(["a"], 3), ([], 3), ([], 3), ([], 1)]


def test_a_chunk_ends_before_the_picture_that_has_no_room(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(max_encoder_embeddings=5)
    bench.add(with_media(make_request("r", 12), (1, 4, "a"), (6, 3, "b")))
    assert bench.step() == {"r": (0, 6)}
    plan = bench.plan()
    assert ([item.content_hash for item in plan.encode], plan.evict_media) == (["b"], ("a",))
    bench.commit(plan, bench.run(plan))
    assert bench.sequences["r"].num_computed_tokens == 12
    assert [type(e).__name__ for e in bench.of(Encoded, MediaEvicted)] == [
        "Encoded",
        "MediaEvicted",
        "Encoded",
    ]


def test_a_running_request_whose_picture_has_no_room_waits_while_others_go_on(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(max_encoder_embeddings=5, max_num_batched_tokens=8)
    bench.add(with_media(make_request("a", 12), (2, 5, "x")), with_media(make_request("b", 8), (1, 5, "y")))
    bench.add(make_request("c", 2))
    assert bench.step() == {"a": (0, 8)}
    assert bench.step() == {"a": (8, 4), "b": (0, 4)}  # x is computed, y may take its room
    assert bench.step() == {"a": (12, 1), "b": (4, 4), "c": (0, 2)}
    assert bench.drain() > 0
    assert encoded(bench) == ["x", "y"]


def test_nobody_overtakes_a_waiting_request_whose_picture_has_no_room(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(max_encoder_embeddings=5)
    bench.add(with_media(make_request("a", 6), (0, 5, "x")), with_media(make_request("b", 6), (0, 5, "y")))
    bench.add(make_request("c", 2))
    assert bench.step() == {"a": (0, 6)}
    assert bench.step() == {"a": (6, 1), "b": (0, 6), "c": (0, 2)}


def test_with_chunking_off_a_prompt_waits_for_room_for_all_of_its_pictures(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(max_encoder_embeddings=5, enable_chunked_prefill=False)
    bench.add(with_media(make_request("a", 6), (0, 3, "x")))
    bench.add(with_media(make_request("b", 8), (0, 2, "y"), (4, 3, "z")))
    assert bench.step() == {"a": (0, 6)}
    assert bench.step() == {"a": (6, 1), "b": (0, 8)}
    with pytest.raises(CapacityError, match="turn it on"):
        bench.add(with_media(make_request("c", 8), (0, 3, "y"), (4, 3, "z")))


def test_a_prefix_hit_does_not_encode_what_it_skips(make_bench: MakeBench, make_request: MakeRequest) -> None:
    bench = make_bench(max_encoder_embeddings=5)
    prompt = list(range(500, 510))
    bench.add(with_media(make_request("a", prompt), (1, 4, "x")))
    bench.drain()
    bench.scheduler.reset_encoder_cache()
    bench.add(with_media(make_request("b", prompt), (1, 4, "x")))
    bench.drain()
    assert bench.sequences["b"].num_cached_tokens == 8
    assert encoded(bench) == ["x"]


def test_a_prefix_hit_that_ends_inside_a_picture_encodes_it(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench()
    prompt = list(range(500, 510))
    bench.add(with_media(make_request("a", prompt), (1, 7, "x")))
    bench.drain()
    other = with_media(make_request("b", [*prompt[:5], 900, *prompt[6:]]), (1, 3, "x"), (6, 3, "y"))
    other.media_items = {"x": MediaItem("x", "image", 7, {}), "y": MediaItem("y", "image", 3, {})}
    bench.add(other)
    bench.drain()
    assert other.num_cached_tokens == 4
    assert encoded(bench) == ["x", "y"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("steps", range(1, 9))
def test_preempted_at_any_step_a_request_ends_with_its_pictures_encoded_once(
    make_bench: MakeBench, make_request: MakeRequest, steps: int, mode: str
) -> None:
    bench = make_bench(max_num_batched_tokens=3, host=20, caching=False)
    bench.add(with_media(make_request("r", 14), (2, 4, "a"), (8, 4, "b")))
    bench.steps(steps)
    live = "r" in bench.scheduler.requests
    assert bench.scheduler.preempt("r", mode) is live
    bench.drain()
    assert bench.sequences["r"].finish_reason is FinishReason.LENGTH
    assert encoded(bench) == ["a", "b"]


def test_aborting_the_first_of_two_that_share_a_picture_leaves_it_to_the_second(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(max_num_batched_tokens=4, max_encoder_embeddings=6)
    bench.add(with_media(make_request("a", 9), (1, 6, "x")), with_media(make_request("b", 9), (1, 6, "x")))
    bench.step()
    plan = bench.plan()
    result = bench.run(plan)
    bench.scheduler.abort("a")
    bench.commit(plan, result)
    bench.drain()
    assert encoded(bench) == ["x"]


def test_the_sequences_of_a_request_share_its_pictures(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(caching=False)
    bench.add(with_media(make_request("r", 6, n=3), (1, 4, "x")))
    bench.step()
    bench.scheduler.preempt("r/1")
    bench.drain()
    assert encoded(bench) == ["x"]
    assert all(s.finish_reason is FinishReason.LENGTH for s in bench.sequences.values())


def test_the_encoder_budget_must_be_positive(make_bench: MakeBench) -> None:
    with pytest.raises(ConfigError, match="max_encoder_embeddings must be at least 1, got 0"):
        make_bench(max_encoder_embeddings=0)


def test_by_default_a_picture_has_at_most_2048_rows(make_bench: MakeBench, make_request: MakeRequest) -> None:
    bench = make_bench(max_model_len=3000, usable=2000)
    bench.add(with_media(make_request("r", 2050), (1, 2048, "a")))
    with pytest.raises(CapacityError, match="2049 embeddings exceeds the encoder cache of 2048"):
        bench.add(with_media(make_request("s", 2050), (1, 2049, "b")))


def whole(request: Request, *spans: tuple[int, int, str]) -> Request:
    """As `with_media`, and the tokens of each span see one another."""
    with_media(request, *spans)
    request.media = tuple(replace(span, whole=True) for span in request.media)
    return request


@pytest.mark.parametrize("budget", [4, 5, 6, 7, 9, 20])
def test_a_chunk_never_ends_inside_a_picture_that_is_whole(
    make_bench: MakeBench, make_request: MakeRequest, budget: int
) -> None:
    bench = make_bench(max_num_batched_tokens=budget)
    bench.add(whole(make_request("r", 16), (2, 4, "a"), (6, 4, "b"), (11, 3, "c")))
    chunks = []
    while not chunks or chunks[-1][1] < 16:
        start, size = bench.step()["r"]
        chunks.append((start, start + size))
        assert size <= budget
    assert [start for start, _ in chunks[1:]] == [end for _, end in chunks[:-1]]
    inside = {*range(3, 6), *range(7, 10), 12, 13}
    assert not inside & {end for _, end in chunks}
    assert bench.drain() > 0
    assert encoded(bench) == ["a", "b", "c"]


def test_a_whole_picture_waits_for_a_step_that_has_room_for_it(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(max_num_batched_tokens=6)
    bench.add(make_request("text", 4), whole(make_request("r", 8), (1, 5, "a")))
    assert bench.step() == {"text": (0, 4), "r": (0, 1)}
    assert bench.step() == {"text": (4, 1), "r": (1, 5)}
    assert bench.step() == {"text": (5, 1), "r": (6, 2)}


def test_a_running_request_whose_whole_picture_has_no_room_holds_nobody_up(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(max_num_batched_tokens=5)
    bench.add(make_request("text", 2, max_tokens=2), whole(make_request("r", 8), (1, 5, "a")))
    bench.add(make_request("last", 2, max_tokens=2))
    assert bench.step() == {"text": (0, 2), "r": (0, 1), "last": (0, 2)}
    assert bench.step() == {"text": (2, 1), "last": (2, 1)}
    assert bench.step() == {"r": (1, 5)}


def test_nobody_overtakes_a_waiting_request_whose_whole_picture_has_no_room(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(max_num_batched_tokens=6)
    bench.add(make_request("text", 4), whole(make_request("r", 7), (0, 5, "a")), make_request("last", 1))
    assert bench.step() == {"text": (0, 4)}
    assert bench.step() == {"text": (4, 1), "r": (0, 5)}


def test_a_prefix_hit_may_end_inside_a_whole_picture(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(max_num_batched_tokens=8, block_size=4)
    prompt = [*range(100, 112)]
    bench.add(whole(make_request("one", prompt), (2, 7, "a")))
    assert bench.step() == {"one": (0, 2)}
    assert bench.step() == {"one": (2, 8)}
    bench.drain()
    # Positions 0 … 7 are in shared blocks; the picture ends with position 8.
    bench.add(whole(make_request("two", [*prompt[:9], 5, 6, 7, 8, 9]), (2, 7, "a"), (10, 3, "b")))
    bench.add(make_request("three", 6))
    assert bench.step() == {"two": (8, 6), "three": (0, 2)}
    assert bench.drain() > 0


def test_a_whole_picture_longer_than_a_step_is_refused_with_what_would_do(
    make_bench: MakeBench, make_request: MakeRequest
) -> None:
    bench = make_bench(max_num_batched_tokens=5)
    with pytest.raises(CapacityError, match=r"the 6 tokens of an image see one another.*at least 6"):
        bench.add(whole(make_request("r", 10), (2, 6, "a")))
    bench.add(with_media(make_request("r", 10), (2, 6, "a")))
    assert bench.drain() > 0
