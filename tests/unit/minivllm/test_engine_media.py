"""Pictures through the whole engine, on a model with deepstack and multimodal rope: by bits the same
however the prompt is cut, cached, preempted and batched; every bad prompt refused, the engine alive."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from minivllm import LLM
from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine
from minivllm.errors import (
    BadMedia,
    BadParameter,
    CapacityError,
    ConfigError,
    PromptTooLong,
    UnknownRequest,
    UnsupportedError,
)
from minivllm.models import LanguageModel, MediaEmbeddings, VisionLanguageModel
from minivllm.multimodal.image_processor import ImageProcessor
from minivllm.request import MediaItem, RequestOutput, SamplingParams
from minivllm.trace import Encoded, Event, MediaEvicted

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
ALL = ("positions", "embeddings", "deepstack", "pixel_values", "vision", "hidden", "logits", "kv")

Make = Callable[..., LLMEngine]


def picture(width: int, height: int, seed: int) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


RED, BLUE = picture(112, 84, 1), picture(96, 160, 2)
FILM = [picture(64, 64, seed) for seed in range(5)]


@pytest.fixture(scope="module")
def make(checkpoints: Path) -> Make:
    """Engines over one loaded model per name."""
    loaded: dict[str, LanguageModel] = {}

    def make(*, model: str = "tiny-qwen3-vl", **options: Any) -> LLMEngine:
        trace = options.pop("trace", lambda _event: None)
        options = {
            "num_kv_blocks": 128,
            "block_size": 4,
            "batch_invariant": True,
            "max_model_len": 256,
            **options,
        }
        config = EngineConfig(model=str(checkpoints / model), **options)
        engine = LLMEngine(config, trace=trace, model=loaded.get(model))
        loaded[model] = engine.model
        return engine

    return make


def ask(*parts: Image.Image | str | Mapping[str, Any]) -> list[dict[str, Any]]:
    """One user turn of pictures and texts."""
    content: list[Any] = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else dict(part)
        if isinstance(part, Mapping)
        else {"type": "image", "image": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def run(
    engine: LLMEngine,
    *conversations: list[dict[str, Any]],
    params: SamplingParams = GREEDY,
    capture: Sequence[str] = ("logits", "kv"),
    between: Callable[[LLMEngine, int], None] | None = None,
) -> list[tuple[RequestOutput, dict[str, np.ndarray]]]:
    """Outputs and stages, in order; `between` is called after every step with its number."""
    for number, messages in enumerate(conversations):
        engine.add_request(str(number), engine.chat_prompt(messages), params, capture=capture)
    final: dict[str, RequestOutput] = {}
    steps = 0
    while engine.has_unfinished_requests():
        final.update((o.request_id, o) for o in engine.step() if o.finished)
        steps += 1
        if between is not None:
            between(engine, steps)
    counts = engine.pool_counts()
    assert counts.in_use == 0
    return [(final[str(i)], engine.stages(str(i))) for i in range(len(conversations))]


def same(
    one: tuple[RequestOutput, dict[str, np.ndarray]], other: tuple[RequestOutput, dict[str, np.ndarray]]
) -> bool:
    """Equal tokens, and equal bits of every stage both have."""
    assert one[0].error is other[0].error is None
    stages = one[1].keys() & other[1].keys()
    assert "logits" in stages
    tokens = one[0].outputs[0].token_ids == other[0].outputs[0].token_ids
    return tokens and all(np.array_equal(one[1][name], other[1][name], equal_nan=True) for name in stages)


QUESTION = ask("Left ", RED, " or right ", BLUE, "?")


@pytest.fixture(scope="module")
def whole(make: Make) -> tuple[RequestOutput, dict[str, np.ndarray]]:
    """`QUESTION` alone, in one step, with every stage."""
    engine = make()
    [outcome] = run(engine, QUESTION, capture=ALL)
    return outcome


def test_rows_stand_at_their_spans_and_positions_follow_the_pictures(
    make: Make, whole: tuple[RequestOutput, dict[str, np.ndarray]]
) -> None:
    engine = make()
    engine.add_request("r", engine.chat_prompt(QUESTION), GREEDY)
    media = engine.media("r")
    output, stages = whole
    assert [span.length for span in media.media] == [12, 15]
    assert len(media.media_items) == 2
    prompt = len(output.prompt_token_ids)
    assert stages["positions"].shape == (prompt + 5, 3)
    assert np.array_equal(stages["positions"][:prompt].T, media.positions)
    generated = np.arange(prompt, prompt + 5) + media.position_delta
    assert np.array_equal(stages["positions"][prompt:], np.stack([generated] * 3, axis=1))
    assert media.position_delta < 0
    visual = np.zeros(prompt + 5, dtype=bool)
    for number, span in enumerate(media.media):
        item = media.media_items[span.content_hash]
        where = slice(span.start, span.end)
        visual[where] = True
        assert np.array_equal(stages["embeddings"][where], stages[f"vision.{number}"])
        assert np.array_equal(stages[f"pixel_values.{number}"], item.data["pixel_values"].numpy())
        assert isinstance(engine.model, VisionLanguageModel)
        with torch.inference_mode():
            made = engine.model.encode(item)
        assert np.array_equal(made.rows.numpy(), stages[f"vision.{number}"])
        for layer, rows in enumerate(made.deepstack):
            assert np.array_equal(stages[f"deepstack.{layer}"][where], rows.numpy())
    assert not stages["deepstack.0"][:prompt][~visual[:prompt]].any()
    table = dict(engine.model.named_parameters())["language_model.model.embed_tokens.weight"]
    text = [i for i in range(prompt) if not visual[i]]
    ids = torch.tensor(output.prompt_token_ids)[text]
    assert np.array_equal(stages["embeddings"][text], table[ids].numpy())
    engine.abort_request("r")
    with pytest.raises(UnknownRequest):
        engine.media("r")


@pytest.mark.parametrize(
    ("model", "chunk"),
    [*(("tiny-qwen3-vl", chunk) for chunk in (1, 3, 7, 13)), ("tiny-qwen2-vl", 2), ("tiny-qwen2-vl", 5)],
)
def test_cut_anywhere_a_prompt_gives_the_same_bits(make: Make, chunk: int, model: str) -> None:
    [expected] = run(make(model=model), QUESTION, capture=ALL)
    [outcome] = run(make(model=model, max_num_batched_tokens=chunk), QUESTION, capture=ALL)
    assert same(outcome, expected)
    assert all(name in outcome[1] for name in expected[1])


def test_in_a_batch_each_request_gives_the_bits_it_gives_alone(make: Make) -> None:
    asked = [QUESTION, ask("No picture here."), ask(BLUE, RED, "Which?"), ask(RED, "What?")]
    alone = [run(make(), one)[0] for one in asked]
    together = run(make(max_num_batched_tokens=9), *asked)
    assert all(same(a, b) for a, b in zip(together, alone, strict=True))


def test_a_text_gives_the_same_bits_beside_pictures_with_deepstack(make: Make) -> None:
    text = ask("Only words.")
    [alone] = run(make(), text, capture=("hidden", "logits"))
    beside = run(make(), text, QUESTION, capture=("hidden", "logits"))[0]
    assert same(beside, alone)


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_prefix_hit_gives_the_bits_of_a_cold_run(make: Make, block_size: int) -> None:
    engine = make(block_size=block_size)
    [first] = run(engine, QUESTION)
    [again] = run(engine, QUESTION)
    assert again[0].num_cached_tokens > 0
    assert again[0].outputs[0].token_ids == first[0].outputs[0].token_ids
    assert np.array_equal(again[1]["logits"], first[1]["logits"])
    assert np.array_equal(again[1]["k.2"], first[1]["k.2"])


@pytest.mark.parametrize(
    ("other", "most"),
    [
        (ask("Left ", BLUE, " or right ", BLUE, "?"), "first picture"),
        (ask("Left ", picture(112, 84, 3), " or right ", BLUE, "?"), "first picture"),
        (ask("Left ", RED, " or right ", picture(96, 160, 4), "?"), "second picture"),
        (ask("Left ", RED, " or right ", RED, "?"), "second picture"),
    ],
)
def test_another_picture_is_never_hit(make: Make, other: list[dict[str, Any]], most: str) -> None:
    engine = make(block_size=1)
    run(engine, QUESTION)
    engine.add_request("probe", engine.chat_prompt(QUESTION), GREEDY)
    spans = engine.media("probe").media
    engine.abort_request("probe")
    [warm] = run(engine, other)
    [cold] = run(make(block_size=1), other)
    assert warm[0].num_cached_tokens == spans[0 if most == "first picture" else 1].start
    assert warm[0].outputs[0].token_ids == cold[0].outputs[0].token_ids
    assert np.array_equal(warm[1]["logits"], cold[1]["logits"])


def test_other_settings_of_the_processor_are_another_picture(make: Make) -> None:
    engine = make(block_size=1)
    prompt = engine.chat_prompt(ask(RED, "What?"))
    assert isinstance(prompt, dict)
    hits = []
    for number, settings in enumerate([{}, {"do_normalize": False}, {}]):
        engine.add_request(str(number), {**prompt, "mm_processor_kwargs": settings}, GREEDY)
        while engine.has_unfinished_requests():
            hits += [o.num_cached_tokens for o in engine.step() if o.finished]
    assert hits[0] == 0
    assert 0 < hits[1] < 12 < hits[2]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_after_any_step_a_request_gives_the_same_bits(
    make: Make, mode: str, whole: tuple[RequestOutput, dict[str, np.ndarray]]
) -> None:
    steps = len(whole[0].prompt_token_ids) // 11 + 6
    preempted = 0
    for step in range(1, steps + 1):
        engine = make(max_num_batched_tokens=11, swap_space_bytes=2**22, enable_prefix_caching=step % 2 == 0)

        def at_step(engine: LLMEngine, number: int, step: int = step) -> None:
            nonlocal preempted
            if number == step and engine.has_unfinished_requests():
                preempted += engine.preempt_request("0", mode)  # type: ignore[arg-type]

        [outcome] = run(engine, QUESTION, between=at_step)
        assert same(outcome, whole)
    assert preempted >= steps - 2


def test_a_tiny_encoder_budget_gives_the_same_bits(
    make: Make, whole: tuple[RequestOutput, dict[str, np.ndarray]]
) -> None:
    events: list[Event] = []
    engine = make(encoder_cache_embeddings=15, max_num_batched_tokens=30, trace=events.append)
    [outcome] = run(engine, QUESTION)
    assert same(outcome, whole)
    assert [type(e) for e in events if isinstance(e, Encoded | MediaEvicted)] == [
        Encoded,
        MediaEvicted,
        Encoded,
    ]


def test_a_picture_evicted_while_its_request_was_preempted_is_encoded_anew(
    make: Make, whole: tuple[RequestOutput, dict[str, np.ndarray]]
) -> None:
    events: list[Event] = []
    engine = make(encoder_cache_embeddings=15, enable_prefix_caching=False, trace=events.append)

    def late(engine: LLMEngine, number: int) -> None:
        if number == 4:
            engine.preempt_request("0", "recompute")

    [outcome] = run(engine, QUESTION, between=late)
    assert same(outcome, whole)
    assert sum(isinstance(e, Encoded) for e in events) == 4


def test_two_requests_share_one_encoding(make: Make) -> None:
    events: list[Event] = []
    engine = make(max_num_batched_tokens=8, trace=events.append, enable_prefix_caching=False)
    asked = [ask(RED, "What?"), ask("And ", RED.copy(), "?")]

    def abort(engine: LLMEngine, number: int) -> None:
        if number == 2:
            engine.abort_request("0")

    for number, one in enumerate(asked):
        engine.add_request(str(number), engine.chat_prompt(one), GREEDY, capture=("logits",))
    steps = 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
        abort(engine, steps)
    assert sum(isinstance(e, Encoded) for e in events) == 1
    [alone] = run(make(), asked[1])
    assert np.array_equal(engine.stages("1")["logits"], alone[1]["logits"])


def test_supplied_embeddings_give_the_bits_of_the_pixels(
    make: Make, whole: tuple[RequestOutput, dict[str, np.ndarray]]
) -> None:
    engine = make(max_num_batched_tokens=11)
    engine.add_request("r", engine.chat_prompt(QUESTION), GREEDY)
    items = list(engine.media("r").media_items.values())
    engine.abort_request("r")
    assert isinstance(engine.model, VisionLanguageModel)
    parts = []
    for item in items:
        with torch.inference_mode():
            made = engine.model.encode(item)
        parts.append(
            {
                "type": "image_embeds",
                "image_embeds": {
                    "image_embeds": made.rows,
                    "deepstack": torch.stack(made.deepstack),
                    "image_grid_thw": item.data["image_grid_thw"][0],
                },
            }
        )
    events: list[Event] = []
    engine = make(max_num_batched_tokens=11, trace=events.append, encoder_cache_embeddings=1)
    [outcome] = run(engine, ask("Left ", parts[0], " or right ", parts[1], "?"))
    assert same(outcome, whole)
    assert not any(isinstance(e, Encoded) for e in events)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen3-vl"])
def test_prompt_embeds_give_the_bits_of_the_token_ids(make: Make, model: str) -> None:
    ids = [5, 17, 300, 42, 42, 9, 111]
    outcomes = []
    engine = make(model=model)
    with torch.inference_mode():
        rows = engine.model.embed(torch.tensor(ids))
    for number, prompt in enumerate(
        [{"prompt_token_ids": ids}, {"prompt_embeds": rows}, {"prompt_embeds": rows}]
    ):
        engine.add_request(str(number), prompt, GREEDY, capture=("logits", "hidden"))
        while engine.has_unfinished_requests():
            outcomes += [(o, engine.stages(o.request_id)) for o in engine.step() if o.finished]
    assert same(outcomes[1], outcomes[0])
    assert outcomes[1][0].num_cached_tokens == 0
    assert outcomes[2][0].num_cached_tokens == 4
    assert outcomes[2][0].outputs[0].token_ids == outcomes[0][0].outputs[0].token_ids
    assert outcomes[1][0].prompt_token_ids == (0,) * 7


class TestRefusals:
    """Each is a named error at add; the engine goes on, and no block is lost."""

    @pytest.fixture
    def engine(self, make: Make) -> LLMEngine:
        return make(limit_mm_per_prompt={"image": 2}, encoder_cache_embeddings=40, max_model_len=128)

    def refused(
        self, engine: LLMEngine, prompt: Any, error: type[Exception], message: str, **more: Any
    ) -> None:
        with pytest.raises(error, match=message):
            engine.add_request("bad", prompt, replace(GREEDY, **more))
        assert not engine.has_unfinished_requests()
        [outcome] = run(engine, ask(RED, "Still there?"))
        assert outcome[0].error is None

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"multi_modal_data": {}}, BadMedia, "1 image placeholders .* no image was given"),
            ({"multi_modal_data": {"image": [RED, BLUE]}}, BadMedia, "1 image placeholders .* for 2 images"),
            ({"multi_modal_data": {"image": [RED] * 3}}, BadMedia, "at most 2 images"),
            ({"multi_modal_data": {"image": b"junk"}}, BadMedia, "no image format"),
            ({"multi_modal_data": {"sound": RED}}, BadParameter, "unknown multi_modal_data"),
            ({"mm_processor_kwargs": {"min_pixel": 1}}, BadParameter, "unknown image processor settings"),
            ({"mm_processor_kwargs": 5}, BadParameter, "mm_processor_kwargs is a mapping"),
            ({"mm_processor_kwargs": []}, BadParameter, "mm_processor_kwargs is a mapping"),
            ({"mm_processor_kwargs": {"size": 56}}, BadParameter, "size of this model has shortest_edge"),
            ({"mm_processor_kwargs": {"size": {"height": 56}}}, BadParameter, "size of this model has"),
            ({"mm_processor_kwargs": {"fps": "2"}}, BadParameter, "fps must be a positive number"),
            ({"multi_modal_data": np.ones(2)}, BadParameter, "multi_modal_data is a mapping"),
            (
                {"multi_modal_data": {"image": picture(336, 252, 5)}},
                CapacityError,
                "exceeds the encoder cache of 40",
            ),
            ({"multi_modal_data": {"image_embeds": torch.ones(12, 63)}}, BadMedia, r"shape \[rows, 64\]"),
            ({"prompt": "and text"}, BadParameter, "has one of prompt, prompt_token_ids and prompt_embeds"),
            ({"images": RED}, BadParameter, "has one of prompt"),
        ],
    )
    def test_of_a_prompt_with_a_picture(
        self, engine: LLMEngine, change: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        prompt = engine.chat_prompt(ask(RED, "What?"))
        assert isinstance(prompt, dict)
        self.refused(engine, {**prompt, **change}, error, message)

    def test_of_a_missing_placeholder(self, engine: LLMEngine) -> None:
        prompt = {"prompt": "No place for it.", "multi_modal_data": {"image": RED}}
        self.refused(engine, prompt, BadMedia, "0 image placeholders .* for 1 images")

    def test_of_a_picture_that_makes_the_prompt_too_long(self, engine: LLMEngine) -> None:
        wide = engine.chat_prompt(ask(picture(168, 168, 6), "What? " * 60))
        self.refused(engine, wide, PromptTooLong, "max_model_len is 128")

    @pytest.mark.parametrize(
        ("model", "data"),
        [
            ("tiny-blip2", {"image": [RED]}),
            ("tiny-qwen2-vl", {"image": [RED, BLUE]}),
            ("tiny-qwen2-vl", {"video": [FILM, FILM]}),
            ("tiny-qwen3-vl", {"video": {"frames": FILM, "fps": 1.5}}),
            ("tiny-smolvlm", {"image": BLUE}),
        ],
    )
    def test_of_a_prompt_too_long_comes_before_the_pixels(
        self, make: Make, model: str, data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make(model=model, max_model_len=512)
        [(modality, items)] = data.items()
        token = engine._processor._multimodal.placeholder_ids[modality]  # type: ignore[union-attr]
        placeholders = [token] * (2 if model == "tiny-qwen2-vl" else 1)
        prompt = {"prompt_token_ids": [5, *placeholders, 6], "multi_modal_data": {modality: items}}
        engine.add_request("whole", prompt, GREEDY)
        count = len(engine.abort_request("whole").prompt_token_ids)

        def untouched(*_: object, **__: object) -> None:
            raise AssertionError("pixels were made")

        monkeypatch.setattr(ImageProcessor, "__call__", untouched)
        message = f"the prompt has {count} tokens and max_model_len is {count}:"
        with pytest.raises(PromptTooLong, match=message):
            make(model=model, max_model_len=count).add_request("bad", prompt, GREEDY)
        with pytest.raises(AssertionError, match="pixels were made"):
            make(model=model, max_model_len=count + 1).add_request("good", prompt, GREEDY)

    def test_of_token_ids_that_are_none(self, engine: LLMEngine) -> None:
        prompt = {"prompt_token_ids": [5, [6]], "multi_modal_data": {"image": RED}}
        self.refused(engine, prompt, BadParameter, r"must be integers in \[0, .*got \[\[6\]\]")

    @pytest.mark.parametrize(
        ("embeds", "more", "error", "message"),
        [
            (
                torch.ones(3, 63),
                {},
                BadMedia,
                r"prompt_embeds must have the shape \[rows, 64\], got \[3, 63\]",
            ),
            (torch.ones(0, 64), {}, BadMedia, "prompt_embeds must have"),
            (torch.ones(3, 64).int(), {}, BadMedia, "floating point"),
            ([[1.0]], {}, BadMedia, "must be a tensor"),
            (torch.full((3, 64), float("inf")), {}, BadMedia, "must be finite"),
            (
                torch.ones(3, 64),
                {"repetition_penalty": 1.1},
                BadParameter,
                "repetition_penalty need token ids",
            ),
            (torch.ones(3, 64), {"prompt_logprobs": 1}, BadParameter, "prompt_logprobs need token ids"),
            (torch.ones(200, 64), {}, PromptTooLong, "max_model_len is 128"),
        ],
    )
    def test_of_prompt_embeds(
        self, engine: LLMEngine, embeds: Any, more: dict[str, Any], error: type[Exception], message: str
    ) -> None:
        self.refused(engine, {"prompt_embeds": embeds}, error, message, **more)

    def test_of_prompt_embeds_with_media(self, engine: LLMEngine) -> None:
        prompt = {"prompt_embeds": torch.ones(3, 64), "multi_modal_data": {"image": RED}}
        self.refused(engine, prompt, BadParameter, "come alone")

    def test_of_a_video_whose_model_takes_images_only(self, make: Make) -> None:
        engine = make(model="tiny-llava")
        token = next(iter(engine._processor._multimodal.placeholder_ids.values()))  # type: ignore[union-attr]
        prompt = {"prompt_token_ids": [5, token], "multi_modal_data": {"video": [RED]}}
        with pytest.raises(UnsupportedError, match="takes image, got video"):
            engine.add_request("bad", prompt, GREEDY)

    def test_of_media_for_a_text_only_model(self, make: Make) -> None:
        engine = make(model="tiny-llama")
        with pytest.raises(UnsupportedError, match="text-only model"):
            engine.add_request("r", {"prompt": "x", "multi_modal_data": {"image": RED}}, GREEDY)
        with pytest.raises(UnsupportedError, match="text-only model"):
            engine.chat_prompt(ask(RED, "What?"))
        assert not engine.has_unfinished_requests()

    def test_of_settings_without_media(self, engine: LLMEngine) -> None:
        prompt = {"prompt": "x", "mm_processor_kwargs": {"min_pixel": 1}}
        self.refused(engine, prompt, BadParameter, "unknown image processor settings")

    def test_of_settings_of_the_engine(self, make: Make) -> None:
        with pytest.raises(ConfigError, match="mm_processor_kwargs: unknown image processor settings"):
            make(mm_processor_kwargs={"min_pixel": 1})
        with pytest.raises(ConfigError, match="of no use to LlamaForCausalLM"):
            make(model="tiny-llama", mm_processor_kwargs={"min_pixels": 1})


def broken(make: Make, encode: Callable[[MediaItem], Any], monkeypatch: pytest.MonkeyPatch) -> LLMEngine:
    """An engine whose encoder answers `encode` for the picture BLUE alone."""
    engine = make()
    model = engine.model
    assert isinstance(model, VisionLanguageModel)
    real = model.encode
    monkeypatch.setattr(
        model, "encode", lambda item: encode(item) if item.facts["size"] == BLUE.size else real(item)
    )
    return engine


def refuse(item: MediaItem) -> MediaEmbeddings:
    raise ValueError(f"no {item.modality} today")


@pytest.mark.parametrize(
    ("encode", "message"),
    [
        (
            lambda item: MediaEmbeddings(torch.full((item.num_embeddings, 64), float("nan"))),
            "the embeddings of image .* are not finite .* at row 0",
        ),
        (
            lambda item: MediaEmbeddings(
                torch.ones(item.num_embeddings, 64), (torch.full((item.num_embeddings, 64), float("inf")),)
            ),
            "not finite .* at deepstack 0 row 0",
        ),
        (lambda _: MediaEmbeddings(torch.ones(3, 64)), "the encoder made 3 rows of image .*, not 15"),
        (refuse, "cannot be encoded: ValueError: no image today"),
    ],
)
def test_what_cannot_be_encoded_fails_only_the_requests_that_need_it(
    make: Make, encode: Callable[[MediaItem], Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    [healthy] = run(make(), ask(RED, "What?"))
    engine = broken(make, encode, monkeypatch)
    outcomes = run(engine, ask(RED, "What?"), ask(BLUE, "What?"), ask("See ", BLUE, "?"))
    assert same(outcomes[0], healthy)

    for output, _ in outcomes[1:]:
        assert output.outputs[0].finish_reason == "error"
        assert re.search(message, output.error or "")
    [again] = run(engine, ask(BLUE, "What?"))
    # the block before the picture is the healthy request's; those of a failed one are never hit
    assert again[0].num_cached_tokens == 4


def test_new_vision_weights_are_used_although_text_and_picture_are_the_same(
    make: Make,
) -> None:
    engine = make(model="tiny-qwen2-vl")
    asked = ask(RED, "What?")
    [before] = run(engine, asked)
    name = next(n for n, p in engine.model.named_parameters() if n.startswith("vision") and p.dim() == 2)
    weight = dict(engine.model.named_parameters())[name]
    old = weight.clone()
    engine.update_weights({name: old * 1.5})
    [after] = run(engine, asked)
    assert after[0].num_cached_tokens == 0
    assert not np.array_equal(before[1]["logits"], after[1]["logits"])
    engine.update_weights({name: old})
    [back] = run(engine, asked)
    assert same(back, before)


def test_a_placeholder_that_a_message_spells_stays_text(make: Make) -> None:
    engine = make()
    typed = "Is <|image_pad|> or <|video_pad|> here?"
    prompt = engine.chat_prompt(ask(RED, typed, BLUE))
    assert isinstance(prompt, dict)
    assert engine.tokenizer is not None
    ids = prompt["prompt_token_ids"]
    family = engine._processor._multimodal
    assert family is not None
    assert [i for i in ids if i in family.placeholder_ids.values()] == [family.placeholder_ids["image"]] * 2
    assert typed in engine.tokenizer.decode(ids, skip_special_tokens=False)
    [outcome] = run(engine, ask(RED, typed, BLUE))
    assert outcome[0].error is None


def test_a_sampled_placeholder_is_a_token_like_any_other(make: Make) -> None:
    engine = make()
    family = engine._processor._multimodal
    assert family is not None
    forced = [family.placeholder_ids["image"]] * 3
    [outcome] = run(engine, ask(RED, "What?"), params=replace(GREEDY, forced_token_ids=forced))
    assert outcome[0].error is None
    assert outcome[0].outputs[0].token_ids[:3] == tuple(forced)
    [whole] = run(make(), ask(RED, "What?"), params=replace(GREEDY, forced_token_ids=forced))
    engine = make(max_num_batched_tokens=3, enable_prefix_caching=False)

    def late(engine: LLMEngine, number: int) -> None:
        if number == 12:
            engine.preempt_request("0", "recompute")

    [resumed] = run(engine, ask(RED, "What?"), params=replace(GREEDY, forced_token_ids=forced), between=late)
    assert resumed[0].num_preemptions == 1
    assert same(resumed, whole)


def test_llm_chats_about_files_and_bytes_alike(checkpoints: Path, tmp_path: Path) -> None:
    stream = io.BytesIO()
    RED.save(stream, "PNG")
    path = tmp_path / "red.png"
    path.write_bytes(stream.getvalue())
    llm = LLM(model=str(checkpoints / "tiny-qwen2-vl"), num_kv_blocks=64, max_model_len=256)
    sources = [RED, str(path), path, stream.getvalue(), np.asarray(RED)]
    outputs = llm.chat([ask({"type": "image", "image": s}, "What?") for s in sources], GREEDY)
    assert len({o.outputs[0].token_ids for o in outputs}) == 1
    [generated] = llm.generate(
        {"prompt_token_ids": outputs[0].prompt_token_ids, "multi_modal_data": {"image": RED}}, GREEDY
    )
    assert generated.outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_llm_chats_with_settings_of_the_image_processor(checkpoints: Path) -> None:
    llm = LLM(model=str(checkpoints / "tiny-qwen2-vl"), num_kv_blocks=64, max_model_len=256)
    talks, small = [ask(picture(112, 112, 7), "What?"), ask("What?")], {"max_pixels": 56 * 56}
    outputs = llm.chat(talks, GREEDY, mm_processor_kwargs=small)
    prompts = [{**llm.engine.chat_prompt(talk), "mm_processor_kwargs": small} for talk in talks]  # type: ignore[dict-item]
    assert [o.prompt_token_ids for o in outputs] == [
        o.prompt_token_ids for o in llm.generate(prompts, GREEDY)
    ]
    assert len(outputs[0].prompt_token_ids) == len(llm.chat(talks, GREEDY)[0].prompt_token_ids) - 12
    with pytest.raises(BadParameter, match="unknown image processor settings"):
        llm.chat(talks[1], GREEDY, mm_processor_kwargs={"max_pixel": 1})
    with pytest.raises(BadParameter, match="mm_processor_kwargs is a mapping, got 5"):
        llm.chat(talks[0], GREEDY, mm_processor_kwargs=5)  # type: ignore[arg-type]  # wrong on purpose
    blind = LLM(model=str(checkpoints / "tiny-llama"), num_kv_blocks=64)
    with pytest.raises(UnsupportedError, match="text-only model"):
        blind.chat(talks[1], GREEDY, mm_processor_kwargs=small)
    assert not llm.engine.has_unfinished_requests()


def test_a_snapshot_tells_which_part_of_which_picture_is_in_which_block(make: Make) -> None:
    engine = make(block_size=5)
    engine.add_request("r", engine.chat_prompt(QUESTION), GREEDY)
    media = engine.media("r")
    engine.step()
    told: dict[tuple[str, int], tuple[int, Any]] = {}
    for block in engine.kv_snapshot().blocks:
        for rows in block.media:
            assert rows.size == (RED if rows.content_hash == media.media[0].content_hash else BLUE).size
            assert block.first_position is not None
            for i in range(rows.num_rows):
                position = block.first_position + rows.first_slot + i
                told[rows.content_hash, rows.first_row + i] = (position, rows.patches[i])
    wanted = {
        (span.content_hash, span.first_row + i): (
            span.start + i,
            media.media_items[span.content_hash].patches[span.first_row + i],
        )
        for span in media.media
        for i in range(span.length)
    }
    assert told == wanted
    run(engine)
    assert any(block.media for block in engine.kv_snapshot().blocks), "cached blocks still know theirs"
