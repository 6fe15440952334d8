"""Gemma 3's squares, the tokens of their ends, and the paragraph they stand in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from conformance.hf_processors import load_processor
from conformance.paths import data_root
from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine
from minivllm.errors import BadMedia, BadParameter, UnsupportedError
from minivllm.models import load_model_config
from minivllm.multimodal import MULTIMODAL
from minivllm.multimodal.gemma3 import Gemma3Processor
from minivllm.multimodal.load import load_image
from minivllm.request import PatchRect, SamplingParams
from minivllm.tokenizer import load_tokenizer

ASSETS = data_root() / "scenarios" / "assets"
BEGIN, END, SOFT = 445, 446, 447


def picture(name: str) -> Image.Image:
    return load_image(ASSETS / f"{name}.png")


@pytest.fixture
def directory(checkpoints: Path) -> Path:
    return checkpoints / "tiny-gemma3-vision"


@pytest.fixture
def make(directory: Path) -> Any:
    def make(where: Path = directory, **settings: Any) -> Gemma3Processor:
        family = MULTIMODAL.get("Gemma3ForConditionalGeneration")
        made = family(where, load_model_config(directory), load_tokenizer(directory), settings)
        assert isinstance(made, Gemma3Processor)
        return made

    return make


@pytest.mark.parametrize(
    "name", ["shapes/red_circle", "sizes/noise_112x84", "sizes/wide_200x40", "sizes/dot_1x1"]
)
def test_pixels_and_tokens_are_those_of_transformers(make: Any, directory: Path, name: str) -> None:
    (expansion,) = make().expand("image", [picture(name)], {})
    assert expansion.token_ids == (BEGIN, *[SOFT] * 16, END)
    assert expansion.is_embed == (False, *[True] * 16, False)
    assert expansion.whole
    truth = load_processor(directory)(
        images=[[picture(name)]], text=["a<start_of_image>b"], return_tensors="pt"
    )
    ids = truth["input_ids"][0].tolist()
    first = ids.index(BEGIN)
    assert tuple(ids[first : first + 18]) == expansion.token_ids
    assert torch.equal(expansion.item.data["pixel_values"], truth["pixel_values"])


def test_each_row_is_a_sixteenth_of_the_picture(make: Any) -> None:
    (expansion,) = make().expand("image", [picture("sizes/wide_200x40")], {})
    assert expansion.item.num_embeddings == len(expansion.item.patches) == 16
    assert expansion.item.patches[6] == PatchRect(0, 0.5, 0.25, 0.25, 0.25)


@pytest.mark.parametrize("text", ["<start_of_image>What?", "Look \n<start_of_image>\n\nat<start_of_image>"])
def test_the_paragraph_of_a_picture_may_become_one_token_with_the_text_beside_it(
    directory: Path, text: str
) -> None:
    """Newlines of text and paragraph are split as one run: the ids are those of the text as a whole."""
    pictures = [picture("shapes/red_circle"), picture("shapes/blue_circle")][: text.count("<start_of_image>")]
    truth = load_processor(directory)(images=[pictures], text=[text], return_tensors="pt")
    engine = LLMEngine(EngineConfig(model=str(directory), num_kv_blocks=64))
    engine.add_request(
        "r", {"prompt": text, "multi_modal_data": {"image": pictures}}, SamplingParams(max_tokens=1)
    )
    output = engine.step()
    while not output:
        output = engine.step()
    assert list(output[0].prompt_token_ids) == truth["input_ids"][0].tolist()


def test_prompts_of_ids_get_the_picture_and_no_paragraph(directory: Path) -> None:
    engine = LLMEngine(EngineConfig(model=str(directory), num_kv_blocks=64))
    prompt = {
        "prompt_token_ids": [442, 9, BEGIN, 9],
        "multi_modal_data": {"image": picture("shapes/red_circle")},
    }
    engine.add_request("r", prompt, SamplingParams(max_tokens=1))
    (span,) = engine.media("r").media
    assert (span.start, span.length, span.whole) == (3, 16, True)
    assert list(engine.step()[0].prompt_token_ids) == [442, 9, BEGIN, *[SOFT] * 16, END, 9]


def test_supplied_embeddings_have_the_rows_of_one_picture(make: Any) -> None:
    rows = torch.ones(16, 64)
    (expansion,) = make().expand("image", [{"image_embeds": rows}], {})
    assert expansion.item.is_supplied
    assert expansion.whole
    for count in (15, 32):
        with pytest.raises(BadMedia, match="16 rows"):
            make().expand("image", [torch.ones(count, 64)], {})


def test_pan_and_scan_is_refused_by_name_wherever_it_is_asked_for(
    make: Any, directory: Path, tmp_path: Path
) -> None:
    with pytest.raises(BadParameter, match=r"'do_pan_and_scan' cannot be changed: pan and scan writes"):
        make(do_pan_and_scan=True)
    with pytest.raises(BadParameter, match="'pan_and_scan_max_num_crops' cannot be changed"):
        make().expand("image", [picture("shapes/red_circle")], {"pan_and_scan_max_num_crops": 2})
    shutil.copytree(directory, tmp_path / "model")
    file = tmp_path / "model" / "processor_config.json"
    values = json.loads(file.read_text(encoding="utf-8"))
    values["image_processor"]["do_pan_and_scan"] = True
    file.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UnsupportedError, match="has do_pan_and_scan: pan and scan writes a text"):
        make(tmp_path / "model")


def test_a_size_that_the_tower_has_no_positions_for_is_refused(make: Any) -> None:
    with pytest.raises(BadMedia, match="56 × 56"):
        make().expand("image", [picture("shapes/red_circle")], {"size": {"height": 28, "width": 28}})
