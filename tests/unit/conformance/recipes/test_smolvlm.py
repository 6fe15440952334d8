"""The SmolVLM checkpoint tells crops apart by rows and columns, and its template writes placeholders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer

from conformance.recipes.build import MECHANICS
from conformance.recipes.smolvlm import CROP

NAME = "tiny-smolvlm"


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


def test_the_tower_hands_on_as_many_tokens_as_the_processor_writes() -> None:
    vision = MECHANICS[NAME].vision
    assert vision is not None
    side = vision.vision_config["image_size"] // vision.vision_config["patch_size"]
    assert side**2 // vision.config["scale_factor"] ** 2 == vision.processor["image_seq_len"]
    assert vision.processor["image_processor"]["max_image_size"]["longest_edge"] == CROP


def test_the_names_of_crops_are_single_tokens(checkpoints: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / NAME)
    names = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
    assert tokenizer.encode("".join(names)) == list(range(446, 455))
    assert tokenizer.image_token == "<image>"
    assert AutoConfig.from_pretrained(checkpoints / NAME).image_token_id == tokenizer.image_token_id == 444
