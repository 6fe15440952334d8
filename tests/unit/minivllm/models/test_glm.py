"""What GLM has of its own; its arithmetic is compared with Transformers in test_decoder.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm.errors import ConfigError
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import load_model, load_model_config
from minivllm.models.glm import rotate_pairs


def test_neighbours_turn_together_and_the_rest_passes() -> None:
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]])
    cos, sin = torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    assert rotate_pairs(x, cos, sin).tolist() == [[[-2.0, 1.0, 3.0, 4.0, 5.0, 6.0]]]


def test_half_of_each_head_turns_by_default(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Glm").path
    config = load_model_config(path)
    assert config.rope is not None
    assert (config.rope.rotary_fraction, config.head_dim) == (0.5, 32)
    model = load_model(path, dtype=torch.float32, device="cpu", ops=TorchOps())
    cos, sin = model.rotation(model.rope, torch.tensor([0, 7]))
    assert cos.shape == sin.shape == (2, 16)
    # the first frequency is 1: one radian per position, for the first two dimensions
    assert cos[1, 0] == cos[1, 1] == torch.tensor(7.0).cos()
    assert cos[1, 2] == cos[1, 3] != cos[1, 1]


@pytest.mark.parametrize("bias", [True, False])
def test_the_bias_is_on_q_k_and_v_only(make_checkpoint: Callable[..., Any], bias: bool) -> None:
    path = make_checkpoint("Glm", attention_bias=bias).path
    model = load_model(path, dtype=torch.float32, device="cpu", ops=TorchOps())
    biased = {name.split(".")[-2] for name, _ in model.named_parameters() if name.endswith("bias")}
    assert biased == ({"q_proj", "k_proj", "v_proj"} if bias else set())


def test_gate_and_up_are_one_matrix_gate_first(make_checkpoint: Callable[..., Any]) -> None:
    model: Any = load_model(make_checkpoint("Glm").path, dtype=torch.float32, device="cpu", ops=TorchOps())
    mlp = model.model.layers[0].mlp
    assert mlp.gate_up_proj.weight.shape == (2 * 80, 48)
    x = torch.randn(3, 48, generator=torch.Generator().manual_seed(0))
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    expected = mlp.down_proj(torch.nn.functional.silu(x @ gate.T) * (x @ up.T))
    torch.testing.assert_close(mlp(x), expected)


@pytest.mark.parametrize("fraction", [0, -0.5, 1.5, True])
def test_a_fraction_that_is_none_is_refused(make_checkpoint: Callable[..., Any], fraction: float) -> None:
    path: Path = make_checkpoint("Glm").path
    values = json.loads((path / "config.json").read_text())
    values["rope_parameters"]["partial_rotary_factor"] = fraction
    (path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="partial_rotary_factor"):
        load_model_config(path)
