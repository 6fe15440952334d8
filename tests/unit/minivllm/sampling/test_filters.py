from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from minivllm.request import SamplingParams
from minivllm.sampling.filters import draw, filter_tokens, most_likely

# Few distinct values, so that ties are common; -inf is a token that is ruled out.
LOGITS = hnp.arrays(
    np.float64, st.integers(1, 30), elements=st.sampled_from([-np.inf, -3, 0, 1, 1.5, 4])
).filter(lambda x: np.isfinite(x.max()))


def kept(logits: list[float] | NDArray[np.float64], **params: float) -> list[int]:
    ids, _ = filter_tokens(np.array(logits, dtype=np.float64), SamplingParams(**params))  # type: ignore[arg-type]
    return ids.tolist()


@settings(deadline=None, max_examples=100)
@given(LOGITS, st.integers(0, 40))
def test_most_likely_is_the_head_of_a_full_stable_sort(logits: NDArray[np.float64], k: int) -> None:
    full = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    assert most_likely(logits, k).tolist() == full[:k]


@settings(deadline=None, max_examples=100)
@given(
    LOGITS,
    st.sampled_from([0.1, 1.0, 3.0]),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.integers(-1, 12),
    st.sampled_from([1e-9, 0.3, 0.5, 0.9, 0.999, 1.0]),
)
def test_filters_agree_with_their_definitions(
    logits: NDArray[np.float64], temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    sampling = SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    ids, weights = filter_tokens(logits, sampling)

    p = np.exp(logits / temperature)
    order = sorted(range(len(p)), key=lambda i: (-logits[i], i))
    order = [i for i in order if p[i] >= min_p * p.max() * (1 - 1e-12)]
    order = order[:top_k] if top_k > 0 else order
    mass, wanted = 0.0, []
    total = sum(p[i] for i in order)
    for i in order:
        if mass / total >= top_p - 1e-12 and top_p < 1:
            break
        wanted.append(i)
        mass += p[i]
    assert ids.tolist() == sorted(wanted)
    np.testing.assert_allclose(weights, p[ids] / p.max(), rtol=1e-12)


def test_top_k_takes_lower_ids_first_among_equals() -> None:
    assert kept([1, 2, 2, 2, 0], top_k=2) == [1, 2]


def test_top_p_takes_lower_ids_first_among_equals() -> None:
    assert kept([0, 0, 0, 0], top_p=0.5) == [0, 1]


def test_top_p_includes_the_token_that_reaches_it() -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    assert kept(logits, top_p=0.4) == [0]
    assert kept(logits, top_p=0.79) == [0, 1]
    assert kept(logits, top_p=0.81) == [0, 1, 2]


def test_top_p_is_measured_on_what_top_k_left() -> None:
    logits = np.log([0.4, 0.3, 0.3])
    assert kept(logits, top_k=2, top_p=0.56) == [0]  # 0.4 of 0.7
    assert kept(logits, top_p=0.56) == [0, 1]


def test_temperature_comes_before_min_p_and_top_p() -> None:
    logits = np.log([0.5, 0.3, 0.2])
    assert kept(logits, min_p=0.5) == [0, 1]
    assert kept(logits, min_p=0.5, temperature=2.0) == [0, 1, 2]
    assert kept(logits, top_p=0.7, temperature=0.1) == [0]


def test_min_p_one_keeps_only_the_most_likely_and_its_equals() -> None:
    assert kept([3, 1, 3], min_p=1.0) == [0, 2]


@pytest.mark.parametrize("top_k", [0, -1, 5, 1000])
def test_top_k_of_zero_minus_one_or_the_vocabulary_keeps_all(top_k: int) -> None:
    assert kept([5, 4, 3, 2, 1], top_k=top_k) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("temperature", [1e-300, 1e-8, 1e8])
def test_extreme_temperatures_give_finite_weights(temperature: float) -> None:
    ids, weights = filter_tokens(
        np.array([1e30, -np.inf, 1e30, 7.0]), SamplingParams(temperature=temperature)
    )
    assert np.isfinite(weights).all()
    assert draw(ids, weights, 0.99) in (0, 2, 3)


def test_a_draw_passes_over_tokens_of_probability_zero() -> None:
    ids, weights = np.array([2, 5, 7, 9]), np.array([0.0, 1.0, 0.0, 1.0])
    assert [draw(ids, weights, u) for u in (0.0, 0.4999, 0.5, 1 - 2**-53)] == [5, 5, 9, 9]


@settings(deadline=None, max_examples=100)
@given(LOGITS, st.floats(0, 1, exclude_max=True))
def test_a_draw_is_always_a_possible_token(logits: NDArray[np.float64], number: float) -> None:
    token_id = draw(*filter_tokens(logits, SamplingParams()), number)
    assert np.isfinite(logits[token_id])
