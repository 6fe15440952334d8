"""The visual recall checkpoint reads grids it never saw, far from a tie, and single KV faults show.

In bfloat16, by tokens alone: each request has one fault in minivllm's paged cache, at a visual
token, and counts as caught when its greedy tokens differ from the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

from conformance.recipes.build import sha256_of
from conformance.recipes.scenes import Scene, paint
from conformance.recipes.visual_recall import LAYERS, NAME, QUESTION, ROWS, TEXT_CONFIG, answer, draw_grid
from conformance.recipes.visual_recall_training import measure_grids
from minivllm import LLM, SamplingParams
from tests.integration.kv_faults import ENTRY_KINDS, Fault, Rig, spoil_writes

#: Tokens before the first visual one: <|im_start|>, user, newline, <|vision_start|>.
BEFORE = 4
#: Id of <|im_end|>.
END = TEXT_CONFIG["eos_token_id"]
#: All others: the four, <|vision_end|>, the question and the turn's end.
TEXT = 12


def draw(count: int, rows: int, seed: object) -> tuple[list[Scene], list[Image.Image]]:
    rng = Random(f"held out {seed}")
    scenes = [draw_grid(rng, rows) for _ in range(count)]
    return scenes, [Image.fromarray(paint(scene, rng)) for scene in scenes]


def chat(picture: Image.Image) -> dict[str, Any]:
    """The turn that asks to read it."""
    return {
        "role": "user",
        "content": [{"type": "image", "image": picture}, {"type": "text", "text": QUESTION}],
    }


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def llm(request: pytest.FixtureRequest, checkpoints: Path) -> LLM:
    return LLM(model=str(checkpoints / NAME), dtype=request.param, device="cpu", num_kv_blocks=400)


@pytest.mark.parametrize("rows", range(ROWS[0], ROWS[1] + 1))
def test_every_cell_is_read_far_from_a_tie(llm: LLM, rows: int) -> None:
    scenes, pictures = draw(8, rows, rows)
    chats = [[chat(picture)] for picture in pictures]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=40, logprobs=2))
    assert [output.outputs[0].text for output in outputs] == [answer(scene) for scene in scenes]
    margins = []
    for output in outputs:
        for step in output.outputs[0].logprobs or ():
            best = sorted((entry.logprob for entry in step.values()), reverse=True)
            margins.append(best[0] - best[1])
    print(f"{rows} rows: smallest margin {min(margins):.1f}, median {np.median(margins):.1f}")
    assert min(margins) > 10


def test_grids_are_read_with_the_stated_accuracy(checkpoints: Path) -> None:
    """What a training from scratch reaches as well; margins and faults are these weights' own."""
    stated = json.loads((checkpoints / NAME / "RECIPE.json").read_text(encoding="utf-8"))["accuracy"]
    model = transformers.Qwen2VLForConditionalGeneration.from_pretrained(
        checkpoints / NAME, dtype=torch.float32, attn_implementation="eager"
    )
    reached = measure_grids(model.eval(), stated["grids"], stated["seed"])
    print(reached)
    assert min(reached.values()) >= 0.95
    assert all(abs(stated[size] - part) < 0.025 for size, part in reached.items())  # two grids, by CPU


class GridRig(Rig):
    """A rig whose requests are pictures to read."""

    def __init__(self, checkpoints: Path, block_size: int, *, requests: int, rows: int) -> None:
        super().__init__(checkpoints / NAME, block_size, requests=requests, length=TEXT + 2 * 4 * rows + 1)

    def run(self, scenes: Sequence[Scene], pictures: Sequence[Image.Image]) -> dict[int, list[int]]:
        prompts = [self.engine.chat_prompt([chat(picture)]) for picture in pictures]
        self.start(prompts, [len(scene.cells) + 1 for scene in scenes])
        return self.finish()

    def expected(self, scene: Scene) -> list[int]:
        assert self.engine.tokenizer is not None
        return [*self.engine.tokenizer.encode(answer(scene), add_special_tokens=False), END]


def visual_faults(rows: int, every: int) -> Iterator[Fault]:
    for kind in ENTRY_KINDS:
        for layer in range(LAYERS):
            for cell in range(0, 4 * rows, every):
                yield Fault(kind, layer, BEFORE + cell)


def test_at_least_nine_in_ten_single_faults_at_visual_tokens_change_the_tokens(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kinds × layers × cells, with block sizes that divide the grid and do not."""
    table: dict[tuple[str, int], list[bool]] = {}
    for block_size, rows, every in ((4, 3, 2), (7, 5, 3)):
        faults = list(visual_faults(rows, every))
        rig = GridRig(checkpoints, block_size, requests=len(faults), rows=rows)
        rig.run(*draw(len(faults), rows, "earlier requests, for something stale"))
        scenes, pictures = draw(len(faults), rows, f"faults {rows}")
        with monkeypatch.context() as patch:
            fired = spoil_writes(rig, faults, patch)
            tokens = rig.run(scenes, pictures)
        assert fired == dict.fromkeys(range(len(faults)), 1)
        for i, (fault, scene) in enumerate(zip(faults, scenes, strict=True)):
            table.setdefault((fault.kind, fault.layer), []).append(tokens[i] != rig.expected(scene))
    for (kind, layer), hits in sorted(table.items()):
        print(f"layer {layer}  {kind:25} {sum(hits):4} of {len(hits):4}")
    hits = [hit for row in table.values() for hit in row]
    print(f"total {sum(hits)} of {len(hits)}")
    assert sum(hits) >= 0.9 * len(hits)
    assert all(sum(row) >= 0.8 * len(row) for row in table.values())


def test_without_a_fault_every_answer_is_right(checkpoints: Path) -> None:
    rig = GridRig(checkpoints, 5, requests=6, rows=4)
    scenes, pictures = draw(6, 4, "none")
    tokens = rig.run(scenes, pictures)
    assert [tokens[i] for i in range(6)] == [rig.expected(scene) for scene in scenes]


def test_the_recipe_file_tells_what_the_directory_holds(checkpoints: Path) -> None:
    directory = checkpoints / NAME
    facts: dict[str, Any] = json.loads((directory / "RECIPE.json").read_text(encoding="utf-8"))
    assert facts["sha256"] == {p.name: sha256_of(p) for p in directory.iterdir() if p.name != "RECIPE.json"}
    assert (facts["kind"], facts["dtypes"]) == ("recall", ["float32", "bfloat16"])
    weights = load_file(directory / "model.safetensors")
    assert {str(weight.dtype) for weight in weights.values()} == {"torch.bfloat16"}
    assert sum(p.stat().st_size for p in directory.iterdir()) < 1_000_000
