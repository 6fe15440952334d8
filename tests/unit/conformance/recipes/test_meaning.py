"""What the meaning recipe makes of examples is what Transformers makes of them."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from PIL import Image

from conformance.hf_processors import load_image_processor
from conformance.paths import data_root
from conformance.recipes.meaning import (
    held_out,
    make_meaning_tokenizer,
    messages,
    paint_example,
    patches,
    row_of,
)
from conformance.recipes.meaning_training import make_meaning_model
from conformance.recipes.scenes import COLOURS, GRIDS, SHAPES, TASKS, draw_example, draw_scene, paint

QWEN2_VL = data_root() / "golden" / "checkpoints" / "tiny-qwen2-vl"
IMAGE, END = 445, 442


def test_every_word_is_one_token() -> None:
    tokenizer = make_meaning_tokenizer()
    assert len(tokenizer) == 448
    for word in (*COLOURS, *SHAPES, "nothing", "zero", "eight", "bottom", "centre", "bread"):
        assert len(tokenizer.encode(f" {word}")) == 1, word
    assert tokenizer.decode(tokenizer.encode("Grüße, 你好")) == "Grüße, 你好"


@pytest.mark.parametrize("grid", GRIDS)
def test_patches_are_those_of_the_genuine_image_processor(grid: tuple[int, int]) -> None:
    rng = Random("patches")
    pictures = [paint(draw_scene(rng, *grid, 4), rng) for _ in range(2)]
    genuine = load_image_processor(QWEN2_VL)([Image.fromarray(p) for p in pictures], return_tensors="np")
    assert genuine["image_grid_thw"].tolist() == [[1, 2 * grid[0], 2 * grid[1]]] * 2
    ours = patches(pictures)
    np.testing.assert_allclose(ours.reshape(-1, 1176), genuine["pixel_values"], atol=1e-6)
    assert patches([]).shape == (0, 4, 1176)


@pytest.mark.parametrize("task", TASKS)
def test_positions_are_those_of_the_genuine_model(task: str) -> None:
    example = draw_example(Random(task), task, 2, 3)
    row = row_of(example, make_meaning_tokenizer())
    ids = torch.tensor([row.tokens])
    grids = torch.tensor([[1, 4, 6]] * len(example.scenes)).view(-1, 3)
    positions, _ = make_meaning_model(0).model.get_rope_index(
        ids, mm_token_type_ids=(ids == IMAGE).int(), image_grid_thw=grids if len(grids) else None
    )
    assert positions[:, 0].tolist() == row.positions.tolist()


def test_a_row_is_the_chat_the_answer_and_an_end() -> None:
    tokenizer = make_meaning_tokenizer()
    example = draw_example(Random(1), "two", 3, 2)
    row = row_of(example, tokenizer)
    chat = tokenizer.apply_chat_template(
        messages(2, example.question), add_generation_prompt=True, tokenize=False
    )
    expected = tokenizer.encode(chat.replace("<|image_pad|>", "<|image_pad|>" * 6))
    assert row.tokens[: row.prompt] == expected
    assert row.tokens[row.prompt :] == [*tokenizer.encode(example.answer), END]


def test_held_out_examples_are_the_same_every_time() -> None:
    one, other = list(held_out(4)), list(held_out(4))
    assert [example for example, _ in one] == [example for example, _ in other]
    assert [example.task for example, _ in one] == [task for task in TASKS for _ in range(4)]
    for (example, pictures), (_, again) in zip(one, other, strict=True):
        assert len(pictures) == len(example.scenes)
        assert all(np.array_equal(a, b) for a, b in zip(pictures, again, strict=True))
    assert [example for example, _ in held_out(4, "another seed")] != [example for example, _ in one]


def test_pictures_are_painted_in_the_order_of_the_scenes() -> None:
    example = draw_example(Random(2), "two", 2, 3)
    pictures = paint_example(example, Random(3))
    rng = Random(3)
    assert all(
        np.array_equal(a, paint(scene, rng)) for a, scene in zip(pictures, example.scenes, strict=True)
    )
