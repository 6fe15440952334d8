"""Draws a snapshot of a KV cache, for a person to look at: as text, and as SVG.

A snapshot is plain data, see `parse_snapshot`. Each request gets a letter and a colour. A block
shows its holders (several, where it is shared) and how far it is filled.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.etree import ElementTree as ET

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

__all__ = ["Block", "Snapshot", "SnapshotError", "draw_svg", "parse_snapshot", "print_map"]

#: Colours that differ for most kinds of sight (Okabe and Ito, 2008), then lighter ones.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800", "#8c6bb1")
_CACHED, _EMPTY, _LINE, _NULL = "#b0b0b0", "#ffffff", "#404040", "#e0e0e0"
_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_LEVELS = " ▁▂▃▄▅▆▇█"
_STATES = ("null", "free", "cached", "in_use")


class SnapshotError(ValueError):
    """The data is no snapshot of a KV cache; the message says where it is not."""


@dataclass(frozen=True, slots=True)
class Block:
    """One block.

    Attributes:
        holders: (request, index of the block in its block table).
        token_ids: tokens whose KV it holds, in order of its slots.
        first_position: position of its first slot in the sequence; None if it is nobody's.
        num_computed: slots that hold KV, from the first on.
        digits: start of its prefix key, if the prefix cache can find it.
        media: (first slot, number of rows, content hash) of images and videos.
    """

    block_id: int
    state: str
    holders: tuple[tuple[str, int], ...]
    token_ids: tuple[int, ...]
    first_position: int | None
    num_computed: int
    digits: str | None
    media: tuple[tuple[int, int, str], ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All blocks of both pools, by block id."""

    block_size: int
    blocks: tuple[Block, ...]
    host_blocks: tuple[Block, ...]

    def pools(self) -> Iterator[tuple[str, tuple[Block, ...]]]:
        """(name, blocks) of each pool that there is."""
        yield "device", self.blocks
        if self.host_blocks:
            yield "host", self.host_blocks

    def tables(self) -> dict[str, list[tuple[str, Block]]]:
        """Request → (pool, block) in logical order; requests in alphabetical order."""
        found: dict[str, list[tuple[int, str, Block]]] = {}
        for pool, blocks in self.pools():
            for block in blocks:
                for request, index in block.holders:
                    found.setdefault(request, []).append((index, pool, block))
        return {
            request: [(pool, block) for _, pool, block in sorted(rows, key=lambda row: row[0])]
            for request, rows in sorted(found.items())
        }


def parse_snapshot(data: Any) -> Snapshot:
    """Read what `minivllm.cache.KVSnapshot.as_dict` writes, or another engine in the same form.

    {"block_size": int, "blocks": [block…], "host_blocks": [block…]}, a block being {"block_id",
    "state": null | free | cached | in_use, "owners": [{"request_id", "index"}…], "token_ids",
    "first_position", "num_computed", "hash", "media": [{"first_slot", "num_rows",
    "content_hash"}…]}; all but the first two of a block may be left out.

    Raises:
        SnapshotError: the data has another form.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("block_size"), int):
        raise SnapshotError("a snapshot is a mapping with block_size, blocks and perhaps host_blocks")
    if data["block_size"] < 1:
        raise SnapshotError(f"block_size must be a positive number of tokens, got {data['block_size']}")
    pools = []
    for name in ("blocks", "host_blocks"):
        blocks = data.get(name, [] if name == "host_blocks" else None)
        if not isinstance(blocks, Sequence):
            raise SnapshotError(f"{name} must be a list of blocks, got {type(blocks).__name__}")
        pools.append(
            tuple(_block(block, f"{name}[{i}]", data["block_size"]) for i, block in enumerate(blocks))
        )
    return Snapshot(data["block_size"], pools[0], pools[1])


def _block(data: Any, where: str, block_size: int) -> Block:
    try:
        block = Block(
            block_id=int(data["block_id"]),
            state=str(data["state"]),
            holders=tuple((str(o["request_id"]), int(o["index"])) for o in data.get("owners", ())),
            token_ids=tuple(int(t) for t in data.get("token_ids", ())),
            first_position=data.get("first_position"),
            num_computed=int(data.get("num_computed", 0)),
            digits=data.get("hash"),
            media=tuple(
                (int(m["first_slot"]), int(m["num_rows"]), str(m["content_hash"]))
                for m in data.get("media", ())
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(f"{where} is no block: {type(error).__name__}: {error}") from error
    if block.state not in _STATES:
        raise SnapshotError(f"{where}: state must be one of {', '.join(_STATES)}, got {block.state!r}")
    if not 0 <= block.num_computed <= block_size:
        raise SnapshotError(f"{where}: num_computed {block.num_computed} is outside 0 … {block_size}")
    return block


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
    count = {state: sum(b.state == state for b in blocks) for state in _STATES}
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
    """Print the pools as grids, then the requests with their block tables.

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
                escape(", ".join(f"{h[:8]} from slot {s}, {n} rows" for s, n, h in block.media)) or "-",
                block.digits or "-",
            )
    return table


def _positions(block: Block) -> str:
    if block.first_position is None or not block.num_computed:
        return "-"
    return f"{block.first_position} … {block.first_position + block.num_computed - 1}"


# ---- SVG ----------------------------------------------------------------------------------------

_SLOT, _GAP, _HEAD, _MARGIN, _ROW = 10, 8, 16, 16, 20


def draw_svg(snapshot: Snapshot, *, title: str = "KV cache") -> str:
    """The pools as rows of blocks, a cell per slot, and a legend. Cells tell their token on hover.

    A cell has the colours of all who hold its block, one under the other; cached ones are grey,
    empty slots white.
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
        if any(first <= slot < first + rows for first, rows, _ in block.media):
            mark = {"cx": f"{left + _SLOT / 2:g}", "cy": f"{top + _SLOT / 2:g}", "r": "2", "fill": "#ffffff"}
            ET.SubElement(group, "circle", mark)


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
