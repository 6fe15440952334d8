"""Gemma 3 with pictures: its config and tensors, its rows, and Transformers' answers under all cuts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from conformance.hf_processors import load_processor
from conformance.paths import data_root
from minivllm.attention import base
from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine
from minivllm.errors import CapacityError, ConfigError, UnsupportedError
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import VisionLanguageModel, load_model, load_model_config
from minivllm.models.gemma3 import Gemma3Details
from minivllm.models.gemma3_vision import Gemma3Vision
from minivllm.request import MediaItem, SamplingParams
from tests.unit.minivllm.media_prompts import picture

DIRECTORY = data_root() / "golden" / "checkpoints" / "tiny-gemma3-vision"
A, B = picture(112, 84, 1), picture(84, 120, 2)
CHATS = {"text": (), "one": (A,), "two": (A, B), "other order": (B, A)}
MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


def load(path: Path) -> VisionLanguageModel:
    model = load_model(path, dtype=torch.float32, device="cpu", ops=TorchOps())
    assert isinstance(model, VisionLanguageModel)
    return model


@cache
def transformers_model() -> Any:
    return AutoModelForImageTextToText.from_pretrained(DIRECTORY, attn_implementation="eager").eval()


def chat(pictures: Sequence[Any]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for one in pictures:
        parts += [{"type": "text", "text": "Look at "}, {"type": "image", "image": one}]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


@cache
def truth(name: str) -> tuple[list[int], list[int], np.ndarray[Any, Any]]:
    """Prompt ids, greedy ids and prompt logits of Transformers."""
    model, processor = transformers_model(), load_processor(DIRECTORY)
    text = processor.tokenizer.apply_chat_template(
        chat(CHATS[name]), tokenize=False, add_generation_prompt=True
    )
    pictures = [list(CHATS[name])] if CHATS[name] else None
    inputs = processor(images=pictures, text=[text], return_tensors="pt", add_special_tokens=False)
    prompt = inputs["input_ids"].shape[1]
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None)
        logits = model(**inputs).logits[0].numpy()
    return inputs["input_ids"][0].tolist(), ids[0, prompt:].tolist(), logits


def answer(
    engine: LLMEngine, name: str, request_id: str = "r"
) -> tuple[list[int], list[int], dict[str, Any]]:
    """Prompt ids, greedy ids and stages of one conversation."""
    engine.add_request(
        request_id,
        engine.chat_prompt(chat(CHATS[name])),
        GREEDY,
        capture=("prompt_logits", "logits", "kv"),
    )
    while engine.has_unfinished_requests():
        output = engine.step()
    assert output[-1].error is None
    final = output[-1]
    return list(final.prompt_token_ids), list(final.outputs[0].token_ids), engine.stages(request_id)


def make(**options: Any) -> LLMEngine:
    return LLMEngine(EngineConfig(model=str(DIRECTORY), **{"num_kv_blocks": 64, "block_size": 4, **options}))


@torch.inference_mode()
def test_rows_of_a_picture_are_those_of_transformers() -> None:
    pixels = torch.randn(1, 3, 56, 56, generator=torch.Generator().manual_seed(1))
    expected = transformers_model().model.get_image_features(pixels).pooler_output[0]
    rows = load(DIRECTORY).encode(MediaItem("h", "image", 16, {"pixel_values": pixels})).rows
    assert rows.shape == (16, 64)
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 17},
        {"max_num_batched_tokens": 29, "batch_invariant": True},
        {"attention_backend": "dense"},
    ],
    ids=str,
)
def test_answers_are_those_of_transformers_in_any_chunks(name: str, options: dict[str, Any]) -> None:
    ids, tokens, logits = truth(name)
    prompt, ours, stages = answer(make(**options), name)
    assert (prompt, ours) == (ids, tokens)
    expected = logits[: len(stages["prompt_logits"])]
    assert len(expected) >= len(ids) - 1
    np.testing.assert_allclose(stages["prompt_logits"], expected, rtol=1e-4, atol=5e-4)


def test_chunks_hits_and_preemptions_change_no_bit() -> None:
    """The prefix cache ends inside a picture: its other rows are computed with what is cached of it."""
    _, tokens, whole = answer(make(batch_invariant=True, enable_prefix_caching=False), "two")
    for options in ({"max_num_batched_tokens": 16}, {"max_num_batched_tokens": 23}, {"block_size": 7}):
        engine = make(batch_invariant=True, prefix_cache_seed=1, **options)
        for request_id in ("cold", "hit"):
            _, again, stages = answer(engine, "two", request_id)
            assert again == tokens
            for name in whole:
                mine = stages[name]
                known = ~np.isnan(mine)
                assert np.array_equal(mine[known], whole[name][known]), (options, request_id, name)
    engine = make(batch_invariant=True, max_num_batched_tokens=20, num_kv_blocks=40)
    engine.add_request("r", engine.chat_prompt(chat(CHATS["two"])), GREEDY, capture=("kv",))
    step = 0
    while engine.has_unfinished_requests():
        output = engine.step()
        step += 1
        if step % 2 and engine.has_unfinished_requests():
            engine.preempt_request("r")
        assert step < 200
    assert list(output[-1].outputs[0].token_ids) == tokens
    stages = engine.stages("r")
    assert all(np.array_equal(stages[name], whole[name]) for name in whole if name[:2] in ("k.", "v."))


def test_a_hit_that_ends_inside_a_picture_answers_as_a_cold_start() -> None:
    engine = make(batch_invariant=True, max_num_batched_tokens=64)
    answer(engine, "one")
    start: Any = engine.chat_prompt(chat([A]))
    place = start["prompt_token_ids"].index(445)
    # The picture, then other text at once: the hit ends with the last block that is full before it.
    prompt = {**start, "prompt_token_ids": [*start["prompt_token_ids"][: place + 1], 9, 8, 7]}
    engine.add_request("short", prompt, GREEDY)
    while engine.has_unfinished_requests():
        output = engine.step()
    cached = output[-1].num_cached_tokens
    assert place + 1 < cached < place + 1 + 16
    cold = make(batch_invariant=True, enable_prefix_caching=False)
    cold.add_request("short", prompt, GREEDY)
    while cold.has_unfinished_requests():
        expected = cold.step()
    assert output[-1].outputs[0].token_ids == expected[-1].outputs[0].token_ids


def test_image_tokens_see_one_another_and_only_those_of_their_own_picture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The faults that the mask could have change the logits by far more than rounding."""
    _, _, expected = truth("two")
    genuine = base._last_seen

    def rounding(fault: Any) -> float:
        monkeypatch.setattr(base, "_last_seen", fault)
        _, _, stages = answer(make(), "two")
        return float(np.abs(stages["prompt_logits"][: len(expected)] - expected).max())

    assert rounding(genuine) < 5e-4
    assert rounding(lambda _r: None) > 0.5

    def one_long_picture(r: Any) -> Any:
        seen = genuine(r)
        return None if seen is None else np.where(seen > np.arange(r.start, r.end), seen.max(), seen)

    assert rounding(one_long_picture) > 0.5


def test_a_picture_that_no_step_can_take_whole_is_refused() -> None:
    engine = make(max_num_batched_tokens=15)
    with pytest.raises(CapacityError, match=r"the 16 tokens of an image see one another.*at least 16"):
        engine.add_request("r", engine.chat_prompt(chat([A])), GREEDY)
    assert not engine.has_unfinished_requests()


def test_every_spelling_of_the_tensors_loads(tmp_path: Path) -> None:
    committed = dict(load(DIRECTORY).named_parameters())
    tensors = load_file(DIRECTORY / "model.safetensors")
    published = {
        name.replace("vision_tower.", "vision_tower.vision_model."): t for name, t in tensors.items()
    }
    in_memory = {name: t.contiguous() for name, t in transformers_model().state_dict().items()}
    del in_memory["lm_head.weight"]  # the same tensor as the embeddings
    assert len({frozenset(names) for names in (tensors, published, in_memory)}) == 3
    for number, spelt in enumerate((published, in_memory)):
        directory = tmp_path / str(number)
        shutil.copytree(DIRECTORY, directory)
        save_file(spelt, directory / "model.safetensors")
        again = dict(load(directory).named_parameters())
        assert again.keys() == committed.keys()
        assert all(torch.equal(committed[name], again[name]) for name in committed)


def test_the_config_has_a_decoder_a_tower_and_the_ids_of_three_tokens() -> None:
    config = load_model_config(DIRECTORY)
    assert (config.text_model_type, config.windows) == ("gemma3_text", (12, None, 12))
    assert config.details == Gemma3Details(query_pre_attn_scalar=24, final_logit_softcapping=None)
    assert isinstance(config.vision, Gemma3Vision)
    assert (config.vision.side, config.vision.tower.grid) == (4, 8)
    assert (config.vision.begin_token_id, config.vision.end_token_id) == (445, 446)
    assert config.vision.image_token_id == 447


@pytest.mark.parametrize(
    ("part", "changes", "error", "message"),
    [
        ("", {"mm_tokens_per_image": 15}, ConfigError, "mm_tokens_per_image must be a square .* got 15"),
        ("", {"mm_tokens_per_image": 9}, ConfigError, "mm_tokens_per_image must be a square .* got 9"),
        (
            "vision_config",
            {"model_type": "clip_vision_model"},
            UnsupportedError,
            "known: siglip_vision_model",
        ),
        (
            "text_config",
            {"use_bidirectional_attention": True},
            UnsupportedError,
            "use_bidirectional_attention",
        ),
    ],
)
def test_a_config_that_is_not_implemented_is_refused(
    tmp_path: Path, part: str, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    values = json.loads((DIRECTORY / "config.json").read_text(encoding="utf-8"))
    (values[part] if part else values).update(changes)
    (tmp_path / "config.json").write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(error, match=message):
        load_model_config(tmp_path)
