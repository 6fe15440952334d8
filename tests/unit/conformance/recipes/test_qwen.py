"""The Qwen checkpoints have biases or head norms, and their family's templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from conformance.recipes.qwen import QWEN_RECIPES

CHAT = [{"role": "user", "content": "Hello"}]


def render(checkpoints: Path, name: str, chat: list[dict[str, str]], **options: Any) -> str:
    return AutoTokenizer.from_pretrained(checkpoints / name).apply_chat_template(
        chat, tokenize=False, **options
    )


def names_of(checkpoints: Path, name: str) -> set[str]:
    with safe_open(checkpoints / name / "model.safetensors", framework="pt") as file:
        return set(file.keys())


def test_qwen2_has_biases_on_q_k_and_v_but_not_on_o(checkpoints: Path) -> None:
    biases = {n.split(".")[-2] for n in names_of(checkpoints, "tiny-qwen2") if n.endswith("bias")}
    assert biases == {"q_proj", "k_proj", "v_proj"}


def test_the_head_of_qwen2_is_tied_and_so_not_in_the_file(checkpoints: Path) -> None:
    assert AutoConfig.from_pretrained(checkpoints / "tiny-qwen2").tie_word_embeddings
    assert "lm_head.weight" not in names_of(checkpoints, "tiny-qwen2")


def test_qwen2_uses_no_sliding_window(checkpoints: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoints / "tiny-qwen2")
    assert not config.use_sliding_window
    assert set(config.layer_types) == {"full_attention"}


def test_the_window_is_on_all_layers_but_the_first(checkpoints: Path) -> None:
    config = AutoConfig.from_pretrained(checkpoints / "tiny-qwen2-window")
    assert config.layer_types == ["full_attention", "sliding_attention", "sliding_attention"]
    assert config.sliding_window == 16


def test_qwen3_has_norms_on_q_and_k_and_no_bias(checkpoints: Path) -> None:
    names = names_of(checkpoints, "tiny-qwen3")
    assert sum(n.endswith(("q_norm.weight", "k_norm.weight")) for n in names) == 2 * 3
    assert not [n for n in names if n.endswith("bias")]
    assert "lm_head.weight" in names


def test_qwen2_gives_a_conversation_without_a_system_turn_one(checkpoints: Path) -> None:
    assert render(checkpoints, "tiny-qwen2", CHAT) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    )


@pytest.mark.parametrize("name", [r.name for r in QWEN_RECIPES])
def test_a_system_turn_is_kept(checkpoints: Path, name: str) -> None:
    chat = [{"role": "system", "content": "Be brief."}, *CHAT]
    assert render(checkpoints, name, chat, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_qwen3_adds_no_system_turn(checkpoints: Path) -> None:
    assert render(checkpoints, "tiny-qwen3", CHAT) == "<|im_start|>user\nHello<|im_end|>\n"


@pytest.mark.parametrize("name", [r.name for r in QWEN_RECIPES])
def test_there_is_no_bos_and_padding_is_not_the_end_of_a_turn(checkpoints: Path, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / name)
    assert tokenizer.bos_token_id is None
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.encode("x") == tokenizer.encode("x", add_special_tokens=False)
