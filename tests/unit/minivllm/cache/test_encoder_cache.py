"""Items are encoded when a step needs them, pinned for the step, and kept within the budget."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from minivllm.cache import EncoderCache
from minivllm.errors import CapacityError, InvariantError, RequestError
from minivllm.request import MediaItem, MediaSpan, Request, SamplingParams
from minivllm.trace import Encoded, Event, MediaEvicted


def request(
    name: str,
    spans: list[tuple[int, int, str]],
    rows: Mapping[str, int] | None = None,
    length: int = 30,
    supplied: str = "",
) -> Request:
    """Spans are (start, length, content hash); an item has as many rows as its first span, or `rows`."""
    sizes = {h: n for _, n, h in reversed(spans)} | dict(rows or {})
    items = {
        h: MediaItem(h, "image", n, {"embeddings": None} if h in supplied else {}) for h, n in sizes.items()
    }
    media = tuple(MediaSpan(start, n, "image", h) for start, n, h in spans)
    return Request(name, list(range(length)), length, SamplingParams(), media=media, media_items=items)


class Bench:
    """A cache whose steps are run at once; `held` mirrors what a runner would hold."""

    def __init__(self, budget: int) -> None:
        self.events: list[Event] = []
        self.cache = EncoderCache(budget, self.events.append)
        self.held: dict[str, int] = {}

    def step(self, *chunks: tuple[Request, int, int]) -> list[int]:
        """Plan chunks (request, start, most tokens), check, commit; how many tokens each got."""
        self.cache.begin()
        got = []
        for one, start, wanted in chunks:
            tokens = self.cache.most_tokens(one, start, wanted)
            got.append(tokens)
            if tokens:
                self.cache.claim(one, start, tokens)
        self.cache.check_integrity({user for users in self.cache._users.values() for user in users})
        encode, evict = self.cache.changes()
        for content_hash in evict:
            del self.held[content_hash]
        self.held.update((item.content_hash, item.num_embeddings) for item in encode)
        for (one, start, _), tokens in zip(chunks, got, strict=True):
            for span in one.media:
                if tokens and span.start < start + tokens and span.end > start:
                    assert one.media_items[span.content_hash].is_supplied or span.content_hash in self.held
        assert sum(self.held.values()) <= self.cache.budget
        self.cache.committed()
        assert {*self.cache.held} == {*self.held}
        for (one, start, _), tokens in zip(chunks, got, strict=True):
            one.num_computed_tokens = start + tokens
        return got


def test_an_item_is_encoded_when_a_chunk_first_touches_it_and_once() -> None:
    bench, one = Bench(10), request("r", [(5, 4, "a")])
    bench.cache.join(one)
    assert bench.step((one, 0, 5)) == [5]
    assert bench.cache.held == ()
    for start in (5, 6, 7, 8, 9):
        assert bench.step((one, start, 1)) == [1]
        assert bench.cache.held == ("a",)
    assert bench.events == [Encoded("r", "a", 4)]
    assert bench.cache.num_encoded == 1


def test_requests_share_an_item() -> None:
    bench = Bench(10)
    requests = [request(name, [(2, 4, "a")]) for name in "xyz"]
    for one in requests:
        bench.cache.join(one)
    assert bench.step((requests[0], 0, 9), (requests[1], 0, 9)) == [9, 9]
    bench.cache.leave(requests[0])
    assert bench.step((requests[2], 0, 9)) == [9]
    assert bench.events == [Encoded("x", "a", 4)]


def test_what_no_request_uses_stays_until_its_room_is_needed() -> None:
    bench, old, new = Bench(10), request("old", [(0, 6, "a")]), request("new", [(0, 5, "b")])
    bench.cache.join(old)
    bench.step((old, 0, 10))
    bench.cache.leave(old)
    bench.step()
    assert bench.cache.held == ("a",)
    bench.cache.join(new)
    bench.step((new, 0, 10))
    assert bench.events == [Encoded("old", "a", 6), MediaEvicted("a", 6), Encoded("new", "b", 5)]


def test_the_chunk_ends_before_an_item_that_does_not_fit_beside_those_it_needs() -> None:
    bench, one = Bench(10), request("r", [(2, 6, "a"), (9, 6, "b"), (16, 4, "c")])
    bench.cache.join(one)
    assert bench.step((one, 0, 30)) == [9]
    assert bench.step((one, 9, 21)) == [21]  # b and c fit together once a may go
    assert bench.cache.held == ("b", "c")


def test_a_later_request_waits_while_an_earlier_one_pins_the_room() -> None:
    bench = Bench(10)
    first, second = request("x", [(2, 6, "a")]), request("y", [(1, 6, "b")])
    bench.cache.join(first)
    bench.cache.join(second)
    assert bench.step((first, 0, 4), (second, 0, 4)) == [4, 1]
    assert bench.step((first, 4, 1), (second, 1, 4)) == [1, 0]
    assert bench.step((first, 8, 1), (second, 1, 4)) == [1, 4]


def test_of_two_victims_the_one_nobody_still_has_to_compute_goes_first() -> None:
    bench = Bench(12)
    done, waiting, new = (request(n, [(2, 5, h)]) for n, h in (("x", "a"), ("y", "b"), ("z", "c")))
    for one in (done, waiting):
        bench.cache.join(one)
    bench.step((waiting, 0, 4))  # b is older, and half of it is still to come
    bench.step((done, 0, 10))
    assert bench.cache.held == ("b", "a")
    bench.cache.join(new)
    bench.step((new, 0, 10))
    assert bench.cache.held == ("b", "c")


def test_among_equals_the_least_recently_used_goes_first() -> None:
    bench, one = Bench(9), request("r", [(0, 3, "a"), (3, 3, "b"), (6, 3, "c"), (9, 3, "d"), (12, 3, "a")])
    bench.cache.join(one)
    for start in (0, 3, 6):
        bench.step((one, start, 3))
    bench.step((request("s", [(0, 3, "a")]), 0, 3))  # used again
    bench.step((one, 9, 3))
    assert bench.cache.held == ("c", "a", "d")


def test_a_preempted_request_finds_its_item_or_has_it_encoded_anew() -> None:
    bench, one, other = Bench(8), request("r", [(0, 5, "a")]), request("s", [(0, 5, "b")])
    bench.cache.join(one)
    bench.step((one, 0, 20))
    bench.step((one, 0, 20))
    assert bench.cache.num_encoded == 1
    bench.cache.join(other)
    bench.step((other, 0, 20))
    bench.step((one, 0, 20))
    assert [type(e).__name__ for e in bench.events] == [
        "Encoded", "MediaEvicted", "Encoded", "MediaEvicted", "Encoded",
    ]  # fmt: skip


def test_a_plan_that_is_given_up_changes_nothing() -> None:
    bench, one, other = Bench(8), request("r", [(0, 5, "a")]), request("s", [(0, 5, "b")])
    for r in (one, other):
        bench.cache.join(r)
    bench.step((one, 0, 3))
    bench.cache.begin()
    bench.cache.claim(other, 0, 3)
    assert bench.cache.changes()[1] == ("a",)
    assert bench.step((one, 3, 3)) == [3]
    assert bench.cache.held == ("a",)
    assert bench.cache.num_encoded == 1


def test_cleared_items_are_evicted_and_encoded_anew_in_one_step() -> None:
    bench, one = Bench(8), request("r", [(0, 5, "a")])
    bench.cache.join(one)
    bench.step((one, 0, 5))
    bench.cache.clear()
    bench.cache.begin()
    bench.cache.begin()  # given up once: still to be done
    bench.step((one, 0, 5))
    assert bench.events == [Encoded("r", "a", 5), MediaEvicted("a", 5), Encoded("r", "a", 5)]
    bench.step((one, 0, 5))
    assert bench.cache.num_encoded == 2


def test_supplied_embeddings_take_no_room() -> None:
    bench, one = Bench(4), request("r", [(0, 9, "a"), (9, 4, "b")], supplied="a")
    bench.cache.check(one)
    bench.cache.join(one)
    assert bench.step((one, 0, 20)) == [20]
    assert bench.events == [Encoded("r", "b", 4)]


def test_the_same_item_twice_in_a_prompt_counts_once() -> None:
    bench, one = Bench(5), request("r", [(0, 5, "a"), (6, 5, "a")])
    bench.cache.check_whole(one)
    bench.cache.join(one)
    assert bench.step((one, 0, 20)) == [20]
    assert bench.cache.num_encoded == 1


def test_claiming_more_than_there_is_room_for_is_an_internal_error() -> None:
    cache, one = EncoderCache(5), request("r", [(0, 3, "a"), (3, 3, "b")])
    cache.begin()
    with pytest.raises(InvariantError, match="encoder budget of 5"):
        cache.claim(one, 0, 6)


def test_an_item_above_the_budget_is_refused_with_the_numbers() -> None:
    cache = EncoderCache(5)
    cache.check(request("r", [(0, 5, "a")]))
    with pytest.raises(
        CapacityError, match=r"an image of 6 embeddings exceeds the encoder cache of 5.*at least 6"
    ):
        cache.check(request("r", [(0, 6, "a")]))


def test_items_that_must_be_encoded_together_are_refused_with_the_numbers() -> None:
    cache = EncoderCache(5)
    with pytest.raises(
        CapacityError, match="2 media items have 6 embeddings, more than the encoder cache of 5"
    ):
        cache.check_whole(request("r", [(0, 3, "a"), (3, 3, "b")]))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("r", [(0, 3, "a"), (2, 3, "b")]), "in order, apart"),
        (request("r", [(4, 3, "a"), (0, 3, "b")]), "in order, apart"),
        (request("r", [(28, 3, "a")]), "within the 30 prompt tokens"),
        (request("r", [(0, 3, "a")], {"a": 2}), "rows 0 to 2 of an item with 2"),
        (request("r", [(0, 0, "a")]), "rows 0 to -1"),
    ],
)
def test_spans_that_do_not_fit_the_prompt_are_refused(bad: Request, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        EncoderCache(10).check(bad)


def test_a_span_without_an_item_is_refused() -> None:
    bad = request("r", [(0, 3, "a")])
    bad.media_items = {}
    with pytest.raises(RequestError, match="no media item belongs to"):
        EncoderCache(10).check(bad)
