"""Drawings show what the digest holds: dots in and out of the band, lanes, blocks; and they escape names."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from conformance.adapters.base import PoolState
from conformance.digest import Gap
from conformance.html.drawing import gap_svg, gap_words, timeline_svg, timeline_words
from conformance.timeline import BlockSpan, Chunk, Timeline

GAP = Gap(
    "red", "logits", 1e-5, 1e-6, (1e-5, 3.9e-5, 4.1e-5, None, float("inf")), (1.0, 7e-5, 2.0, 3.0), (2,), 9
)
TIMELINE = Timeline(
    of="free",
    requests=("a", "b<script>"),
    steps=((Chunk(0, 0, 5),), (Chunk(0, 5, 1), Chunk(1, 0, 3))),
    notes=((1, "b is <preempted>"),),
    spans=(
        BlockSpan(1, 0, 1, (0,)),
        BlockSpan(2, 0, 0, (0,)),
        BlockSpan(2, 1, 1, (0, 1)),
        BlockSpan(3, 1, 1, ()),
    ),
    num_steps=2,
    num_blocks=3,
    pool_before=None,
    pool_after=PoolState(8, 5, 2, 1),
)


def paths(svg: str) -> dict[str, str]:
    found = ET.fromstring(svg).iter("path")
    return {path.get("class", ""): path.get("d", "") for path in found}


def test_a_gap_tells_in_words_what_it_draws() -> None:
    assert gap_words(GAP) == (
        "largest error NaN M at position 4; 2 of 4 positions inside the band of 4 M; "
        "smallest margin of the truth 7 M, 1 undecided; another id came out at 2; "
        "the first 4 of 9 positions"
    )
    silent = Gap("red", "", 1e-5, 1e-6, (None,), (1.0,), (), 1)
    assert (
        gap_words(silent) == "the engine shows no numbers; smallest margin of the truth 1e+05 M, 0 undecided"
    )


def test_dots_outside_of_the_band_have_another_colour() -> None:
    drawn = paths(gap_svg(GAP))
    assert drawn["dot ok"].count("M") == 2
    assert drawn["dot off"].count("M") == 2
    assert drawn["margin"].count("M") == 4
    assert drawn["swap"].count("M") == 1


def test_a_dot_is_inside_the_band_exactly_where_the_error_is() -> None:
    drawn = paths(gap_svg(GAP))
    top = int(drawn["band"].split("H")[0].split()[1])
    heights = {
        name: [int(y) for y in re.findall(r" (-?\d+)h0", drawn[name])] for name in ("dot ok", "dot off")
    }
    assert all(y >= top for y in heights["dot ok"])
    assert all(y <= top for y in heights["dot off"])
    decided = int(drawn["decided"].split("H")[0].split()[1])
    assert decided < top, "a larger margin is needed to decide than an error is allowed"


def test_an_exact_yardstick_and_an_empty_answer_can_be_drawn() -> None:
    exact = Gap("red", "logits", 0.0, 0.0, (0.0, 1e-9), (1.0, 0.0), (), 2)
    assert paths(gap_svg(exact))["dot off"].count("M") == 1
    assert "margin" in paths(gap_svg(Gap("red", "", 1e-5, 1e-6, (), (), (), 0)))


def test_a_timeline_tells_in_words_what_it_draws() -> None:
    assert timeline_words(TIMELINE) == (
        "2 requests in 2 steps; 3 blocks used, 1 span shared; "
        "pool at the end: 5 free, 2 cached, 1 in use of 8"
    )


def test_lanes_and_blocks_have_the_colours_of_their_requests() -> None:
    svg = timeline_svg(TIMELINE)
    root = ET.fromstring(svg)
    areas = [(path.get("class"), path.get("d", "").count("M")) for path in root.iter("path")]
    lanes, blocks = areas[:2], areas[2:5]
    assert lanes == [("r0", 2), ("r1", 1)]
    assert blocks == [("cached", 1), ("r0", 3), ("r1", 1)]
    assert ("note", 1) in areas
    hints = [title.text for title in root.iter("title")]
    assert hints == ["step 0\na: 5 from 0", "step 1\na: 1 from 5\nb<script>: 3 from 0\nb is <preempted>"]


def test_names_are_text_and_never_markup() -> None:
    worst = '"><script>\x00\x1b'
    for svg in (
        gap_svg(Gap(worst, "logits", 1e-5, 1e-6, (1e-5,), (1.0,), (), 1)),
        timeline_svg(Timeline("free", (worst,), ((Chunk(0, 0, 1),),), ((0, worst),), (), 1, 0, None, None)),
    ):
        assert "<script" not in svg
        assert ET.fromstring(svg).tag == "svg"
