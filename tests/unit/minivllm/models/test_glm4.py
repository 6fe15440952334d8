"""What GLM-4 adds to GLM; its arithmetic is compared with Transformers in test_decoder.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from minivllm.errors import ConfigError
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import load_model, load_model_config


@pytest.mark.parametrize("name", ["post_self_attn_layernorm", "post_mlp_layernorm"])
def test_a_norm_follows_each_branch_and_counts(
    make_checkpoint: Callable[..., Any],
    run_model: Callable[..., Any],
    token_ids: torch.Tensor,
    name: str,
) -> None:
    model: Any = load_model(make_checkpoint("Glm4").path, dtype=torch.float32, device="cpu", ops=TorchOps())
    before = run_model(model, token_ids).logits
    getattr(model.model.layers[1], name).weight.fill_(1.0)
    assert (run_model(model, token_ids).logits - before).abs().max() > 0.1


def test_a_branch_of_zeros_leaves_the_residual_alone(
    make_checkpoint: Callable[..., Any], run_model: Callable[..., Any], token_ids: torch.Tensor
) -> None:
    model: Any = load_model(make_checkpoint("Glm4").path, dtype=torch.float32, device="cpu", ops=TorchOps())
    for layer in model.model.layers:
        layer.post_self_attn_layernorm.weight.zero_()
        layer.post_mlp_layernorm.weight.zero_()
    stages = run_model(model, token_ids).stages
    assert torch.equal(stages["hidden.2"], model.embed(token_ids))


def test_a_glm_checkpoint_under_the_name_of_glm4_is_refused(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Glm").path
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace('"GlmForCausalLM"', '"Glm4ForCausalLM"'))
    with pytest.raises(ConfigError, match="model_type 'glm' does not belong to Glm4ForCausalLM"):
        load_model_config(path)
