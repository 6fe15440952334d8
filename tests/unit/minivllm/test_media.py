"""The runner's media store: rows by span, one encoding per item, reasons instead of numbers that fail."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from minivllm.errors import InvariantError
from minivllm.layers.ops import make_ops
from minivllm.layers.probe import threads
from minivllm.media import MediaStore
from minivllm.models import MediaEmbeddings, VisionLanguageModel
from minivllm.request import MediaItem, MediaSpan, Request, SamplingParams, ScheduledRequest, TokenView

HIDDEN = 4


class Encoder(VisionLanguageModel):
    """Row r of an item is 100 * its number + r; one deepstack feature, negated."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.ops = make_ops("torch", torch.device("cpu"))
        self.seen: list[str] = []
        self.threads: list[int] = []

    def encode(self, item: MediaItem) -> MediaEmbeddings:
        self.seen.append(item.content_hash)
        self.threads.append(torch.get_num_threads())
        rows = (
            (item.data["number"] * 100 + torch.arange(item.num_embeddings))[:, None]
            .expand(-1, HIDDEN)
            .float()
        )
        return MediaEmbeddings(rows, (-rows,))


def item(name: str, number: int, rows: int, **data: object) -> MediaItem:
    return MediaItem(name, "image", rows, {"number": number, **data})


def scheduled(request: Request, start: int, end: int) -> ScheduledRequest:
    tokens = TokenView(request.token_ids)
    return ScheduledRequest(
        request.request_id, start, end - start, tokens, request.num_prompt_tokens, (1,), False, request
    )


def request(*spans: MediaSpan, items: list[MediaItem], capture: frozenset[str] = frozenset()) -> Request:
    by_hash = {one.content_hash: one for one in items}
    return Request(
        "r", list(range(20)), 20, SamplingParams(), media=spans, media_items=by_hash, capture=capture
    )


def merged(
    store: MediaStore, *rows: ScheduledRequest
) -> tuple[list[float], list[list[float]], dict[str, str]]:
    """First column of the embeddings and of each deepstack feature; text is -1."""
    count = sum(r.num_tokens for r in rows)
    firsts = [sum(r.num_tokens for r in rows[:i]) for i in range(len(rows))]
    embeddings, deepstack, failures = store.merge(torch.full((count, HIDDEN), -1.0), rows, firsts)
    return embeddings[:, 0].tolist(), [one[:, 0].tolist() for one in deepstack], failures


A, B = item("a", 1, 5), item("b", 2, 3)


def test_rows_go_to_their_spans_and_deepstack_is_zero_elsewhere() -> None:
    store = MediaStore(Encoder())
    store.update((), (A, B))
    one = request(MediaSpan(1, 5, "image", "a"), MediaSpan(7, 3, "image", "b"), items=[A, B])
    rows, deepstack, failures = merged(store, scheduled(one, 0, 11))
    assert rows == [-1, 100, 101, 102, 103, 104, -1, 200, 201, 202, -1]
    assert deepstack == [[0, -100, -101, -102, -103, -104, 0, -200, -201, -202, 0]]
    assert failures == {}


def test_nothing_is_added_at_text_rows_by_bits() -> None:
    store = MediaStore(Encoder())
    store.update((), (B,))
    one = request(MediaSpan(1, 3, "image", "b"), items=[B])
    _, deepstack, _ = store.merge(torch.zeros(5, HIDDEN), [scheduled(one, 0, 5)], [0])
    text = torch.tensor([0.0, -0.0, 1e-45, -3.5])
    assert torch.equal((text + deepstack[0][0]).view(torch.int32), text.view(torch.int32))


@pytest.mark.parametrize(
    ("start", "end", "rows"), [(0, 3, [-1, 100, 101]), (3, 5, [102, 103]), (5, 7, [104, -1])]
)
def test_a_chunk_takes_its_slice_of_the_rows(start: int, end: int, rows: list[float]) -> None:
    store = MediaStore(Encoder())
    store.update((), (A,))
    one = request(MediaSpan(1, 5, "image", "a"), items=[A])
    assert merged(store, scheduled(one, start, end))[0] == rows


def test_an_item_in_runs_takes_the_rows_that_each_run_says() -> None:
    store = MediaStore(Encoder())
    store.update((), (A,))
    one = request(MediaSpan(0, 2, "image", "a", 0), MediaSpan(3, 3, "image", "a", 2), items=[A])
    assert merged(store, scheduled(one, 0, 6))[0] == [100, 101, -1, 102, 103, 104]
    assert merged(store, scheduled(one, 4, 6))[0] == [103, 104]


def test_requests_in_one_batch_do_not_mix() -> None:
    store = MediaStore(Encoder())
    store.update((), (A, B))
    one = request(MediaSpan(0, 5, "image", "a"), items=[A])
    other = replace(request(MediaSpan(1, 3, "image", "b"), items=[B]), request_id="s")
    rows, _, _ = merged(store, scheduled(one, 3, 6), scheduled(other, 0, 3))
    assert rows == [103, 104, -1, -1, 200, 201]


def test_supplied_rows_are_used_as_they_are_and_never_encoded() -> None:
    encoder = Encoder()
    given = MediaItem("c", "embeds", 2, {"embeddings": torch.full((2, HIDDEN), 7.0, dtype=torch.float64)})
    one = request(MediaSpan(0, 2, "embeds", "c"), items=[given])
    rows, deepstack, _ = merged(MediaStore(encoder), scheduled(one, 0, 3))
    assert rows == [7, 7, -1]
    assert deepstack == []
    assert encoder.seen == []


def test_what_is_evicted_is_encoded_anew() -> None:
    encoder = Encoder()
    store = MediaStore(encoder)
    store.update((), (A,))
    store.update(("a",), (B,))
    store.update(("b",), (A,))
    assert encoder.seen == ["a", "b", "a"]
    one = request(MediaSpan(0, 3, "image", "b"), items=[B])
    with pytest.raises(InvariantError, match="image b is needed but neither held nor encoded"):
        merged(store, scheduled(one, 0, 2))
    with pytest.raises(InvariantError, match="b is evicted but not held"):
        store.update(("b",), ())


def test_a_model_without_an_encoder_is_never_to_encode() -> None:
    with pytest.raises(InvariantError, match="without an encoder"):
        MediaStore(object()).update((), (A,))


def test_the_reason_why_an_item_has_no_embeddings_goes_to_whoever_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nan(_: object, what: MediaItem) -> MediaEmbeddings:
        rows = torch.zeros(what.num_embeddings, HIDDEN)
        rows[2] = float("nan")
        return MediaEmbeddings(rows)

    monkeypatch.setattr(Encoder, "encode", nan)
    store = MediaStore(Encoder())
    store.update((), (A,))
    one = request(MediaSpan(1, 5, "image", "a"), items=[A])
    assert merged(store, scheduled(one, 0, 1))[2] == {}
    rows, _, failures = merged(store, scheduled(one, 0, 3))
    assert rows == [-1, -1, -1]
    assert failures == {"r": "the embeddings of image a are not finite (NaN or infinite) at row 2"}


def test_rows_of_another_width_are_an_internal_error() -> None:
    store = MediaStore(Encoder())
    store.update((), (A,))
    one = request(MediaSpan(0, 5, "image", "a"), items=[A])
    with pytest.raises(InvariantError, match="has rows of 4, not 6"):
        store.merge(torch.zeros(3, 6), [scheduled(one, 0, 3)], [0])


def test_stages_show_what_the_step_touches() -> None:
    pixels: Tensor = torch.arange(6.0).reshape(2, 3)
    shown = item("b", 2, 3, pixel_values=pixels)
    store = MediaStore(Encoder())
    store.update((), (A, shown))
    one = request(
        MediaSpan(0, 5, "image", "a"), MediaSpan(6, 3, "image", "b"), items=[A, shown],
        capture=frozenset({"vision", "pixel_values"}),
    )  # fmt: skip
    assert sorted(store.stages(scheduled(one, 0, 3))) == ["vision.0"]
    stages = store.stages(scheduled(one, 3, 9))
    assert sorted(stages) == ["pixel_values.1", "vision.0", "vision.1"]
    assert stages["pixel_values.1"].tolist() == pixels.tolist()
    assert stages["vision.1"][:, 0].tolist() == [200, 201, 202]
    assert store.stages(scheduled(one, 9, 12)) == {}


def test_deepstack_is_shown_even_in_steps_without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Encoder, "num_deepstack_layers", 2)
    one = request(items=[], capture=frozenset({"deepstack"}))
    assert merged(MediaStore(Encoder()), scheduled(one, 0, 2))[1] == [[0, 0], [0, 0]]


@pytest.mark.parametrize(("ops", "expected"), [("torch", 2), ("torch-pad", 1)])
def test_ops_that_keep_bits_encode_on_one_thread(ops: str, expected: int) -> None:
    encoder = Encoder()
    encoder.ops = make_ops(ops, torch.device("cpu"))
    with threads(2):
        MediaStore(encoder).update((), [item("a", 1, 2)])
        assert torch.get_num_threads() == 2
    assert encoder.threads == [expected]
