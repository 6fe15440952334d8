"""The meaning checkpoint answers right about pictures it never saw, in float32 and in bfloat16."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file

from conformance.recipes.build import sha256_of
from conformance.recipes.meaning import NAME, held_out
from conformance.recipes.scenes import TASKS, paint, scene_of
from minivllm import LLM, SamplingParams
from tests.integration.kv_faults import ENTRY_KINDS, Fault, Rig, spoil_writes

Pixels = NDArray[np.uint8]

#: Of the held-out examples of each task, how many are asked here: the first.
ASKED = 50


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def llm(request: pytest.FixtureRequest, checkpoints: Path) -> LLM:
    return LLM(model=str(checkpoints / NAME), dtype=request.param, device="cpu", num_kv_blocks=4000)


@pytest.fixture(scope="module")
def facts(checkpoints: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((checkpoints / NAME / "RECIPE.json").read_text(encoding="utf-8"))
    return read


def chat(question: str, pictures: Sequence[Pixels]) -> list[dict[str, Any]]:
    """The turn that asks about some pictures."""
    images = [{"type": "image", "image": Image.fromarray(picture)} for picture in pictures]
    return [{"role": "user", "content": [*images, {"type": "text", "text": question}]}]


def answers(llm: LLM, asked: Sequence[tuple[str, Sequence[Pixels]]]) -> list[str]:
    """What the model says to each question about some pictures."""
    chats = [chat(question, pictures) for question, pictures in asked]
    outputs = llm.chat(chats, SamplingParams(temperature=0, max_tokens=24))
    return [output.outputs[0].text for output in outputs]


def test_every_task_keeps_its_stated_accuracy(llm: LLM, facts: dict[str, Any]) -> None:
    """On examples that it was measured on when the weights were made."""
    stated = facts["accuracy"]
    assert stated["examples"] >= ASKED
    examples = list(held_out(ASKED, stated["seed"]))
    said = answers(llm, [(example.question, pictures) for example, pictures in examples])
    right = Counter(
        example.task for (example, _), answer in zip(examples, said, strict=True) if answer == example.answer
    )
    reached = {task: right[task] / ASKED for task in TASKS}
    print(reached)
    assert all(reached[task] >= stated[task] - 0.03 for task in TASKS)


def test_no_task_is_only_tried(facts: dict[str, Any]) -> None:
    assert min(facts["accuracy"][task] for task in TASKS) >= 0.9


def test_another_picture_gives_another_right_answer(llm: LLM) -> None:
    rows = [
        [["red circle", "none", "blue cross"], ["none", "green square", "none"]],
        [["none", "black ring", "none"], ["yellow two", "none", "none"]],
        [["purple four", "none"], ["none", "red circle"], ["green square", "none"]],
    ]
    pictures = [paint(scene_of(cells), Random(f"by hand {i}")) for i, cells in enumerate(rows)]
    assert answers(llm, [("What is shown?", [picture]) for picture in pictures]) == [
        "Shown: red circle blue cross green square",
        "Shown: black ring yellow two",
        "Shown: purple four red circle green square",
    ]


def test_the_order_of_two_pictures_is_told(llm: LLM) -> None:
    one = paint(scene_of([["none", "red circle", "none"], ["none"] * 3]), Random("one"))
    other = paint(scene_of([["none"] * 3, ["none", "none", "blue seven"]]), Random("other"))
    question = "What is in each?"
    assert answers(llm, [(question, [one, other]), (question, [other, one])]) == [
        "First red circle second blue seven",
        "First blue seven second red circle",
    ]


def test_most_damaged_cache_entries_do_not_show_in_bfloat16(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why bfloat16 cases of this checkpoint are WEAK: the recall ones are held to nine in ten."""
    examples = [e for e in held_out(30) if e[0].task == "place"]
    faults = [Fault(kind, layer, 4 + at) for kind in ENTRY_KINDS for layer in range(3) for at in (0, 5)]
    rig = Rig(checkpoints / NAME, 4, requests=len(faults), length=40)

    def said() -> dict[int, list[int]]:
        chats = [chat(example.question, pictures) for example, pictures in examples]
        prompts: list[Any] = [rig.engine.chat_prompt(turns) for turns in chats]
        rig.start(prompts, [5] * len(chats))
        return rig.finish()

    healthy = said()
    fired = spoil_writes(rig, faults, monkeypatch)
    damaged = said()
    assert fired == dict.fromkeys(range(len(faults)), 1)
    shown = sum(damaged[i] != healthy[i] for i in range(len(faults)))
    print(f"{shown} of {len(faults)} show")
    assert shown < 0.5 * len(faults)


def test_the_recipe_file_tells_what_the_directory_holds(checkpoints: Path, facts: dict[str, Any]) -> None:
    directory = checkpoints / NAME
    assert facts["sha256"] == {p.name: sha256_of(p) for p in directory.iterdir() if p.name != "RECIPE.json"}
    assert (facts["kind"], facts["dtypes"]) == ("meaning", ["float32", "bfloat16"])
    weights = load_file(directory / "model.safetensors")
    assert {str(weight.dtype) for weight in weights.values()} == {"torch.bfloat16"}
    assert sum(p.stat().st_size for p in directory.iterdir()) < 4_000_000
