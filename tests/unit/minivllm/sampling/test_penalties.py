from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from numpy.typing import NDArray

from minivllm.request import ScheduledRequest
from minivllm.sampling.penalties import adjust, needs_adjusting

MakeRow = Callable[..., ScheduledRequest]
LOGITS = (2.0, -1.0, 0.5, 3.0, -0.25, 1.0)


def adjusted(row: ScheduledRequest) -> NDArray[np.float64]:
    values = np.array(LOGITS)
    adjust(values, row)
    if not np.array_equal(values, LOGITS):
        assert needs_adjusting(row)
    return values


def masked(row: ScheduledRequest) -> list[int]:
    return np.flatnonzero(np.isneginf(adjusted(row))).tolist()


def test_default_parameters_leave_logits_alone(make_row: MakeRow) -> None:
    row = make_row([0, 1], [2, 3])
    assert not needs_adjusting(row)
    assert adjusted(row).tolist() == list(LOGITS)


def test_frequency_counts_output_tokens_only(make_row: MakeRow) -> None:
    values = adjusted(make_row([0, 0, 1], [3, 2, 3], frequency_penalty=0.5))
    assert (values - LOGITS).tolist() == [0, 0, -0.5, -1.0, 0, 0]


def test_presence_counts_each_output_token_once(make_row: MakeRow) -> None:
    values = adjusted(make_row([0, 0, 1], [3, 2, 3], presence_penalty=0.5))
    assert (values - LOGITS).tolist() == [0, 0, -0.5, -0.5, 0, 0]


def test_repetition_reads_prompt_and_output_and_shrinks_both_signs(make_row: MakeRow) -> None:
    values = adjusted(make_row([0, 1, 1], [3], repetition_penalty=2.0))
    assert values.tolist() == [1.0, -2.0, 0.5, 1.5, -0.25, 1.0]


def test_repetition_comes_before_frequency_and_presence(make_row: MakeRow) -> None:
    values = adjusted(
        make_row([0], [0, 0], repetition_penalty=2.0, frequency_penalty=0.25, presence_penalty=1.0)
    )
    assert values[0] == 2.0 / 2 - 0.25 * 2 - 1.0


def test_a_bias_may_be_any_real_number(make_row: MakeRow) -> None:
    values = adjusted(make_row([1], [], logit_bias={1: Fraction(1, 2), 4: np.float32(0.25)}))
    assert values.tolist() == [2.0, -0.5, 0.5, 3.0, 0.0, 1.0]


def test_bias_comes_before_penalties(make_row: MakeRow) -> None:
    values = adjusted(make_row([1], [], logit_bias={1: 5.0, 4: -1.0}, repetition_penalty=2.0))
    assert values.tolist() == [2.0, 2.0, 0.5, 3.0, -1.25, 1.0]


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_min_tokens_masks_every_eos_and_stop_id(make_row: MakeRow, ignore_eos: bool) -> None:
    params = {"eos": (1, 3), "stop_token_ids": [5], "min_tokens": 2, "ignore_eos": ignore_eos}
    assert masked(make_row([0], [], **params)) == [1, 3, 5]
    assert masked(make_row([0], [2], **params)) == [1, 3, 5]
    assert masked(make_row([0], [2, 2], **params)) == []


def test_min_tokens_beats_any_bias(make_row: MakeRow) -> None:
    row = make_row([0], eos=(1, 3), min_tokens=1, logit_bias={3: 100.0})
    assert masked(row) == [1, 3]


def test_an_eos_beyond_the_logits_is_no_error(make_row: MakeRow) -> None:
    assert masked(make_row([0], eos=(1, 99), min_tokens=1)) == [1]


def test_a_bad_word_is_cut_at_its_last_token(make_row: MakeRow) -> None:
    words = ((4,), (2, 3), (2, 3, 5))
    assert masked(make_row([2], [], bad_words=words)) == [4]  # the prompt does not count
    assert masked(make_row([0], [2], bad_words=words)) == [3, 4]
    assert masked(make_row([0], [2, 3], bad_words=words)) == [4, 5]
    assert masked(make_row([0], [3, 2, 0], bad_words=words)) == [4]


def test_history_beyond_the_view_does_not_count(make_row: MakeRow) -> None:
    row = make_row([0], [2], frequency_penalty=1.0)
    row.request.token_ids.append(3)  # committed after this step was planned
    assert (adjusted(row) - LOGITS).tolist() == [0, 0, -1.0, 0, 0, 0]
