"""The random numbers are exact, and every parameter gets a size that makes it count."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from torch import nn

from conformance.recipes.build import MECHANICS, make_model
from conformance.recipes.initialise import initialise, standard_normal


def test_numbers_have_mean_zero_and_variance_one() -> None:
    z = standard_normal(0, "a", (200, 100))
    assert abs(z.mean()) < 0.03
    assert abs(z.var() - 1) < 0.03
    assert np.abs(z).max() <= 6


def test_numbers_are_a_function_of_seed_and_name() -> None:
    one = standard_normal(1, "a", (4, 4))
    assert np.array_equal(one, standard_normal(1, "a", (4, 4)))
    assert not np.array_equal(one, standard_normal(2, "a", (4, 4)))
    assert not np.array_equal(one, standard_normal(1, "b", (4, 4)))


def test_numbers_never_change() -> None:
    """Pinned: another library version or processor must give these bits too."""
    digest = hashlib.sha256(standard_normal(7, "pinned", (3, 5)).astype("<f8").tobytes()).hexdigest()
    assert digest == "fd4588047663f5977568ce5ce2e97b58902c9849ec0b18f7838252f0e10f3d46"


def test_numbers_are_multiples_of_two_to_the_minus_17() -> None:
    z = standard_normal(0, "a", (64,)) * 2**17
    assert np.array_equal(z, np.round(z))


def test_no_norm_weight_is_one_and_no_bias_is_zero() -> None:
    for name, parameter in make_model(MECHANICS["tiny-qwen2"]).named_parameters():
        if parameter.ndim == 1:
            neutral = 0.0 if name.endswith(".bias") else 1.0
            assert (parameter - neutral).abs().mean() > 0.05, name


def test_matrices_keep_the_size_of_their_input() -> None:
    model = make_model(MECHANICS["tiny-llama"])
    for name, parameter in model.named_parameters():
        if name.endswith(("v_proj.weight", "o_proj.weight", "down_proj.weight")):
            assert parameter.std().item() * parameter.shape[1] ** 0.5 == pytest.approx(1.25, rel=0.05), name
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            assert parameter.std().item() * parameter.shape[1] ** 0.5 == pytest.approx(2.0, rel=0.05), name


def test_norms_on_q_and_k_sharpen_attention_instead_of_the_matrices() -> None:
    attention = make_model(MECHANICS["tiny-qwen3"]).model.layers[0].self_attn
    assert attention.q_norm.weight.mean().item() == pytest.approx(1.7, rel=0.1)
    assert attention.q_proj.weight.std().item() * 8 == pytest.approx(1.0, rel=0.05)


def test_a_tied_model_has_small_embeddings_and_a_large_final_norm() -> None:
    model = make_model(MECHANICS["tiny-llama-tied"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.model.embed_tokens.weight[:440].std().item() == pytest.approx(0.1, rel=0.05)
    assert model.model.norm.weight.mean().item() == pytest.approx(8, rel=0.1)


def test_a_tower_has_uneven_norms_and_biases_and_sharp_attention() -> None:
    model = make_model(MECHANICS["tiny-qwen2-vl"])
    for name, parameter in model.model.visual.named_parameters():
        if parameter.ndim == 1:
            neutral = 0.0 if name.endswith(".bias") else 1.0
            assert (parameter - neutral).abs().mean() > 0.05, name
    q, k, v = model.model.visual.blocks[0].attn.qkv.weight.chunk(3)
    for part, gain in ((q, 2.0), (k, 2.0), (v, 1.25)):
        assert part.std().item() * 8 == pytest.approx(gain, rel=0.05)
    patches = model.model.visual.patch_embed.proj.weight
    assert patches.std().item() * patches[0].numel() ** 0.5 == pytest.approx(1.25, rel=0.05)


def test_the_decoder_of_a_vision_language_model_follows_the_rules_of_text() -> None:
    model = make_model(MECHANICS["tiny-qwen2-vl"])
    assert model.model.language_model.norm.weight.mean().item() == pytest.approx(1, rel=0.1)
    assert model.model.language_model.layers[0].self_attn.q_proj.weight.std().item() * 8 == pytest.approx(
        2.0, rel=0.05
    )


def test_what_is_a_row_of_a_tower_is_as_large_as_a_token() -> None:
    model = make_model(MECHANICS["tiny-blip2"])
    embeddings = model.vision_model.embeddings
    for rows in (model.query_tokens, embeddings.class_embedding, embeddings.position_embedding):
        assert rows.std().item() == pytest.approx(1, rel=0.3)


def test_the_decoder_of_blip2_is_tied_so_its_embeddings_are_small() -> None:
    decoder = make_model(MECHANICS["tiny-blip2"]).language_model.model.decoder
    assert decoder.embed_tokens.weight[:440].std().item() == pytest.approx(0.1, rel=0.05)
    assert decoder.embed_positions.weight.std().item() == pytest.approx(0.1, rel=0.05)
    assert decoder.final_layer_norm.weight.mean().item() == pytest.approx(8, rel=0.1)
    assert decoder.embed_tokens.weight[440:].std() < 0.4 * decoder.embed_tokens.weight[:440].std()


@pytest.mark.parametrize("name", ["tiny-smolvlm", "tiny-blip2"])
def test_no_vector_of_a_vision_language_model_is_neutral(name: str) -> None:
    for key, parameter in make_model(MECHANICS[name]).named_parameters():
        if parameter.ndim == 1:
            neutral = 0.0 if key.endswith(".bias") else 1.0
            assert (parameter - neutral).abs().mean() > 0.05, key


def test_a_parameter_of_a_tower_without_a_rule_is_refused() -> None:
    model = make_model(MECHANICS["tiny-qwen2-vl"])
    model.model.visual.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"no rule for parameter 'model\.visual\.scale'"):
        initialise(model, 0)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2", "tiny-qwen2-vl"])
def test_output_rows_of_special_tokens_are_small(name: str) -> None:
    rows = make_model(MECHANICS[name]).lm_head.weight
    assert rows[440:].std() < 0.4 * rows[:440].std()


def test_a_parameter_without_a_rule_is_refused() -> None:
    model = make_model(MECHANICS["tiny-llama"])
    model.model.extra = nn.Linear(3, 3, bias=False)
    with pytest.raises(ValueError, match=r"no rule for parameter 'model\.extra\.weight'"):
        initialise(model, 0)


def test_a_vector_without_a_rule_is_refused() -> None:
    model = make_model(MECHANICS["tiny-llama"])
    model.model.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"of shape \(3,\)"):
        initialise(model, 0)
