"""The page is whole, self-contained, and harmless whatever an engine says; it is read as a browser would."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import conformance.html
from conformance import EDITION, REPORT_SCHEMA
from conformance.digest import Digest, Gap
from conformance.html.page import render
from conformance.saved_report import EngineName, Report, SavedCase, SavedWaiver, StaleWaiver
from conformance.thumbnails import Thumbnail
from conformance.timeline import BlockSpan, Chunk, Timeline
from conformance.verdicts import Finding, Power, Verdict

WORST = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"' onclick='alert(1) {{ 7*7 }}"
VOID = {"meta", "link", "img", "br", "input"}
PIXEL = "data:image/png;base64,iVBORw0KGgo="
STEPS = Timeline(
    "free", ("one",), ((Chunk(0, 0, 3),),), ((0, "one ends"),), (BlockSpan(1, 0, 0, (0,)),), 1, 1, None, None
)
DIGEST = Digest(
    operations=("submit one", "run"),
    timelines=(STEPS,),
    gaps=(Gap("one", "logits", 1e-5, 1e-6, (1e-6,), (1.0,), (), 1),),
    pictures=(
        Thumbnail(("one",), "shapes/a.png", (8, 4), PIXEL),
        Thumbnail(("one",), "broken/b.png", None, ""),
    ),
)
TRIAGE = {
    "stage": "k.0",
    "text": "k.0: row 3 is off",
    "causes": ["rope"],
    "truth": "the golden record",
    "stages": [
        {"stage": "positions", "size": None, "inside": True},
        {"stage": "k.0", "size": 1e6, "inside": False},
    ],
}


class Tree(HTMLParser):
    """Checks that tags nest, and keeps them: (tag, attributes), and all text outside of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    def all(self, tag: str) -> Iterator[dict[str, str]]:
        return (attributes for name, attributes in self.tags if name == tag)


def case(verdict: Verdict = Verdict.PASS, name: str = "a/one", **changes: Any) -> SavedCase:
    made = SavedCase(
        scenario=name,
        label=name,
        area=name.partition("/")[0],
        requirement="It answers.",
        source=("https://example.org/1",),
        level="must",
        point={"model": "toy", "dtype": "float32"},
        verdict=verdict,
        seconds=1.0,
        waiver=None,
        reproduce=None,
        power=Power(("tokens",), {"bits": "off"}, 9, 8, 0),
        findings=(Finding(verdict, "tokens_match_golden", "one", "position 3"),),
        digest=DIGEST,
    )
    return replace(made, **changes)


def report(*cases: SavedCase, name: str = "fake", **changes: Any) -> Report:
    made = Report(
        schema=REPORT_SCHEMA,
        suite=EDITION,
        failed=any(c.verdict.fails_run for c in cases),
        engine=EngineName(name, "1.2"),
        environment={"torch": "2.13"},
        cases=cases,
        stale_waivers=(),
        power="Power: of 1 cases judged, some.",
        seeded_faults="Seeded faults: 1 of 2 would have shown.",
    )
    return replace(made, **changes)


@pytest.fixture(scope="module")
def failed() -> SavedCase:
    finding = Finding(
        Verdict.FAIL, "tokens_match_golden", "one", "position 3", 3, 12.5, "tokens", {"triage": TRIAGE}
    )
    return case(Verdict.FAIL, "b/two", findings=(finding, finding), reproduce="conformance run b/two")


@pytest.fixture(scope="module")
def page(failed: SavedCase) -> str:
    stale = (StaleWaiver(4, "c/*", "no scenario has this id"),)
    return render([report(case(), failed, stale_waivers=stale)])


def test_nothing_is_fetched_from_anywhere(page: str) -> None:
    tree = Tree(page)
    assert [
        tag for tag, _ in tree.tags if tag in ("iframe", "object", "embed", "base", "audio", "video")
    ] == []
    assert all(link["href"].startswith("data:") for link in tree.all("link"))
    assert [image["src"] for image in tree.all("img")] == [PIXEL] * 2
    assert all("src" not in script for script in tree.all("script"))
    assert not re.search(r"url\(|@import", page)
    [policy] = [m["content"] for m in tree.all("meta") if m.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith(
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-"
    )


def test_the_only_script_is_ours_and_the_policy_names_its_hash(page: str) -> None:
    [script] = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in page or f"script-src 'sha256-{digest}'" in page


def test_no_word_of_an_engine_or_a_scenario_becomes_markup() -> None:
    triage = {**TRIAGE, "stage": WORST, "text": WORST, "causes": [WORST], "note": WORST}
    finding = Finding(Verdict.FAIL, WORST, WORST, WORST, detail={"triage": triage})
    worst = case(
        Verdict.FAIL,
        WORST,
        requirement=WORST,
        source=("javascript:alert(1)", WORST),
        point={"model": WORST},
        findings=(finding,),
        reproduce=WORST,
        power=Power((WORST,), {WORST: WORST}),
        digest=replace(
            DIGEST,
            operations=(WORST,),
            trouble=(WORST,),
            pictures=(Thumbnail((WORST,), WORST, (1, 1), PIXEL),),
            gaps=(replace(DIGEST.gaps[0], request=WORST),),
        ),
    )
    made = report(worst, name=WORST, environment={WORST: WORST}, power=WORST, seeded_faults=WORST)
    tree = Tree(render([made, made]))
    assert len(list(tree.all("script"))) == 1
    assert not [name for _, attributes in tree.tags for name in attributes if name.startswith("on")]
    assert {image["src"] for image in tree.all("img")} == {PIXEL}
    assert not [a for a in tree.all("a") if a["href"].startswith("javascript")]
    assert WORST in "".join(tree.text)


def test_a_failure_stands_on_top_with_its_stage_and_open_with_its_command(page: str) -> None:
    text = Tree(page).words
    assert text.index("What failed") < text.index("Requirements") < text.index("Cases")
    assert "FAIL b/two first wrong stage k.0 tokens_match_golden one: position 3" in text
    assert "fake 1.2 FAILED" in text
    assert "conformance run b/two" in text
    assert "one: k.0: row 3 is off" in text
    assert "positions equal k.0 1e+06 outside" in text
    assert "(12.5 × the yardstick)" in text
    assert text.count("k.0: row 3 is off") == 1, "two findings share their triage"
    assert "STALE waiver on line 4 (c/*): no scenario has this id" in text
    opened = [d["data-verdict"] for d in Tree(page).all("details") if "open" in d]
    assert opened == ["FAIL"]


def test_the_header_has_edition_counts_power_and_environment(page: str) -> None:
    text = Tree(page).words
    assert f"PASS 1 FAIL 1 of 2 cases, 2 s, suite {EDITION}" in text
    assert "Power: of 1 cases judged, some. Seeded faults: 1 of 2 would have shown." in text
    assert "Environment torch 2.13" in text


def test_every_square_of_the_matrix_leads_to_its_case(page: str) -> None:
    tree = Tree(page)
    squares = [a for a in tree.all("a") if "sq" in a.get("class", "").split()]
    assert [s["title"] for s in squares] == ["PASS a/one", "FAIL b/two"]
    anchors = [attributes["id"] for _, attributes in tree.tags if "id" in attributes]
    assert len(anchors) == len(set(anchors))
    internal = [a["href"].removeprefix("#") for a in tree.all("a") if a["href"].startswith("#")]
    assert set(internal) <= set(anchors)
    assert {s["data-case"] for s in squares} == {
        d["data-case"] for d in tree.all("details") if "data-case" in d
    }


def test_several_runs_stand_side_by_side_by_requirement(failed: SavedCase) -> None:
    tree = Tree(
        render(
            [report(case(), failed), report(replace(failed, verdict=Verdict.PASS), name="other"), report()]
        )
    )
    text = tree.words
    assert "Requirement fake 1.2 other 1.2 fake 1.2 (2)" in text
    assert "a/one It answers. P not run not run" in text
    assert "b/two It answers. F P not run" in text
    engines = [d["data-engine"] for d in tree.all("details") if "data-engine" in d]
    assert engines == ["fake 1.2", "fake 1.2", "other 1.2"]


def test_filters_appear_only_where_scripts_run_and_everything_has_a_label(page: str) -> None:
    tree = Tree(page)
    [form] = list(tree.all("form"))
    assert "hidden" in form
    assert [i["value"] for i in tree.all("input") if i["name"] == "verdict"] == ["PASS", "FAIL"]
    assert [s["name"] for s in tree.all("select")] == ["area", "model"]
    controls = sum(tag in ("select", "input") for tag, _ in tree.tags)
    assert controls == sum(tag == "label" for tag, _ in tree.tags)
    assert all(image["alt"] for image in tree.all("img"))
    assert all(svg["aria-label"] for svg in tree.all("svg"))


def test_a_waived_case_says_why_and_a_case_that_did_not_run_has_no_drawings() -> None:
    waived = case(Verdict.WAIVED, waiver=SavedWaiver("known", "https://example.org/9"))
    text = Tree(render([report(waived, case(Verdict.SKIP, "a/skip", digest=None))])).words
    assert "Waived: known (https://example.org/9)" in text
    assert text.count("Pass free") == 1


def test_the_letters_of_the_squares_are_distinct() -> None:
    verdicts = [verdict for verdict in Verdict if verdict is not Verdict.STALE]  # that is a waiver's
    page = render([report(*(case(verdict, f"a/{verdict.value}") for verdict in verdicts))])
    letters = re.findall(r'<a class="sq (\w+)"[^>]*>(.)</a>', page)
    assert {name for name, _ in letters} == {verdict.value for verdict in verdicts}
    assert len({letter for _, letter in letters}) == len(verdicts)


def test_stages_are_shown_of_triage_and_of_the_check_of_stages() -> None:
    right = Finding(Verdict.PASS, "stages_within_band", "one", "inside", detail={"k.0": 1.25})
    wrong = Finding(
        Verdict.FAIL, "stages_within_band", "two", "v.0 off", size=9.0, detail={"stage": "v.0", "k.0": 0.5}
    )
    told = Finding(Verdict.FAIL, "tokens_match_golden", "six", "no", detail={"triage": "no stages here"})
    words = Tree(render([report(case(Verdict.FAIL, findings=(right, wrong, told)))])).words
    assert "one stage error / yardstick band 4 k.0 1.25" in words
    assert "two stage error / yardstick band 4 k.0 0.5 v.0 9 outside" in words
    assert "six: no stages here" in words


def test_a_case_with_hundreds_of_findings_stays_readable() -> None:
    findings = tuple(Finding(Verdict.FAIL, "tokens_match_golden", "one", f"position {i}") for i in range(300))
    text = Tree(render([report(case(Verdict.FAIL, findings=findings))])).words
    assert "position 2" in text
    assert "position 3" not in text
    assert "300 findings in all" in text


def test_a_run_of_the_default_size_stays_small() -> None:
    steps = tuple((Chunk(0, i, 1), Chunk(1, i, 1)) for i in range(48))
    spans = tuple(BlockSpan(block, step, step + 5, (0,)) for block in range(30) for step in (0, 6))
    timeline = Timeline("free", ("one", "two"), steps, (), spans, 48, 30, None, None)
    gaps = (Gap("one", "logits", 1e-5, 1e-6, (1e-6,) * 32, (1.0,) * 32, (), 32),) * 3
    digest = replace(DIGEST, timelines=(timeline,), gaps=gaps)
    cases = [case(name=f"a/{i}", digest=digest) for i in range(480)]
    assert len(render([report(*cases)]).encode()) < 10e6


def test_the_templates_lie_beside_their_module_so_that_a_wheel_carries_them() -> None:
    folder = Path(conformance.html.__file__).parent
    assert {"report.html.j2", "report.css", "report.js"} <= {path.name for path in folder.iterdir()}
