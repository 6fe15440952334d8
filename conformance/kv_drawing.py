"""Draws a snapshot of a KV cache, for a person to look at: as text, and as SVG.

A snapshot is plain data, see `conformance.kv_snapshot`. Each request gets a letter and a colour. A
block shows its holders (several, where it is shared) and how far it is filled; a picture shows which
block holds which part of it.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from xml.etree import ElementTree as ET

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from conformance.kv_pictures import Grid, Picture, pictures_of
from conformance.kv_snapshot import Block, Patch, Snapshot

__all__ = ["draw_svg", "print_map"]

#: Colours that differ for most kinds of sight (Okabe and Ito, 2008), then lighter ones.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#8c6bb1")
_CACHED, _EMPTY, _LINE, _NULL = "#b0b0b0", "#ffffff", "#404040", "#e0e0e0"
_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_LEVELS = " ▁▂▃▄▅▆▇█"


# ---- who is who ---------------------------------------------------------------------------------


class _Legend:
    """A letter and a colour for each request."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.requests = list(snapshot.tables())
        self._number = {request: i for i, request in enumerate(self.requests)}

    def letter(self, request: str) -> str:
        number = self._number[request]
        return _LETTERS[number] if number < len(_LETTERS) else "#"

    def colour(self, request: str) -> str:
        return _COLOURS[self._number[request] % len(_COLOURS)]


def _summary(name: str, blocks: Sequence[Block], block_size: int) -> str:
    count = {state: sum(b.state == state for b in blocks) for state in ("null", "free", "cached", "in_use")}
    shared = sum(len(b.holders) > 1 for b in blocks)
    used = sum(b.num_computed for b in blocks if b.state == "in_use")
    room = count["in_use"] * block_size
    return (
        f"{name} pool: {len(blocks)} blocks of {block_size} tokens: {count['in_use']} in use"
        f" ({shared} shared), {count['cached']} cached, {count['free']} free, {count['null']} null;"
        f" {used} of {room} slots in use are filled" + (f" ({used / room:.0%})" if room else "")
    )


# ---- text ---------------------------------------------------------------------------------------


def print_map(console: Console, snapshot: Snapshot, *, blocks: bool = False, columns: int = 16) -> None:
    """Print the pools as grids, the requests with their block tables, and the pictures by block.

    Args:
        blocks: also print a line per block that is not free.
        columns: blocks per row of a grid.
    """
    legend = _Legend(snapshot)
    for name, pool in snapshot.pools():
        console.print(_summary(name, pool, snapshot.block_size), markup=False)
        width = len(str(max((b.block_id for b in pool), default=0)))
        for start in range(0, len(pool), columns):
            row = Text(f"{pool[start].block_id:>{width}}  ")
            for block in pool[start : start + columns]:
                row.append_text(_cell(block, legend, snapshot.block_size))
                row.append(" ")
            console.print(row)
    console.print(
        "A█ held by A and full, A▄ half full, AB█ shared by A and B, +█ shared by more, "
        "~█ cached, ·· free, ∅∅ the null block",
        style="dim",
        markup=False,
    )
    if legend.requests:
        console.print(_request_table(snapshot, legend))
    for picture in pictures_of(snapshot):
        _print_picture(console, picture, legend)
    if blocks:
        console.print(_block_table(snapshot, legend))


def _cell(block: Block, legend: _Legend, block_size: int) -> Text:
    level = _LEVELS[-(-block.num_computed * (len(_LEVELS) - 1) // block_size)]
    if block.state == "null":
        return Text("∅∅ ", style="dim")
    if block.state == "free":
        return Text("·· ", style="dim")
    if block.state == "cached":
        return Text(f"~{level} ", style=_CACHED)
    if len(block.holders) == 1:
        request = block.holders[0][0]
        return Text(f"{legend.letter(request)}{level} ", style=f"bold {legend.colour(request)}")
    cell = Text()
    shown = block.holders if len(block.holders) == 2 else ()
    for request, _ in shown:
        cell.append(legend.letter(request), style=f"bold {legend.colour(request)}")
    cell.append(f"{'' if shown else '+'}{level}{'' if shown else ' '}", style="bold")
    return cell


def _request_table(snapshot: Snapshot, legend: _Legend) -> Table:
    table = Table(
        "", "request", "tokens", "block table (filled slots, where not full)", "shared with", box=None
    )
    for request, rows in snapshot.tables().items():
        tokens = sum(block.num_computed for _, block in rows)
        cells = []
        for pool, block in rows:
            cell = f"{'host ' if pool == 'host' else ''}{block.block_id}"
            full = block.num_computed == snapshot.block_size
            cells.append(cell if full else f"{cell}({block.num_computed}/{snapshot.block_size})")
        others = sorted({other for _, block in rows for other, _ in block.holders} - {request})
        table.add_row(
            Text(legend.letter(request), style=f"bold {legend.colour(request)}"),
            escape(request),
            str(tokens),
            " ".join(cells),
            escape(", ".join(others)) or "-",
        )
    return table


def _block_table(snapshot: Snapshot, legend: _Legend) -> Table:
    table = Table(
        "pool", "block", "state", "held by (index)", "positions", "tokens", "media", "key", box=None
    )
    for name, pool in snapshot.pools():
        for block in pool:
            if block.state in ("free", "null"):
                continue
            holders = ", ".join(f"{legend.letter(r)} {r}({i})" for r, i in block.holders)
            table.add_row(
                name,
                str(block.block_id),
                block.state,
                escape(holders) or "-",
                _positions(block),
                " ".join(map(str, block.token_ids)),
                escape(", ".join(_media_text(block))) or "-",
                block.digits or "-",
            )
    return table


def _media_text(block: Block) -> list[str]:
    return [
        f"{m.content_hash[:8]} rows {m.first_row} … {m.first_row + m.num_rows - 1} from slot {m.first_slot}"
        for m in block.media
    ]


def _print_picture(console: Console, picture: Picture, legend: _Legend) -> None:
    """The block of each patch, laid out as the picture is; "+" where several blocks hold it."""
    console.print(f"{picture.title}, by block", markup=False)
    for grid in picture.grids():
        if grid.frame or picture.modality == "video":
            console.print(f"frame {grid.frame}:", style="dim", markup=False)
        width = max(len(_block_name(picture, patch)) for row in grid.cells for patch in row)
        for row in grid.cells:
            line = Text("  ")
            for patch in row:
                style = _holder_colour(picture, patch, legend)
                line.append(f"{_block_name(picture, patch):>{width}} ", style=style)
            console.print(line)


def _block_name(picture: Picture, patch: Patch | None) -> str:
    held = picture.holders(patch) if patch is not None else []
    if not held:
        return "·"
    return held[0].name + ("+" if len(held) > 1 else "")


def _holder_colour(picture: Picture, patch: Patch | None, legend: _Legend) -> str:
    """The colour of the first request that holds a block with the patch; grey if none does."""
    held = picture.holders(patch) if patch is not None else []
    requests = [request for one in held for request, _ in one.block.holders]
    return legend.colour(requests[0]) if requests else _CACHED


def _positions(block: Block) -> str:
    if block.first_position is None or not block.num_computed:
        return "-"
    return f"{block.first_position} … {block.first_position + block.num_computed - 1}"


# ---- SVG ----------------------------------------------------------------------------------------

_SLOT, _GAP, _HEAD, _MARGIN, _ROW = 10, 8, 16, 16, 20
#: The longer side of a drawn picture.
_PICTURE = 240


def draw_svg(snapshot: Snapshot, *, title: str = "KV cache") -> str:
    """The pools as rows of blocks, a cell per slot, the pictures, and a legend.

    A cell has the colours of all who hold its block, one under the other; cached ones are grey,
    empty slots white. In the cell of a visual token a small picture shows which part it stands for
    (a dot if that is unknown). Below, each picture has the blocks of its parts written on it. Cells
    and parts tell more on hover.
    """
    legend = _Legend(snapshot)
    block_width = min(snapshot.block_size, 16) * _SLOT
    slot_rows = -(-snapshot.block_size // 16)
    block_height = _HEAD + slot_rows * _SLOT
    columns = max(1, min(16, 1100 // (block_width + _GAP)))
    width = 2 * _MARGIN + max(columns * (block_width + _GAP), 560)
    svg = ET.Element(
        "svg", {"xmlns": "http://www.w3.org/2000/svg", "font-family": "monospace", "font-size": "10"}
    )
    ET.SubElement(svg, "title").text = title
    y = _MARGIN
    _write(svg, _MARGIN, y + 8, title, size=13)
    y += _ROW
    for name, pool in snapshot.pools():
        _write(svg, _MARGIN, y + 8, _summary(name, pool, snapshot.block_size))
        y += _ROW
        for i, block in enumerate(pool):
            x = _MARGIN + i % columns * (block_width + _GAP)
            top = y + i // columns * (block_height + _GAP)
            _draw_block(svg, x, top, block, legend, snapshot.block_size)
        y += -(-len(pool) // columns) * (block_height + _GAP) + _GAP
    for picture in pictures_of(snapshot):
        y = _draw_picture(svg, y, picture, legend)
    for request, rows in snapshot.tables().items():
        ET.SubElement(svg, "rect", _box(_MARGIN, y, 12, 12, legend.colour(request)))
        tokens = sum(block.num_computed for _, block in rows)
        table = " ".join(f"{'host ' if pool == 'host' else ''}{block.block_id}" for pool, block in rows)
        _write(
            svg,
            _MARGIN + 18,
            y + 10,
            f"{legend.letter(request)}  {request}: {tokens} tokens in blocks {table}",
        )
        y += _ROW
    for colour, meaning in ((_CACHED, "cached: nobody holds it, a later prompt may"), (_EMPTY, "empty slot")):
        ET.SubElement(svg, "rect", _box(_MARGIN, y, 12, 12, colour))
        _write(svg, _MARGIN + 18, y + 10, meaning)
        y += _ROW
    y += _MARGIN
    svg.set("width", str(width))
    svg.set("height", str(y))
    svg.set("viewBox", f"0 0 {width} {y}")
    background = {"width": str(width), "height": str(y), "fill": "#ffffff"}
    svg.insert(1, ET.Element("rect", background))
    ET.indent(svg)
    return ET.tostring(svg, encoding="unicode") + "\n"


def _draw_block(svg: ET.Element, x: int, y: int, block: Block, legend: _Legend, block_size: int) -> None:
    group = ET.SubElement(svg, "g")
    holders = "+".join(legend.letter(request) for request, _ in block.holders)
    label = {"null": "null", "free": "", "cached": "cached"}.get(block.state, holders)
    _write(group, x, y + 11, f"{block.block_id} {label}".strip())
    ET.SubElement(group, "title").text = _tooltip(block)
    colours = [legend.colour(request) for request, _ in block.holders] or [_CACHED]
    for slot in range(block_size):
        left, top = x + slot % 16 * _SLOT, y + _HEAD + slot // 16 * _SLOT
        if slot >= block.num_computed:
            ET.SubElement(
                group, "rect", _box(left, top, _SLOT, _SLOT, _NULL if block.state == "null" else _EMPTY)
            )
            continue
        height = _SLOT / len(colours)
        for i, colour in enumerate(colours):
            ET.SubElement(group, "rect", _box(left, top + i * height, _SLOT, height, colour))
        if slot < len(block.token_ids):
            position = "" if block.first_position is None else f"position {block.first_position + slot}, "
            ET.SubElement(group[-1], "title").text = f"{position}token {block.token_ids[slot]}"
        for rows in block.media:
            if rows.first_slot <= slot < rows.first_slot + rows.num_rows:
                _mark(group, left, top, rows.patch(slot))


def _mark(group: ET.Element, left: int, top: int, patch: Patch | None) -> None:
    """What part of its picture a slot stands for: a frame with that part filled; or a dot."""
    if patch is None:
        mark = {"cx": f"{left + _SLOT / 2:g}", "cy": f"{top + _SLOT / 2:g}", "r": "2", "fill": "#ffffff"}
        ET.SubElement(group, "circle", mark)
        return
    inner = _SLOT - 3
    frame = _box(left + 1.5, top + 1.5, inner, inner, "none") | {"stroke": "#ffffff"}
    ET.SubElement(group, "rect", frame)
    part = _box(
        left + 1.5 + patch.left * inner,
        top + 1.5 + patch.top * inner,
        max(patch.width * inner, 0.5),
        max(patch.height * inner, 0.5),
        "#ffffff",
    )
    ET.SubElement(group, "rect", part | {"stroke": "none"})


def _draw_picture(svg: ET.Element, y: int, picture: Picture, legend: _Legend) -> int:
    """One frame per group of patches, side by side; returns where the next thing goes."""
    _write(svg, _MARGIN, y + 8, f"{picture.title}, by block")
    y += _ROW
    width, height = picture.size or (1, 1)
    scale = _PICTURE / max(width, height)
    shown = max(width * scale, 16), max(height * scale, 16)
    x, bottom = _MARGIN, y
    for grid in picture.grids():
        if x > _MARGIN and x + shown[0] > 1100:
            x, y = _MARGIN, bottom
        _draw_grid(svg, x, y, shown, picture, grid, legend)
        x += int(shown[0]) + _GAP
        bottom = max(bottom, y + int(shown[1]) + _GAP)
    return bottom + _GAP


def _draw_grid(
    svg: ET.Element,
    x: int,
    y: int,
    shown: tuple[float, float],
    picture: Picture,
    grid: Grid,
    legend: _Legend,
) -> None:
    group = ET.SubElement(svg, "g")
    ET.SubElement(group, "rect", _box(x, y, shown[0], shown[1], _EMPTY))
    for patch in (patch for row in grid.cells for patch in row if patch is not None):
        left, top = x + patch.left * shown[0], y + patch.top * shown[1]
        wide, high = patch.width * shown[0], patch.height * shown[1]
        colour = _holder_colour(picture, patch, legend)
        box = ET.SubElement(group, "rect", _box(left, top, wide, high, colour) | {"fill-opacity": "0.6"})
        held = picture.holders(patch)
        where = ", ".join(f"block {one.name} of {one.pool}" for one in held)
        ET.SubElement(box, "title").text = (
            f"frame {patch.frame}, left {patch.left:.3g}, top {patch.top:.3g}, width {patch.width:.3g},"
            f" height {patch.height:.3g}: {where}"
        )
        if wide >= 14 and high >= 10:
            _write(group, int(left + 1), int(top + min(high, 11) - 1), _block_name(picture, patch), size=8)


def _tooltip(block: Block) -> str:
    parts = [f"block {block.block_id}, {block.state}"]
    parts += [f"held by {request} as its block {index}" for request, index in block.holders]
    parts += [f"positions {_positions(block)}"] if block.num_computed else []
    parts += [f"key {block.digits}"] if block.digits else []
    return "; ".join(parts)


def _write(parent: ET.Element, x: int, y: int, text: str, *, size: int | None = None) -> None:
    attributes = {"x": str(x), "y": str(y), "fill": "#000000"}
    if size is not None:
        attributes["font-size"] = str(size)
    ET.SubElement(parent, "text", attributes).text = text


def _box(x: float, y: float, width: float, height: float, fill: str) -> dict[str, str]:
    return {
        "x": f"{x:g}",
        "y": f"{y:g}",
        "width": f"{width:g}",
        "height": f"{height:g}",
        "fill": fill,
        "stroke": _LINE,
        "stroke-width": "0.5",
    }
