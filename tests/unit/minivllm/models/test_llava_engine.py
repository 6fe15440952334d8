"""LLaVA, LLaVA-OneVision and InternVL through the whole engine: the tokens of Transformers' `generate`.

The engine runs under what hides mistakes: blocks of 4, chunks that cut pictures, warm prefixes,
preemption, an encoder cache that holds one picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from transformers import AutoModelForImageTextToText

from conformance.hf_processors import load_processor
from minivllm.config import EngineConfig, PreemptionMode
from minivllm.engine import LLMEngine
from minivllm.errors import BadMedia
from minivllm.layers.ops_torch import TorchOps
from minivllm.layers.probe import threads
from minivllm.models import LanguageModel, load_model
from minivllm.request import RequestOutput, SamplingParams
from minivllm.trace import Encoded, Event, MediaEvicted, Preempted
from tests.unit.minivllm.media_prompts import picture

NAMES = ("tiny-llava", "tiny-llava-onevision", "tiny-internvl")
LENGTH = 8

WIDE, HIGH, SMALL = picture(112, 84, 0), picture(84, 112, 1), picture(40, 70, 2)
#: "*" is a picture.
PROMPTS: dict[str, tuple[str, list[Image]]] = {
    "text": ("What is the capital of France?", []),
    "image": ("What is * this?", [WIDE]),
    "other image": ("What is * this?", [picture(112, 84, 9)]),
    "two images": ("The first * and the second * differ.", [WIDE, HIGH]),
    "swapped": ("The first * and the second * differ.", [HIGH, WIDE]),
    "first, last, repeated": ("* shows * and *", [SMALL, WIDE, SMALL]),
}


def spelt(name: str, text: str) -> str:
    return text.replace("*", "<IMG_CONTEXT>" if name == "tiny-internvl" else "<image>")


def prompt(name: str, what: str) -> dict[str, Any]:
    text, pictures = PROMPTS[what]
    media = {"multi_modal_data": {"image": pictures}} if pictures else {}
    return {"prompt": spelt(name, text), **media}


@cache
def truth(path: Path) -> dict[str, list[int]]:
    """Greedy ids of Transformers eager, one prompt at a time."""
    hf = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager").eval()
    processor = load_processor(path)
    found = {}
    for what, (text, pictures) in PROMPTS.items():
        images = [pictures] if pictures else None
        inputs = processor(text=[spelt(path.name, text)], images=images, return_tensors="pt")
        out = hf.generate(**inputs, max_new_tokens=LENGTH, do_sample=False, eos_token_id=None)
        found[what] = out[0, inputs["input_ids"].shape[1] :].tolist()
    assert len(set(map(tuple, found.values()))) == len(PROMPTS)
    return found


@cache
def model(path: Path) -> LanguageModel:
    return load_model(path, dtype=torch.float32, device="cpu", ops=TorchOps())


class Bench:
    """An engine on the shared model, and what it told."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.name = path.name
        self.events: list[Event] = []
        self.live: set[str] = set()
        settings = {"block_size": 4, "num_kv_blocks": 400, **options}
        self.engine = LLMEngine(
            EngineConfig(model=str(path), **settings), trace=self.events.append, model=model(path)
        )

    def run(
        self, which: Sequence[str], after_step: Callable[[int], None] | None = None
    ) -> list[RequestOutput]:
        """Final outputs of prompts served together; `after_step` is told each step's number."""
        sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
        for number, what in enumerate(which):
            self.engine.add_request(str(number), prompt(self.name, what), sampling)
            self.live.add(str(number))
        final: dict[str, RequestOutput] = {}
        step = 0
        while self.engine.has_unfinished_requests():
            final |= {output.request_id: output for output in self.engine.step()}
            self.live -= {output.request_id for output in final.values() if output.finished}
            if after_step is not None:
                after_step(step)
            step += 1
        return [final[str(number)] for number in range(len(which))]

    def ids(self, *which: str, after_step: Callable[[int], None] | None = None) -> dict[str, list[int]]:
        outputs = self.run(which, after_step)
        return {what: list(o.outputs[0].token_ids) for what, o in zip(which, outputs, strict=True)}

    def count(self, kind: type[Event]) -> int:
        return sum(isinstance(event, kind) for event in self.events)


@pytest.mark.parametrize("chunk", [7, 2048])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_transformers_alone_and_together(
    checkpoints: Path, name: str, chunk: int
) -> None:
    bench = Bench(checkpoints / name, max_num_batched_tokens=chunk, enable_prefix_caching=False)
    expected = truth(checkpoints / name)
    assert bench.ids(*PROMPTS) == expected
    assert bench.ids("image")["image"] == expected["image"]


@pytest.mark.parametrize("name", NAMES)
def test_a_warm_prefix_changes_nothing(checkpoints: Path, name: str) -> None:
    bench = Bench(checkpoints / name, max_num_batched_tokens=16)
    expected = truth(checkpoints / name)
    for what in (*PROMPTS, *reversed(PROMPTS)):
        assert bench.ids(what)[what] == expected[what], what
    again, other = bench.run(["image"])[0], bench.run(["other image"])[0]
    assert again.num_cached_tokens > 16, "the picture's blocks were found"
    assert list(other.outputs[0].token_ids) == expected["other image"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("name", NAMES)
def test_preemption_before_inside_and_after_pictures_changes_nothing(
    checkpoints: Path, name: str, mode: PreemptionMode
) -> None:
    """One request in turn loses its blocks, while prompts are computed and while answers are."""
    bench = Bench(
        checkpoints / name, max_num_batched_tokens=48, swap_space_bytes=2**24, enable_prefix_caching=False
    )
    lost = 0

    def preempt(step: int) -> None:
        nonlocal lost
        victim = str(step % len(PROMPTS))
        if step < 4 * len(PROMPTS) and victim in bench.live:
            lost += bench.engine.preempt_request(victim, mode)

    assert bench.ids(*PROMPTS, after_step=preempt) == truth(checkpoints / name)
    assert bench.count(Preempted) == lost > len(PROMPTS)


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_encoded_once_and_a_small_encoder_cache_changes_nothing(
    checkpoints: Path, name: str
) -> None:
    shared = Bench(checkpoints / name)
    assert shared.ids("image", "image") == {"image": truth(checkpoints / name)["image"]}
    assert shared.count(Encoded) == 1
    largest = max(e.num_embeddings for e in shared.events if isinstance(e, Encoded))
    tight = Bench(
        checkpoints / name,
        max_num_batched_tokens=16,
        encoder_cache_embeddings=largest,
        enable_prefix_caching=False,
    )
    assert tight.ids(*PROMPTS) == truth(checkpoints / name)
    assert tight.count(MediaEvicted) > 0


@pytest.mark.parametrize("name", NAMES)
def test_supplied_embeddings_do_what_their_picture_does(checkpoints: Path, name: str) -> None:
    bench = Bench(checkpoints / name)
    sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True)
    bench.engine.add_request("seen", prompt(name, "image"), sampling)
    (item,) = bench.engine.media("seen").media_items.values()
    rows = bench.engine.model.encode(item).rows  # type: ignore[attr-defined]  # of a model with eyes
    bench.engine.add_request(
        "given",
        {"prompt": spelt(name, PROMPTS["image"][0]), "multi_modal_data": {"image_embeds": rows}},
        sampling,
    )
    final: dict[str, RequestOutput] = {}
    while bench.engine.has_unfinished_requests():
        final |= {output.request_id: output for output in bench.engine.step()}
    assert final["seen"].prompt_token_ids == final["given"].prompt_token_ids
    for output in final.values():
        assert list(output.outputs[0].token_ids) == truth(checkpoints / name)["image"]


@pytest.mark.parametrize("name", NAMES)
def test_blocks_know_which_part_of_which_picture_they_hold(checkpoints: Path, name: str) -> None:
    bench = Bench(checkpoints / name)
    bench.engine.add_request("a", prompt(name, "two images"), SamplingParams(max_tokens=2, ignore_eos=True))
    bench.engine.step()
    items = bench.engine.media("a").media_items
    held: dict[str, list[int]] = {}
    for block in bench.engine.kv_snapshot().blocks:
        for rows in block.media:
            held.setdefault(rows.content_hash, []).extend(
                range(rows.first_row, rows.first_row + rows.num_rows)
            )
    assert {key: sorted(rows) for key, rows in held.items()} == {
        key: list(range(item.num_embeddings)) for key, item in items.items()
    }
    assert all(len(item.patches) == item.num_embeddings for item in items.values())
    bench.engine.abort_request("a")


@pytest.mark.parametrize("name", NAMES)
def test_too_few_and_too_many_pictures_are_refused_and_the_engine_lives(checkpoints: Path, name: str) -> None:
    bench = Bench(checkpoints / name)
    for pictures in ([], [WIDE, HIGH]):
        with pytest.raises(BadMedia):
            bench.engine.add_request(
                "bad",
                {"prompt": spelt(name, "See *"), "multi_modal_data": {"image": pictures}},
                SamplingParams(max_tokens=1),
            )
    assert bench.ids("image") == {"image": truth(checkpoints / name)["image"]}


@pytest.mark.parametrize("name", NAMES)
def test_batch_invariant_logits_keep_their_bits(checkpoints: Path, name: str) -> None:
    """Whatever the chunks, the blocks, the threads and the other requests."""
    found: list[NDArray[np.generic]] = []
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for chunk, block_size, others, count in (
        (2048, 16, [], 1),
        (7, 4, ["image"], 1),
        (33, 1, ["swapped"], 2),
    ):
        with threads(count):
            engine = LLMEngine(
                EngineConfig(
                    model=str(checkpoints / name),
                    max_num_batched_tokens=chunk,
                    block_size=block_size,
                    num_kv_blocks=2000 // block_size,
                    batch_invariant=True,
                )
            )
            for what in others:
                engine.add_request(what, prompt(name, what), sampling)
            engine.add_request("a", prompt(name, "two images"), sampling, capture=["logits"])
            while engine.has_unfinished_requests():
                engine.step()
            found.append(engine.stages("a")["logits"])
    assert found[0].shape == (4, 448)
    assert all(np.array_equal(found[0], other) for other in found[1:])
