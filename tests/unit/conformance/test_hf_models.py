from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors import torch as safetensors

from conformance.hf_models import (
    NoTruth,
    eos_token_ids,
    has_stateless_rope,
    load_hf,
    load_tokenizer,
    prompt_token_ids,
)

SaveTiny = Callable[..., Path]
IDS = torch.arange(5, 25)[None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_model_is_built_at_its_dtype_with_float32_rope_buffers(
    tiny_checkpoint: Path, dtype: torch.dtype
) -> None:
    module = load_hf(tiny_checkpoint, dtype).module
    assert {p.dtype for p in module.parameters()} == {dtype}
    assert {b.dtype for b in module.buffers()} == {torch.float32}
    assert not module.training
    assert not any(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_asked_for_is_used(tiny_checkpoint: Path, attention: str) -> None:
    module = load_hf(tiny_checkpoint, torch.float32, attention).module
    assert module.config._attn_implementation == attention


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gguf_loads_without_accelerate_and_equals_the_safetensors_model_bit_for_bit(
    square_checkpoint: Path,
    write_gguf: Callable[..., Path],
    tmp_path: Path,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)  # any import of it fails
    path = write_gguf(tmp_path / "tiny.gguf", square_checkpoint)
    ours, theirs = load_hf(path, dtype), load_hf(square_checkpoint, dtype)
    assert type(ours.module) is type(theirs.module)
    assert ours.eos_token_ids == theirs.eos_token_ids == (2,)
    wanted = dict(theirs.module.named_parameters()) | dict(theirs.module.named_buffers())
    actual = dict(ours.module.named_parameters()) | dict(ours.module.named_buffers())
    assert actual.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(actual[name], tensor), name
    assert torch.equal(ours.module(IDS).logits, theirs.module(IDS).logits)


def test_a_changed_gguf_file_is_read_again(
    square_checkpoint: Path, write_gguf: Callable[..., Path], save_tiny: SaveTiny, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", square_checkpoint)
    before = load_hf(path, torch.float32).module.lm_head.weight.clone()
    other = save_tiny(tmp_path / "other", initializer_range=0.1)
    write_gguf(path, other)
    assert not torch.equal(load_hf(path, torch.float32).module.lm_head.weight, before)


def test_a_gguf_file_that_lacks_a_tensor_is_refused(
    square_checkpoint: Path, write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    path = write_gguf(tmp_path / "tiny.gguf", square_checkpoint, leave_out=name)
    with pytest.raises(NoTruth, match=f"missing=\\['{name}'\\]"):
        load_hf(path, torch.float32)


@pytest.mark.parametrize("kind", ["missing", "unexpected", "mismatched"])
def test_safetensors_that_do_not_fit_the_model_are_refused(
    save_tiny: SaveTiny, tmp_path: Path, kind: str
) -> None:
    path = save_tiny(tmp_path / "tiny")
    file = path / "model.safetensors"
    weights = safetensors.load_file(file)
    if kind == "missing":
        del weights["model.norm.weight"]
    elif kind == "unexpected":
        weights["model.extra.weight"] = torch.zeros(2)
    else:
        weights["model.norm.weight"] = torch.zeros(31)
    safetensors.save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(NoTruth, match=r"model\.(norm|extra)\.weight"):
        load_hf(path, torch.float32)


def test_an_architecture_transformers_lacks_is_refused(save_tiny: SaveTiny, tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "tiny")
    config = json.loads((path / "config.json").read_text()) | {"architectures": ["MysteryForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(NoTruth, match="'MysteryForCausalLM', which Transformers does not have"):
        load_hf(path, torch.float32)


def test_a_configuration_transformers_cannot_read_is_no_truth(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NoTruth, match=r"cannot read the configuration of .*: ValueError"):
        load_hf(tmp_path, torch.float32)


def test_eos_comes_from_generation_config_before_config(save_tiny: SaveTiny, tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "tiny")
    file = path / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [9, 2, 7]}))
    assert load_hf(path, torch.float32).eos_token_ids == (2, 7, 9)
    file.unlink()
    assert load_hf(path, torch.float32).eos_token_ids == (2,)


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (5, (5,)), (0, (0,)), ([7, 5, 7], (5, 7))])
def test_eos_ids_are_a_sorted_tuple(value: int | list[int] | None, ids: tuple[int, ...]) -> None:
    assert eos_token_ids(value) == ids


@pytest.mark.parametrize(
    ("parameters", "stateless"),
    [
        ({"rope_type": "default", "rope_theta": 1e4}, True),
        ({"rope_type": "linear", "factor": 2.0}, True),
        ({"rope_type": "llama3"}, True),
        ({"rope_type": "yarn"}, True),
        ({"rope_type": "dynamic"}, False),
        ({"rope_type": "longrope"}, False),
        ({"rope_type": "invented"}, False),
        ({"full_attention": {"rope_type": "linear"}, "sliding_attention": {"rope_type": "default"}}, True),
        ({"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}, False),
        ({}, False),
        (None, False),
    ],
)
def test_only_rope_kinds_known_to_keep_no_state_count_as_stateless(parameters: Any, stateless: bool) -> None:
    assert has_stateless_rope(SimpleNamespace(rope_parameters=parameters)) is stateless


def test_text_gets_the_special_tokens_of_the_tokenizer(tiny_checkpoint: Path) -> None:
    assert prompt_token_ids(load_tokenizer(tiny_checkpoint), {"text": "w0 w3"}) == (1, 5, 8)


def test_a_chat_gets_one_bos_and_equals_the_templates_own_ids(tiny_checkpoint: Path) -> None:
    tokenizer = load_tokenizer(tiny_checkpoint)
    messages = [{"role": "user", "content": "w0 w3"}]
    ids = prompt_token_ids(tokenizer, {"messages": messages})
    assert tokenizer is not None
    assert ids == (1, 3, 5, 8, 4)
    assert list(ids) == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_token_ids_need_no_tokenizer(save_tiny: SaveTiny, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save_tiny(tmp_path / "tiny", tokenizer=False))
    assert tokenizer is None
    assert prompt_token_ids(tokenizer, {"token_ids": [7, 8]}) == (7, 8)
    with pytest.raises(NoTruth, match="no tokenizer: give the prompt as token_ids"):
        prompt_token_ids(tokenizer, {"text": "w0"})


def test_a_chat_needs_a_template(tiny_checkpoint: Path) -> None:
    tokenizer: Any = load_tokenizer(tiny_checkpoint)
    tokenizer.chat_template = None
    with pytest.raises(NoTruth, match="no chat template"):
        prompt_token_ids(tokenizer, {"messages": [{"role": "user", "content": "w0"}]})


def test_a_prompt_without_tokens_has_no_truth(tiny_checkpoint: Path) -> None:
    tokenizer: Any = load_tokenizer(tiny_checkpoint)
    tokenizer.chat_template = "{{ '' }}"
    with pytest.raises(NoTruth, match="has no tokens"):
        prompt_token_ids(tokenizer, {"messages": [{"role": "user", "content": "w0"}]})


def test_no_sampling_default_of_the_checkpoint_survives_loading(save_tiny: SaveTiny, tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "tiny")
    settings = {"repetition_penalty": 9.0, "min_new_tokens": 5, "eos_token_id": 2}
    transformers.GenerationConfig(**settings).save_pretrained(path)
    left = load_hf(path, torch.float32).module.generation_config
    assert (left.repetition_penalty, left.min_new_tokens, left.eos_token_id) == (None, None, None)
