"""The SigLIP tower against Transformers eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import SiglipVisionConfig

from minivllm.errors import BadMedia
from minivllm.models.vision.siglip import SiglipTower
from minivllm.models.vision.vit import ViTConfig


def towers(make_towers: Callable[..., Any]) -> Any:
    return make_towers(SiglipVisionConfig, ViTConfig, SiglipTower, vision_use_head=False)


@torch.inference_mode()
def test_every_hidden_state_is_that_of_transformers(
    make_towers: Callable[..., Any], pixels: torch.Tensor
) -> None:
    hf, ours = towers(make_towers)
    out = hf(pixels, output_hidden_states=True)
    for got, expected in zip(ours(pixels, (0, 1, 2, 3)), out.hidden_states, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    (last,) = ours(pixels)
    torch.testing.assert_close(ours.post_layernorm(last), out.last_hidden_state, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_position_ids_choose_rows_of_the_position_table(
    make_towers: Callable[..., Any], pixels: torch.Tensor
) -> None:
    _, ours = towers(make_towers)
    own = torch.arange(9)
    assert torch.equal(ours(pixels, (0,), own)[0], ours(pixels, (0,))[0])
    turned = ours(pixels, (0,), own.flip(0).expand(2, -1))[0] - ours(pixels, (0,))[0]
    table = ours.embeddings.position_embedding.weight
    torch.testing.assert_close(turned, (table.flip(0) - table).expand(2, -1, -1), rtol=0, atol=1e-5)
    assert ours(pixels[:, :, :, :16], (0,), own[:6])[0].shape == (2, 6, 32)


def test_a_picture_of_another_size_needs_position_ids(make_towers: Callable[..., Any]) -> None:
    _, ours = towers(make_towers)
    with pytest.raises(BadMedia, match="are 26 × 34, the model has positions for 3 × 3 patches of 8"):
        ours(torch.zeros(1, 3, 26, 34))
