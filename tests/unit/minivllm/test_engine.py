"""The engine's loop on a tiny model: requests in, outputs out, refusals by name."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine
from minivllm.errors import (
    BadParameter,
    CapacityError,
    DuplicateRequest,
    PromptTooLong,
    UnknownRequest,
)
from minivllm.request import RequestOutput, SamplingParams, StepPlan, StepResult
from minivllm.trace import Event

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


def make(tiny_llama: str, **options: Any) -> LLMEngine:
    return LLMEngine(EngineConfig(model=tiny_llama, num_kv_blocks=64, block_size=4, **options))


def drain(engine: LLMEngine) -> dict[str, RequestOutput]:
    final = {}
    while engine.has_unfinished_requests():
        final.update({o.request_id: o for o in engine.step() if o.finished})
    return final


def test_outputs_are_cumulative_and_end_once(tiny_llama: str) -> None:
    engine = make(tiny_llama)
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, GREEDY)
    seen = []
    while engine.has_unfinished_requests():
        seen += engine.step()
    assert [len(o.outputs[0].token_ids) for o in seen] == [1, 2, 3, 4, 5, 6]
    assert [o.finished for o in seen] == [False] * 5 + [True]
    assert seen[-1].outputs[0].finish_reason == "length"
    assert engine.step() == []


def test_a_bad_request_is_refused_and_the_others_are_served(tiny_llama: str) -> None:
    engine = make(tiny_llama, max_model_len=40)
    engine.add_request("good", {"prompt_token_ids": [5, 6, 7]}, GREEDY)
    alone = make(tiny_llama, max_model_len=40)
    alone.add_request("good", {"prompt_token_ids": [5, 6, 7]}, GREEDY)
    refusals: list[tuple[Any, SamplingParams, type[Exception], str]] = [
        ({"prompt_token_ids": []}, GREEDY, BadParameter, "empty"),
        ({"prompt_token_ids": [448]}, GREEDY, BadParameter, "448"),
        ({"prompt_token_ids": [-1]}, GREEDY, BadParameter, "-1"),
        ({"prompt_token_ids": [True]}, GREEDY, BadParameter, "True"),
        ({"prompt_token_ids": [1.0]}, GREEDY, BadParameter, "1.0"),
        ({"prompt": 3}, GREEDY, BadParameter, "int"),
        ({"image": "x"}, GREEDY, BadParameter, "image"),
        ({}, GREEDY, BadParameter, "prompt_token_ids"),
        (17, GREEDY, BadParameter, "int"),
        ({"prompt_token_ids": [1] * 40}, GREEDY, PromptTooLong, "40"),
        ({"prompt_token_ids": [1]}, SamplingParams(logit_bias={448: 1.0}), BadParameter, "448"),
        ({"prompt_token_ids": [1]}, SamplingParams(forced_token_ids=[9999]), BadParameter, "9999"),
    ]
    for i, (prompt, params, kind, word) in enumerate(refusals):
        with pytest.raises(kind, match=word):
            engine.add_request(f"bad{i}", prompt, params)
    with pytest.raises(DuplicateRequest, match="good"):
        engine.add_request("good", {"prompt_token_ids": [5]}, GREEDY)
    with pytest.raises(BadParameter, match="colour"):
        engine.add_request("stages", {"prompt_token_ids": [5]}, GREEDY, capture=["colour"])
    assert drain(engine)["good"].outputs == drain(alone)["good"].outputs
    counts = engine.pool_counts()
    assert counts.in_use == 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"request_id": None},
        {"request_id": 5},
        {"request_id": ["a"]},
        {"sampling_params": None},
        {"sampling_params": {"max_tokens": 3}},
        {"priority": None},
        {"priority": "high"},
        {"cache_salt": 5},
        {"prompt": {"prompt_token_ids": None}},
        {"prompt": {"prompt_token_ids": 5}},
        {"prompt": {"prompt_token_ids": {5, 6}}},
        {"prompt": {"prompt_token_ids": {5: 6}}},
        {"capture": None},
        {"capture": "logits"},
        {"capture": [["logits"]]},
        {"prompt": {"prompt": "x", 1: 2}},
        {"prompt": "a\ud800b"},
        {"sampling_params": SamplingParams(bad_words=["\ud800"])},
    ],
)
def test_an_argument_of_another_type_is_refused_and_the_others_are_served(
    tiny_llama: str, wrong: dict[str, Any], policy: str
) -> None:
    engine = make(tiny_llama, scheduling_policy=policy)
    engine.add_request("good", {"prompt_token_ids": [5, 6, 7]}, GREEDY)
    valid = {"request_id": "bad", "prompt": {"prompt_token_ids": [5]}, "sampling_params": GREEDY}
    with pytest.raises(BadParameter):
        engine.add_request(**{**valid, **wrong})
    assert set(drain(engine)) == {"good"}


@pytest.mark.parametrize("wrong", [None, 3, ["good"], {"good": 1}])
def test_an_id_that_is_no_text_belongs_to_no_request(tiny_llama: str, wrong: Any) -> None:
    engine = make(tiny_llama)
    engine.add_request("good", {"prompt_token_ids": [5, 6, 7]}, GREEDY)
    for ask in (engine.abort_request, engine.preempt_request, engine.read_kv, engine.stages, engine.media):
        with pytest.raises(UnknownRequest, match="a request id is text"):
            ask(wrong)
    with pytest.raises(BadParameter, match="must be recompute, swap or auto, got 'lose'"):
        engine.preempt_request("good", "lose")  # type: ignore[arg-type]  # wrong on purpose
    assert set(drain(engine)) == {"good"}


@pytest.mark.parametrize("late", [False, True], ids=["before the pass", "after it"])
def test_an_interrupted_step_is_done_again_and_changes_no_token(
    tiny_llama: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(interrupt_at: int) -> dict[str, RequestOutput]:
        engine = make(tiny_llama, max_num_batched_tokens=4, prefix_cache_seed=1)
        run, calls = engine._runner.run, 0

        def interrupted(plan: StepPlan) -> StepResult:
            nonlocal calls
            calls += 1
            if late and calls == interrupt_at:
                run(plan)
            if calls == interrupt_at:
                raise KeyboardInterrupt
            return run(plan)

        monkeypatch.setattr(engine._runner, "run", interrupted)
        for i in range(3):
            params = SamplingParams(temperature=1.0, seed=i, max_tokens=6, ignore_eos=True)
            engine.add_request(str(i), {"prompt_token_ids": [5, 6, 7, 8, 9 + i]}, params)
        if interrupt_at:
            with pytest.raises(KeyboardInterrupt):
                drain(engine)
        return drain(engine)

    undisturbed = answers(0)
    for step in (1, 2, 5):
        assert {k: o.outputs for k, o in answers(step).items()} == {
            k: o.outputs for k, o in undisturbed.items()
        }


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers(tiny_llama: str) -> None:
    engine = LLMEngine(EngineConfig(model=tiny_llama, num_kv_blocks=4, block_size=4))
    with pytest.raises(CapacityError, match=r"3"):
        engine.add_request("big", {"prompt_token_ids": [5] * 20}, GREEDY)
    engine.add_request("small", {"prompt_token_ids": [5] * 5}, GREEDY)
    assert drain(engine)["small"].finished


def test_an_aborted_request_tells_what_it_had_and_leaves_nothing(tiny_llama: str) -> None:
    engine = make(tiny_llama)
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, GREEDY)
    engine.step()
    engine.step()
    output = engine.abort_request("a")
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert len(output.outputs[0].token_ids) == 2
    assert not engine.has_unfinished_requests()
    assert engine.pool_counts().in_use == 0
    with pytest.raises(UnknownRequest):
        engine.abort_request("a")


def test_a_finished_id_may_be_used_again(tiny_llama: str) -> None:
    engine = make(tiny_llama)
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, GREEDY)
    first = drain(engine)["a"]
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, GREEDY)
    assert drain(engine)["a"].outputs == first.outputs


def test_captured_stages_cover_every_position_also_after_a_preemption(tiny_llama: str) -> None:
    capture = ["positions", "embeddings", "hidden", "logits", "prompt_logits", "kv"]
    results = []
    for preempt in (False, True):
        engine = make(tiny_llama, max_num_batched_tokens=3, batch_invariant=True)
        engine.add_request("a", {"prompt_token_ids": [5, 6, 7, 8, 9]}, GREEDY, capture=capture)
        for _ in range(4):
            engine.step()
        if preempt:
            assert engine.preempt_request("a")
        drain(engine)
        results.append(engine.stages("a"))
    plain, preempted = results
    assert plain["positions"].tolist() == list(range(10))
    assert plain["logits"].shape == (6, 448)
    assert plain["prompt_logits"].shape[0] == 5
    assert plain["hidden.2"].shape == (10, 64)
    assert plain["k.0"].shape == (10, 2, 32)
    assert set(plain) == set(preempted)
    for name in plain:
        assert np.array_equal(plain[name], preempted[name]), name


def test_the_cache_of_a_live_request_can_be_read_in_logical_order(tiny_llama: str) -> None:
    engine = make(tiny_llama)
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7, 8, 9, 10]}, GREEDY, capture=["kv"])
    engine.step()
    layers = engine.read_kv("a")
    assert len(layers) == 3
    assert layers[0][0].shape == (6, 2, 32)
    assert np.array_equal(layers[1][1].numpy(), engine.stages("a")["v.1"])
    with pytest.raises(UnknownRequest):
        engine.read_kv("b")


def test_poison_fills_unused_slots_and_changes_no_bit(tiny_llama: str) -> None:
    def run(poison: bool) -> RequestOutput:
        engine = make(tiny_llama)
        engine.add_request(
            "a", {"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=8, seed=3, logprobs=2)
        )
        outputs = []
        while engine.has_unfinished_requests():
            if poison:
                assert engine.poison() > 0
            outputs += engine.step()
        return outputs[-1]

    assert run(poison=True) == run(poison=False)


def test_weights_that_are_not_finite_fail_the_request_by_name(tiny_llama: str) -> None:
    engine = make(tiny_llama)
    with torch.no_grad():
        dict(engine.model.named_parameters())["model.embed_tokens.weight"][9].fill_(float("nan"))
    engine.add_request("bad", {"prompt_token_ids": [5, 9]}, GREEDY)
    engine.add_request("good", {"prompt_token_ids": [5, 6]}, GREEDY)
    final = drain(engine)
    assert final["bad"].error is not None
    assert final["bad"].outputs[0].finish_reason == "error"
    assert final["good"].error is None
    assert len(final["good"].outputs[0].token_ids) == 6
    assert engine.pool_counts().in_use == 0


def test_seeds_are_derived_from_engine_seed_and_arrival_and_told(tiny_llama: str) -> None:
    def seeds(engine_seed: int) -> list[int]:
        engine = make(tiny_llama, seed=engine_seed)
        for name in ("a", "b"):
            engine.add_request(name, {"prompt_token_ids": [5]}, SamplingParams(max_tokens=1))
        engine.add_request("c", {"prompt_token_ids": [5]}, SamplingParams(max_tokens=1, seed=77))
        final = drain(engine)
        return [final[name].seed for name in ("a", "b", "c")]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 5
    assert seeds(1)[2] == 77


def test_every_step_and_token_is_traced(tiny_llama: str) -> None:
    events: list[Event] = []
    engine = LLMEngine(EngineConfig(model=tiny_llama, num_kv_blocks=16, block_size=4), trace=events.append)
    engine.add_request("a", {"prompt_token_ids": [5, 6, 7]}, GREEDY)
    drain(engine)
    counts = Counter(type(e).__name__ for e in events)
    assert counts["Submitted"] == counts["Finished"] == 1
    assert counts["Planned"] == counts["Sampled"] == 6
