from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.errors import InvariantError
from minivllm.output import OutputProcessor
from minivllm.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestOutput,
    RequestStatus,
    SampledToken,
    SamplingParams,
    StepResult,
    sequence_ids,
)


class Letters:
    """Token i is the i-th letter; 0 is the special token "<s>"."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        letters = [chr(96 + t) if t else ("" if skip_special_tokens else "<s>") for t in token_ids]
        return "".join(letters)


LETTERS = Letters()


@dataclass
class Engine:
    """What scheduler and engine do around an OutputProcessor, for one request."""

    processor: OutputProcessor
    request: Request
    finished: list[tuple[str, FinishReason, str]] = field(default_factory=list)

    def step(
        self, token_id: int, *, choice: int | None = None, logprobs: Mapping[int, Logprob] | None = None
    ) -> CompletionOutput:
        return self.output(token_id, choice=choice, logprobs=logprobs).outputs[0]

    def output(
        self,
        token_id: int,
        *,
        choice: int | None = None,
        logprobs: Mapping[int, Logprob] | None = None,
        prompt_logprobs: Sequence[Mapping[int, Logprob]] = (),
    ) -> RequestOutput:
        r = self.request
        r.token_ids.append(token_id)
        r.num_computed_tokens = r.num_tokens - 1
        sampling = r.sampling
        if r.num_output_tokens >= sampling.min_tokens and token_id in (
            *r.eos_token_ids,
            *sampling.stop_token_ids,
        ):
            r.status, r.finish_reason = RequestStatus.FINISHED, FinishReason.STOP
            r.stop_reason = None if token_id in r.eos_token_ids else token_id
        elif r.num_output_tokens == sampling.max_tokens:
            r.status, r.finish_reason = RequestStatus.FINISHED, FinishReason.LENGTH
        result = StepResult(
            {r.request_id: SampledToken(token_id, token_id if choice is None else choice, logprobs)},
            prompt_logprobs={r.request_id: prompt_logprobs} if prompt_logprobs else {},
        )
        (output,) = self.processor.process([r], result)
        return output

    def prefill(self, end: int, entries: Sequence[Mapping[int, Logprob]]) -> None:
        """A step that computes prompt tokens up to `end` and samples nothing."""
        self.request.num_computed_tokens = end
        result = StepResult({}, prompt_logprobs={self.request.request_id: entries})
        assert self.processor.process([], result) == []

    def preempt(self) -> None:
        self.request.num_computed_tokens = 0
        self.request.num_preemptions += 1

    def spell(self, text: str) -> CompletionOutput:
        """Generate these letters until the request ends."""
        for letter in text:
            output = self.step(ord(letter) - 96)
            if output.finish_reason is not None:
                break
        return output


Start = Callable[..., Engine]


@pytest.fixture
def start() -> Start:
    def make(
        prompt: Sequence[int] = (26,), *, eos: tuple[int, ...] = (), tokenizer: Any = LETTERS, **params: Any
    ) -> Engine:
        params.setdefault("max_tokens", 50)
        request = Request(
            "r", list(prompt), len(prompt), SamplingParams(**params), eos_token_ids=eos, seed=77
        )
        request.status = RequestStatus.RUNNING
        finished: list[tuple[str, FinishReason, str]] = []

        def finish(request_id: str, reason: FinishReason, stop_reason: str) -> None:
            finished.append((request_id, reason, stop_reason))
            request.status, request.finish_reason = RequestStatus.FINISHED, reason
            request.stop_reason = stop_reason

        processor = OutputProcessor(tokenizer, finish)
        processor.add(request, "the prompt")
        return Engine(processor, request, finished)

    return make


def lp(token_id: int, value: float = -1.0, rank: int = 1) -> dict[int, Logprob]:
    return {token_id: Logprob(value, rank)}


def test_outputs_are_cumulative_and_carry_the_requests_facts(start: Start) -> None:
    engine = start([26, 25])
    engine.request.num_cached_tokens, engine.request.num_preemptions = 1, 3
    engine.step(1)
    output = engine.output(2)
    assert output == RequestOutput(
        request_id="r",
        prompt="the prompt",
        prompt_token_ids=(26, 25),
        outputs=(CompletionOutput(0, "ab", (1, 2), (1, 2)),),
        finished=False,
        num_cached_tokens=1,
        num_preemptions=3,
        seed=77,
    )


def test_an_earlier_output_does_not_change_later(start: Start) -> None:
    engine = start(logprobs=0)
    first = engine.output(1, logprobs=lp(1))
    engine.output(2, logprobs=lp(2))
    assert first.outputs[0].token_ids == (1,)
    assert first.outputs[0].logprobs is not None
    assert len(first.outputs[0].logprobs) == 1


def test_a_stop_string_finishes_the_request_and_is_the_stop_reason(start: Start) -> None:
    engine = start(stop=["cd"])
    output = engine.spell("abcdef")
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", "cd")
    assert output.token_ids == (1, 2, 3, 4)
    assert engine.finished == [("r", FinishReason.STOP, "cd")]


def test_half_a_character_after_the_stop_string_is_dropped(start: Start) -> None:
    class Bytes:
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:  # noqa: ARG002  (protocol)
            return b"".join({26: b"", 1: b"ab\xc3"}[t] for t in token_ids).decode(errors="replace")

    assert start(stop=["b"], tokenizer=Bytes()).step(1).text == "a"
    assert start(max_tokens=1, tokenizer=Bytes()).step(1).text == "ab\ufffd"


def test_text_that_may_become_a_stop_string_is_not_shown_yet(start: Start) -> None:
    engine = start(stop=["bcx"])
    assert [engine.step(i).text for i in (1, 2, 3, 4)] == ["a", "a", "a", "abcd"]


def test_text_held_back_is_shown_when_the_request_ends(start: Start) -> None:
    output = start(stop=["bcx"], max_tokens=3).spell("abc")
    assert (output.text, output.finish_reason, output.stop_reason) == ("abc", "length", None)


def test_a_stop_string_wins_over_length_in_the_same_step(start: Start) -> None:
    engine = start(stop=["c"], max_tokens=3)
    output = engine.spell("abc")
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", "c")
    assert engine.finished == []  # the scheduler has ended it already


def test_a_kept_stop_string_is_in_the_text(start: Start) -> None:
    output = start(stop=["bc"], include_stop_str_in_output=True).spell("abc")
    assert (output.text, output.stop_reason) == ("abc", "bc")


def test_a_stop_string_does_not_act_within_min_tokens(start: Start) -> None:
    engine = start(stop=["b"], min_tokens=3)
    output = engine.spell("abbab")
    assert (output.text, output.token_ids) == ("abba", (1, 2, 2, 1, 2))


def test_an_eos_token_is_counted_but_not_shown(start: Start) -> None:
    output = start(eos=(5, 6)).spell("abf")
    assert (output.text, output.token_ids, output.finish_reason) == ("ab", (1, 2, 6), "stop")
    assert output.stop_reason is None


def test_a_stop_token_is_shown_only_when_stops_are_kept(start: Start) -> None:
    output = start(stop_token_ids=[3]).spell("abc")
    assert (output.text, output.finish_reason, output.stop_reason) == ("ab", "stop", 3)
    kept = start(stop_token_ids=[3], include_stop_str_in_output=True).spell("abc")
    assert (kept.text, kept.stop_reason) == ("abc", 3)


def test_a_stop_token_ends_the_request_before_its_text_can(start: Start) -> None:
    engine = start(stop_token_ids=[3], stop=["bc"], include_stop_str_in_output=True)
    output = engine.spell("abc")
    assert (output.text, output.stop_reason, engine.finished) == ("abc", 3, [])


def test_special_tokens_are_shown_on_request(start: Start) -> None:
    assert start().step(0).text == ""
    assert start(skip_special_tokens=False).step(0).text == "<s>"


@pytest.mark.parametrize("params", [{"tokenizer": None}, {"detokenize": False}])
def test_without_detokenising_there_is_no_text(start: Start, params: dict[str, Any]) -> None:
    engine = start(logprobs=0, max_tokens=1, **params)
    output = engine.step(1, logprobs=lp(1))
    assert (output.text, output.finish_reason) == ("", "length")
    assert output.logprobs == ({1: Logprob(-1.0, 1, None)},)


def test_logprobs_carry_text_and_add_up(start: Start) -> None:
    engine = start(logprobs=1, forced_token_ids=[2])
    engine.step(2, choice=3, logprobs={2: Logprob(-2.0, 5), 3: Logprob(-0.5, 1)})
    output = engine.step(0, logprobs=lp(0, -0.25))
    assert output.logprobs == (
        {2: Logprob(-2.0, 5, "b"), 3: Logprob(-0.5, 1, "c")},
        {0: Logprob(-0.25, 1, "<s>")},
    )
    assert output.cumulative_logprob == -2.25
    assert (output.token_ids, output.choice_token_ids) == ((2, 0), (3, 0))


def test_logprobs_are_absent_unless_asked(start: Start) -> None:
    output = start().output(1, logprobs=lp(1))
    assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None, None)
    assert output.prompt_logprobs is None


def test_prompt_logprobs_begin_with_none_and_join_over_chunks(start: Start) -> None:
    engine = start([1, 2, 3, 4], prompt_logprobs=0)
    engine.prefill(1, [lp(2)])
    engine.prefill(3, [lp(3), lp(4)])
    assert engine.output(5).prompt_logprobs == (
        None,
        {2: Logprob(-1.0, 1, "b")},
        {3: Logprob(-1.0, 1, "c")},
        {4: Logprob(-1.0, 1, "d")},
    )


def test_prompt_logprobs_of_a_one_token_prompt_are_one_none(start: Start) -> None:
    assert start([1], prompt_logprobs=0).output(5).prompt_logprobs == (None,)


def test_prompt_logprobs_come_whole_or_not_at_all(start: Start) -> None:
    engine = start([1, 2, 3, 4], prompt_logprobs=0)
    engine.prefill(2, [lp(2), lp(3)])
    assert engine.processor.abort(engine.request.request_id).prompt_logprobs is None


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_prompt_logprobs_do_not_depend_on_chunks_or_preemptions(start: Start, data: st.DataObject) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    engine = start(prompt, prompt_logprobs=0)
    entries = [lp(t, -i) for i, t in enumerate(prompt[1:])]
    wanted = [None, *({t: Logprob(-i, 1, chr(96 + t))} for i, t in enumerate(prompt[1:]))]

    def prefill(upto: int) -> int:
        position = 0
        while position < upto:
            end = position + data.draw(st.integers(1, upto - position))
            engine.prefill(end, entries[position : min(end, 7)])
            position = end
        return position

    for _ in range(data.draw(st.integers(0, 2))):
        prefill(data.draw(st.integers(1, 7)))
        engine.preempt()
    position = prefill(data.draw(st.integers(0, 7)))
    first = engine.output(10, prompt_logprobs=entries[position:])
    assert list(first.prompt_logprobs or ()) == wanted
    if data.draw(st.booleans()):  # computed again after the first token
        engine.preempt()
        prefill(8)
    assert list(engine.output(11).prompt_logprobs or ()) == wanted


def test_prompt_logprobs_with_a_gap_are_refused(start: Start) -> None:
    engine = start([1, 2, 3, 4], prompt_logprobs=0)
    with pytest.raises(InvariantError, match="only 0 came before"):
        engine.prefill(3, [lp(4)])


def test_prompt_logprobs_of_a_request_aborted_meanwhile_are_ignored(start: Start) -> None:
    engine = start([1, 2, 3], prompt_logprobs=0)
    engine.processor.abort(engine.request.request_id)
    engine.prefill(1, [lp(2)])


def test_a_failed_request_ends_with_its_error_and_its_text_so_far(start: Start) -> None:
    engine = start(stop=["bx"])
    engine.spell("ab")
    r = engine.request
    r.status, r.finish_reason, r.error = RequestStatus.FAILED, FinishReason.ERROR, "logits are NaN"
    (output,) = engine.processor.process([r], StepResult({}, failures={"r": "logits are NaN"}))
    assert output.finished
    assert output.error == "logits are NaN"
    assert output.outputs == (CompletionOutput(0, "ab", (1, 2), (1, 2), finish_reason="error"),)


def test_an_aborted_request_keeps_what_it_had(start: Start) -> None:
    engine = start(stop=["bx"])
    engine.spell("ab")
    output = engine.processor.abort(engine.request.request_id)
    assert output.finished
    assert output.outputs == (CompletionOutput(0, "ab", (1, 2), (1, 2), finish_reason="abort"),)


def test_cached_tokens_of_a_request_never_admitted_are_zero(start: Start) -> None:
    engine = start()
    assert engine.request.num_cached_tokens == -1
    assert engine.processor.abort(engine.request.request_id).num_cached_tokens == 0


def test_nothing_is_kept_of_a_request_that_ended(start: Start) -> None:
    engine = start(max_tokens=1)
    engine.step(1)
    with pytest.raises(InvariantError, match="'r'"):
        engine.processor.abort(engine.request.request_id)


def test_an_id_can_be_used_again_after_its_request_ended(start: Start) -> None:
    engine = start(max_tokens=1)
    engine.step(1)
    second = Request("r", [1], 1, SamplingParams(max_tokens=1))
    engine.processor.add(second)
    output = Engine(engine.processor, second).output(2)
    assert (output.prompt, output.outputs[0].text) == (None, "b")


def test_a_token_nobody_sampled_is_refused(start: Start) -> None:
    engine = start()
    engine.request.token_ids.append(1)
    with pytest.raises(InvariantError, match="nobody sampled"):
        engine.processor.process([engine.request], StepResult({}))


def test_requests_in_one_step_do_not_mix() -> None:
    processor = OutputProcessor(LETTERS, lambda *_: None)
    requests = [
        Request("a", [1], 1, SamplingParams(stop=["b"], logprobs=0)),
        Request("b", [2], 1, SamplingParams(stop=["x"])),
    ]
    for r in requests:
        processor.add(r)
        r.status = RequestStatus.RUNNING
        r.token_ids.append(2)
    samples = {"a": SampledToken(2, 2, lp(2)), "b": SampledToken(2, 2)}
    a, b = processor.process(requests, StepResult(samples))
    assert (a.request_id, a.finished, a.outputs[0].text, a.outputs[0].stop_reason) == ("a", True, "", "b")
    assert (b.request_id, b.finished, b.outputs[0].text, b.outputs[0].logprobs) == ("b", False, "b", None)


# --- several sequences -------------------------------------------------------------------------


class Family:
    """What scheduler and engine do around an OutputProcessor for one request of n sequences."""

    def __init__(self, n: int = 3, prompt: Sequence[int] = (26,), **params: Any) -> None:
        params.setdefault("max_tokens", 50)
        self.ids = sequence_ids("r", n)
        self.finished: list[tuple[str, str]] = []
        self.processor = OutputProcessor(LETTERS, self._finish)
        parent = Request("r", list(prompt), len(prompt), SamplingParams(n=n, **params), seed=77)
        parent.status = RequestStatus.RUNNING
        self.live = {"r": parent}
        self.processor.add(parent, "the prompt")

    def _finish(self, request_id: str, reason: FinishReason, stop: str) -> None:
        self.finished.append((request_id, stop))
        self.end(request_id, reason, stop)

    def end(self, request_id: str, reason: FinishReason, stop: str | None = None) -> Request:
        request = self.live.pop(request_id)
        request.status, request.finish_reason = RequestStatus.FINISHED, reason
        request.stop_reason = stop
        return request

    def step(self, **tokens: int) -> RequestOutput:
        """One token per sequence, by index: step(s0=1, s2=3); the first step forks."""
        wanted = {self.ids[int(name[1:])]: token for name, token in tokens.items()}
        for index, name in enumerate(self.ids):
            if name in wanted and name not in self.live:
                parent = self.live["r"]
                self.live[name] = Request(
                    name,
                    list(parent.token_ids[: parent.num_prompt_tokens]),
                    parent.num_prompt_tokens,
                    parent.sampling,
                    seed=parent.seed,
                    status=RequestStatus.RUNNING,
                    parent_id="r",
                    sequence_index=index,
                )
        changed = [self.live[name] for name in self.ids if name in wanted]
        for request in changed:
            request.token_ids.append(wanted[request.request_id])
            if request.num_output_tokens == request.sampling.max_tokens:
                self.end(request.request_id, FinishReason.LENGTH)
        wants = changed[0].sampling.logprobs is not None
        samples = {
            name: SampledToken(token, token, lp(token, -float(token)) if wants else None)
            for name, token in wanted.items()
        }
        (output,) = self.processor.process(changed, StepResult(samples))
        return output


def test_the_sequences_of_a_request_make_one_output_in_order_of_their_index() -> None:
    family = Family()
    first = family.step(s0=1, s1=2, s2=3)
    assert [(c.index, c.text) for c in first.outputs] == [(0, "a"), (1, "b"), (2, "c")]
    second = family.step(s2=6, s0=4)
    assert [c.text for c in second.outputs] == ["ad", "b", "cf"]
    assert [c.token_ids for c in second.outputs] == [(1, 4), (2,), (3, 6)]
    assert (second.request_id, second.prompt, second.seed) == ("r", "the prompt", 77)
    assert not second.finished


def test_an_output_of_several_sequences_is_finished_when_all_of_them_are() -> None:
    family = Family(max_tokens=2)
    family.step(s0=1, s1=1, s2=1)
    assert not family.step(s0=1).finished
    assert not family.step(s2=1).finished
    last = family.step(s1=1)
    assert last.finished
    assert [c.finish_reason for c in last.outputs] == ["length"] * 3
    with pytest.raises(InvariantError, match="never added here, or has ended"):
        family.processor.abort("r")


def test_a_stop_string_ends_the_sequence_that_completes_it_and_no_other() -> None:
    family = Family(stop=["ab"])
    family.step(s0=1, s1=1, s2=2)
    output = family.step(s0=3, s1=2, s2=2)
    assert family.finished == [("r/1", "ab")]
    assert [c.finish_reason for c in output.outputs] == [None, "stop", None]
    assert output.outputs[1].stop_reason == "ab"
    after = family.step(s0=4, s2=1)
    assert [c.text for c in after.outputs] == ["acd", "", "bb"], "an open a of s2 is held back"


def test_the_first_sequence_may_end_by_a_stop_string_before_the_others() -> None:
    family = Family(n=2, stop=["a"])
    output = family.step(s0=1, s1=2)
    assert family.finished == [("r", "a")]
    assert [c.finish_reason for c in output.outputs] == ["stop", None]
    assert not output.finished
    assert [c.text for c in family.step(s1=3).outputs] == ["", "bc"]


def test_each_sequence_has_its_own_logprobs() -> None:
    family = Family(n=2, logprobs=0)
    family.step(s0=1, s1=2)
    output = family.step(s0=3, s1=4)
    sums = [c.cumulative_logprob for c in output.outputs]
    assert sums == [-4.0, -6.0]
    assert [[list(entry) for entry in c.logprobs or ()] for c in output.outputs] == [[[1], [3]], [[2], [4]]]


def test_aborting_the_request_ends_every_sequence_that_has_not_ended() -> None:
    family = Family(max_tokens=2)
    family.step(s0=1, s1=2, s2=3)
    family.step(s1=2)
    output = family.processor.abort("r")
    assert output.finished
    assert [c.finish_reason for c in output.outputs] == ["abort", "length", "abort"]
    with pytest.raises(InvariantError):
        family.processor.abort("r/2")


def test_aborting_one_sequence_leaves_the_others() -> None:
    family = Family(max_tokens=2)
    family.step(s0=1, s1=2, s2=3)
    family.end("r/1", FinishReason.ABORT)
    output = family.processor.abort("r/1")
    assert not output.finished
    assert [c.finish_reason for c in output.outputs] == [None, "abort", None]
    last = family.step(s0=1, s2=1)
    assert last.finished
    assert [c.finish_reason for c in last.outputs] == ["length", "abort", "length"]
    assert [len(c.token_ids) for c in last.outputs] == [2, 1, 2]


def test_aborting_the_last_live_sequence_finishes_the_request() -> None:
    family = Family(n=2, max_tokens=2)
    family.step(s0=1, s1=2)
    assert not family.step(s0=1).finished
    family.end("r/1", FinishReason.ABORT)
    assert family.processor.abort("r/1").finished


def test_a_request_aborted_before_it_forked_has_all_its_sequences_aborted() -> None:
    family = Family()
    output = family.processor.abort("r")
    assert output.finished
    assert [(c.index, c.token_ids, c.finish_reason) for c in output.outputs] == [
        (i, (), "abort") for i in range(3)
    ]


def test_a_request_that_fails_before_it_forked_fails_in_all_its_sequences() -> None:
    family = Family(n=2)
    parent = family.live["r"]
    parent.status, parent.finish_reason, parent.error = RequestStatus.FAILED, FinishReason.ERROR, "NaN"
    (output,) = family.processor.process([parent], StepResult({}, failures={"r": "NaN"}))
    assert output.finished
    assert output.error == "NaN"
    assert [c.finish_reason for c in output.outputs] == ["error", "error"]


def test_a_sequence_that_fails_later_names_its_error_and_leaves_the_others() -> None:
    family = Family(n=2)
    family.step(s0=1, s1=2)
    child = family.live.pop("r/1")
    child.status, child.finish_reason, child.error = RequestStatus.FAILED, FinishReason.ERROR, "NaN"
    (output,) = family.processor.process([child], StepResult({}, failures={"r/1": "NaN"}))
    assert not output.finished
    assert output.error == "NaN"
    assert [c.finish_reason for c in output.outputs] == [None, "error"]
    assert family.step(s0=5).outputs[0].text == "ae"


def test_preemptions_of_all_sequences_are_counted() -> None:
    family = Family(n=2)
    family.step(s0=1, s1=2)
    family.live["r"].num_preemptions, family.live["r/1"].num_preemptions = 1, 2
    assert family.step(s0=1).num_preemptions == 3


def test_a_request_that_got_a_token_but_no_forks_is_a_bug() -> None:
    family = Family(n=2, max_tokens=1)
    parent = family.live["r"]
    parent.token_ids.append(1)
    family.end("r", FinishReason.LENGTH)
    with pytest.raises(InvariantError, match="was not forked"):
        family.processor.process([parent], StepResult({"r": SampledToken(1, 1)}))


def test_prompt_logprobs_of_a_fork_that_is_computed_anew_are_not_the_requests() -> None:
    family = Family(n=2, prompt=[1, 2, 3], prompt_logprobs=0)
    family.live["r"].num_computed_tokens = 3
    family.processor.process([], StepResult({}, prompt_logprobs={"r": [lp(2), lp(3)]}))
    wanted = family.step(s0=1, s1=2).prompt_logprobs
    assert wanted is not None
    family.processor.process([], StepResult({}, prompt_logprobs={"r/1": [lp(2, -9.0), lp(3, -9.0)]}))
    assert family.step(s1=3).prompt_logprobs == wanted
