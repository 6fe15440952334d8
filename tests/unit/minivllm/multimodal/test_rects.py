"""Grids of picture parts."""

from __future__ import annotations

from minivllm.multimodal.rects import grid_rects
from minivllm.request import PatchRect


def test_a_grid_goes_line_by_line() -> None:
    assert list(grid_rects(2, 4, frame=1))[:5] == [
        PatchRect(1, 0.0, 0.0, 0.25, 0.5),
        PatchRect(1, 0.25, 0.0, 0.25, 0.5),
        PatchRect(1, 0.5, 0.0, 0.25, 0.5),
        PatchRect(1, 0.75, 0.0, 0.25, 0.5),
        PatchRect(1, 0.0, 0.5, 0.25, 0.5),
    ]


def test_a_grid_may_cover_a_part_of_the_picture() -> None:
    assert list(grid_rects(1, 2, left=0.5, top=0.25, width=0.5, height=0.25)) == [
        PatchRect(0, 0.5, 0.25, 0.25, 0.25),
        PatchRect(0, 0.75, 0.25, 0.25, 0.25),
    ]


def test_what_is_padding_is_cut_off() -> None:
    assert list(grid_rects(4, 1, top=-0.5, height=2.0)) == [
        PatchRect(0, 0.0, 0.0, 1.0, 0.0),
        PatchRect(0, 0.0, 0.0, 1.0, 0.5),
        PatchRect(0, 0.0, 0.5, 1.0, 0.5),
        PatchRect(0, 0.0, 1.0, 1.0, 0.0),
    ]
