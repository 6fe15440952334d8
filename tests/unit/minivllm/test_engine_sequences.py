"""n > 1 through the whole engine: sequences share a prompt, and then nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine
from minivllm.errors import BadParameter, CapacityError, DuplicateRequest, UnknownRequest
from minivllm.models import LanguageModel
from minivllm.request import CompletionOutput, RequestOutput, SamplingParams, sequence_ids
from minivllm.trace import Event

PROMPT = {"prompt_token_ids": [5, 6, 7, 8, 9, 10]}
HOT = SamplingParams(n=3, temperature=1.5, seed=11, max_tokens=8, ignore_eos=True, logprobs=2)

Make = Callable[..., LLMEngine]


@pytest.fixture(scope="module")
def make(tiny_llama: str) -> Make:
    """Engines over one loaded model."""
    loaded: list[LanguageModel] = []

    def make(**options: Any) -> LLMEngine:
        trace = options.pop("trace", lambda _event: None)
        options = {"num_kv_blocks": 64, "block_size": 4, "batch_invariant": True, **options}
        config = EngineConfig(model=tiny_llama, **options)
        engine = LLMEngine(config, trace=trace, model=loaded[0] if loaded else None)
        loaded[:] = [engine.model]
        return engine

    return make


def drain(engine: LLMEngine) -> dict[str, RequestOutput]:
    final = {}
    while engine.has_unfinished_requests():
        final.update({o.request_id: o for o in engine.step() if o.finished})
    return final


def alone(make: Make, params: SamplingParams, index: int, prompt: Any = None) -> CompletionOutput:
    """The same request for one sequence, with the random numbers of sequence `index`."""
    engine = make()
    values = {name: getattr(params, name) for name in SamplingParams.__dataclass_fields__}
    engine.add_request("alone", prompt or PROMPT, SamplingParams(**{**values, "n": 1}))
    engine._scheduler.requests["alone"].sequence_index = index
    return drain(engine)["alone"].outputs[0]


def same(one: CompletionOutput, other: CompletionOutput) -> bool:
    """All but the index; logprobs are compared to the bit."""
    return repr({**facts(one), "index": 0}) == repr({**facts(other), "index": 0})


def facts(one: CompletionOutput) -> dict[str, Any]:
    return {name: getattr(one, name) for name in CompletionOutput.__dataclass_fields__}


def test_each_sequence_is_what_it_would_be_alone_and_they_differ(make: Make) -> None:
    events: list[Event] = []
    engine = make(trace=events.append)
    engine.add_request("a", PROMPT, HOT)
    output = drain(engine)["a"]
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert all(same(c, alone(make, HOT, c.index)) for c in output.outputs)
    assert len({c.token_ids for c in output.outputs}) == 3
    counts = Counter(type(e).__name__ for e in events)
    assert counts["Forked"] == 2
    assert counts["Copied"] >= 2, "the prompt ends inside a block, which all three hold"
    assert engine.pool_counts().in_use == 0


def test_sampling_parameters_act_on_each_sequence_alone(make: Make) -> None:
    params = SamplingParams(
        n=3,
        temperature=0.9,
        seed=4,
        max_tokens=12,
        ignore_eos=True,
        presence_penalty=0.7,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        top_p=0.9,
        min_p=0.01,
    )
    engine = make(max_num_batched_tokens=4)
    engine.add_request("a", PROMPT, params)
    assert all(same(c, alone(make, params, c.index)) for c in drain(engine)["a"].outputs)


def test_a_stop_string_ends_one_sequence_and_not_the_others(make: Make) -> None:
    engine = make()
    engine.add_request("a", PROMPT, HOT)
    texts = [c.text for c in drain(engine)["a"].outputs]
    stop = next(
        texts[1][i : i + 2] for i in range(len(texts[1])) if texts[1][i : i + 2] not in texts[0] + texts[2]
    )
    values = {name: getattr(HOT, name) for name in SamplingParams.__dataclass_fields__}
    params = SamplingParams(**{**values, "stop": [stop]})
    engine = make()
    engine.add_request("a", PROMPT, params)
    outputs = drain(engine)["a"].outputs
    assert [c.finish_reason for c in outputs] == ["length", "stop", "length"]
    assert outputs[1].stop_reason == stop
    assert [c.text for c in outputs] == [texts[0], texts[1][: texts[1].index(stop)], texts[2]]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempting_sequences_one_by_one_changes_no_bit(make: Make, mode: str) -> None:
    engine = make()
    engine.add_request("a", PROMPT, HOT, capture=["logits", "kv"])
    plain = drain(engine)["a"]
    stages = {name: engine.stages(name) for name in sequence_ids("a", 3)}
    for victim in sequence_ids("a", 3):
        for step in (1, 2, 5):
            engine = make(swap_space_bytes=2**20, preemption_mode=mode)
            engine.add_request("a", PROMPT, HOT, capture=["logits", "kv"])
            for _ in range(step):
                engine.step()
            assert engine.preempt_request(victim)
            output = drain(engine)["a"]
            assert output.num_preemptions == 1
            assert repr(output.outputs) == repr(plain.outputs)
            for name, wanted in stages.items():
                got = engine.stages(name)
                assert got.keys() == wanted.keys()
                assert all(np.array_equal(got[stage], wanted[stage]) for stage in wanted), (name, step)


def test_aborting_one_sequence_leaves_the_others_as_they_are(make: Make) -> None:
    engine = make()
    engine.add_request("a", PROMPT, HOT)
    whole = drain(engine)["a"].outputs
    engine = make()
    engine.add_request("a", PROMPT, HOT)
    for _ in range(3):
        engine.step()
    output = engine.abort_request("a/1")
    assert [c.finish_reason for c in output.outputs] == [None, "abort", None]
    with pytest.raises(UnknownRequest):
        engine.abort_request("a/1")
    left = drain(engine)["a"].outputs
    assert (left[0], left[2]) == (whole[0], whole[2])
    assert left[1].token_ids == whole[1].token_ids[:3]


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_aborting_the_request_ends_all_its_sequences_and_frees_everything(make: Make, steps: int) -> None:
    engine = make(max_num_batched_tokens=4)  # the prompt takes two steps
    engine.add_request("a", PROMPT, HOT)
    for _ in range(steps):
        engine.step()
    output = engine.abort_request("a")
    assert output.finished
    assert [c.finish_reason for c in output.outputs] == ["abort"] * 3
    assert not engine.has_unfinished_requests()
    assert engine.pool_counts().in_use == 0


def test_the_request_can_be_aborted_after_its_first_sequence_has_ended(make: Make) -> None:
    engine = make()
    engine.add_request("a", PROMPT, HOT)
    engine.step()
    engine._scheduler.requests["a"].max_total_tokens = 8  # ends sequence 0 with its second token
    engine.step()
    output = engine.abort_request("a")
    assert [c.finish_reason for c in output.outputs] == ["length", "abort", "abort"]
    assert engine.pool_counts().in_use == 0


def test_ids_of_sequences_are_taken_while_the_request_lives(make: Make) -> None:
    engine = make()
    engine.add_request("a", PROMPT, HOT)
    with pytest.raises(DuplicateRequest, match="a/2"):
        engine.add_request("a/2", PROMPT, SamplingParams())
    drain(engine)
    engine.add_request("a/2", PROMPT, SamplingParams(max_tokens=1))
    with pytest.raises(DuplicateRequest, match="a/2"):
        engine.add_request("a", PROMPT, HOT)


def test_each_sequence_has_its_kv_and_its_stages_from_the_prompt_on(make: Make) -> None:
    engine = make()
    engine.add_request("a", PROMPT, HOT, capture=["positions", "logits", "hidden", "kv"])
    for _ in range(4):
        engine.step()
    kv = {name: engine.read_kv(name) for name in sequence_ids("a", 3)}
    for name, layers in kv.items():
        assert layers[0][0].shape == (9, 2, 32)
        stages = engine.stages(name)
        assert stages["positions"].tolist() == list(range(9))
        assert stages["logits"].shape == (4, 448)
        assert np.array_equal(layers[1][1].numpy(), stages["v.1"])
    assert np.array_equal(engine.stages("a")["logits"][0], engine.stages("a/1")["logits"][0])
    assert not np.array_equal(engine.stages("a")["logits"][1], engine.stages("a/1")["logits"][1])
    drain(engine)
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=1))
    assert engine.stages("a/1") == {}, "stages of an earlier request of this id are gone"


def test_a_request_that_ends_with_its_first_token_ends_in_all_sequences(make: Make) -> None:
    engine = make()
    engine.add_request("a", PROMPT, SamplingParams(n=4, max_tokens=1, seed=2, temperature=2.0))
    [output] = engine.step()
    assert output.finished
    assert [len(c.token_ids) for c in output.outputs] == [1, 1, 1, 1]
    assert engine.pool_counts().in_use == 0


def test_sequences_that_find_no_seat_are_served_later(make: Make) -> None:
    engine = make(max_num_seqs=2)
    params = SamplingParams(n=5, temperature=1.5, seed=11, max_tokens=5, ignore_eos=True)
    engine.add_request("a", PROMPT, params)
    output = drain(engine)["a"]
    assert all(same(c, alone(make, params, c.index)) for c in output.outputs)


def test_prompt_logprobs_belong_to_the_request(make: Make) -> None:
    params = SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=3, prompt_logprobs=1)
    engine = make()
    engine.add_request("a", PROMPT, params)
    output = drain(engine)["a"]
    engine = make()
    engine.add_request("b", PROMPT, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1))
    assert output.prompt_logprobs == drain(engine)["b"].prompt_logprobs


def test_forced_tokens_are_forced_on_every_sequence_and_choices_are_their_own(make: Make) -> None:
    params = SamplingParams(
        n=3, temperature=1.5, seed=1, max_tokens=4, ignore_eos=True, forced_token_ids=[20, 21, 22, 23]
    )
    engine = make()
    engine.add_request("a", PROMPT, params)
    outputs = drain(engine)["a"].outputs
    assert {c.token_ids for c in outputs} == {(20, 21, 22, 23)}
    assert len({c.choice_token_ids for c in outputs}) == 3


def test_a_request_whose_sequences_cannot_all_fit_is_refused_with_the_numbers(make: Make) -> None:
    engine = make(num_kv_blocks=6)
    with pytest.raises(CapacityError):
        engine.add_request("a", PROMPT, SamplingParams(n=9, max_tokens=8, temperature=1.0))
    with pytest.raises(BadParameter, match="n must be 1"):
        SamplingParams(n=2, temperature=0.0)
    assert not engine.has_unfinished_requests()
