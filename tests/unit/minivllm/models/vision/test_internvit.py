"""The InternVL tower against Transformers eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import InternVLVisionConfig

from minivllm.errors import BadMedia, ConfigError, UnsupportedError
from minivllm.models.vision.internvit import InternViT, InternViTConfig

VARIANTS: dict[str, dict[str, Any]] = {
    "InternVL3 300M": {"attention_bias": True},
    "InternVL 6B": {"use_qk_norm": True, "norm_type": "rms_norm"},
    "final norm": {"use_mean_pooling": False, "hidden_act": "gelu_pytorch_tanh"},
}


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@torch.inference_mode()
def test_every_hidden_state_is_that_of_transformers(
    make_towers: Callable[..., Any], pixels: torch.Tensor, variant: str
) -> None:
    hf, ours = make_towers(InternVLVisionConfig, InternViTConfig, InternViT, **VARIANTS[variant])
    out = hf(pixels, output_hidden_states=True)
    for got, expected in zip(ours(pixels, (0, 1, 2, 3)), out.hidden_states, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    (last,) = ours(pixels)
    torch.testing.assert_close(last, out.last_hidden_state, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_without_learned_positions_equal_patches_stay_equal(make_towers: Callable[..., Any]) -> None:
    hf, ours = make_towers(
        InternVLVisionConfig, InternViTConfig, InternViT, use_absolute_position_embeddings=False
    )
    flat = torch.full((1, 3, 26, 26), 0.5)
    (state,) = ours(flat)
    assert torch.equal(state[:, 1:2].expand(-1, 9, -1), state[:, 1:])
    torch.testing.assert_close(state, hf(flat).last_hidden_state, rtol=1e-4, atol=1e-4)


def test_a_tile_of_another_size_is_refused(make_towers: Callable[..., Any]) -> None:
    _, ours = make_towers(InternVLVisionConfig, InternViTConfig, InternViT)
    with pytest.raises(BadMedia, match="tiles are 26 × 34, the model has positions for 26 × 26"):
        ours(torch.zeros(1, 3, 26, 34))


def test_what_only_training_needs_and_unknown_norms_are_refused() -> None:
    values = InternVLVisionConfig().to_dict()
    with pytest.raises(UnsupportedError, match="use_mask_token"):
        InternViTConfig.read({**values, "use_mask_token": True})
    with pytest.raises(ConfigError, match="norm_type must be layer_norm or rms_norm, got 'batch_norm'"):
        InternViTConfig.read({**values, "norm_type": "batch_norm"})
