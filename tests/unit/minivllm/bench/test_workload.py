"""Workloads are the same for the same seed, and their lengths are what they say."""

from __future__ import annotations

import random
from statistics import mean, median

import pytest

from minivllm.bench.workload import WORKLOADS, FakeRunner, Length
from minivllm.request import Request, SamplingParams, ScheduledRequest, StepPlan, TokenView


def test_a_seed_decides_every_prompt_and_length() -> None:
    workload = WORKLOADS["short"]
    one, same, other = (workload.requests(seed) for seed in (3, 3, 4))
    assert [(r.token_ids, r.sampling) for r in one] == [(r.token_ids, r.sampling) for r in same]
    assert [r.token_ids for r in one] != [r.token_ids for r in other]
    assert len(one) == workload.num_requests


def test_lengths_stay_inside_their_bounds_and_show_their_median() -> None:
    numbers = random.Random(0)
    drawn = [Length(4, 1024, 100, 1.0).draw(numbers) for _ in range(4000)]
    assert min(drawn) >= 4
    assert max(drawn) == 1024
    assert median(drawn) == pytest.approx(100, rel=0.1)
    uniform = [Length(1, 16).draw(numbers) for _ in range(2000)]
    assert set(uniform) == set(range(1, 17))


def test_the_default_workload_has_the_mean_lengths_it_claims() -> None:
    requests = [r for seed in range(10) for r in WORKLOADS["chat"].requests(seed)]
    assert mean(r.num_prompt_tokens for r in requests) == pytest.approx(161, rel=0.1)
    outputs = [r.sampling.max_tokens for r in requests if r.sampling.max_tokens is not None]
    assert mean(outputs) == pytest.approx(338, rel=0.1)


def test_a_distribution_is_stated_in_full() -> None:
    assert str(Length(1, 16)) == "uniform 1 … 16"
    assert str(Length(4, 9, 5, 0.5)) == "log-normal, median 5, sigma 0.5, clipped to 4 … 9"


def scheduled(tokens: list[int], *, sample: bool = True, forks: tuple[str, ...] = ()) -> ScheduledRequest:
    request = Request("r", tokens, 2, SamplingParams(), seed=5)
    return ScheduledRequest("r", 0, len(tokens), TokenView(tokens), 2, (1,), sample, request, forks)


def test_the_fake_runner_answers_whoever_samples_and_nobody_else() -> None:
    runner = FakeRunner()
    assert runner.run(StepPlan(0, (scheduled([1, 2], sample=False),))).samples == {}
    samples = runner.run(StepPlan(0, (scheduled([1, 2], forks=("r/1", "r/2")),))).samples
    assert list(samples) == ["r", "r/1", "r/2"]
    assert len({token.token_id for token in samples.values()}) == 3


def test_a_fake_token_depends_on_the_position_and_not_on_the_step() -> None:
    runner = FakeRunner()
    first = runner.run(StepPlan(0, (scheduled([1, 2]),))).samples["r"]
    assert runner.run(StepPlan(9, (scheduled([1, 2]),))).samples["r"] == first
    assert runner.run(StepPlan(1, (scheduled([1, 2, 3]),))).samples["r"] != first
