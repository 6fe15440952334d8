from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from minivllm.sampling.logprobs import describe

LOGITS = np.array([1.0, 3.0, 2.0, 3.0, -np.inf], dtype=np.float32)
LOGPROBS = (LOGITS - np.log(np.exp(LOGITS).sum())).astype(np.float32)


def ranks(chosen: list[int], top: int) -> list[tuple[int, int | None]]:
    return [(i, p.rank) for i, p in describe(LOGITS, LOGPROBS, chosen, top).items()]


def test_zero_returns_only_the_chosen_token_with_its_rank() -> None:
    assert ranks([2], 0) == [(2, 3)]


def test_the_chosen_token_comes_first_then_the_top_in_order() -> None:
    assert ranks([0], 2) == [(0, 4), (1, 1), (3, 2)]


def test_a_chosen_token_among_the_top_is_listed_once() -> None:
    assert ranks([3], 2) == [(3, 2), (1, 1)]


def test_minus_one_returns_the_whole_vocabulary() -> None:
    assert ranks([4], -1) == [(4, 5), (1, 1), (3, 2), (2, 3), (0, 4)]


def test_values_are_those_of_the_given_row() -> None:
    found = describe(LOGITS, LOGPROBS, [4], 1)
    assert found[1].logprob == float(LOGPROBS[1])
    assert found[4].logprob == -np.inf


def test_logits_that_round_to_the_same_logprob_keep_their_ranks() -> None:
    logits = np.array([0.0, np.float32(2**-25), 20.0], dtype=np.float32)
    logprobs = np.array([-20.0, -20.0, 0.0], dtype=np.float32)
    found = describe(logits, logprobs, [0], 3)
    assert {i: p.rank for i, p in found.items()} == {2: 1, 1: 2, 0: 3}


@settings(deadline=None, max_examples=100)
@given(hnp.arrays(np.float32, st.integers(1, 20), elements=st.sampled_from([-2.0, 0.0, 0.5, 1.0])), st.data())
def test_ranks_are_a_permutation_and_agree_however_they_are_asked(
    logits: NDArray[np.float32], data: st.DataObject
) -> None:
    everything = describe(logits, logits, [], -1)
    assert [p.rank for p in everything.values()] == list(range(1, len(logits) + 1))
    token_id = data.draw(st.integers(0, len(logits) - 1))
    assert describe(logits, logits, [token_id], 0)[token_id] == everything[token_id]
