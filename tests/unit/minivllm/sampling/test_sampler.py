from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.request import SampledToken, ScheduledRequest
from minivllm.sampling import Sampler

MakeRow = Callable[..., ScheduledRequest]
MakeSampler = Callable[[int], Sampler]

PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 3, 50]),
        "top_p": st.sampled_from([0.2, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "presence_penalty": st.sampled_from([0.0, 1.0]),
        "frequency_penalty": st.sampled_from([0.0, -0.5]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "logit_bias": st.sampled_from([None, {2: 4.0, 5: -100.0}]),
        "min_tokens": st.sampled_from([0, 4]),
        "logprobs": st.sampled_from([None, 0, 2, -1]),
        "seed": st.integers(0, 3),
    }
)


def only(results: list[SampledToken | str]) -> SampledToken:
    (result,) = results
    assert isinstance(result, SampledToken)
    return result


def test_greedy_takes_the_lowest_id_among_equals(make_row: MakeRow, make_sampler: MakeSampler) -> None:
    logits = torch.tensor([[0.0, 2, 2, 1], [5, 5, 5, 5], [0, 1, 2, 3]])
    results = make_sampler(4).sample(logits, [make_row()] * 3)
    assert results == [SampledToken(1, 1), SampledToken(0, 0), SampledToken(3, 3)]


def test_greedy_after_penalties_takes_the_lowest_id_too(make_row: MakeRow, make_sampler: MakeSampler) -> None:
    logits = torch.tensor([[3.0, 2, 2, 1]])
    row = make_row([1], [0], presence_penalty=2.0)
    assert only(make_sampler(4).sample(logits, [row])).token_id == 1


def test_logprobs_are_of_the_raw_logits(make_row: MakeRow, make_sampler: MakeSampler) -> None:
    logits = torch.tensor([[3.0, 2, 1, 0]])
    expected = torch.log_softmax(logits[0].double(), 0)
    row = make_row([0], [0], repetition_penalty=9.0, logit_bias={3: 50.0}, temperature=0.5, logprobs=2)
    found = only(make_sampler(4).sample(logits, [row])).logprobs
    assert found is not None
    assert [(i, p.rank) for i, p in found.items()] == [(3, 4), (0, 1), (1, 2)]
    for token_id, entry in found.items():
        assert entry.logprob == pytest.approx(float(expected[token_id]), abs=1e-6)


def test_logprobs_are_absent_unless_asked(make_row: MakeRow, make_sampler: MakeSampler) -> None:
    logits = torch.tensor([[0.0, 1], [0, 1]])
    first, second = make_sampler(2).sample(logits, [make_row(), make_row(logprobs=0)])
    assert isinstance(first, SampledToken)
    assert first.logprobs is None
    assert isinstance(second, SampledToken)
    assert second.logprobs is not None
    assert list(second.logprobs) == [1]


def test_forcing_records_the_choice_and_feeds_the_forced_id(
    make_row: MakeRow, make_sampler: MakeSampler
) -> None:
    logits = torch.tensor([[0.0, 3, 1, 2]])
    sampler = make_sampler(4)
    forced = {"forced_token_ids": [2, 0], "logprobs": 0}
    first = only(sampler.sample(logits, [make_row([1], [], **forced)]))
    assert (first.token_id, first.choice_token_id) == (2, 1)
    assert first.logprobs is not None
    assert {i: p.rank for i, p in first.logprobs.items()} == {2: 3, 1: 1}
    second = only(sampler.sample(logits, [make_row([1], [2], **forced)]))
    assert (second.token_id, second.choice_token_id) == (0, 1)
    past_the_end = only(sampler.sample(logits, [make_row([1], [2, 0], **forced)]))
    assert (past_the_end.token_id, past_the_end.choice_token_id) == (1, 1)


def test_forcing_draws_the_same_choice_as_the_request_alone(
    make_row: MakeRow, make_sampler: MakeSampler
) -> None:
    logits = torch.zeros(1, 50)
    sampler = make_sampler(50)
    for seed in range(5):
        free = only(sampler.sample(logits, [make_row(seed=seed, temperature=1.0)]))
        forced = only(sampler.sample(logits, [make_row(seed=seed, temperature=1.0, forced_token_ids=[7])]))
        assert (forced.token_id, forced.choice_token_id) == (7, free.token_id)


def test_draws_follow_the_distribution(make_row: MakeRow, make_sampler: MakeSampler) -> None:
    probabilities = np.array([0.5, 0.25, 0.15, 0.1])
    logits = torch.tensor(np.log(probabilities), dtype=torch.float32)[None]
    sampler = make_sampler(4)
    tokens = [
        only(sampler.sample(logits, [make_row([1], [1] * n, seed=5, temperature=1.0)])).token_id
        for n in range(2000)
    ]
    counts = np.bincount(tokens, minlength=4)
    chi_square = float(((counts - 2000 * probabilities) ** 2 / (2000 * probabilities)).sum())
    assert chi_square < 16.3  # 99.9 % point with 3 degrees of freedom


def test_a_draw_depends_on_seed_and_generated_position_alone(
    make_row: MakeRow, make_sampler: MakeSampler
) -> None:
    logits = torch.zeros(1, 10_000)
    sampler = make_sampler(10_000)

    def token(prompt: list[int], output: list[int], seed: int) -> int:
        return only(sampler.sample(logits, [make_row(prompt, output, seed=seed, temperature=1.0)])).token_id

    assert token([1], [2], 0) == token([5, 6, 7], [9], 0)
    assert len({token([1], [2] * n, seed) for n in range(5) for seed in range(5)}) == 25


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ([0.0, float("nan"), 1.0], "logits at generated position 0 are unusable: 1 NaN and 0 infinite of 3"),
        ([0.0, float("inf"), 1.0], "logits at generated position 0 are unusable: 0 NaN and 1 infinite of 3"),
        ([-float("inf")] * 3, "logits at generated position 0 are unusable: all 3 are -inf"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_unusable_row_fails_by_name_and_alone(
    make_row: MakeRow, make_sampler: MakeSampler, row: list[float], reason: str, temperature: float
) -> None:
    good = [0.0, 1.0, 2.0]
    rows = [make_row(logprobs=1), make_row(temperature=temperature, logprobs=1), make_row(logprobs=1)]
    results = make_sampler(3).sample(torch.tensor([good, row, good]), rows)
    assert results[1] == reason
    assert results[0] == results[2] == only(make_sampler(3).sample(torch.tensor([good]), rows[:1]))


def test_a_row_with_some_ruled_out_tokens_is_fine(make_row: MakeRow, make_sampler: MakeSampler) -> None:
    logits = torch.tensor([[-torch.inf, 1.0, -torch.inf]])
    row = make_row(temperature=1.0, top_k=3, top_p=0.9, logprobs=-1)
    found = only(make_sampler(3).sample(logits, [row]))
    assert found.token_id == 1
    assert found.logprobs is not None
    assert {i: p.logprob for i, p in found.logprobs.items()} == {1: 0.0, 0: -np.inf, 2: -np.inf}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_masks_that_leave_no_token_fail_by_name(
    make_row: MakeRow, make_sampler: MakeSampler, temperature: float
) -> None:
    row = make_row(eos=(0,), bad_words=((1,),), min_tokens=1, temperature=temperature)
    (result,) = make_sampler(2).sample(torch.tensor([[1.0, 2.0]]), [row])
    assert isinstance(result, str)
    assert "no token can be chosen at generated position 0" in result


def test_a_penalty_that_overflows_fails_by_name(make_row: MakeRow, make_sampler: MakeSampler) -> None:
    row = make_row([0], repetition_penalty=1e-300)
    (result,) = make_sampler(2).sample(torch.tensor([[1e30, 2.0]]), [row])
    assert isinstance(result, str)
    assert "penalties the largest logit is inf" in result


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(PARAMS, st.integers(0, 6)), min_size=2, max_size=6), st.randoms(use_true_random=False)
)
def test_a_row_is_bitwise_the_same_alone_and_in_any_batch(
    make_row: MakeRow, make_sampler: MakeSampler, requests: list[tuple[dict[str, Any], int]], random: Any
) -> None:
    vocab = 67
    sampler = make_sampler(vocab)
    logits = torch.randn(len(requests), vocab, generator=torch.Generator().manual_seed(len(requests))) * 4
    rows = [
        make_row([1, 2, 3], list(range(length)), eos=(0,), bad_words=((4, 5),), **params)
        for params, length in requests
    ]
    alone = [only(sampler.sample(logits[i : i + 1], [row])) for i, row in enumerate(rows)]
    order = list(range(len(rows)))
    random.shuffle(order)
    together = sampler.sample(logits[order], [rows[i] for i in order])
    assert together == [alone[i] for i in order]


def test_inputs_are_left_as_they_were(make_row: MakeRow, make_sampler: MakeSampler) -> None:
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    rows = [
        make_row(temperature=1.0, top_p=0.5, logit_bias={1: 3.0}),
        make_row([1], [2], presence_penalty=1.0),
    ]
    make_sampler(9).sample(logits, rows)
    assert torch.equal(logits, before)


def test_each_row_needs_its_sequence_index_and_each_logit_row_its_next_id(
    make_row: MakeRow, make_sampler: MakeSampler
) -> None:
    logits = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="shorter"):
        make_sampler(3).sample(logits, [make_row()] * 2, [0])
    with pytest.raises(ValueError, match="shorter"):
        make_sampler(3).prompt_logprobs(logits, [1], 0)


def test_torch_s_default_device_does_not_matter(make_row: MakeRow, make_sampler: MakeSampler) -> None:
    logits = torch.tensor([[0.0, 2, 2, 1]])
    with torch.device("meta"):
        assert only(make_sampler(4).sample(logits, [make_row(logprobs=1)])).token_id == 1


def test_an_empty_batch_gives_nothing(make_sampler: MakeSampler) -> None:
    assert make_sampler(5).sample(torch.empty(0, 5), []) == []


def test_prompt_logprobs_tell_the_next_token_and_the_top(make_sampler: MakeSampler) -> None:
    logits = torch.tensor([[3.0, 2, 1, 0], [0, 0, 0, 0]])
    first, second = make_sampler(4).prompt_logprobs(logits, [2, 3], 1)
    assert [(i, p.rank) for i, p in first.items()] == [(2, 3), (0, 1)]
    assert first[0].logprob == pytest.approx(float(torch.log_softmax(logits[0].double(), 0)[0]), abs=1e-6)
    assert [(i, p.rank) for i, p in second.items()] == [(3, 4), (0, 1)]
    assert second[3].logprob == pytest.approx(-np.log(4), abs=1e-6)


def test_prompt_logprobs_of_a_chunk_are_bitwise_those_of_the_whole(make_sampler: MakeSampler) -> None:
    logits = torch.randn(9, 301, generator=torch.Generator().manual_seed(3))
    ids = list(range(9))
    sampler = make_sampler(301)
    whole = sampler.prompt_logprobs(logits, ids, 4)
    chunked = [
        entry
        for start, end in ((0, 1), (1, 5), (5, 9))
        for entry in sampler.prompt_logprobs(logits[start:end], ids[start:end], 4)
    ]
    assert chunked == whole


def test_prompt_logprobs_of_no_rows_are_none(make_sampler: MakeSampler) -> None:
    assert make_sampler(4).prompt_logprobs(torch.empty(0, 4), [], 1) == []


def test_rows_of_one_request_draw_by_their_sequence_index(
    make_row: MakeRow, make_sampler: MakeSampler
) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1)).repeat(8, 1)
    row = make_row(temperature=1.5, seed=3)
    together = make_sampler(50).sample(logits, [row] * 8, range(8))
    alone = []
    for index in range(8):
        single = make_row(temperature=1.5, seed=3)
        single.request.sequence_index = index
        alone += make_sampler(50).sample(logits[:1], [single])
    assert together == alone
    assert len({only([token]).token_id for token in together}) > 3, "sequences differ"


def test_without_indices_the_requests_own_sequence_index_counts(
    make_row: MakeRow, make_sampler: MakeSampler
) -> None:
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    row = make_row(temperature=1.5, seed=3)
    row.request.sequence_index = 5
    (by_request,) = make_sampler(50).sample(logits, [row])
    (by_argument,) = make_sampler(50).sample(logits, [make_row(temperature=1.5, seed=3)], [5])
    assert by_request == by_argument
