"""Every "auto" is decided once, with a reason; contradictions are refused before loading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm.build import DEFAULT_KV_CACHE_BYTES, build_engine, resolve
from minivllm.config import EngineConfig
from minivllm.errors import ConfigError
from minivllm.layers.ops_pad import PadOps
from minivllm.models import load_model_config
from minivllm.trace import no_trace


def resolved(tiny_llama: str, **options: object) -> object:
    config = EngineConfig.from_dict({"model": tiny_llama, **options})
    return resolve(config, load_model_config(Path(tiny_llama)))


def test_the_pool_defaults_to_the_budget_or_to_what_could_be_used(tiny_llama: str) -> None:
    config = EngineConfig(model=tiny_llama, max_num_seqs=2, max_model_len=100, block_size=16)
    few = resolve(config, load_model_config(Path(tiny_llama)))
    assert few.num_kv_blocks == 2 * 7 + 1
    many = resolve(EngineConfig(model=tiny_llama), load_model_config(Path(tiny_llama)))
    assert many.num_kv_blocks == DEFAULT_KV_CACHE_BYTES // many.kv_block_bytes
    # 3 layers, K and V, 2 heads of 32 floats, 16 positions
    assert many.kv_block_bytes == 3 * 2 * 2 * 32 * 4 * 16


def test_every_automatic_choice_has_a_reason(tiny_llama: str) -> None:
    r = resolve(EngineConfig(model=tiny_llama), load_model_config(Path(tiny_llama)))
    assert {"dtype", "device", "ops_backend", "attention_backend"} <= {name for name, _ in r.why}
    assert r.dtype == "float32"
    assert "auto" not in (r.dtype, r.device, r.ops_backend, r.attention_backend)


def test_a_length_beyond_the_model_is_refused(tiny_llama: str) -> None:
    with pytest.raises(ConfigError, match="max_model_len 9000 exceeds the model's 8192"):
        resolved(tiny_llama, max_model_len=9000)


def test_a_budget_too_small_for_one_block_is_refused(tiny_llama: str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory_bytes"):
        resolved(tiny_llama, kv_cache_memory_bytes=1000)


@pytest.mark.parametrize(
    ("name", "size"), [("num_kv_blocks", 24576), ("swap_space_bytes", 1), ("max_model_len", 128)]
)
def test_more_memory_than_there_is_is_refused_before_it_is_asked_for(
    tiny_llama: str, name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minivllm.build.total_memory", lambda _: 10_000_000)
    model = replace(load_model_config(Path(tiny_llama)), max_position_embeddings=10**15)
    options: dict[str, Any] = {"num_kv_blocks": 2, "max_model_len": 100}
    most = 10_000_000 // size
    with pytest.raises(ConfigError, match=f"{name} .* cpu has 10000000; lower {name} to at most {most}"):
        resolve(EngineConfig(model=tiny_llama, device="cpu", **{**options, name: 10**12}), model)
    monkeypatch.setattr("minivllm.build.total_memory", lambda _: None)
    assert resolve(EngineConfig(model=tiny_llama, device="cpu", **{**options, name: 10**12}), model)


def test_the_bitwise_probe_tries_no_more_rows_than_a_step_can_have(
    tiny_llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(PadOps, "prepare", lambda _self, _model, *, max_rows: asked.append(max_rows))
    for batched in (7, 10**12):
        config = EngineConfig(
            model=tiny_llama,
            num_kv_blocks=5,
            block_size=16,
            max_num_batched_tokens=batched,
            batch_invariant=True,
        )
        build_engine(config, trace=no_trace, model=None)
    assert asked == [7, 80]


def test_a_checkpoint_of_a_dtype_without_arithmetic_is_refused(tiny_llama: str) -> None:
    model = replace(load_model_config(Path(tiny_llama)), dtype="int8")
    with pytest.raises(ConfigError, match="the checkpoint's dtype 'int8' cannot be computed with"):
        resolve(EngineConfig(model=tiny_llama), model)


def test_unknown_backends_list_the_known_ones(tiny_llama: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown attention backend 'flash'; known: .*dense"):
        resolved(tiny_llama, attention_backend="flash")


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has MPS")
def test_a_device_that_is_not_here_is_an_error_and_never_a_fallback(tiny_llama: str) -> None:
    with pytest.raises(ConfigError, match="mps"):
        resolved(tiny_llama, device="mps")
