"""Checkpoints rebuild to the bit and load with the Auto classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)

from conformance.recipes.build import MECHANICS, build, make_model, make_tokenizer, sha256_of
from conformance.recipes.tokenizer import NUM_BPE_TOKENS

VISION = sorted(name for name, recipe in MECHANICS.items() if recipe.vision is not None)

TEXTS = (
    "I'm 1234 & don't\r\n  know   \n y",
    "<|im_end|> <|eot_id|>x",
    "h\xe9llo 你好 🌍👨‍👩‍👧 \n\n  tab\t x",
)


def recipe_of(directory: Path) -> dict[str, object]:
    return json.loads((directory / "RECIPE.json").read_text(encoding="utf-8"))


def recipe_processor(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "processor_config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen2", "tiny-qwen2-vl"])
def test_a_rebuild_gives_every_file_bit_for_bit(name: str, tmp_path: Path, checkpoints: Path) -> None:
    build(name, tmp_path / name)
    rebuilt, committed = recipe_of(tmp_path / name), recipe_of(checkpoints / name)
    assert rebuilt["sha256"] == committed["sha256"]


@pytest.mark.parametrize("name", sorted(MECHANICS))
def test_committed_weights_are_the_recipe_s(name: str, checkpoints: Path) -> None:
    auto = AutoModelForImageTextToText if name in VISION else AutoModelForCausalLM
    committed = dict(auto.from_pretrained(checkpoints / name).named_parameters())
    made = dict(make_model(MECHANICS[name]).named_parameters())
    assert committed.keys() == made.keys()
    assert all(torch.equal(committed[key], made[key]) for key in made)


@pytest.mark.parametrize("name", sorted(MECHANICS))
def test_recipe_file_tells_what_the_directory_holds(name: str, checkpoints: Path) -> None:
    facts = recipe_of(checkpoints / name)
    files = {p.name: sha256_of(p) for p in (checkpoints / name).iterdir() if p.name != "RECIPE.json"}
    assert facts["sha256"] == files
    assert facts["name"] == name
    assert facts["seed"] == MECHANICS[name].seed
    assert facts["dtypes"] == ["float32"]
    assert set(facts["versions"]) == {"numpy", "safetensors", "tokenizers", "torch", "transformers"}


@pytest.mark.parametrize("name", sorted(MECHANICS))
def test_checkpoints_are_small(name: str, checkpoints: Path) -> None:
    limit = 2_000_000 if name in VISION else 1_300_000
    assert sum(p.stat().st_size for p in (checkpoints / name).iterdir()) < limit


@pytest.mark.parametrize("name", VISION)
def test_the_image_processor_loads_without_torchvision(name: str, checkpoints: Path) -> None:
    processor = AutoImageProcessor.from_pretrained(checkpoints / name, backend="pil")
    assert type(processor).__name__.endswith("Pil")
    written = recipe_processor(checkpoints / name)["image_processor"]
    assert list(processor.image_mean) == written["image_mean"]


@pytest.mark.parametrize("name", sorted(MECHANICS))
def test_tokenizer_json_alone_says_what_transformers_does(name: str, checkpoints: Path) -> None:
    """Engines read the file; Transformers may rebuild the tokenizer from the model's type."""
    loaded = AutoTokenizer.from_pretrained(checkpoints / name)
    raw = tokenizers.Tokenizer.from_file(str(checkpoints / name / "tokenizer.json"))
    made = make_tokenizer(MECHANICS[name])
    for text in TEXTS:
        assert loaded.encode(text) == raw.encode(text).ids == made.encode(text)
    assert len(loaded) == NUM_BPE_TOKENS + len(MECHANICS[name].special.tokens)
    assert loaded.padding_side == "left"


@pytest.mark.parametrize("name", sorted(MECHANICS))
def test_generation_config_is_greedy_and_lists_every_end_token(name: str, checkpoints: Path) -> None:
    recipe = MECHANICS[name]
    config = GenerationConfig.from_pretrained(checkpoints / name)
    assert not config.do_sample
    assert config.eos_token_id == [recipe.special.ids[token] for token in recipe.end_tokens]
    assert len(config.eos_token_id) > 1


@pytest.mark.parametrize("name", sorted(MECHANICS))
def test_no_file_carries_the_version_that_wrote_it(name: str, checkpoints: Path) -> None:
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        assert "transformers_version" not in (checkpoints / name / file).read_text(encoding="utf-8")


def test_an_end_token_can_be_forced_by_a_logit_bias(checkpoints: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoints / "tiny-llama")
    prompt = torch.tensor([[440, 71, 80]])
    free = model.generate(prompt, max_new_tokens=8, attention_mask=torch.ones_like(prompt))
    assert free.shape[1] == 3 + 8
    biased = model.generate(
        prompt, max_new_tokens=8, attention_mask=torch.ones_like(prompt), sequence_bias=[[[444], 50.0]]
    )
    assert biased[0, 3:].tolist() == [444]


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no mechanics recipe 'tiny-gpt'; known: tiny-llama, "):
        build("tiny-gpt", tmp_path)
