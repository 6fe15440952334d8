"""Requests with lengths from a stated distribution, and a runner that answers them at once."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from minivllm.request import Request, SampledToken, SamplingParams, StepPlan, StepResult

__all__ = ["WORKLOADS", "FakeRunner", "Length", "Workload"]

VOCABULARY = 1000


@dataclass(frozen=True, slots=True)
class Length:
    """A distribution of lengths in tokens, clipped to low … high.

    Attributes:
        median, sigma: of a log-normal distribution; sigma None: uniform over low … high.
    """

    low: int
    high: int
    median: float = 0.0
    sigma: float | None = None

    def draw(self, numbers: random.Random) -> int:
        """One length."""
        if self.sigma is None:
            return numbers.randint(self.low, self.high)
        value = math.exp(numbers.gauss(math.log(self.median), self.sigma))
        return min(max(round(value), self.low), self.high)

    def __str__(self) -> str:
        if self.sigma is None:
            return f"uniform {self.low} … {self.high}"
        return (
            f"log-normal, median {self.median:g}, sigma {self.sigma:g}, clipped to {self.low} … {self.high}"
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """Lengths of prompts and outputs, and how many requests there are."""

    name: str
    prompt: Length
    output: Length
    num_requests: int = 400

    def requests(self, seed: int) -> list[Request]:
        """The requests, the same for the same seed. Prompts are random, so that none share a prefix."""
        numbers = random.Random(f"{self.name}:{seed}")
        return [self._request(i, numbers) for i in range(self.num_requests)]

    def _request(self, number: int, numbers: random.Random) -> Request:
        prompt = [numbers.randrange(VOCABULARY) for _ in range(self.prompt.draw(numbers))]
        sampling = SamplingParams(max_tokens=self.output.draw(numbers), ignore_eos=True)
        return Request(str(number), prompt, len(prompt), sampling, seed=number, arrival=number)


#: By name, the default first. "chat" has about the mean lengths that Kwon et al. (SOSP 2023,
#: arXiv:2309.06180, section 6.1) report for ShareGPT: 161 prompt tokens and 338 output tokens.
WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("chat", Length(4, 1024, 100, 1.0), Length(1, 1024, 240, 0.9)),
        Workload("short", Length(1, 16), Length(1, 16)),
    )
}


class FakeRunner:
    """Answers every plan without computing: tokens depend on seed, sequence and position only."""

    def run(self, plan: StepPlan) -> StepResult:
        """A token for each sequence that samples."""
        samples = {}
        for r in plan.requests:
            if r.sample:
                position = len(r.tokens) - r.num_prompt_tokens
                samples[r.request_id] = _token(r.request.seed, r.request.sequence_index, position)
                for index, name in enumerate(r.fork_ids, start=1):
                    samples[name] = _token(r.request.seed, index, position)
        return StepResult(samples)


def _token(seed: int, sequence_index: int, position: int) -> SampledToken:
    token = (seed * 7919 + sequence_index * 104_729 + position * 31) % VOCABULARY
    return SampledToken(token, token)
