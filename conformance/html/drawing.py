"""Drawings of a report as inline SVG: an answer's numbers beside the band, and a pass step by step.

Shapes of one colour are one path, so that a report of hundreds of cases stays small. Colours are
classes of the page's style sheet.
"""

from __future__ import annotations

import math
from collections import defaultdict
from xml.etree import ElementTree as ET

from conformance.checks.case import BAND
from conformance.digest import Gap
from conformance.timeline import Timeline

__all__ = ["COLOURS", "gap_svg", "gap_words", "timeline_svg", "timeline_words"]

#: How many colours tell requests apart; then they repeat.
COLOURS = 8

_LEFT, _TOP = 96, 14


# ---- numbers beside the band --------------------------------------------------------------------

_HEIGHT, _POINT = 132, 11


def gap_words(gap: Gap) -> str:
    """What the drawing shows, in one sentence."""
    known = [(error, i) for i, error in enumerate(gap.errors) if error is not None]
    parts = []
    if known:
        worst, at = max(known)
        inside = sum(error <= BAND * gap.M for error, _ in known)
        parts.append(
            f"largest error {_in(worst, gap.M)} M at position {at}; {inside} of {len(known)} positions "
            f"inside the band of {BAND:g} M"
        )
    else:
        parts.append("the engine shows no numbers")
    if gap.margins:
        margin = min(gap.margins)
        undecided = sum(one <= 2 * BAND * gap.M for one in gap.margins)
        parts.append(f"smallest margin of the truth {_in(margin, gap.M)} M, {undecided} undecided")
    if gap.other:
        listed = ", ".join(map(str, gap.other[:8])) + ("…" if gap.other[8:] else "")
        parts.append(f"another id came out at {listed}")
    if gap.num_positions > len(gap.margins):
        parts.append(f"the first {len(gap.margins)} of {gap.num_positions} positions")
    return "; ".join(parts)


def gap_svg(gap: Gap) -> str:
    """Errors as dots, margins of the truth as bars, both in multiples of M on a log scale, and the band."""
    errors = [None if e is None else _log(e, gap.M) for e in gap.errors]
    margins = [_log(m, gap.M) for m in gap.margins]
    values = [v for v in (*errors, *margins, math.log10(BAND), math.log10(2 * BAND)) if v is not None]
    low, high = min(-2, math.floor(min(values))), math.ceil(max(values) + 0.01)
    count = max(len(margins), len(errors), 1)
    step = min(_POINT, max(3, 640 // count))
    width = _LEFT + count * step + 12
    scale = (_HEIGHT - _TOP - 18) / (high - low)

    def y(value: float) -> int:
        return round(_TOP + (high - value) * scale)

    bottom, right = y(low), _LEFT + count * step
    svg = _svg(width, _HEIGHT, f"Request {gap.request}: {gap_words(gap)}")
    top = y(math.log10(BAND))
    ET.SubElement(svg, "path", {"class": "band", "d": f"M{_LEFT} {top}H{right}V{bottom}H{_LEFT}z"})
    decided = y(math.log10(2 * BAND))
    ET.SubElement(svg, "path", {"class": "decided", "d": f"M{_LEFT} {decided}H{right}"})
    _text(svg, _LEFT - 4, top + 8, f"{BAND:g} M band", "e")
    _text(svg, _LEFT - 4, decided - 1, f"{2 * BAND:g} M decided", "e")
    _text(svg, _LEFT - 4, bottom + 4, f"1e{low:+d} M", "e")
    _text(svg, _LEFT - 4, y(high) + 6, f"1e{high:+d} M", "e")
    for at in range(0, count, max(1, 10 * math.ceil(count / 100))):
        _text(svg, _LEFT + at * step + step // 2, bottom + 14, str(at), "m")
    bars = "".join(f"M{_LEFT + i * step + step // 2} {y(m)}V{bottom}" for i, m in enumerate(margins))
    ET.SubElement(svg, "path", {"class": "margin", "d": bars})
    inside: list[str] = []
    outside: list[str] = []
    for i, error in enumerate(errors):
        if error is not None:
            dot = f"M{_LEFT + i * step + step // 2} {y(min(error, high))}h0"
            (inside if error <= math.log10(BAND) else outside).append(dot)
    for name, dots in (("ok", inside), ("off", outside)):
        if dots:
            ET.SubElement(svg, "path", {"class": f"dot {name}", "d": "".join(dots)})
    marks = "".join(f"M{_LEFT + i * step + step // 2 - 3} 4l3 6l3-6z" for i in gap.other)
    if marks:
        ET.SubElement(svg, "path", {"class": "swap", "d": marks})
    return ET.tostring(svg, encoding="unicode")


def _log(value: float, unit: float) -> float:
    """log10 of a value in units, within what a plot can hold: nothing at all is at the bottom."""
    if math.isinf(value):
        return 12.0
    return min(12.0, math.log10(max(value / max(unit, 1e-30), 1e-3)))


def _in(value: float, unit: float) -> str:
    return "NaN" if math.isinf(value) else f"{value / max(unit, 1e-30):.3g}"


# ---- steps and blocks ---------------------------------------------------------------------------

_CELL, _LANE, _BLOCK = 12, 14, 8


def timeline_words(timeline: Timeline) -> str:
    """What the drawing shows, in one sentence."""
    shared = sum(len(span.holders) > 1 for span in timeline.spans)
    shown = len({span.block for span in timeline.spans})
    parts = [f"{_count(len(timeline.requests), 'request')} in {_count(timeline.num_steps, 'step')}"]
    if len(timeline.steps) < timeline.num_steps:
        parts[0] += f", the first {len(timeline.steps)} drawn"
    if timeline.num_blocks:
        told = f", {_count(shared, 'span')} shared" if shared else ""
        parts.append(f"{_count(timeline.num_blocks, 'block')} used{told}")
    if shown < timeline.num_blocks:
        parts[-1] += f", the first {shown} drawn"
    if timeline.pool_after is not None:
        pool = timeline.pool_after
        parts.append(
            f"pool at the end: {pool.free} free, {pool.cached} cached, {pool.in_use} in use of {pool.total}"
        )
    return "; ".join(parts)


def timeline_svg(timeline: Timeline) -> str:
    """A lane per request (tall: several tokens, low: one), below it a row per block with its holders."""
    lanes, blocks = len(timeline.requests), sorted({span.block for span in timeline.spans})
    below = _TOP + lanes * _LANE + 12
    width = _LEFT + len(timeline.steps) * _CELL + 12
    height = below + len(blocks) * _BLOCK + 6
    svg = _svg(width, height, f"Pass {timeline.of}: {timeline_words(timeline)}")
    for at in range(0, len(timeline.steps), 5):
        _text(svg, _LEFT + at * _CELL + _CELL // 2, _TOP - 4, str(at), "m")
    _lanes(svg, timeline)
    _blocks(svg, timeline, {block: below + i * _BLOCK for i, block in enumerate(blocks)})
    for i, block in enumerate(blocks):
        if i % 4 == 0:
            _text(svg, _LEFT - 4, below + i * _BLOCK + 7, f"block {block}", "e")
    _hints(svg, timeline, height)
    return ET.tostring(svg, encoding="unicode")


def _lanes(svg: ET.Element, timeline: Timeline) -> None:
    cells: dict[int, list[str]] = defaultdict(list)
    for at, chunks in enumerate(timeline.steps):
        for chunk in chunks:
            high = _LANE - 3 if chunk.tokens > 1 else 5
            x, y = _LEFT + at * _CELL, _TOP + chunk.request * _LANE + (_LANE - 2 - high)
            cells[chunk.request].append(f"M{x} {y}h{_CELL - 1}v{high}h-{_CELL - 1}z")
    for request, name in enumerate(timeline.requests):
        _text(svg, _LEFT - 4, _TOP + request * _LANE + 10, name if len(name) < 15 else f"{name[:13]}…", "e")
        if cells[request]:
            ET.SubElement(svg, "path", {"class": _colour(request), "d": "".join(cells[request])})


def _blocks(svg: ET.Element, timeline: Timeline, rows: dict[int, int]) -> None:
    cells: dict[str, list[str]] = defaultdict(list)
    for span in timeline.spans:
        x, wide = _LEFT + span.first * _CELL, (span.last - span.first + 1) * _CELL - 1
        holders = span.holders or (None,)
        high = (_BLOCK - 1) / len(holders)
        for i, holder in enumerate(holders):
            colour = "cached" if holder is None else _colour(holder)
            y = round(rows[span.block] + i * high, 1)
            cells[colour].append(f"M{x} {y:g}h{wide}v{high:.2g}h-{wide}z")
    for colour, path in sorted(cells.items()):
        ET.SubElement(svg, "path", {"class": colour, "d": "".join(path)})


def _hints(svg: ET.Element, timeline: Timeline, height: int) -> None:
    """Hovering a step tells what ran in it, and what else happened."""
    notes: dict[int, list[str]] = defaultdict(list)
    for step, note in timeline.notes:
        notes[step].append(note)
    for at, chunks in enumerate(timeline.steps):
        told = [f"{timeline.requests[c.request]}: {c.tokens} from {c.start}" for c in chunks]
        box = {"class": "hit", "x": str(_LEFT + at * _CELL), "width": str(_CELL), "height": str(height)}
        if notes[at]:
            x, y = _LEFT + at * _CELL + _CELL // 2, _TOP + len(timeline.requests) * _LANE
            ET.SubElement(svg, "path", {"class": "note", "d": f"M{x} {y}l3 6h-6z"})
        title = ET.SubElement(ET.SubElement(svg, "rect", box), "title")
        title.text = _plain("\n".join([f"step {at}", *told, *notes[at]]))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _colour(request: int) -> str:
    return f"r{request % COLOURS}"


# ---- elements -----------------------------------------------------------------------------------


def _svg(width: int, height: int, label: str) -> ET.Element:
    attributes = {"viewBox": f"0 0 {width} {height}", "width": str(width), "height": str(height)}
    return ET.Element("svg", {**attributes, "role": "img", "aria-label": _plain(label)})


def _text(svg: ET.Element, x: int, y: int, text: str, anchor: str) -> None:
    ET.SubElement(svg, "text", {"x": str(x), "y": str(y), "class": anchor}).text = _plain(text)


def _plain(text: str) -> str:
    """Without characters that XML does not allow."""
    return "".join(c if c >= " " or c == "\n" else "\ufffd" for c in text)
