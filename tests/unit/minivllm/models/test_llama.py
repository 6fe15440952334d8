"""Llama's flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from minivllm.layers.ops_torch import TorchOps
from minivllm.models import load_model, load_model_config
from minivllm.models.llama import LlamaForCausalLM


@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("mlp", [False, True])
def test_the_attention_flag_covers_all_four_projections_and_the_mlp_flag_all_three(
    attention: bool, mlp: bool, make_checkpoint: Callable[..., Any]
) -> None:
    path = make_checkpoint("Llama", attention_bias=attention, mlp_bias=mlp).path
    config = load_model_config(path)
    assert (config.attention_bias, config.attention_output_bias, config.mlp_bias) == (
        attention,
        attention,
        mlp,
    )
    assert not config.qk_norm
    model = load_model(path, dtype=torch.float32, device="cpu", ops=TorchOps())
    assert isinstance(model, LlamaForCausalLM)
    biases = {name.split(".")[-2] for name, _ in model.named_parameters() if name.endswith("bias")}
    expected = {"q_proj", "k_proj", "v_proj", "o_proj"} if attention else set()
    assert biases == expected | ({"gate_proj", "up_proj", "down_proj"} if mlp else set())


def test_the_head_has_no_bias(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Llama", attention_bias=True, mlp_bias=True).path
    assert load_model(path, dtype=torch.float32, device="cpu", ops=TorchOps()).lm_head.bias is None


def test_head_dim_defaults_to_hidden_size_over_heads(make_checkpoint: Callable[..., Any]) -> None:
    config = load_model_config(make_checkpoint("Llama", hidden_size=64, head_dim=None).path)
    assert config.head_dim == 16


def test_llama_is_the_family_whose_gguf_files_permute_q_and_k() -> None:
    assert LlamaForCausalLM.gguf_architecture == "llama"
    assert LlamaForCausalLM.gguf_permutes_qk
