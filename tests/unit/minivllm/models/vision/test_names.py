"""Tensor names of LLaVA's descendants, in every spelling that checkpoints have."""

from __future__ import annotations

import pytest

from minivllm.models.vision.names import llava_name


@pytest.mark.parametrize(
    ("ours", "spellings"),
    [
        (
            "language_model.model.layers.0.mlp.up_proj.weight",
            [
                "language_model.model.layers.0.mlp.up_proj.weight",
                "model.language_model.layers.0.mlp.up_proj.weight",
            ],
        ),
        (
            "language_model.model.embed_tokens.weight",
            ["language_model.model.embed_tokens.weight", "model.language_model.embed_tokens.weight"],
        ),
        ("language_model.lm_head.weight", ["language_model.lm_head.weight", "lm_head.weight"]),
        (
            "vision.encoder.layers.1.layer_norm1.bias",
            [
                "vision_tower.vision_model.encoder.layers.1.layer_norm1.bias",
                "vision_tower.encoder.layers.1.layer_norm1.bias",
                "model.vision_tower.encoder.layers.1.layer_norm1.bias",
                "model.vision_tower.vision_model.encoder.layers.1.layer_norm1.bias",
            ],
        ),
        (
            "multi_modal_projector.linear_1.weight",
            ["multi_modal_projector.linear_1.weight", "model.multi_modal_projector.linear_1.weight"],
        ),
        ("image_newline", ["image_newline", "model.image_newline"]),
    ],
)
def test_a_parameter_has_one_name_however_it_is_spelt(ours: str, spellings: list[str]) -> None:
    assert [llava_name(name) for name in spellings] == [ours] * len(spellings)


@pytest.mark.parametrize(
    "name",
    [
        "vision_tower.vision_model.embeddings.position_ids",
        "vision_tower.vision_model.head.probe",
        "vision_tower.vision_model.head.attention.in_proj_weight",
        "language_model.model.layers.3.self_attn.rotary_emb.inv_freq",
    ],
)
def test_buffers_and_the_pooling_head_are_not_needed(name: str) -> None:
    assert llava_name(name) is None


def test_a_foreign_tensor_keeps_a_name_that_no_parameter_has() -> None:
    assert llava_name("language_model.model.layers.0.adapter.weight") == (
        "language_model.model.layers.0.adapter.weight"
    )
