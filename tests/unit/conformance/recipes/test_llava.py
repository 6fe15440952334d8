"""The LLaVA checkpoints: templates, placeholders, and shapes that agree with their processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from conformance.recipes.llava import LLAVA_RECIPES

PARTS = [
    {"type": "text", "text": "a"},
    {"type": "image"},
    {"type": "text", "text": "b"},
    {"type": "image_url", "image_url": "x.png"},
]


def render(checkpoints: Path, name: str, *turns: tuple[str, Any]) -> str:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / name)
    chat = [{"role": role, "content": content} for role, content in turns]
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


def test_llava_shows_the_pictures_of_a_turn_before_its_text(checkpoints: Path) -> None:
    assert render(checkpoints, "tiny-llava", ("user", PARTS)) == ("<s>USER: <image>\n<image>\nab ASSISTANT:")
    assert (
        render(
            checkpoints,
            "tiny-llava",
            ("system", "Be brief."),
            ("user", "Hi"),
            ("assistant", "Ho"),
            ("user", "x"),
        )
        == "<s>Be brief. USER: Hi ASSISTANT: Ho</s>USER: x ASSISTANT:"
    )


def test_onevision_leaves_pictures_where_they_are_in_the_text(checkpoints: Path) -> None:
    assert render(checkpoints, "tiny-llava-onevision", ("user", PARTS)) == (
        "<|im_start|>user\na<image>\nb<image>\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(checkpoints, "tiny-llava-onevision", ("system", "Be brief."), ("user", "Hi")) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", [recipe.name for recipe in LLAVA_RECIPES])
def test_the_placeholder_is_one_token_that_config_and_tokenizer_agree_on(
    checkpoints: Path, name: str
) -> None:
    config, tokenizer = (c.from_pretrained(checkpoints / name) for c in (AutoConfig, AutoTokenizer))
    assert tokenizer.image_token == "<image>"
    assert tokenizer.encode("<image>", add_special_tokens=False) == [config.image_token_index]


def test_only_onevision_is_tied(checkpoints: Path) -> None:
    tied = [AutoConfig.from_pretrained(checkpoints / r.name).tie_word_embeddings for r in LLAVA_RECIPES]
    assert tied == [False, True]


def test_the_tiles_of_the_largest_pictures_are_shrunk(checkpoints: Path) -> None:
    """Or shrinking would never run: 3 × 3 tiles of 16 features are more than the 4 × 16 allowed."""
    config = AutoConfig.from_pretrained(checkpoints / "tiny-llava-onevision")
    assert config.vision_aspect_ratio == "anyres_max_4"
    assert [168, 168] in config.image_grid_pinpoints
    assert config.vision_config.image_size == 56
