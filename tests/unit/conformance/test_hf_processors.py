"""Genuine processors are made without torchvision; they expand placeholders as Transformers does."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from transformers import Blip2Processor, SmolVLMProcessor

from conformance.hf_processors import has_processor, load_image_processor, load_processor
from conformance.recipes.build import MECHANICS

VISION = sorted(name for name, recipe in MECHANICS.items() if recipe.vision is not None)


def picture() -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (84, 112, 3), dtype=np.uint8))


@pytest.mark.parametrize("name", VISION)
def test_every_checkpoint_with_eyes_has_one_and_its_pixels_are_pillow_s(name: str, checkpoints: Path) -> None:
    assert has_processor(checkpoints / name)
    processor = load_processor(checkpoints / name)
    assert type(processor.image_processor).__name__.endswith("Pil")
    written = json.loads((checkpoints / name / "processor_config.json").read_text(encoding="utf-8"))
    assert type(processor).__name__ == written["processor_class"]


def test_smolvlm_writes_rows_and_columns(checkpoints: Path) -> None:
    processor = load_processor(checkpoints / "tiny-smolvlm")
    assert isinstance(processor, SmolVLMProcessor)
    out = processor(images=[picture()], text=["<image>."], return_tensors="pt")
    crop = "<fake_token_around_image><row_{}_col_{}><image><image><image><image>"
    rows = "".join(crop.format(r, 1) + crop.format(r, 2) + "\n" for r in (1, 2))
    last = "\n<fake_token_around_image><global-img><image><image><image><image><fake_token_around_image>."
    assert processor.tokenizer.decode(out["input_ids"][0]) == rows + last
    assert out["pixel_values"].shape == (1, 5, 3, 56, 56)


def test_blip2_writes_placeholders_before_bos(checkpoints: Path) -> None:
    processor = load_processor(checkpoints / "tiny-blip2")
    assert isinstance(processor, Blip2Processor)
    out = processor(images=[picture()], text=["Hi"], return_tensors="pt")
    assert processor.tokenizer.decode(out["input_ids"][0]) == "<image><image><image><image></s>Hi"


def test_a_model_of_text_has_none(checkpoints: Path) -> None:
    assert not has_processor(checkpoints / "tiny-llama")
    with pytest.raises(FileNotFoundError, match=r"processor_config\.json"):
        load_processor(checkpoints / "tiny-llama")


def test_an_unknown_class_is_named(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text('{"processor_class": "EyesProcessor"}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"no processor class 'EyesProcessor'"):
        load_processor(tmp_path)


def test_settings_of_a_call_reach_the_image_processor(checkpoints: Path) -> None:
    processor = load_image_processor(checkpoints / "tiny-smolvlm")
    pixels = processor([picture()], size={"longest_edge": 56}, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 1, 3, 56, 56)
