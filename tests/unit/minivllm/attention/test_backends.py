"""What every registered attention backend must do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm.attention import ATTENTION_BACKENDS, AUTO_ORDER

BACKENDS = list(ATTENTION_BACKENDS)
DTYPES = (torch.float32, torch.bfloat16)
LENGTHS = (70, 1, 33)
WHOLE = [[(0, 0, 70), (1, 0, 1), (2, 0, 33)]]
MIXED = [
    [(0, 0, 30), (2, 0, 1)],
    [(2, 1, 20), (0, 30, 31), (1, 0, 1)],
    *[[(0, i, i + 1), (2, i - 11, i - 10)] for i in range(31, 43)],
    [(0, 43, 70), (2, 32, 33)],
]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def truth(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int = 10**9,
    whole: Sequence[tuple[int, int]] = (),
) -> Tensor:
    """Causal attention in float64, one row at a time; the rows of `whole` spans see on to their ends."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(groups, 1), v.double().repeat_interleave(groups, 1)
    rows = []
    for i, row in enumerate(q.double()):
        end = next((last for first, last in whole if first <= i < last), i + 1)
        seen = slice(max(0, i + 1 - window), end)
        weights = torch.softmax(torch.einsum("hd,lhd->hl", row, k[seen]) * scale, -1)
        rows.append(torch.einsum("hl,lhd->hd", weights, v[seen]).flatten())
    return torch.stack(rows)


def test_the_registered_names_are_the_published_ones() -> None:
    assert BACKENDS == ["dense", "sdpa", "tiled"]
    assert set(AUTO_ORDER) <= set(BACKENDS)
    assert {name: ATTENTION_BACKENDS.get(name).bitwise for name in BACKENDS} == {
        "dense": False,
        "sdpa": False,
        "tiled": True,
    }
    assert all(ATTENTION_BACKENDS.get(name).name == name for name in BACKENDS)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_backend_supports_an_ordinary_model_on_cpu(name: str, config: Any) -> None:
    for dtype in DTYPES:
        assert ATTENTION_BACKENDS.get(name).supports(config(), dtype, torch.device("cpu")) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (3, 3, 16), (6, 1, 64), (9, 3, 24)])
@pytest.mark.parametrize("name", BACKENDS)
def test_attention_agrees_with_float64_in_prefill_chunks_and_decode(
    name: str, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, world: Any
) -> None:
    w = world(LENGTHS, heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype)
    scale = 1 / math.sqrt(dim)
    # bfloat16 scores near 16 are rounded by 1/32: 3 % of a weight, of values near 4.
    tolerance = 5e-6 if dtype == torch.float32 else 0.2
    for steps in (WHOLE, MIXED):
        for got, (q, k, v) in zip(w.run(name, steps, scale), w.sequences, strict=True):
            torch.testing.assert_close(got.double(), truth(q, k, v, scale), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [1, 2, 16, 33, 69])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_window_shows_that_many_positions_the_row_s_own_included(
    name: str, window: int, world: Any
) -> None:
    w = world(LENGTHS)
    for steps in (WHOLE, MIXED):
        for got, (q, k, v) in zip(w.run(name, steps, 0.2, window), w.sequences, strict=True):
            expected = truth(q, k, v, 0.2, window)
            torch.testing.assert_close(got.double(), expected, rtol=5e-6, atol=5e-6)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_window_as_long_as_the_sequence_changes_no_bit(name: str, world: Any) -> None:
    w = world(LENGTHS)
    for steps in (WHOLE, MIXED):
        assert same(w.run(name, steps, window=70), w.run(name, steps))
        assert not same(w.run(name, steps, window=69), w.run(name, steps))


@pytest.mark.parametrize("name", BACKENDS)
def test_positions_before_the_window_may_hold_any_number(name: str, world: Any) -> None:
    w = world(LENGTHS)
    expected = w.run(name, MIXED, window=8)
    for part in w.sequences[0][1:]:
        part[:10] = 1e4
    got = w.run(name, MIXED, window=8)
    assert torch.equal(got[0][17:], expected[0][17:])
    assert not torch.equal(got[0][16], expected[0][16])


#: Spans of the three sequences, and steps that cut none of them. Steps 4 and 5 begin inside a span, as
#: after a cache hit: what was before was computed with all of it, and is computed once more.
SPANS = (((3, 20), (31, 47)), ((0, 1),), ((0, 9), (20, 33)))
UNCUT = [
    [(0, 0, 25), (2, 0, 9)],
    [(0, 25, 31), (2, 9, 12)],
    [(0, 31, 47), (1, 0, 1), (2, 12, 33)],
    [(0, 40, 47), (2, 26, 33)],
    [(0, 46, 48), (2, 32, 33)],
    *[[(0, i, i + 1)] for i in range(48, 52)],
    [(0, 52, 70)],
]


@pytest.mark.parametrize("window", [None, 5, 30])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_rows_of_a_whole_span_see_on_to_its_end_and_back_as_far_as_any(
    name: str, window: int | None, world: Any
) -> None:
    w = world(LENGTHS, whole=SPANS, poison=True)
    for steps in (WHOLE, UNCUT):
        got = w.run(name, steps, 0.2, window)
        for rows, (q, k, v), whole in zip(got, w.sequences, SPANS, strict=True):
            expected = truth(q, k, v, 0.2, window or 10**9, whole)
            torch.testing.assert_close(rows.double(), expected, rtol=5e-6, atol=5e-6)
    assert not torch.equal(
        w.run(name, WHOLE, 0.2, window)[0], world(LENGTHS).run(name, WHOLE, 0.2, window)[0]
    )


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_spans_have_the_bits_of_any_steps_that_do_not_cut_them(
    dtype: torch.dtype, window: int | None, world: Any
) -> None:
    w = world(LENGTHS, dtype=dtype, whole=SPANS)
    assert same(w.run("tiled", WHOLE, 0.2, window), w.run("tiled", UNCUT, 0.2, window))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BACKENDS)
def test_slots_that_hold_no_token_may_hold_nan(name: str, dtype: torch.dtype, world: Any) -> None:
    for steps in (WHOLE, MIXED):
        clean, poisoned = (world(LENGTHS, dtype=dtype, poison=p).run(name, steps) for p in (False, True))
        assert same(clean, poisoned)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BACKENDS)
def test_block_size_and_placement_change_no_bit(name: str, dtype: torch.dtype, world: Any) -> None:
    expected = world(LENGTHS, dtype=dtype, shuffle=None).run(name, MIXED)
    for block_size in (1, 3, 16, 256):
        for shuffle in (None, 1, 2):
            w = world(LENGTHS, dtype=dtype, block_size=block_size, shuffle=shuffle)
            assert same(w.run(name, MIXED), expected), (block_size, shuffle)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BACKENDS)
def test_neighbours_in_the_batch_change_no_bit_of_dense_and_tiled_and_little_of_sdpa(
    name: str, dtype: torch.dtype, world: Any
) -> None:
    w = world(LENGTHS, dtype=dtype)
    together = w.run(name, MIXED)
    for i in range(len(LENGTHS)):
        alone = w.run(
            name, [[part for part in step if part[0] == i] for step in MIXED if i in {p[0] for p in step}]
        )
        if name == "sdpa":
            tolerance = 5e-6 if dtype == torch.float32 else 0.05
            torch.testing.assert_close(alone[i], together[i], rtol=tolerance, atol=tolerance)
        else:
            assert torch.equal(alone[i], together[i])


@pytest.mark.parametrize("name", BACKENDS)
def test_one_request_with_nan_spoils_no_other(name: str, world: Any) -> None:
    w = world(LENGTHS)
    expected = w.run(name, MIXED)
    for part in w.sequences[0]:
        part[5] = float("nan")
    got = w.run(name, MIXED)
    assert torch.equal(got[1], expected[1])
    assert torch.equal(got[2], expected[2])
    assert bool(torch.isnan(got[0][5:]).all())


@pytest.mark.parametrize("name", BACKENDS)
def test_queries_may_be_strided(name: str, world: Any) -> None:
    w = world(LENGTHS)
    expected = w.run(name, MIXED)
    w.sequences = [tuple(torch.stack([p, p], -1)[..., 0] for p in parts) for parts in w.sequences]
    assert not w.sequences[0][0].is_contiguous()
    assert same(w.run(name, MIXED), expected)


@pytest.mark.parametrize("name", BACKENDS)
def test_running_again_changes_no_bit(name: str, world: Any) -> None:
    assert same(world(LENGTHS).run(name, MIXED), world(LENGTHS).run(name, MIXED))
