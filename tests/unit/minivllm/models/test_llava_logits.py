"""Whole prompts with pictures: logits of LLaVA, LLaVA-OneVision and InternVL against Transformers eager."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL.Image import Image
from transformers import AutoModelForImageTextToText

from conformance.hf_processors import load_processor
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import VisionLanguageModel, load_model
from minivllm.multimodal import MULTIMODAL, MultiModalProcessor
from minivllm.tokenizer import Tokenizer, load_tokenizer
from tests.unit.minivllm.media_prompts import Placed, logits, picture, place

NAMES = ("tiny-llava", "tiny-llava-onevision", "tiny-internvl")

WIDE, HIGH, SMALL = (112, 84, 0), (84, 140, 1), (40, 70, 2)
#: "*" is a picture.
PROMPTS: dict[str, tuple[str, list[tuple[int, int, int]]]] = {
    "text": ("What is the capital of France?", []),
    "image": ("What is * this?", [WIDE]),
    "two images": ("The first * and the second * differ.", [WIDE, HIGH]),
    "swapped": ("The first * and the second * differ.", [HIGH, WIDE]),
    "first, last, repeated": ("* shows * and *", [SMALL, WIDE, SMALL]),
    "no text between": ("See ** and answer", [HIGH, SMALL]),
}


@cache
def load(path: Path) -> tuple[VisionLanguageModel, MultiModalProcessor, Tokenizer, Any, Any]:
    model = load_model(path, dtype=torch.float32, device="cpu", ops=TorchOps())
    assert isinstance(model, VisionLanguageModel)
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    processor = MULTIMODAL.get(model.config.architecture)(path, model.config, tokenizer, {})
    hf = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager").eval()
    return model, processor, tokenizer, hf, load_processor(path)


def placed(path: Path, text: str, pictures: list[Image]) -> Placed:
    """Our expansion of a text with "*" for pictures."""
    _, processor, tokenizer, _, _ = load(path)
    token = processor.placeholder_ids["image"]
    found = tokenizer.encode(text.replace("*", tokenizer.token_text(token)))
    expansions = iter(processor.expand("image", pictures, {}) if pictures else [])
    return place([next(expansions) if i == token else [i] for i in found])


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_logits_are_those_of_transformers_whole_and_in_chunks(checkpoints: Path, name: str) -> None:
    path = checkpoints / name
    model, processor, tokenizer, hf, hf_processor = load(path)
    for what, (text, sizes) in PROMPTS.items():
        pictures = [picture(*size) for size in sizes]
        ours = placed(path, text, pictures)
        spelt = text.replace("*", tokenizer.token_text(processor.placeholder_ids["image"]))
        inputs = hf_processor(text=[spelt], images=[pictures] if pictures else None, return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == ours.token_ids, what
        expected = hf(**inputs).logits[0]
        assert expected.std() > 3
        for chunk in (1000, 7):
            found = logits(model, processor, ours, chunk)
            worst = (found - expected).abs().max().item()
            assert worst < 2e-3, f"{what} in chunks of {chunk}: {worst}"
            assert torch.equal(found.argmax(-1), expected.argmax(-1)), what


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_what_a_picture_shows_changes_what_follows(checkpoints: Path, name: str) -> None:
    model, processor, *_ = load(checkpoints / name)
    found = [
        logits(model, processor, placed(checkpoints / name, "See *, yes", [picture(84, 84, seed)]), 1000)[-1]
        for seed in (0, 1)
    ]
    assert (found[0] - found[1]).abs().max() > 1
