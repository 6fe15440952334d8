"""A drawing shows every block, whoever holds it, and how far it is filled."""

from __future__ import annotations

import copy
import io
from typing import Any
from xml.etree import ElementTree as ET

from rich.console import Console

from conformance.kv_drawing import draw_svg, print_map
from conformance.kv_snapshot import parse_snapshot

SVG = "{http://www.w3.org/2000/svg}"

DATA: dict[str, Any] = {
    "block_size": 4,
    "blocks": [
        {"block_id": 0, "state": "null"},
        {
            "block_id": 1,
            "state": "in_use",
            "owners": [{"request_id": "red", "index": 0}, {"request_id": "blue<1>", "index": 0}],
            "token_ids": [10, 11, 12, 13],
            "first_position": 0,
            "num_computed": 4,
            "hash": "abc123",
        },
        {
            "block_id": 2,
            "state": "in_use",
            "owners": [{"request_id": "red", "index": 1}],
            "token_ids": [14, 15, 16],
            "first_position": 4,
            "num_computed": 3,
            "media": [{"first_slot": 1, "num_rows": 2, "content_hash": "feedbeefcafe"}],
        },
        {
            "block_id": 3,
            "state": "cached",
            "token_ids": [7, 8, 9, 6],
            "first_position": 8,
            "num_computed": 4,
            "hash": "ffff",
        },
        {"block_id": 4, "state": "free"},
    ],
    "host_blocks": [
        {
            "block_id": 0,
            "state": "in_use",
            "owners": [{"request_id": "out", "index": 0}],
            "token_ids": [30],
            "first_position": 0,
            "num_computed": 1,
        },
        {"block_id": 1, "state": "free"},
    ],
}


def changed(**blocks: Any) -> dict[str, Any]:
    """The data with fields of block 2 replaced."""
    data = copy.deepcopy(DATA)
    data["blocks"][2].update(blocks)
    return data


def text(data: Any = DATA, **options: Any) -> str:
    out = io.StringIO()
    print_map(Console(file=out, width=160), parse_snapshot(data), **options)
    return out.getvalue()


def svg(data: Any = DATA) -> ET.Element:
    return ET.fromstring(draw_svg(parse_snapshot(data), title="a < b & c"))


def test_the_summary_counts_blocks_by_state_and_filled_slots() -> None:
    shown = text()
    assert "device pool: 5 blocks of 4 tokens: 2 in use (1 shared), 1 cached, 1 free, 1 null" in shown
    assert "7 of 8 slots in use are filled (88%)" in shown
    assert "host pool: 2 blocks of 4 tokens: 1 in use (0 shared), 0 cached, 1 free, 0 null" in shown


def test_the_grid_has_a_cell_per_block_with_holders_and_fill() -> None:
    (row,) = [line for line in text().splitlines() if line.startswith("0  ∅∅")]
    assert row.split() == ["0", "∅∅", "CA█", "C▆", "~█", "··"]


def test_the_grid_breaks_after_its_columns() -> None:
    rows = [line for line in text(columns=2).splitlines() if line[:1].isdigit()]
    assert [row.split()[0] for row in rows] == ["0", "2", "4", "0"]


def test_each_request_has_a_line_with_its_block_table_in_logical_order() -> None:
    lines = {line.split()[1]: line for line in text().splitlines() if line[:2] in (" A", " B", " C")}
    assert lines["red"].split() == ["C", "red", "7", "1", "2(3/4)", "blue<1>"]
    assert lines["blue<1>"].split() == ["A", "blue<1>", "4", "1", "red"]
    assert lines["out"].split() == ["B", "out", "1", "host", "0(1/4)", "-"]


def test_a_line_per_block_tells_everything() -> None:
    (line,) = [line for line in text(blocks=True).splitlines() if "from slot" in line]
    wanted = "device 2 in_use C red(1) 4 … 6 14 15 16 feedbeef rows 0 … 1 from slot 1 -"
    assert " ".join(line.split()) == wanted


def test_more_than_two_holders_are_told_by_a_sign() -> None:
    owners = [{"request_id": name, "index": 1} for name in ("red", "a", "b")]
    assert "+▆" in text(changed(owners=owners))


def test_names_with_markup_are_shown_as_they_are() -> None:
    assert "[bold]x" in text(changed(owners=[{"request_id": "[bold]x", "index": 0}]))


def test_the_svg_is_well_formed_and_has_a_cell_per_slot() -> None:
    root = svg()
    assert root.find(f"{SVG}title").text == "a < b & c"  # type: ignore[union-attr]
    groups = root.findall(f"{SVG}g")
    assert len(groups) == 7
    # Block 1 has two holders, so each of its 4 slots is drawn in two halves.
    assert [len(group.findall(f"{SVG}rect")) for group in groups] == [4, 8, 4, 4, 4, 4, 4]


def test_the_svg_tells_tokens_positions_and_holders_on_hover() -> None:
    titles = [element.text or "" for element in svg().iter(f"{SVG}title")]
    assert "position 5, token 15" in titles
    held = "held by red as its block 0; held by blue<1> as its block 0"
    assert f"block 1, in_use; {held}; positions 0 … 3; key abc123" in titles


def test_the_svg_marks_the_slots_of_media() -> None:
    assert len(list(svg().iter(f"{SVG}circle"))) == 2


def test_every_request_has_a_colour_of_its_own_in_the_svg_and_shared_blocks_have_all() -> None:
    groups = svg().findall(f"{SVG}g")
    shared, red, cached = ({r.get("fill") for r in groups[i].findall(f"{SVG}rect")} for i in (1, 2, 3))
    assert len(shared) == 2
    assert red - {"#ffffff"} < shared
    assert not cached & shared


def test_an_empty_pool_is_drawn_too() -> None:
    data = {"block_size": 4, "blocks": [{"block_id": 0, "state": "null"}]}
    assert "0 in use" in text(data)
    assert len(svg(data).findall(f"{SVG}g")) == 1


#: A picture of 2 × 2 patches: three of them in block 2, the last one in the cached block 3; one in both.
PICTURE: dict[str, Any] = {"content_hash": "feedbeefcafe", "modality": "image", "size": [200, 100]}


def patches(*cells: tuple[int, int]) -> list[dict[str, float]]:
    return [{"left": c / 2, "top": r / 2, "width": 0.5, "height": 0.5} for r, c in cells]


def with_picture(**changes: Any) -> dict[str, Any]:
    data = changed(
        media=[
            {
                **PICTURE,
                "first_slot": 0,
                "num_rows": 3,
                "first_row": 0,
                "patches": patches((0, 0), (0, 1), (1, 0)),
            }
        ]
    )
    data["blocks"][3]["media"] = [
        {
            **PICTURE,
            "first_slot": 1,
            "num_rows": 2,
            "first_row": 2,
            "patches": patches((1, 0), (1, 1)),
            **changes,
        }
    ]
    return data


def test_a_picture_is_laid_out_by_the_blocks_of_its_patches() -> None:
    lines = text(with_picture()).splitlines()
    start = lines.index("image feedbeef (200 × 100): 4 rows, by block")
    assert [line.split() for line in lines[start + 1 : start + 3]] == [["2", "2"], ["2+", "3"]]


def test_frames_of_a_video_are_apart_and_what_no_block_holds_is_a_dot() -> None:
    data = changed(media=[{"content_hash": "ab", "modality": "video", "first_slot": 0, "num_rows": 3}])
    data["blocks"][2]["media"][0]["patches"] = [
        {**patch, "frame": frame}
        for frame, patch in zip((0, 0, 1), patches((0, 1), (1, 0), (0, 0)), strict=True)
    ]
    lines = text(data).splitlines()
    start = lines.index("video ab: 3 rows, by block")
    assert [line.split() for line in lines[start + 1 : start + 6]] == [
        ["frame", "0:"], ["·", "2"], ["2", "·"], ["frame", "1:"], ["2"],
    ]  # fmt: skip


def test_a_picture_whose_patches_are_unknown_is_told_by_its_rows() -> None:
    assert "media feedbeef: 2 rows, by block" in text().splitlines()


def test_the_svg_shows_in_a_slot_which_part_of_the_picture_it_stands_for() -> None:
    root = svg(with_picture())
    assert not list(root.iter(f"{SVG}circle"))
    block = root.findall(f"{SVG}g")[2]
    parts = [rect for rect in block.findall(f"{SVG}rect") if rect.get("stroke") == "none"]
    slots = [rect for rect in block.findall(f"{SVG}rect") if rect.get("width") == "10"]
    place = [
        (
            float(part.get("x", "")) - float(slot.get("x", "")),
            float(part.get("y", "")) - float(slot.get("y", "")),
        )
        for part, slot in zip(parts, slots, strict=False)
    ]
    assert place == [(1.5, 1.5), (5, 1.5), (1.5, 5)]


def test_the_svg_draws_the_picture_with_its_proportions_and_tells_blocks_on_hover() -> None:
    root = svg(with_picture())
    drawn = root.findall(f"{SVG}g")[-1]
    frame, *boxes = drawn.findall(f"{SVG}rect")
    assert (frame.get("width"), frame.get("height")) == ("240", "120")
    assert [(b.get("width"), b.get("height")) for b in boxes] == [("120", "60")] * 4
    titles = [b.findtext(f"{SVG}title") for b in boxes]
    assert titles[2] == (
        "frame 0, left 0, top 0.5, width 0.5, height 0.5: block 2 of device, block 3 of device"
    )
    assert [t.text for t in drawn.findall(f"{SVG}text")] == ["2", "2", "2+", "3"]
