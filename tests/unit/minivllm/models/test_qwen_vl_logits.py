"""Whole prompts with pictures and videos: logits of the Qwen line against Transformers eager."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from minivllm.layers.ops_torch import TorchOps
from minivllm.models import VisionLanguageModel, load_model
from minivllm.multimodal import MULTIMODAL, MultiModalProcessor, Video
from minivllm.tokenizer import load_tokenizer
from tests.unit.minivllm.media_prompts import Placed, hf_media, logits, picture, place

NAMES = ("tiny-qwen2-vl", "tiny-qwen2-5-vl", "tiny-qwen3-vl")
IMAGE, VIDEO = 445, 446


@cache
def load(path: Path) -> tuple[VisionLanguageModel, MultiModalProcessor, Any]:
    model = load_model(path, dtype=torch.float32, device="cpu", ops=TorchOps())
    assert isinstance(model, VisionLanguageModel)
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    processor = MULTIMODAL.get(model.config.architecture)(path, model.config, tokenizer, {})
    hf = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager").eval()
    return model, processor, hf


def prompts(processor: MultiModalProcessor) -> dict[str, Placed]:
    wide, high, small = processor.expand(
        "image", [picture(112, 84), picture(84, 140, 1), picture(40, 70, 2)], {}
    )
    (video,) = processor.expand(
        "video", [Video(tuple(picture(112, 64, 3 + i) for i in range(5)), fps=1.0)], {}
    )
    question = [443, 72, 80, 268, 90]
    return {
        "text": place([[*range(60, 90)]]),
        "image": place([question, wide, [444, 71, 75]]),
        "two images": place([question, wide, [444, 71, 443], high, [444, 90, 91]]),
        "swapped": place([question, high, [444, 71, 443], wide, [444, 90, 91]]),
        "first, last, repeated": place([small, [444, 71, 443], wide, [444, 443], small]),
        "video": place([question, video, [444, 71, 75, 80, 81]]),
        "video, image": place([question, video, [444, 443], small, [444, 75]]),
    }


def truth(hf: Any, placed: Placed) -> Tensor:
    """Transformers' logits of the whole prompt; a model object keeps deltas, so each call is whole."""
    ids = torch.tensor([placed.token_ids])
    given = hf_media(placed)
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    hf.model.rope_deltas = None
    found: Tensor = hf(input_ids=ids, mm_token_type_ids=kinds if given else None, **given).logits[0]
    return found


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_logits_are_those_of_transformers_whole_and_in_chunks(checkpoints: Path, name: str) -> None:
    model, processor, hf = load(checkpoints / name)
    for what, placed in prompts(processor).items():
        expected = truth(hf, placed)
        assert expected.std() > 3
        for chunk in (1000, 7):
            found = logits(model, processor, placed, chunk)
            worst = (found - expected).abs().max().item()
            assert worst < 2e-3, f"{what} in chunks of {chunk}: {worst}"
            assert torch.equal(found.argmax(-1), expected.argmax(-1)), what


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_what_a_picture_shows_changes_what_follows(checkpoints: Path, name: str) -> None:
    model, processor, _ = load(checkpoints / name)
    one, other = processor.expand("image", [picture(84, 84), picture(84, 84, 1)], {})
    found = [logits(model, processor, place([[5], image, [71, 72]]), 1000)[-1] for image in (one, other)]
    assert (found[0] - found[1]).abs().max() > 1


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_text_has_one_position_on_all_axes(checkpoints: Path, name: str) -> None:
    """So text alone gives the same bits with one axis and with three."""
    model, _, _ = load(checkpoints / name)
    rope = model.language_model.rope
    assert rope is not None
    flat = rope.cos_sin(torch.arange(50))
    axes = rope.cos_sin(torch.from_numpy(np.broadcast_to(np.arange(50), (3, 50)).copy()))
    assert all(torch.equal(a, b) for a, b in zip(flat, axes, strict=True))
