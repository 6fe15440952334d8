"""One HTML page of one run or of several: everything in one file, nothing fetched, readable without scripts.

All words of engines and scenarios go through the template's escaping or through XML; besides, the
page's own policy lets no script run but the one whose hash it names.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from conformance.html.drawing import gap_svg, gap_words, timeline_svg, timeline_words
from conformance.report import telling
from conformance.saved_report import Report, SavedCase
from conformance.verdicts import Finding, Verdict

__all__ = ["render", "write_page"]

_HERE = Path(__file__).parent

#: So many failing cases stand open; more would be a wall.
_OPEN = 12

#: So many findings of one check on one request, findings, and tables of stages are shown of one case.
_MOST_ALIKE = 3
_MOST_FINDINGS = 80
_MOST_TABLES = 6


@dataclass(frozen=True, slots=True)
class _Run:
    """One report, with a name of its own among the others."""

    name: str
    report: Report

    @property
    def counts(self) -> list[tuple[Verdict, int]]:
        counted = Counter(case.verdict for case in self.report.cases)
        return [(verdict, counted[verdict]) for verdict in Verdict if counted[verdict]]

    @property
    def seconds(self) -> float:
        return sum(case.seconds for case in self.report.cases)


@dataclass(frozen=True, slots=True)
class _Triaged:
    """One reason, and what is wrong with each request for it."""

    stage: str
    told: list[str]
    causes: tuple[str, ...]
    note: str
    truth: str


@dataclass(frozen=True, slots=True)
class _Shown:
    """One case on the page. `number` makes its anchor, `open` says that it stands open at first."""

    number: int
    run: _Run
    case: SavedCase
    open: bool

    @property
    def anchor(self) -> str:
        return f"case-{self.number}"

    @property
    def model(self) -> str:
        return str(self.case.point.get("model", "?"))

    @property
    def point(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.case.point.items())

    @property
    def words(self) -> str:
        """What the text search looks through."""
        case = self.case
        told = [f"{f.check} {f.message}" for f in telling(case.findings)]
        return " ".join([case.label, self.point, case.requirement, *told]).lower()[:2000]

    @property
    def findings(self) -> list[Finding]:
        """The worst first, each once; not more than a reader can use."""
        once = {(f.verdict, f.check, f.request, f.message): f for f in self.case.findings}
        shown, alike = [], Counter[tuple[Verdict, str, str | None]]()
        for finding in sorted(once.values(), key=lambda f: -f.verdict.severity):
            kind = (finding.verdict, finding.check, finding.request)
            alike[kind] += 1
            if alike[kind] <= _MOST_ALIKE:
                shown.append(finding)
        return shown[:_MOST_FINDINGS]

    @property
    def triaged(self) -> list[_Triaged]:
        """What triage found: by stage and cause, as requests of one case mostly fail for one reason."""
        groups: dict[tuple[str, tuple[str, ...], str, str], dict[str, None]] = {}
        for finding in self.findings:
            found = _triage(finding)
            if found is not None:
                who = f"{finding.request}: " if finding.request else ""
                key = (found.stage, found.causes, found.note, found.truth)
                groups.setdefault(key, {})[who + found.text] = None
        return [
            _Triaged(stage, list(told), causes, note, truth)
            for (stage, causes, note, truth), told in groups.items()
        ]

    @property
    def stages(self) -> list[tuple[str, tuple[_Stage, ...]]]:
        """(request, table of its stages), each once."""
        tables = [(f.request or "", tuple(_stages(f))) for f in self.findings]
        return list(dict.fromkeys((who, table) for who, table in tables if table))[:_MOST_TABLES]

    @property
    def stage(self) -> str:
        return next((t.stage for t in map(_triage, self.case.findings) if t is not None and t.stage), "")


@dataclass(frozen=True, slots=True)
class _Row:
    """One requirement: the scenario that holds it, and its cases by run."""

    number: int
    first: SavedCase
    cells: tuple[tuple[_Shown, ...], ...]

    @property
    def cases(self) -> list[_Shown]:
        return [shown for cell in self.cells for shown in cell]


def write_page(path: Path, reports: Sequence[Report]) -> None:
    """Write the page; half a surrogate pair, which an engine's text may hold, is written as its escape."""
    path.write_text(render(reports), encoding="utf-8", errors="backslashreplace")


def render(reports: Sequence[Report]) -> str:
    """The page of at least one report; several stand side by side, a column for each engine."""
    runs = _named([part for report in reports for part in report.by_engine()])
    areas = _areas(runs)
    shown = [case for rows in areas.values() for row in rows for case in row.cases]
    failed = [one for one in shown if one.case.verdict.fails_run]
    failed.sort(key=lambda one: (-one.case.verdict.severity, one.case.level != "must", one.case.label))
    script, style = _asset("report.js"), _asset("report.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    page: str = _template().render(
        runs=runs,
        areas=areas,
        failed=failed,
        total=len(shown),
        verdicts=[verdict for verdict in Verdict if any(one.case.verdict is verdict for one in shown)],
        models=sorted({one.model for one in shown}),
        script=Markup(script),  # our own file, as is: its hash is what the policy allows
        style=Markup(style),
        script_hash=digest,
    )
    return page


def _named(reports: Sequence[Report]) -> list[_Run]:
    seen: Counter[str] = Counter()
    runs = []
    for report in reports:
        seen[report.title] += 1
        number = f" ({seen[report.title]})" if seen[report.title] > 1 else ""
        runs.append(_Run(report.title + number, report))
    return runs


def _areas(runs: Sequence[_Run]) -> dict[str, list[_Row]]:
    """Area → its requirements, both in order of name."""
    grouped: dict[str, dict[str, list[list[SavedCase]]]] = defaultdict(dict)
    for at, run in enumerate(runs):
        for case in run.report.cases:
            cells = grouped[case.area].setdefault(case.scenario, [[] for _ in runs])
            cells[at].append(case)
    areas: dict[str, list[_Row]] = {}
    number = opened = 0
    for area, scenarios in sorted(grouped.items()):
        rows = areas.setdefault(area, [])
        for row, (_, cells) in enumerate(sorted(scenarios.items())):
            made = []
            for run, cases in zip(runs, cells, strict=True):
                cell = []
                for case in cases:
                    number += 1
                    stands_open = case.verdict.fails_run and opened < _OPEN
                    opened += stands_open
                    cell.append(_Shown(number, run, case, stands_open))
                made.append(tuple(cell))
            first = next(cell[0].case for cell in made if cell)
            rows.append(_Row(row, first, tuple(made)))
    return areas


@dataclass(frozen=True, slots=True)
class _Triage:
    """What triage found about one finding; see `conformance.triage.Suspect` and `conformance.retrace`."""

    text: str
    stage: str
    causes: tuple[str, ...]
    note: str
    truth: str


def _triage(finding: Finding) -> _Triage | None:
    """None if triage did not look."""
    found = finding.detail.get("triage")
    if found is None:
        return None
    if not isinstance(found, Mapping):
        return _Triage(str(found), "", (), "", "")
    text, stage, note, truth = (str(found.get(name) or "") for name in ("text", "stage", "note", "truth"))
    return _Triage(text, stage, tuple(map(str, found.get("causes") or ())), note, truth)


#: Name, largest error in multiples of its yardstick (None where equality is the rule), inside its band.
_Stage = tuple[str, float | None, bool]


def _stages(finding: Finding) -> list[_Stage]:
    """The stages that triage looked at, or the check of stages."""
    if finding.check == "stages_within_band":
        inside: list[_Stage] = [
            (str(n), float(v), True) for n, v in finding.detail.items() if isinstance(v, int | float)
        ]
        wrong = finding.detail.get("stage")
        return inside if wrong is None else [*inside, (str(wrong), finding.size, False)]
    found = finding.detail.get("triage")
    stages = found.get("stages", ()) if isinstance(found, Mapping) else ()
    return [(str(s["stage"]), s["size"], bool(s["inside"])) for s in stages]


def _web(address: str) -> bool:
    """Whether an address may become a link."""
    return address.startswith(("https://", "http://"))


@functools.cache
def _template() -> Any:
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(
        gap_svg=lambda gap: Markup(gap_svg(gap)),  # XML written by a library, escaped there
        gap_words=gap_words,
        timeline_svg=lambda timeline: Markup(timeline_svg(timeline)),  # the same
        timeline_words=timeline_words,
        telling=telling,
        letter=lambda verdict: "X" if verdict is Verdict.WAIVED else verdict.value[0],  # W is WEAK
    )
    environment.tests["web"] = _web
    return environment.get_template("report.html.j2")


@functools.cache
def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")
