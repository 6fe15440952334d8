"""Rows of logits are reduced without losing what a check needs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.observe import OWN_TOP, kv_digests, reduce_logits
from conformance.records import LogitTable


def table(*ids: list[int]) -> LogitTable:
    top = np.array(ids, dtype=np.int64)
    return LogitTable(top, np.zeros(top.shape), np.zeros(len(top)))


def test_values_are_taken_at_the_goldens_ids_in_its_order() -> None:
    logits = np.array([[0.0, 1.0, 2.0, 3.0]], dtype=np.float32)
    [row] = reduce_logits(logits, table([2, 0]))
    assert row.ids == (2, 0)
    assert row.values == (2.0, 0.0)
    assert row.argmax == 3


def test_without_a_golden_the_engines_own_best_are_kept_best_first() -> None:
    logits = np.arange(50, dtype=np.float32)[None]
    [row] = reduce_logits(logits, None)
    assert row.ids == tuple(range(49, 49 - OWN_TOP, -1))


def test_rows_beyond_the_golden_keep_the_engines_own() -> None:
    logits = np.zeros((2, 4), dtype=np.float32)
    first, second = reduce_logits(logits, table([3]))
    assert first.ids == (3,)
    assert second.ids == (0, 1, 2, 3)


@settings(max_examples=40)
@given(values=st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=30))
def test_logsumexp_is_over_the_whole_row_in_float64(values: list[float]) -> None:
    [row] = reduce_logits(np.array([values], dtype=np.float32), table([0]))
    assert row.logsumexp == pytest.approx(math.log(math.fsum(math.exp(v) for v in values)), abs=1e-9)


def test_large_logits_do_not_overflow() -> None:
    [row] = reduce_logits(np.array([[1e4, 1e4]], dtype=np.float32), None)
    assert row.logsumexp == pytest.approx(1e4 + math.log(2))


def test_the_lowest_id_wins_a_tie() -> None:
    [row] = reduce_logits(np.array([[1.0, 5.0, 5.0]], dtype=np.float32), None)
    assert row.argmax == 1


def test_nan_is_counted_and_spoils_the_sum() -> None:
    [row] = reduce_logits(np.array([[np.nan, 2.0, 1.0]], dtype=np.float32), table([0, 1]))
    assert row.num_nan == 1
    assert row.argmax == 1
    assert math.isnan(row.values[0])
    assert math.isnan(row.logsumexp)


def test_a_row_of_nan_alone_is_no_crash() -> None:
    [row] = reduce_logits(np.full((1, 3), np.nan, dtype=np.float32), None)
    assert row.num_nan == 3


def test_masked_logits_are_allowed() -> None:
    [row] = reduce_logits(np.array([[-np.inf, 0.0]], dtype=np.float32), None)
    assert (row.logsumexp, row.num_nan) == (0.0, 0)


def test_a_golden_id_the_engine_does_not_have_reads_as_nan() -> None:
    [row] = reduce_logits(np.zeros((1, 3), dtype=np.float32), table([7, 1]))
    assert math.isnan(row.values[0])
    assert row.values[1] == 0.0


def test_nothing_captured_gives_no_rows() -> None:
    assert reduce_logits(None, table([1])) == ()


def test_equal_digests_mean_equal_bits() -> None:
    base = np.linspace(-1, 1, 16, dtype=np.float32)[None]
    other = base.copy()
    other[0, 7] = np.nextafter(other[0, 7], np.float32(2))
    digest = reduce_logits(base, None)[0].digest
    assert reduce_logits(base.copy(), None)[0].digest == digest
    assert reduce_logits(other, None)[0].digest != digest
    assert reduce_logits(base.astype(np.float64), None)[0].digest != digest
    assert reduce_logits(np.zeros((1, 2), np.float32), None) != reduce_logits(
        -np.zeros((1, 2), np.float32), None
    )


def test_kv_digests_are_k_then_v_by_layer_number() -> None:
    stages = {
        f"{kind}.{layer}": np.full((2, 3), layer + (kind == "v") / 2) for layer in (10, 0, 2) for kind in "vk"
    }
    digests = kv_digests({**stages, "logits": np.zeros(3)})
    expected = [kv_digests({"k.0": stages[f"{kind}.{layer}"], "v.0": stages[f"{kind}.{layer}"]})[0]
                for layer in (0, 2, 10) for kind in "kv"]  # fmt: skip
    assert list(digests) == expected


def test_kv_digests_see_shape_as_well_as_bytes() -> None:
    flat = {"k.0": np.zeros((2, 3)), "v.0": np.zeros((2, 3))}
    tall = {"k.0": np.zeros((3, 2)), "v.0": np.zeros((3, 2))}
    assert kv_digests(flat) != kv_digests(tall)
    assert kv_digests({}) == ()
