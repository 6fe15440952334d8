"""The Llama checkpoints cover the kinds of rope, tying, several end tokens, and BOS in the template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from conformance.recipes.llama import LLAMA_RECIPES

CHAT = [{"role": "user", "content": " Hello\n"}, {"role": "assistant", "content": "Yes?"}]


@pytest.fixture
def tokenizer(checkpoints: Path) -> Any:
    return AutoTokenizer.from_pretrained(checkpoints / "tiny-llama")


def test_each_kind_of_rope_has_a_checkpoint(checkpoints: Path) -> None:
    kinds = {
        recipe.name: AutoConfig.from_pretrained(checkpoints / recipe.name).rope_parameters["rope_type"]
        for recipe in LLAMA_RECIPES
    }
    assert kinds == {
        "tiny-llama": "llama3",
        "tiny-llama-tied": "default",
        "tiny-llama-linear": "linear",
        "tiny-llama-yarn": "yarn",
    }


def test_only_one_is_tied() -> None:
    assert [r.name for r in LLAMA_RECIPES if r.config["tie_word_embeddings"]] == ["tiny-llama-tied"]


def test_config_knows_one_end_token_and_generation_config_three(checkpoints: Path) -> None:
    special = LLAMA_RECIPES[0].special.ids
    assert AutoConfig.from_pretrained(checkpoints / "tiny-llama").eos_token_id == special["<|end_of_text|>"]
    assert LLAMA_RECIPES[0].end_tokens == ("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")


def test_the_template_begins_with_bos_and_trims_content(tokenizer: Any) -> None:
    assert tokenizer.apply_chat_template(CHAT, tokenize=False) == (
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYes?<|eot_id|>"
    )


def test_the_generation_prompt_opens_a_turn_of_the_assistant(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(CHAT[:1], tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")


def test_tokenizing_a_rendered_chat_with_special_tokens_doubles_bos(tokenizer: Any) -> None:
    """The trap these checkpoints set."""
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.encode(text)[:2] == [tokenizer.bos_token_id] * 2
    right = tokenizer.apply_chat_template(CHAT, return_dict=False)
    assert right == tokenizer.encode(text, add_special_tokens=False)
    assert right.count(tokenizer.bos_token_id) == 1
