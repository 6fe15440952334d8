"""minivllm through its adapter: everything declared is there, and nothing leaks between passes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conformance.adapters import minivllm as module
from conformance.adapters.base import (
    FEATURES,
    Controlled,
    EngineRequest,
    KVAccess,
    ModelSource,
    Snapshots,
    Stages,
    Stepped,
    Swapping,
    Traced,
    Weights,
)
from conformance.adapters.minivllm import MiniVLLMAdapter
from minivllm.config import EngineConfig

PROMPT = (1, 20, 33, 47, 5, 60, 61)
SAMPLING = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}
OPTIONS = {"dtype": "float32", "device": "cpu", "num_kv_blocks": 32, "block_size": 4}


@pytest.fixture
def source(tiny_checkpoint: Path) -> ModelSource:
    return ModelSource("tiny", tiny_checkpoint, "w")


@pytest.fixture(autouse=True)
def _no_models_left() -> Iterator[None]:
    module._models.clear()
    yield
    module._models.clear()


def adapter(source: ModelSource, **options: Any) -> MiniVLLMAdapter:
    return MiniVLLMAdapter(source, {**OPTIONS, **options})


def request(name: str = "one", prompt: tuple[int, ...] = PROMPT, **sampling: Any) -> EngineRequest:
    return EngineRequest(name, {**SAMPLING, **sampling}, prompt, capture=frozenset({"logits", "kv"}))


def tokens(source: ModelSource, **options: Any) -> tuple[int, ...]:
    with adapter(source, **options) as a:
        [output] = a.generate([request()])
    assert output.token_ids is not None
    return output.token_ids


def test_every_feature_is_declared_but_bits_without_batch_invariance(source: ModelSource) -> None:
    capabilities = adapter(source).capabilities()
    assert set(FEATURES) - capabilities.features == {"bitwise", "strict_windows"}
    assert capabilities.missing == {
        "bitwise": "batch_invariant is off",
        "strict_windows": "it has sliding windows",
    }
    for protocol in (Stepped, Controlled, Traced, Stages, KVAccess, Weights, Swapping, Snapshots):
        assert isinstance(adapter(source), protocol)


def test_every_option_of_the_engine_is_honoured(source: ModelSource) -> None:
    options = adapter(source).capabilities().options
    assert options == set(EngineConfig.__dataclass_fields__) - {"model"} | {
        "threads",
        "num_host_blocks",
        "placement",
    }


def test_generate_serves_all_and_refuses_by_name(source: ModelSource) -> None:
    with adapter(source) as a:
        one, bad, two = a.generate([request(), request("bad", (9999,)), request("two", (1, 2, 3))])
    assert bad.error is not None
    assert bad.error.type == "BadParameter"
    assert one.finish_reason == two.finish_reason == "length"
    assert one.prompt_token_ids == PROMPT


def test_a_bad_sampling_parameter_is_a_refusal_too(source: ModelSource) -> None:
    with adapter(source) as a:
        error = a.submit(request(max_tokens=0))
        assert error is not None
        assert error.type == "BadParameter"
        assert a.outputs() == []


def test_steps_outputs_events_and_stages(source: ModelSource) -> None:
    with adapter(source) as a:
        assert a.submit(request()) is None
        [before] = a.outputs()
        assert (before.finished, before.text) == (False, "")
        assert a.advance()
        [after] = a.outputs()
        assert after.token_ids is not None
        assert len(after.token_ids) == 1
        names = [event["event"] for event in a.drain_events()]
        assert names[0] == "submitted"
        assert {"planned", "allocated", "sampled"} <= set(names)
        assert a.drain_events() == []
        stages = a.stages("one")
        assert stages["logits"].shape[0] == 1
        kv = a.read_kv("one")
        assert len(kv) == 2
        assert kv[0][0].shape[0] == len(PROMPT)
        assert np.array_equal(stages["k.0"], kv[0][0])
        while a.advance():
            pass
        assert a.stages("one")["logits"].shape[0] == 6


def test_logprobs_come_most_likely_first(source: ModelSource) -> None:
    with adapter(source) as a:
        [output] = a.generate([request(logprobs=4, prompt_logprobs=2)])
    assert output.logprobs is not None
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for row in [*output.logprobs, *(r for r in output.prompt_logprobs if r is not None)]:
        values = [entry.logprob for entry in row]
        assert values == sorted(values, reverse=True)
        assert row[0].rank == 1


def test_forcing_is_passed_on(source: ModelSource) -> None:
    forced = EngineRequest("f", SAMPLING, PROMPT, forced_token_ids=(40, 41, 42, 43, 44, 45))
    with adapter(source) as a:
        [output] = a.generate([forced])
    assert output.token_ids == (40, 41, 42, 43, 44, 45)
    assert output.choice_token_ids is not None
    assert output.choice_token_ids[0] == tokens(source)[0]


def test_text_and_chat_go_through_the_engines_own_tokenizer(source: ModelSource) -> None:
    sampling = {"temperature": 0.0, "max_tokens": 1}
    with adapter(source) as a:
        text, chat = a.generate(
            [
                EngineRequest("t", sampling, text="w0 w1"),
                EngineRequest("c", sampling, chat=({"role": "user", "content": "w0"},)),
            ]
        )
    assert text.prompt_token_ids == (1, 5, 6)
    assert chat.prompt_token_ids == (1, 3, 5, 4)


def test_a_chat_without_a_tokenizer_is_a_refusal(save_tiny: Any, tmp_path: Path) -> None:
    source = ModelSource("mute", save_tiny(tmp_path / "mute", tokenizer=False), "w")
    with adapter(source) as a:
        error = a.submit(EngineRequest("c", SAMPLING, chat=({"role": "user", "content": "w0"},)))
    assert error is not None
    assert error.type == "UnsupportedError"


def test_hooks_preempt_poison_reset_and_pool(source: ModelSource) -> None:
    with adapter(source) as a:
        total = a.pool()
        a.submit(request())
        assert not a.preempt("one")
        a.advance()
        assert a.pool().in_use > 0
        assert a.poison() > 0
        assert not a.reset_prefix_cache()
        assert a.preempt("one")
        while a.advance():
            pass
        [output] = a.outputs()
        assert output.num_preemptions == 1
        assert a.reset_prefix_cache()
        assert a.pool() == total
    assert output.token_ids == tokens(source)


def test_abort_ends_a_request(source: ModelSource) -> None:
    with adapter(source) as a:
        a.submit(request())
        a.advance()
        a.abort("one")
        [output] = a.outputs()
    assert (output.finished, output.finish_reason) == (True, "abort")


def test_a_loaded_model_is_used_again_but_nothing_else_is(source: ModelSource) -> None:
    with adapter(source) as first:
        first.generate([request()])
        loaded = first._loaded.model
    with adapter(source, block_size=8) as second:
        assert second._loaded.model is loaded
        [output] = second.generate([request()])
        assert output.num_cached_tokens == 0


def test_only_so_many_models_are_kept(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_MODELS", 1)
    for dtype in ("float32", "bfloat16"):
        with adapter(source, dtype=dtype):
            pass
    assert [key[1] for key in module._models] == ["bfloat16"]


def test_a_damaged_model_is_never_kept(tiny_checkpoint: Path) -> None:
    with adapter(ModelSource("tiny", tiny_checkpoint, "damaged-truncate")):
        assert not module._models


def test_swapped_weights_change_the_answer_and_are_gone_afterwards(source: ModelSource) -> None:
    before = tokens(source)
    with adapter(source) as a:
        names = [f"model.layers.{i}.mlp.down_proj.weight" for i in (0, 1)]
        a.swap_weights(*names)
        [output] = a.generate([request()])
    assert output.token_ids != before
    assert tokens(source) == before


def test_swapping_what_cannot_be_swapped_is_an_error(source: ModelSource) -> None:
    with adapter(source) as a:
        with pytest.raises(ValueError, match="no parameter"):
            a.swap_weights("model.norm.weight", "nope")
        with pytest.raises(ValueError, match="cannot swap"):
            a.swap_weights("model.norm.weight", "lm_head.weight")


def test_threads_are_set_while_it_is_entered_and_put_back(source: ModelSource) -> None:
    before = torch.get_num_threads()
    other = before + 1
    with adapter(source, threads=other):
        assert torch.get_num_threads() == other
    assert torch.get_num_threads() == before


def test_batch_invariance_declares_bits(source: ModelSource) -> None:
    a = adapter(source, batch_invariant=True, max_num_batched_tokens=16)
    assert "bitwise" in a.capabilities().features
    assert tokens(source, batch_invariant=True, max_num_batched_tokens=16) == tokens(source)


def test_a_machine_without_bits_says_why(source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    from minivllm.errors import ConfigError

    class Refusing:
        def prepare(self, _model: object, *, max_rows: int) -> None:
            raise ConfigError(f"shape [rows, 32] fails for {max_rows} rows")

    a = adapter(source, batch_invariant=True, max_num_batched_tokens=13)
    real = module.make_ops
    monkeypatch.setattr(
        module, "make_ops", lambda name, device: Refusing() if module._models else real(name, device)
    )
    capabilities = a.capabilities()
    assert "bitwise" not in capabilities.features
    assert capabilities.missing["bitwise"] == "shape [rows, 32] fails for 13 rows"


def test_a_model_that_does_not_load_raises_the_engines_own_error(tmp_path: Path) -> None:
    from minivllm.errors import ConfigError

    with pytest.raises(ConfigError):
        adapter(ModelSource("gone", tmp_path / "gone", "w")).__enter__()


def test_it_must_be_entered_first(source: ModelSource) -> None:
    with pytest.raises(RuntimeError, match="not entered"):
        adapter(source).advance()


def test_the_pool_is_small_unless_told_otherwise(source: ModelSource) -> None:
    a = MiniVLLMAdapter(source, {"dtype": "float32", "device": "cpu"})
    with a:
        resolved = a._loaded.resolved
        assert resolved.num_kv_blocks * resolved.kv_block_bytes <= module.DEFAULT_POOL_BYTES


def test_host_blocks_are_counted_in_blocks_whatever_a_block_takes(source: ModelSource) -> None:
    for block_size in (4, 7):
        with adapter(source, num_host_blocks=5, preemption_mode="swap", block_size=block_size) as a:
            assert len(a.kv_snapshot()["host_blocks"]) == 5
    with pytest.raises(ValueError, match="swap_space_bytes"):
        adapter(source, num_host_blocks=0, preemption_mode="swap").__enter__()


def test_another_placement_takes_other_blocks_and_changes_no_token(source: ModelSource) -> None:
    told = []
    for placement in ({}, {"placement": 5}):
        with adapter(source, num_kv_blocks=64, **placement) as a:
            a.submit(request())
            a.advance()
            held = [b["block_id"] for b in a.kv_snapshot()["blocks"] if b["state"] == "in_use"]
            while a.advance():
                pass
            told.append((held, a.outputs()[0].token_ids))
    assert told[0][0] != told[1][0]
    assert told[0][1] == told[1][1]


def test_swapping_moves_a_request_to_the_host_and_changes_no_token(source: ModelSource) -> None:
    with adapter(source, num_host_blocks=8) as a:
        a.submit(request())
        a.advance()
        a.advance()
        assert a.swap("one")
        assert not a.swap("one"), "it holds no device blocks any more"
        while a.advance():
            pass
        kinds = [e["event"] for e in a.drain_events()]
        [output] = a.outputs()
    assert [k for k in kinds if k.startswith("swapped")] == ["swapped_out", "swapped_in"]
    assert output.token_ids == tokens(source)


def test_each_sequence_is_an_output_of_its_own(source: ModelSource) -> None:
    with adapter(source) as a:
        a.submit(request(n=3, temperature=1.5, seed=4))
        assert [o.request_id for o in a.outputs()] == ["one", "one/1", "one/2"]
        a.advance()
        a.advance()
        a.abort("one/1")
        while a.advance():
            pass
        outputs = {o.request_id: o for o in a.outputs()}
        assert {name: o.finish_reason for name, o in outputs.items()} == {
            "one": "length",
            "one/1": "abort",
            "one/2": "length",
        }
        assert len({o.token_ids for o in outputs.values()}) == 3
        assert a.stages("one/2")["logits"].shape[0] == 6


def test_sequences_end_one_by_one(source: ModelSource) -> None:
    with adapter(source) as a:
        a.submit(request(n=2, temperature=1.5, seed=4, max_tokens=5))
        a.advance()
        a.abort("one/1")
        ended = {o.request_id: o.finished for o in a.outputs()}
    assert ended == {"one": False, "one/1": True}


def test_generate_returns_every_sequence_and_refusals_in_order(source: ModelSource) -> None:
    with adapter(source) as a:
        outputs = a.generate(
            [
                request("a", n=2, temperature=1.0, seed=1),
                request("bad", (9999,), n=2, temperature=1.0),
                request("b"),
            ]
        )
    assert [o.request_id for o in outputs] == ["a", "a/1", "bad", "b"]
    assert [o.error is None for o in outputs] == [True, True, False, True]


def test_an_aborted_request_is_aborted_in_all_its_sequences(source: ModelSource) -> None:
    with adapter(source) as a:
        a.submit(request(n=2, temperature=1.5, seed=4))
        a.abort("one")
        assert {o.finish_reason for o in a.outputs()} == {"abort"}


def test_a_snapshot_is_plain_data(source: ModelSource) -> None:
    with adapter(source) as a:
        a.submit(request())
        a.advance()
        snapshot = a.kv_snapshot()
    assert json.loads(json.dumps(snapshot)) == snapshot
    held = [block for block in snapshot["blocks"] if block["owners"]]
    assert [block["token_ids"] for block in held] == [list(PROMPT[:4]), list(PROMPT[4:])]
