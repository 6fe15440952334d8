"""Swapping through the whole engine: KV goes to the host and comes back with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine
from minivllm.errors import ConfigError, WeightError
from minivllm.models import LanguageModel
from minivllm.request import RequestOutput, SamplingParams
from minivllm.trace import Event, Preempted, SwappedIn, SwappedOut

PROMPT = {"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11]}
PARAMS = SamplingParams(
    temperature=0.8, seed=5, max_tokens=9, ignore_eos=True, logprobs=2, repetition_penalty=1.2
)
BLOCK = 3 * 2 * 2 * 32 * 4 * 4
"""Bytes of a block of tiny-llama: 3 layers, K and V, 2 KV heads of 32, 4 tokens, float32."""

Make = Callable[..., LLMEngine]


@pytest.fixture(scope="module")
def make(tiny_llama: str) -> Make:
    """Engines over one loaded model."""
    loaded: list[LanguageModel] = []

    def make(**options: Any) -> LLMEngine:
        trace = options.pop("trace", lambda _event: None)
        options = {
            "num_kv_blocks": 64,
            "block_size": 4,
            "batch_invariant": True,
            "max_num_batched_tokens": 4,
            **options,
        }
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


def test_host_blocks_are_what_swap_space_pays_for(make: Make) -> None:
    engine = make(swap_space_bytes=3 * BLOCK + 1)
    assert engine.resolved.kv_block_bytes == BLOCK
    assert engine.resolved.num_host_blocks == 3
    assert (engine.host_pool_counts().total, engine.host_pool_counts().free) == (3, 3)


@pytest.mark.parametrize("space", [0, BLOCK - 1])
def test_swap_without_a_host_block_is_refused_and_says_what_to_set(make: Make, space: int) -> None:
    with pytest.raises(ConfigError, match=rf"swap_space_bytes {space} .* multiple of {BLOCK}"):
        make(preemption_mode="swap", swap_space_bytes=space)
    assert make(preemption_mode="auto", swap_space_bytes=space).resolved.num_host_blocks == 0


@pytest.mark.parametrize("poison", [False, True])
def test_swapped_and_recomputed_and_untouched_are_the_same_bits_at_every_step(
    make: Make, poison: bool
) -> None:
    def run(mode: str | None, at: int) -> tuple[RequestOutput, dict[str, Any], list[Event]]:
        events: list[Event] = []
        engine = make(swap_space_bytes=64 * BLOCK, preemption_mode=mode or "recompute", trace=events.append)
        engine.add_request("a", PROMPT, PARAMS, capture=["logits", "kv", "hidden"])
        outputs: list[RequestOutput] = []
        step = 0
        while engine.has_unfinished_requests():
            if poison:
                engine.poison()
            outputs += engine.step()
            step += 1
            if step == at:
                assert engine.preempt_request("a")
        assert engine.pool_counts().in_use == engine.host_pool_counts().in_use == 0
        return outputs[-1], engine.stages("a"), events

    plain, stages, _ = run(None, at=0)
    for mode in ("swap", "recompute"):
        for step in range(1, 10):  # two steps of prompt, then eight of decode
            output, got, events = run(mode, at=step)
            told = [e for e in events if isinstance(e, Preempted)]
            assert [(e.mode, e.fallback) for e in told] == [(mode, False)]
            moved = [type(e) for e in events if isinstance(e, SwappedOut | SwappedIn)]
            assert moved == ([SwappedOut, SwappedIn] if mode == "swap" else [])
            assert repr(output.outputs) == repr(plain.outputs)
            assert got.keys() == stages.keys()
            assert all(np.array_equal(got[name], stages[name]) for name in stages), (mode, step)


def test_the_kv_of_a_swapped_out_request_reads_the_same_before_and_after_it_moved(make: Make) -> None:
    # Nobody can be admitted beside "b", so that "a" stays out for a while.
    engine = make(swap_space_bytes=64 * BLOCK, preemption_mode="swap", num_kv_blocks=9)
    engine.add_request("a", PROMPT, PARAMS)
    for _ in range(4):
        engine.step()
    before = engine.read_kv("a")
    assert engine.preempt_request("a")
    about_to_move = engine.read_kv("a")
    engine.poison()
    engine.add_request("b", {"prompt_token_ids": list(range(20, 42))}, PARAMS, priority=-1)
    engine._scheduler._waiting.remove("a")  # held back for one step, whoever would be first
    engine.step()
    moved = engine.read_kv("a")
    assert engine.host_pool_counts().in_use == 3
    engine._scheduler._waiting.push(engine._scheduler._tickets["a"], "a")
    for (k, v), *others in zip(before, about_to_move, moved, strict=True):
        assert all(torch.equal(k, other[0]) and torch.equal(v, other[1]) for other in others)
    drain(engine)


def test_a_full_host_pool_falls_back_to_recompute_and_says_so(make: Make) -> None:
    events: list[Event] = []
    engine = make(swap_space_bytes=1 * BLOCK, preemption_mode="swap", trace=events.append)
    engine.add_request("a", PROMPT, PARAMS)
    for _ in range(5):
        engine.step()
    assert engine.preempt_request("a")
    output = drain(engine)["a"]
    told = [e for e in events if isinstance(e, Preempted)]
    assert [(e.mode, e.fallback) for e in told] == [("recompute", True)]
    fresh = make()
    fresh.add_request("a", PROMPT, PARAMS)
    assert repr(drain(fresh)["a"].outputs) == repr(output.outputs)


def test_one_preemption_may_have_another_mode_than_configured(make: Make) -> None:
    events: list[Event] = []
    engine = make(swap_space_bytes=64 * BLOCK, preemption_mode="recompute", trace=events.append)
    engine.add_request("a", PROMPT, PARAMS)
    for mode in ("swap", "recompute"):
        engine.step()
        engine.step()
        assert engine.preempt_request("a", mode)  # type: ignore[arg-type]  # a str of the Literal
    drain(engine)
    assert [e.mode for e in events if isinstance(e, Preempted)] == ["swap", "recompute"]


def test_poison_reaches_free_host_blocks_and_none_that_is_in_use(make: Make) -> None:
    engine = make(swap_space_bytes=5 * BLOCK, preemption_mode="swap")
    device = 63 * 4 + 4  # all slots of 63 free blocks and of the null block
    assert engine.poison() == device + 5 * 4
    engine.add_request("a", PROMPT, PARAMS)
    for _ in range(3):
        engine.step()
    assert engine.preempt_request("a")
    assert engine.poison() == device - 2 * 4 + 3 * 4, "8 tokens are about to leave 2 blocks for 2"


def test_a_snapshot_shows_who_is_where(make: Make) -> None:
    engine = make(swap_space_bytes=5 * BLOCK, preemption_mode="swap")
    engine.add_request("a", PROMPT, PARAMS)
    for _ in range(3):
        engine.step()
    snapshot = engine.kv_snapshot()
    held = [block for block in snapshot.blocks if block.owners]
    assert [(b.owners[0].request_id, b.first_position, b.num_computed) for b in held] == [
        ("a", 0, 4),
        ("a", 4, 4),
    ]
    assert held[0].token_ids == (5, 6, 7, 8)
    assert len(snapshot.host_blocks) == 5
    assert engine.preempt_request("a")
    assert [b.owners[0].request_id for b in engine.kv_snapshot().host_blocks if b.owners] == ["a", "a"]


# --- weights -------------------------------------------------------------------------------------


def test_new_weights_answer_as_if_loaded_with_them_and_find_no_old_block(tiny_llama: str) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    name = "model.layers.1.mlp.down_proj.weight"

    def make(**options: Any) -> LLMEngine:
        return LLMEngine(EngineConfig(model=tiny_llama, num_kv_blocks=32, block_size=4, **options))

    engine, changed = make(), make()
    negated = -dict(engine.model.named_parameters())[name]
    with torch.no_grad():
        dict(changed.model.named_parameters())[name].copy_(negated)
    engine.add_request("old", PROMPT, greedy)
    old = drain(engine)["old"]
    engine.update_weights({name: negated})
    assert engine.pool_counts().cached == 0
    for one in (engine, changed):
        one.add_request("new", PROMPT, greedy)
    new, wanted = drain(engine)["new"], drain(changed)["new"]
    assert new.num_cached_tokens == 0
    assert new.outputs == wanted.outputs
    assert new.outputs != old.outputs


def test_weights_are_not_updated_while_a_request_holds_kv_of_the_old_ones(make: Make) -> None:
    engine = make(swap_space_bytes=64 * BLOCK, preemption_mode="swap")
    name, parameter = next(iter(engine.model.named_parameters()))
    kept = parameter.clone()
    engine.add_request("a", PROMPT, PARAMS)
    engine.step()
    for _ in range(2):  # running, then swapped out
        with pytest.raises(ConfigError, match=r"1 requests .*a"):
            engine.update_weights({name: torch.zeros_like(parameter)})
        assert torch.equal(parameter, kept)
        engine.preempt_request("a")
    engine.abort_request("a")
    with pytest.raises(WeightError, match="nose"):
        engine.update_weights({"nose": kept})
    engine.update_weights({name: kept.clone()})
    assert torch.equal(parameter, kept)
