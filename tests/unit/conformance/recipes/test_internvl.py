"""The InternVL checkpoint: template, placeholders, and shapes that agree with its processor."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from conformance.recipes.internvl import INTERNVL_RECIPES


def test_the_template_leaves_pictures_where_they_are_in_the_text(checkpoints: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / "tiny-internvl")
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\na<IMG_CONTEXT>\nb<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_processor_writes_as_many_placeholders_as_the_shuffle_leaves_rows() -> None:
    (recipe,) = INTERNVL_RECIPES
    assert recipe.vision is not None
    side = recipe.vision.vision_config["image_size"][0] // recipe.vision.vision_config["patch_size"][0]
    assert recipe.vision.processor["image_seq_length"] == side**2 // 4


def test_the_tokens_around_pictures_have_names(checkpoints: Path) -> None:
    config, tokenizer = (
        c.from_pretrained(checkpoints / "tiny-internvl") for c in (AutoConfig, AutoTokenizer)
    )
    assert (tokenizer.start_image_token, tokenizer.end_image_token) == ("<img>", "</img>")
    assert tokenizer.context_image_token_id == config.image_token_id == 445
