"""Which part of a picture an embedding row stands for, for families whose rows form grids."""

from __future__ import annotations

from collections.abc import Iterator

from minivllm.request import PatchRect

__all__ = ["grid_rects"]


def grid_rects(
    rows: int,
    columns: int,
    *,
    left: float = 0.0,
    top: float = 0.0,
    width: float = 1.0,
    height: float = 1.0,
    frame: int = 0,
) -> Iterator[PatchRect]:
    """A grid over a part of the picture, line by line, in fractions of the whole picture.

    What lies outside the picture (a part that was padded) is cut off; a row that stands for
    padding alone is empty, at the edge nearest to it.
    """
    for row in range(rows):
        for column in range(columns):
            x0, x1 = (_inside(left + width * c / columns) for c in (column, column + 1))
            y0, y1 = (_inside(top + height * r / rows) for r in (row, row + 1))
            yield PatchRect(frame, x0, y0, x1 - x0, y1 - y0)


def _inside(fraction: float) -> float:
    return min(1.0, max(0.0, fraction))
