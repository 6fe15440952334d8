"""The SmolVLM checkpoint tells crops apart by rows and columns, and its template writes placeholders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from conformance.recipes.build import MECHANICS
from conformance.recipes.smolvlm import CROP, IDEFICS3_CROP

NAME, IDEFICS3 = "tiny-smolvlm", "tiny-idefics3"


def render(checkpoints: Path, content: Any) -> str:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / NAME)
    chat = [{"role": "user", "content": content}]
    return tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("Hi", ": Hi"),
        ([{"type": "image"}, {"type": "text", "text": "Hi"}], ":<image>Hi"),
        ([{"type": "text", "text": "See "}, {"type": "image"}], ": See <image>"),
    ],
)
def test_only_text_is_parted_from_the_role(checkpoints: Path, content: Any, said: str) -> None:
    assert render(checkpoints, content) == f"<|im_start|>User{said}<end_of_utterance>\nAssistant:"


@pytest.mark.parametrize(("name", "crop", "tokens"), [(NAME, CROP, 4), (IDEFICS3, IDEFICS3_CROP, 9)])
def test_the_tower_hands_on_as_many_tokens_as_the_processor_writes(name: str, crop: int, tokens: int) -> None:
    vision = MECHANICS[name].vision
    assert vision is not None
    side = vision.vision_config["image_size"] // vision.vision_config["patch_size"]
    assert side**2 // vision.config["scale_factor"] ** 2 == vision.processor["image_seq_len"] == tokens
    assert vision.processor["image_processor"]["max_image_size"]["longest_edge"] == crop


def test_the_names_of_crops_are_single_tokens(checkpoints: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / NAME)
    names = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
    assert tokenizer.encode("".join(names)) == list(range(446, 455))
    assert tokenizer.image_token == "<image>"
    assert AutoConfig.from_pretrained(checkpoints / NAME).image_token_id == tokenizer.image_token_id == 444


def test_idefics3_begins_with_bos_and_has_classes_of_its_own(checkpoints: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / IDEFICS3)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Hi"}]}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<|begin_of_text|>User:<image>Hi<end_of_utterance>\nAssistant:"
    config = AutoConfig.from_pretrained(checkpoints / IDEFICS3)
    assert (config.model_type, config.architectures) == ("idefics3", ["Idefics3ForConditionalGeneration"])
    assert config.image_token_id == tokenizer.image_token_id
