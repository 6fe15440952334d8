"""The GLM checkpoints have partial rotation, fused matrices, biases, and their family's template."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from conformance.recipes.glm import GLM_RECIPES

NAMES = [recipe.name for recipe in GLM_RECIPES]


def names_of(checkpoints: Path, name: str) -> set[str]:
    with safe_open(checkpoints / name / "model.safetensors", framework="pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("name", NAMES)
def test_half_of_each_head_turns(checkpoints: Path, name: str) -> None:
    config = AutoConfig.from_pretrained(checkpoints / name)
    assert config.rope_parameters["partial_rotary_factor"] == 0.5


@pytest.mark.parametrize("name", NAMES)
def test_gate_and_up_are_fused_and_q_k_and_v_have_biases(checkpoints: Path, name: str) -> None:
    names = names_of(checkpoints, name)
    assert {n.split(".")[-2] for n in names if n.endswith("bias")} == {"q_proj", "k_proj", "v_proj"}
    assert sum(n.endswith("gate_up_proj.weight") for n in names) == 3
    assert "lm_head.weight" in names


def test_only_glm4_has_a_norm_after_each_branch(checkpoints: Path) -> None:
    count = {
        name: sum(
            "post_self_attn_layernorm" in n or "post_mlp_layernorm" in n for n in names_of(checkpoints, name)
        )
        for name in NAMES
    }
    assert count == {"tiny-glm": 0, "tiny-glm4": 2 * 3}


@pytest.mark.parametrize("name", NAMES)
def test_a_chat_begins_with_the_mask_and_start_tokens_and_roles_end_turns(
    checkpoints: Path, name: str
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / name)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "[gMASK]<sop><|system|>\nBe brief.<|user|>\nHello<|assistant|>\n"
    )
    ids = tokenizer.convert_tokens_to_ids(["[gMASK]", "<sop>", "<|user|>", "<|observation|>"])
    assert ids == [442, 443, 445, 447]
    assert tokenizer.encode("[gMASK]<sop>x", add_special_tokens=False)[:2] == [442, 443]
