"""The CLIP tower against Transformers eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import CLIPVisionConfig

from minivllm.errors import BadMedia
from minivllm.models.vision.clip import CLIPTower
from minivllm.models.vision.vit import ViTConfig


@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
@torch.inference_mode()
def test_every_hidden_state_is_that_of_transformers(
    make_towers: Callable[..., Any], pixels: torch.Tensor, activation: str
) -> None:
    hf, ours = make_towers(CLIPVisionConfig, ViTConfig, CLIPTower, hidden_act=activation)
    truth = hf(pixels, output_hidden_states=True).hidden_states
    assert len(truth) == 4
    for layers in ((0, 1, 2, 3), (-4, -3, -2, -1)):
        for got, expected in zip(ours(pixels, layers), truth, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_the_norm_of_the_pooled_output_is_never_applied(
    make_towers: Callable[..., Any], pixels: torch.Tensor
) -> None:
    _, ours = make_towers(CLIPVisionConfig, ViTConfig, CLIPTower)
    (before,) = ours(pixels, (-1,))
    ours.post_layernorm.weight.data.fill_(float("nan"))
    assert torch.equal(ours(pixels, (-1,))[0], before)


def test_a_picture_of_another_size_is_refused(make_towers: Callable[..., Any]) -> None:
    _, ours = make_towers(CLIPVisionConfig, ViTConfig, CLIPTower)
    with pytest.raises(BadMedia, match="are 34 × 26, the model has positions for 26 × 26"):
        ours(torch.zeros(1, 3, 34, 26), (-1,))
