"""The shape shared by all mechanics checkpoints."""

from __future__ import annotations

from conformance.recipes.build import MECHANICS
from conformance.recipes.recipe import MAX_POSITIONS, TINY


def test_heads_are_large_enough_for_common_kernels() -> None:
    assert TINY["head_dim"] == 32


def test_heads_times_head_dim_differs_from_hidden_size() -> None:
    assert TINY["num_attention_heads"] * TINY["head_dim"] != TINY["hidden_size"]


def test_query_heads_share_kv_heads() -> None:
    assert TINY["num_attention_heads"] == 2 * TINY["num_key_value_heads"]
    assert TINY["num_key_value_heads"] > 1


def test_every_recipe_fills_the_vocabulary_with_its_special_tokens() -> None:
    for recipe in MECHANICS.values():
        assert max(recipe.special.ids.values()) == {**recipe.shape, **recipe.config}["vocab_size"] - 1
        assert set(recipe.end_tokens) <= set(recipe.special.tokens)


def test_a_small_rope_base_makes_every_position_count() -> None:
    for recipe in MECHANICS.values():
        if recipe.config.get("model_type") != "opt":  # which learns its positions
            rope = recipe.config["rope_parameters"]
            for table in [rope] if "rope_theta" in rope else rope.values():
                assert 100 <= table["rope_theta"] <= 1000


def test_scaled_ropes_reach_the_stated_length() -> None:
    for recipe in MECHANICS.values():
        rope = recipe.config.get("rope_parameters", {})
        if "original_max_position_embeddings" in rope:
            assert rope["factor"] * rope["original_max_position_embeddings"] == MAX_POSITIONS
