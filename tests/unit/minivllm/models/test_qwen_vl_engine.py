"""The Qwen vision-language models through the whole engine: the tokens that Transformers generates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from conformance.hf_prompts import OpenedMedia, PromptMaker
from minivllm import LLM, EngineConfig, LLMEngine, SamplingParams
from minivllm.errors import BadMedia
from minivllm.request import RequestOutput
from minivllm.trace import Encoded, Event, Preempted
from tests.unit.minivllm.media_prompts import picture

NAMES = ("tiny-qwen2-vl", "tiny-qwen2-5-vl", "tiny-qwen3-vl")
MAX_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
SEEN = "<|vision_start|><|image_pad|><|vision_end|>"
FILMED = "<|vision_start|><|video_pad|><|vision_end|>"

WIDE, HIGH, SMALL = picture(140, 84, 21), picture(84, 140, 22), picture(60, 60, 23)
CLIP: dict[str, Any] = {"frames": [picture(112, 84, 30 + i) for i in range(5)], "fps": 1.0}

PROMPTS: Mapping[str, dict[str, Any]] = {
    "text": {"prompt": "Hello, what is 1 2 3?"},
    "image": {"prompt": f"See {SEEN} What is it?", "multi_modal_data": {"image": WIDE}},
    "two": {"prompt": f"{SEEN} and {SEEN} differ", "multi_modal_data": {"image": [WIDE, HIGH]}},
    "swapped": {"prompt": f"{SEEN} and {SEEN} differ", "multi_modal_data": {"image": [HIGH, WIDE]}},
    "twice": {"prompt": f"{SEEN}{SEEN} same, {SEEN} not", "multi_modal_data": {"image": [WIDE, WIDE, SMALL]}},
    "video": {"prompt": f"{FILMED} What goes on?", "multi_modal_data": {"video": [CLIP]}},
    "mixed": {
        "prompt": f"{FILMED} or {SEEN}?",
        "multi_modal_data": {"image": SMALL, "video": CLIP},
    },
}


def engine(path: Path, **options: Any) -> LLM:
    values = {"num_kv_blocks": 300, "block_size": 4, "enable_prefix_caching": False, **options}
    return LLM(str(path), dtype="float32", **values)


@cache
def hf(path: Path) -> tuple[Any, PromptMaker]:
    model = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager").eval()
    return model, PromptMaker(path, model.config)


def opened(prompt: Mapping[str, Any]) -> list[OpenedMedia]:
    """The media of a prompt, in the order of its text."""
    data = prompt.get("multi_modal_data", {})
    images = data.get("image", [])
    images = [images] if isinstance(images, Image.Image) else images
    videos = [OpenedMedia("video", tuple(CLIP["frames"]), CLIP["fps"])] if "video" in data else []
    return [*videos, *(OpenedMedia("image", (image,)) for image in images)]


@cache
def expected(path: Path, what: str) -> tuple[list[int], list[int]]:
    """Prompt and generated ids by Transformers, from text, pictures and frames on."""
    model, maker = hf(path)
    prompt = maker({"text": PROMPTS[what]["prompt"]}, opened(PROMPTS[what]))
    ids = torch.tensor([prompt.token_ids])
    model.model.rope_deltas = None
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_TOKENS,
        do_sample=False,
        eos_token_id=None,
        **prompt.inputs,
    )
    return ids[0].tolist(), out[0, ids.shape[1] :].tolist()


def check(path: Path, names: Sequence[str], outputs: Sequence[RequestOutput]) -> None:
    for what, output in zip(names, outputs, strict=True):
        prompt, generated = expected(path, what)
        assert list(output.prompt_token_ids) == prompt, what
        assert list(output.outputs[0].token_ids) == generated, what


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [2048, 13], ids=["whole", "in chunks that cut pictures and frames"])
def test_a_batch_of_all_prompts_has_the_tokens_of_transformers(
    checkpoints: Path, name: str, step: int
) -> None:
    llm = engine(checkpoints / name, max_num_batched_tokens=step)
    check(checkpoints / name, list(PROMPTS), llm.generate(list(PROMPTS.values()), GREEDY))


@pytest.mark.parametrize("name", NAMES)
def test_hits_that_end_before_within_and_after_a_picture(checkpoints: Path, name: str) -> None:
    llm = engine(checkpoints / name, enable_prefix_caching=True)
    order = ["two", "image", "two", "swapped", "twice", "video", "mixed", "video", "two"]
    cached = []
    for what in order:
        (output,) = llm.generate([PROMPTS[what]], GREEDY)
        check(checkpoints / name, [what], [output])
        cached.append(output.num_cached_tokens)
    length = {what: len(expected(checkpoints / name, what)[0]) for what in order}
    assert cached[0] == 0
    for place, what in ((2, "two"), (7, "video"), (8, "two")):
        assert cached[place] >= length[what] - 4, what
    assert cached[3] == 0, "another picture of the same text begins within the first block"


@pytest.mark.parametrize("name", NAMES)
def test_a_pool_too_small_for_all_gives_the_same_tokens(checkpoints: Path, name: str) -> None:
    """Requests are preempted, and their pictures encoded again where the encoder cache had no room."""
    wanted = list(PROMPTS)
    longest = max(len(expected(checkpoints / name, what)[0]) for what in wanted) + MAX_TOKENS
    events: list[Event] = []
    config = EngineConfig.from_dict(
        {
            "model": str(checkpoints / name),
            "dtype": "float32",
            "block_size": 4,
            "num_kv_blocks": longest // 4 + 8,
            "max_model_len": longest + 4,
            "encoder_cache_embeddings": 36,
            "enable_prefix_caching": False,
        }
    )
    running = LLMEngine(config, trace=events.append)
    for what in wanted:
        running.add_request(what, PROMPTS[what], GREEDY)
    done = {}
    while running.has_unfinished_requests():
        done.update({output.request_id: output for output in running.step() if output.finished})
    check(checkpoints / name, wanted, [done[what] for what in wanted])
    assert any(isinstance(event, Preempted) for event in events)
    encoded = [event.content_hash for event in events if isinstance(event, Encoded)]
    assert len(encoded) > len(set(encoded)) == 4  # three pictures and a video


@pytest.mark.parametrize("name", NAMES)
def test_supplied_embeddings_answer_as_pixels_do(checkpoints: Path, name: str) -> None:
    model, maker = hf(checkpoints / name)
    llm = engine(checkpoints / name)
    data = maker({"text": PROMPTS["image"]["prompt"]}, opened(PROMPTS["image"])).inputs
    with torch.inference_mode():
        features = model.model.get_image_features(data["pixel_values"], data["image_grid_thw"])
    given = {"image_embeds": features.pooler_output[0], "image_grid_thw": data["image_grid_thw"]}
    if name == "tiny-qwen3-vl":
        given["deepstack"] = torch.stack([feature[0] for feature in features.deepstack_features])
    prompt = {**PROMPTS["image"], "multi_modal_data": {"image_embeds": given}}
    check(checkpoints / name, ["image"], llm.generate([prompt], GREEDY))


def test_a_picture_too_many_and_one_too_few_are_refused(checkpoints: Path) -> None:
    llm = engine(checkpoints / "tiny-qwen2-vl")
    for prompt in (
        {"prompt": f"{SEEN}{SEEN}", "multi_modal_data": {"image": WIDE}},
        {"prompt": SEEN, "multi_modal_data": {"image": [WIDE, HIGH]}},
        {"prompt": FILMED},
    ):
        with pytest.raises(BadMedia):
            llm.generate([prompt], GREEDY)
    check(checkpoints / "tiny-qwen2-vl", ["image"], llm.generate([PROMPTS["image"]], GREEDY))
