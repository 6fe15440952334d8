"""Scenes: what they show is what the answers say, and a seed gives the same pixels everywhere."""

from __future__ import annotations

import hashlib
from collections import Counter
from random import Random

import numpy as np
import pytest

from conformance.recipes.scenes import (
    CELL,
    COLOURS,
    GRIDS,
    SHAPES,
    TASKS,
    caption,
    draw_example,
    draw_scene,
    paint,
    scene_of,
)

NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
ROWS = [["red circle", "none", "blue seven"], ["none", "green square", "none"]]


def test_a_caption_names_objects_row_after_row() -> None:
    assert caption(scene_of(ROWS)) == "red circle blue seven green square"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["none"], ["none", "none"]], "equally long"),
        ([["pink circle"]], "pink circle"),
        ([["red"]], "no object"),
    ],
)
def test_scenes_that_cannot_be_are_refused(rows: list[list[str]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scene_of(rows)


def test_painted_cells_hold_their_colour_and_empty_ones_only_light() -> None:
    pixels = paint(scene_of(ROWS), Random(0)).astype(int)
    assert pixels.shape == (2 * CELL, 3 * CELL, 3)
    for row, names in enumerate(ROWS):
        for column, name in enumerate(names):
            cell = pixels[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL].reshape(-1, 3)
            dark = cell[cell.min(axis=1) < 140]
            if name == "none":
                assert len(dark) == 0
            else:
                wanted = np.array(COLOURS[name.split()[0]])
                assert len(dark) > 40
                assert np.abs(dark - wanted).max() <= 14


def test_a_seed_gives_the_same_pixels_everywhere() -> None:
    scene = scene_of([[f"{colour} {shape}" for shape in SHAPES] for colour in COLOURS])
    digest = hashlib.sha256(paint(scene, Random("pinned")).tobytes()).hexdigest()
    assert digest == "190ba6e643ff2da16faa4851e823a07ecc2993d75265a7f6c65a80aa24485ae4"


def test_shapes_differ_from_one_another_wherever_they_stand() -> None:
    """The nearest two pictures of two shapes still differ in a good part of the smaller one."""
    masks = {
        shape: [paint(scene_of([[f"black {shape}"]]), Random(f"{i}")).max(axis=-1) < 100 for i in range(60)]
        for shape in SHAPES
    }
    for one in SHAPES:
        for other in SHAPES:
            if one < other:
                nearest = min((a ^ b).sum() / min(a.sum(), b.sum()) for a in masks[one] for b in masks[other])
                assert nearest > 0.15, (one, other)


def test_objects_of_a_scene_have_different_shapes() -> None:
    for seed in range(50):
        cells = [cell for cell in draw_scene(Random(seed), 3, 3, 8).cells if cell is not None]
        assert len({shape for _, shape in cells}) == 8


@pytest.mark.parametrize("grid", GRIDS)
def test_answers_are_true(grid: tuple[int, int]) -> None:
    rng = Random(f"truth {grid}")
    for _ in range(60):
        example = draw_example(rng, "caption", *grid)
        assert example.answer == f"Shown: {caption(example.scenes[0])}"
        example = draw_example(rng, "colour", *grid)
        shape = example.question.removesuffix("?").split()[-1]
        assert f"{example.answer.split()[-1]} {shape}" in caption(example.scenes[0])
        example = draw_example(rng, "count", *grid)
        colour, number = example.question.removesuffix("?").split()[-1], example.answer.split()[-1]
        count = caption(example.scenes[0]).split().count(colour)
        assert count == NUMBERS.index(number)
        example = draw_example(rng, "copy", *grid)
        assert example.scenes == ()
        assert example.question.split()[1:] == example.answer.split()[1:]
        example = draw_example(rng, "two", *grid)
        first, second = map(caption, example.scenes)
        assert example.answer == f"First {first} second {second}"


def test_places_tell_rows_from_columns() -> None:
    rng, seen = Random("places"), Counter[str]()
    for _ in range(300):
        example = draw_example(rng, "place", 3, 2)
        row, column = example.question.removesuffix("?").split()[-2:]
        at = ("top", "middle", "bottom").index(row) * 2 + ("left", "right").index(column)
        [scene] = example.scenes
        cell = scene.cells[at]
        named = "nothing" if cell is None else caption(scene_of([[_name(cell)]]))
        assert example.answer == f"It is {named}"
        seen[f"{row} {column}"] += 1
    assert len(seen) == 6


def _name(cell: tuple[int, int]) -> str:
    return f"{list(COLOURS)[cell[0]]} {SHAPES[cell[1]]}"


def test_unknown_tasks_are_refused() -> None:
    with pytest.raises(ValueError, match=f"no task 'poem'; known: {', '.join(TASKS)}"):
        draw_example(Random(0), "poem", 2, 3)
