"""Small Transformers towers with uneven weights, and the same weights in ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import AutoModel

from minivllm.layers.ops_torch import TorchOps

#: Not square numbers of anything, so that swapped axes show: 3 × 3 patches of 8, 2 pixels over.
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 26,
    "patch_size": 8,
}


class Towers(NamedTuple):
    """Transformers' tower and ours, with equal float32 weights."""

    hf: Any
    ours: Any


def fill_unevenly(module: nn.Module, seed: int = 5) -> None:
    """Norms and scales far from one, biases far from zero, matrices that keep the size of their input."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif parameter.dim() == 1 and ("norm" in name or "lambda" in name):
                parameter.copy_(1 + 0.3 * noise)
            elif "position" in name or parameter.dim() in (1, 3):
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * 1.5 / parameter[0].numel() ** 0.5)


@pytest.fixture
def make_towers() -> Callable[..., Towers]:
    """`make_towers(CLIPVisionConfig, ViTConfig, CLIPTower, hidden_act="gelu")`."""

    def make(hf_config: Any, config: Any, tower: Any, **overrides: Any) -> Towers:
        values = hf_config(**{**SHAPE, **overrides})
        values._attn_implementation = "eager"
        hf = AutoModel.from_config(values).eval()
        fill_unevenly(hf)
        ours = tower(
            config.read(values.to_dict()), ops=TorchOps(), dtype=torch.float32, device=torch.device("cpu")
        )
        ours.load_state_dict(hf.state_dict(), strict=True)
        return Towers(hf, ours)

    return make


@pytest.fixture
def pixels() -> torch.Tensor:
    """[2, 3, 26, 26] two unequal pictures."""
    return torch.randn(2, 3, 26, 26, generator=torch.Generator().manual_seed(1))
