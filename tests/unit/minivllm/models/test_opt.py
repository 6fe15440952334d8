"""What OPT has of its own; its arithmetic is compared with Transformers in test_decoder.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm.errors import UnsupportedError
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import DecoderModel, load_model, load_model_config


def load(path: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    return load_model(path, dtype=dtype, device="cpu", ops=TorchOps())


def test_parameters_have_the_names_and_shapes_of_transformers(make_checkpoint: Callable[..., Any]) -> None:
    for tied in (True, False):
        checkpoint = make_checkpoint("OPT", tie_word_embeddings=tied)
        theirs = {name: tuple(p.shape) for name, p in checkpoint.hf.named_parameters()}
        ours = {name: tuple(p.shape) for name, p in load(checkpoint.path).named_parameters()}
        assert ours == theirs
        assert ("lm_head.weight" in ours) is not tied


def test_the_config_is_read_from_opt_s_own_names(make_checkpoint: Callable[..., Any]) -> None:
    config = load_model_config(make_checkpoint("OPT").path)
    assert (config.intermediate_size, config.num_key_value_heads, config.head_dim) == (80, 4, 12)
    assert (config.hidden_act, config.rope, config.rms_norm_eps) == ("relu", None, 1e-5)


def test_positions_start_at_the_third_row_and_end_at_the_last(make_checkpoint: Callable[..., Any]) -> None:
    model = load(make_checkpoint("OPT").path)
    stack: Any = model.stack
    assert stack.embed_positions.weight.shape == (256 + 2, 48)

    class Nothing:
        def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
            del layer, k, v

        def attend(
            self, layer: int, q: torch.Tensor, scale: float, window: int | None = None
        ) -> torch.Tensor:
            del layer, scale, window
            return torch.zeros_like(q).flatten(1)

    def run(position: int) -> torch.Tensor:
        return model(model.embed(torch.tensor([3])), torch.tensor([position]), Nothing())

    before = {position: run(position) for position in (0, 1, 255)}
    stack.embed_positions.weight[[0, 1]] = float("nan")
    stack.embed_positions.weight[3] += 1
    assert torch.equal(run(0), before[0])
    assert not torch.equal(run(1), before[1])
    assert torch.equal(run(255), before[255])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"do_layer_norm_before": False}, r"do_layer_norm_before False \(only True\)"),
        ({"word_embed_proj_dim": 24}, r"word_embed_proj_dim 24 \(only 48\)"),
        ({"enable_bias": False}, "enable_bias False"),
        ({"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine False"),
        ({"_remove_final_layer_norm": True}, "_remove_final_layer_norm True"),
        ({"activation_function": "gelu"}, "hidden_act 'gelu' is not implemented for OPTForCausalLM"),
    ],
)
def test_variants_that_are_not_implemented_are_refused_by_name(
    make_checkpoint: Callable[..., Any], changes: dict[str, Any], message: str
) -> None:
    path = make_checkpoint("OPT", **changes).path
    with pytest.raises(UnsupportedError, match=message):
        load_model_config(path)
