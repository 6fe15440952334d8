"""The vision tower of BLIP-2 against Transformers eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Blip2VisionConfig, Blip2VisionModel

from minivllm.errors import BadMedia
from minivllm.layers.ops_torch import TorchOps
from minivllm.models.vision.blip2 import Blip2Tower
from minivllm.models.vision.vit import ViTConfig
from tests.unit.minivllm.models.vision.conftest import SHAPE, fill_unevenly


def towers(**overrides: Any) -> tuple[Any, Blip2Tower]:
    values = Blip2VisionConfig(**{**SHAPE, **overrides})
    values._attn_implementation = "eager"
    hf = Blip2VisionModel(values).eval()
    fill_unevenly(hf)
    config = ViTConfig.read({"num_channels": 3, **values.to_dict()})
    ours = Blip2Tower(
        config, qkv_bias=values.qkv_bias, ops=TorchOps(), dtype=torch.float32, device=torch.device("cpu")
    )
    ours.load_state_dict(hf.state_dict(), strict=True)
    return hf, ours


@pytest.mark.parametrize("overrides", [{}, {"qkv_bias": False}, {"hidden_act": "quick_gelu"}])
@torch.inference_mode()
def test_the_output_is_that_of_transformers(overrides: dict[str, Any], pixels: torch.Tensor) -> None:
    hf, ours = towers(**overrides)
    truth = hf(pixels).last_hidden_state
    assert truth.shape == (2, 10, 32)
    torch.testing.assert_close(ours(pixels), truth, rtol=1e-4, atol=1e-4)


def test_a_picture_of_another_size_is_refused() -> None:
    _, ours = towers()
    with pytest.raises(BadMedia, match="are 26 × 34, the model takes 26 × 26"):
        ours(torch.zeros(1, 3, 26, 34))
