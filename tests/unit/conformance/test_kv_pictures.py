"""Pictures are put together from the blocks that hold parts of them."""

from __future__ import annotations

from typing import Any

from conformance.kv_pictures import pictures_of
from conformance.kv_snapshot import parse_snapshot


def snapshot(*blocks: list[dict[str, Any]], host: list[dict[str, Any]] | None = None) -> Any:
    pools = [
        {"block_id": i, "state": "in_use", "owners": [{"request_id": "r", "index": i}], "media": media}
        for i, media in enumerate([*blocks, *([] if host is None else [host])])
    ]
    split = len(blocks)
    return parse_snapshot({"block_size": 4, "blocks": pools[:split], "host_blocks": pools[split:]})


def rows(name: str, first: int, *patches: tuple[float, float, float], frame: int = 0) -> dict[str, Any]:
    """Patches are (left, top, side)."""
    cells = [{"frame": frame, "left": x, "top": y, "width": s, "height": s} for x, y, s in patches]
    return {
        "first_slot": 0, "num_rows": len(cells), "content_hash": name, "first_row": first, "patches": cells,
    }  # fmt: skip


def test_rows_of_several_blocks_and_pools_come_together() -> None:
    shown = snapshot(
        [rows("a", 0, (0, 0, 0.5), (0.5, 0, 0.5))],
        [rows("a", 1, (0.5, 0, 0.5)), rows("b", 0, (0, 0, 1))],
        host=[rows("a", 2, (0, 0.5, 0.5))],
    )
    a, b = pictures_of(shown)
    assert {row: [one.name for one in held] for row, (_, held) in a.held.items()} == {
        0: ["0"], 1: ["0", "1"], 2: ["h2"],
    }  # fmt: skip
    assert list(b.held) == [0]
    (grid,) = a.grids()
    assert [[cell is not None for cell in row] for row in grid.cells] == [[True, True], [True, False]]


def test_an_overview_is_apart_from_its_details() -> None:
    (picture,) = pictures_of(snapshot([rows("a", 0, (0, 0, 1), (0, 0, 0.5), (0.5, 0.5, 0.5))]))
    assert [(g.width, len(g.cells), len(g.cells[0])) for g in picture.grids()] == [(0.5, 2, 2), (1.0, 1, 1)]


def test_thirds_that_differ_in_the_last_bit_are_one_column() -> None:
    third = 1 / 3
    (picture,) = pictures_of(
        snapshot([rows("a", 0, (third, 0, third), (1 - 2 * third, third, third), (2 * third, third, third))])
    )
    (grid,) = picture.grids()
    assert [len(row) for row in grid.cells] == [2, 2]


def test_frames_have_grids_of_their_own_in_order() -> None:
    (picture,) = pictures_of(snapshot([rows("a", 1, (0, 0, 1), frame=4), rows("a", 0, (0, 0, 1), frame=2)]))
    assert [grid.frame for grid in picture.grids()] == [2, 4]
