"""The Qwen vision-language checkpoints have their family's shapes, and templates that keep places."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from conformance.recipes.qwen_vl import QWEN_VL_RECIPES

NAMES = [recipe.name for recipe in QWEN_VL_RECIPES]

CHAT = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "a"},
            {"type": "image", "image": "x.png"},
            {"type": "text", "text": "b"},
            {"type": "video", "video": "y"},
            {"type": "image_url", "image_url": "z.png"},
        ],
    }
]
SYSTEM = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"


@pytest.mark.parametrize("name", NAMES)
def test_pictures_and_videos_stay_where_they_are_in_the_text(checkpoints: Path, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / name)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    image = "<|vision_start|><|image_pad|><|vision_end|>"
    video = "<|vision_start|><|video_pad|><|vision_end|>"
    turn = f"<|im_start|>user\na{image}b{video}{image}<|im_end|>\n<|im_start|>assistant\n"
    assert text == ("" if name == "tiny-qwen3-vl" else SYSTEM) + turn


@pytest.mark.parametrize("name", NAMES)
def test_content_may_be_plain_text(checkpoints: Path, name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / name)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_config_names_the_ids_of_the_vocabulary(checkpoints: Path, name: str) -> None:
    config = AutoConfig.from_pretrained(checkpoints / name)
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / name)
    spelled = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    assert tokenizer.convert_tokens_to_ids(list(spelled)) == [
        config.image_token_id,
        config.video_token_id,
        config.vision_start_token_id,
        config.vision_end_token_id,
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_sections_of_m_rope_cover_half_a_head(checkpoints: Path, name: str) -> None:
    text = AutoConfig.from_pretrained(checkpoints / name).text_config
    assert sum(text.rope_parameters["mrope_section"]) == 16
    assert len(set(text.rope_parameters["mrope_section"])) > 1
    assert text.head_dim == 32
