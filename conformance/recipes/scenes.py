"""Pictures of coloured shapes in a grid, and questions about them: what meaning checkpoints learn.

A scene is a grid of cells, each empty or with one object of a colour and a shape (a digit counts as
a shape). A cell is 28 pixels square: one visual token of Qwen2-VL. Everything is drawn by arithmetic
on integers from `random.Random`, so that a seed gives the same pixels everywhere. Grids of 2 × 3 and
3 × 2 cells have equally many visual tokens: only their positions tell rows from columns.
Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from random import Random

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CELL",
    "COLOURS",
    "DIGITS",
    "GRIDS",
    "NOTHING",
    "SHAPES",
    "TASKS",
    "Example",
    "Scene",
    "caption",
    "draw_example",
    "draw_scene",
    "paint",
    "scene_of",
    "scene_sentences",
]

#: Pixels per side of a cell.
CELL = 28

#: Rows and columns that scenes have.
GRIDS = ((2, 3), (3, 2), (3, 3))

COLOURS = {
    "red": (205, 40, 45),
    "green": (45, 150, 70),
    "blue": (45, 75, 200),
    "yellow": (230, 195, 40),
    "purple": (140, 55, 170),
    "black": (28, 28, 28),
}
SHAPES = ("circle", "square", "triangle", "cross", "ring", "two", "four", "seven")

#: Five columns by seven rows per digit, one string of bits per row.
DIGITS: Mapping[str, tuple[str, ...]] = {
    "two": ("01110", "10001", "00001", "00110", "01000", "10000", "11111"),
    "four": ("00010", "00110", "01010", "10010", "11111", "00010", "00010"),
    "seven": ("11111", "00001", "00010", "00100", "01000", "01000", "01000"),
}

#: What examples ask for.
TASKS = ("caption", "count", "colour", "place", "two", "copy")

#: What the answer calls an empty cell.
NOTHING = "nothing"

_NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight")
_COPIED = ("bread", "cat", "cold", "door", "fish", "green", "house", "milk", "moon", "red", "river", "stone")
_COLOUR_NAMES = tuple(COLOURS)
_ROWS = {2: ("top", "bottom"), 3: ("top", "middle", "bottom")}
_COLUMNS = {2: ("left", "right"), 3: ("left", "centre", "right")}


@dataclass(frozen=True, slots=True)
class Scene:
    """What stands in each cell, row after row: numbers of a colour and of a shape; None: nothing."""

    rows: int
    columns: int
    cells: tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """A question about pictures, which come before it in the prompt, and its one right answer."""

    task: str
    scenes: tuple[Scene, ...]
    question: str
    answer: str


def caption(scene: Scene) -> str:
    """The objects, row after row: "red circle blue seven"."""
    return " ".join(_named(cell) for cell in scene.cells if cell is not None)


def draw_scene(rng: Random, rows: int, columns: int, objects: int) -> Scene:
    """`objects` objects in cells of their own, at most eight: no two have the same shape."""
    cells: list[tuple[int, int] | None] = [None] * (rows * columns)
    places = rng.sample(range(rows * columns), objects)
    for at, shape in zip(places, rng.sample(range(len(SHAPES)), objects), strict=True):
        cells[at] = (rng.randrange(len(COLOURS)), shape)
    return Scene(rows, columns, tuple(cells))


def draw_example(rng: Random, task: str, rows: int, columns: int) -> Example:
    """An example of a task with pictures of `rows` × `columns` cells."""
    scene = draw_scene(rng, rows, columns, rng.randint(1, min(len(SHAPES), rows * columns)))
    present = [cell for cell in scene.cells if cell is not None]
    if task == "caption":
        return Example(task, (scene,), "What is shown?", f"Shown: {caption(scene)}")
    if task == "count":
        colours = [colour for colour, _ in present]
        colour = rng.choice(colours) if rng.random() < 0.8 else rng.randrange(len(COLOURS))
        # Drawn independently, three of a colour would hardly occur.
        cells = tuple(
            cell if cell is None or rng.random() < 0.5 else (colour, cell[1]) for cell in scene.cells
        )
        number = sum(cell is not None and cell[0] == colour for cell in cells)
        question = f"How many are {_COLOUR_NAMES[colour]}?"
        answer = f"There are {_NUMBERS[number]}"
        return Example(task, (Scene(rows, columns, cells),), question, answer)
    if task == "colour":
        colour, shape = rng.choice(present)
        answer = f"It is {_COLOUR_NAMES[colour]}"
        return Example(task, (scene,), f"What colour is the {SHAPES[shape]}?", answer)
    if task == "place":
        at = rng.choice([i for i, cell in enumerate(scene.cells) if cell is not None or rng.random() < 0.2])
        row, column = divmod(at, columns)
        cell = scene.cells[at]
        place = f"{_ROWS[rows][row]} {_COLUMNS[columns][column]}"
        said = NOTHING if cell is None else _named(cell)
        return Example(task, (scene,), f"What is at {place}?", f"It is {said}")
    if task == "two":
        scenes = tuple(draw_scene(rng, rows, columns, 1) for _ in range(2))
        first, second = map(caption, scenes)
        return Example(task, scenes, "What is in each?", f"First {first} second {second}")
    if task == "copy":
        words = " ".join(rng.sample(_COPIED, rng.randint(2, 6)))
        return Example(task, (), f"Repeat: {words}", f"Said: {words}")
    raise ValueError(f"no task {task!r}; known: {', '.join(TASKS)}")


def paint(scene: Scene, rng: Random) -> NDArray[np.uint8]:
    """[rows × 28, columns × 28, 3]: sizes, places within a cell and shades as `rng` draws them."""
    height, width = scene.rows * CELL, scene.columns * CELL
    y, x = np.mgrid[0:height, 0:width]
    light = rng.randint(205, 250) - (x * rng.randint(0, 25)) // width - (y * rng.randint(0, 25)) // height
    tint = np.array([rng.randint(-8, 0) for _ in range(3)])
    pixels: NDArray[np.uint8] = (light[..., None] + tint).astype(np.uint8)
    for at, cell in enumerate(scene.cells):
        if cell is None:
            continue
        row, column = divmod(at, scene.columns)
        mask = _mask(cell[1], rng.randrange(3), rng.randint(-3, 3), rng.randint(-3, 3))
        colour = np.array(COLOURS[_COLOUR_NAMES[cell[0]]]) + [rng.randint(-14, 14) for _ in range(3)]
        part = pixels[row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
        part[mask] = colour.astype(np.uint8)
    return pixels


def scene_of(rows: Sequence[Sequence[str]]) -> Scene:
    """The scene whose cells are named: "red circle", or "none".

    Raises:
        ValueError: rows of unequal length, or a name of no colour or shape.
    """
    if len({len(row) for row in rows}) != 1:
        raise ValueError(f"rows of a scene are equally long, got {[len(row) for row in rows]}")
    cells = tuple(None if name == "none" else _cell(name) for row in rows for name in row)
    return Scene(len(rows), len(rows[0]), cells)


def scene_sentences() -> Iterator[str]:
    """Sentences with every word in use, for a tokenizer that knows each word as one token."""
    for colour, shape in product(COLOURS, SHAPES):
        yield f"First {colour} {shape} second {colour} {shape}"
        yield f"What colour is the {shape}?\nIt is {colour}"
        yield "user\nWhat is shown?\nassistant\nShown:"
    for row, column in product(_ROWS[3], _COLUMNS[3]):
        yield from [
            f"is at {row} {column}? It is nothing\nWhat is in each?\nHow many are {row}?\nThere are"
        ] * 8
    for word in (*_NUMBERS, *_COPIED):
        yield from [f"Repeat: {word} {word}\nSaid: {word} {word}"] * 12
    for word in (*COLOURS, *SHAPES, *_NUMBERS, *_COPIED):
        yield word
    yield from ["Please look at every picture, then answer."] * 8


def _cell(name: str) -> tuple[int, int]:
    colour, _, shape = name.partition(" ")
    if colour not in COLOURS or shape not in SHAPES:
        raise ValueError(f"no object {name!r}; colours: {', '.join(COLOURS)}; shapes: {', '.join(SHAPES)}")
    return _COLOUR_NAMES.index(colour), SHAPES.index(shape)


def _named(cell: tuple[int, int]) -> str:
    return f"{_COLOUR_NAMES[cell[0]]} {SHAPES[cell[1]]}"


@cache
def _mask(shape: int, size: int, right: int, down: int) -> NDArray[np.bool_]:
    """Which pixels of a cell an object covers, `right` and `down` of its middle."""
    rows, columns = np.mgrid[0:CELL, 0:CELL]
    x, y = columns - CELL // 2 - right, rows - CELL // 2 - down
    radius = 8 + size
    name = SHAPES[shape]
    if name in DIGITS:
        bits = np.array([[bit == "1" for bit in row] for row in DIGITS[name]])
        # Five columns by seven rows, two or three pixels each.
        scale = (4, 5, 6)[size]
        i, j = (2 * y + 7 * scale // 2) // scale, (2 * x + 5 * scale // 2) // scale
        inside = (i >= 0) & (i < 7) & (j >= 0) & (j < 5)
        return np.asarray(inside & bits[i.clip(0, 6), j.clip(0, 4)])
    square = x**2 + y**2
    masks = {
        "circle": square <= radius**2,
        "square": np.maximum(abs(x), abs(y)) <= radius - 1,
        "triangle": (abs(y) <= radius) & (2 * abs(x) <= y + radius),
        "cross": (np.minimum(abs(x), abs(y)) <= 2) & (np.maximum(abs(x), abs(y)) <= radius),
        "ring": (square <= radius**2) & (square >= (radius - 4) ** 2),
    }
    return np.asarray(masks[name])
