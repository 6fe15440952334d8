"""One sequence: tokens in, text and reasons out. What stop strings do is tested with the processor."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from minivllm.output.detokenizer import Detokenizer
from minivllm.output.generation import Generation
from minivllm.request import CompletionOutput, FinishReason, Logprob, Request, SampledToken, SamplingParams


class Letters:
    """Token i is the i-th letter."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:  # noqa: ARG002 - the protocol
        return "".join(chr(96 + t) for t in token_ids)


def make(index: int = 0, **params: object) -> tuple[Generation, Request]:
    sampling = SamplingParams(**params)  # type: ignore[arg-type]
    request = Request("r", [26], 1, sampling)
    generation = Generation(index, sampling, Detokenizer(Letters(), [26], skip_special_tokens=True))
    generation.request = request
    return generation, request


def push(generation: Generation, request: Request, token: int, choice: int | None = None) -> str | None:
    request.token_ids.append(token)
    entry = {token: Logprob(-0.5 * token, 1)}
    return generation.add_token(request, SampledToken(token, token if choice is None else choice), entry)


def test_a_generation_tells_its_index_tokens_choices_and_text() -> None:
    generation, request = make(index=4)
    push(generation, request, 1)
    push(generation, request, 2, choice=7)
    assert generation.output() == CompletionOutput(4, "ab", (1, 2), (1, 7))


def test_a_sequence_that_is_not_forked_yet_is_empty() -> None:
    generation = Generation(2, SamplingParams(logprobs=0), None)
    assert generation.output() == CompletionOutput(2, "", (), (), cumulative_logprob=0.0, logprobs=())


def test_logprobs_are_kept_and_summed_only_when_asked_for() -> None:
    with_logprobs, request = make(logprobs=0)
    push(with_logprobs, request, 1)
    push(with_logprobs, request, 3)
    output = with_logprobs.output()
    assert output.cumulative_logprob == pytest.approx(-2.0)
    assert output.logprobs == ({1: Logprob(-0.5, 1)}, {3: Logprob(-1.5, 1)})
    without, request = make()
    push(without, request, 1)
    assert (without.output().cumulative_logprob, without.output().logprobs) == (None, None)


def test_a_completed_stop_string_is_told_once_it_may_act() -> None:
    generation, request = make(stop=["ab"], min_tokens=3, max_tokens=9)
    assert [push(generation, request, t) for t in (1, 2, 1, 2)] == [None, None, None, "ab"]


def test_the_first_reason_to_end_is_the_one_that_counts() -> None:
    generation, request = make()
    push(generation, request, 1)
    generation.end(FinishReason.STOP, "x")
    generation.end(FinishReason.LENGTH, None)
    assert generation.finished
    assert (generation.output().finish_reason, generation.output().stop_reason) == ("stop", "x")


def test_a_token_that_ends_the_request_is_not_part_of_the_text() -> None:
    for include, text in ((False, "a"), (True, "ab")):
        generation, request = make(stop_token_ids=[2], include_stop_str_in_output=include)
        push(generation, request, 1)
        request.finish_reason = FinishReason.STOP
        push(generation, request, 2)
        generation.end(FinishReason.STOP, 2)
        assert generation.output().text == text
        assert generation.output().token_ids == (1, 2)
