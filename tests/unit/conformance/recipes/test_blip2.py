"""The BLIP-2 checkpoint has a Q-Former with layers of both kinds, and no chat template."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

NAME = "tiny-blip2"


def test_every_second_layer_of_the_q_former_looks_at_the_picture(checkpoints: Path) -> None:
    with safe_open(checkpoints / NAME / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
    layers = {int(name.split(".")[3]) for name in names if name.startswith("qformer.encoder.layer.")}
    looking = {int(name.split(".")[3]) for name in names if ".crossattention." in name}
    assert (layers, looking) == ({0, 1, 2}, {0, 2})


def test_the_placeholder_is_a_token_but_not_one_the_tokenizer_names(checkpoints: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / NAME)
    assert not hasattr(tokenizer, "image_token")
    assert tokenizer.encode("<image>", add_special_tokens=False) == [444]
    assert AutoConfig.from_pretrained(checkpoints / NAME).image_token_index == 444


def test_text_begins_with_the_end_of_text_token_as_opt_has_it(checkpoints: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoints / NAME)
    assert tokenizer.encode("x")[0] == tokenizer.bos_token_id == tokenizer.eos_token_id == 442
    assert tokenizer.chat_template is None
    assert tokenizer.model_max_length == 1024
