"""The visual recall task: words, grids, answers."""

from __future__ import annotations

from itertools import product
from random import Random

from conformance.recipes.scenes import Scene
from conformance.recipes.visual_recall import (
    COLUMNS,
    LOST,
    ROWS,
    answer,
    draw_grid,
    make_visual_recall_tokenizer,
    word_of,
)


def test_every_object_has_a_word_of_one_token() -> None:
    tokenizer = make_visual_recall_tokenizer()
    assert len(tokenizer) == 448
    words = [word_of(cell) for cell in product(range(6), range(8))]
    assert len(set(words)) == 48
    assert [len(tokenizer.encode(word)) for word in [*words, LOST]] == [1] * 49


def test_an_answer_is_the_words_row_after_row() -> None:
    scene = Scene(2, 4, ((0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (0, 6), (1, 7)))
    assert answer(scene) == " rc gs bt yx po kw rf gv"
    assert len(make_visual_recall_tokenizer().encode(answer(scene))) == 8


def test_a_grid_is_full_and_no_two_objects_are_alike() -> None:
    for rows in range(ROWS[0], ROWS[1] + 1):
        scene = draw_grid(Random(rows), rows)
        assert (scene.rows, scene.columns) == (rows, COLUMNS)
        assert None not in scene.cells
        assert len(set(scene.cells)) == rows * COLUMNS
