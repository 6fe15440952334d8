"""Qwen2's fixed flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minivllm.layers.ops_torch import TorchOps
from minivllm.models import load_model, load_model_config
from minivllm.models.qwen2 import Qwen2ForCausalLM


def test_q_k_and_v_have_a_bias_and_nothing_else_has(make_checkpoint: Callable[..., Any]) -> None:
    model = load_model(make_checkpoint("Qwen2").path, dtype=torch.float32, device="cpu", ops=TorchOps())
    assert isinstance(model, Qwen2ForCausalLM)
    biases = {name.split(".")[-2] for name, _ in model.named_parameters() if name.endswith("bias")}
    assert biases == {"q_proj", "k_proj", "v_proj"}


def test_a_head_dim_that_the_config_class_does_not_declare_is_honoured(
    make_checkpoint: Callable[..., Any],
) -> None:
    assert load_model_config(make_checkpoint("Qwen2", head_dim=24).path).head_dim == 24


def test_its_gguf_files_keep_the_row_order() -> None:
    assert Qwen2ForCausalLM.gguf_architecture == "qwen2"
    assert not Qwen2ForCausalLM.gguf_permutes_qk
