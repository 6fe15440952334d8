"""Qwen3's flags."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from minivllm.layers.ops_torch import TorchOps
from minivllm.models import load_model
from minivllm.models.qwen3 import Qwen3ForCausalLM


@pytest.mark.parametrize("bias", [False, True])
def test_every_head_of_q_and_k_is_normed_and_the_bias_is_optional(
    bias: bool, make_checkpoint: Callable[..., Any]
) -> None:
    path = make_checkpoint("Qwen3", attention_bias=bias).path
    model = load_model(path, dtype=torch.float32, device="cpu", ops=TorchOps())
    assert isinstance(model, Qwen3ForCausalLM)
    assert model.config.qk_norm
    names = dict(model.named_parameters())
    assert names["model.layers.0.self_attn.q_norm.weight"].shape == (32,)
    biases = {name.split(".")[-2] for name in names if name.endswith("bias")}
    assert biases == ({"q_proj", "k_proj", "v_proj", "o_proj"} if bias else set())


def test_its_gguf_files_keep_the_row_order() -> None:
    assert Qwen3ForCausalLM.gguf_architecture == "qwen3"
    assert not Qwen3ForCausalLM.gguf_permutes_qk
