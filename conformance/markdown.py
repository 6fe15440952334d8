"""Summaries in Markdown, for the page of a CI job: what failed first, then what could have been seen."""

from __future__ import annotations

import html
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance.compare import Comparison, Kind
from conformance.report import telling, why_skipped
from conformance.saved_report import Report, SavedCase
from conformance.verdicts import Finding, Verdict

__all__ = ["compare_markdown", "run_markdown", "write_markdown"]

#: Cases told in full; GitHub refuses summaries above 1 MiB. The others are named.
_IN_FULL = 40
_NAMED = 500

#: Characters of one message.
_LONGEST = 600

#: GitHub's file for the summary of a step: what is in it already stays.
_STEP_SUMMARY = "GITHUB_STEP_SUMMARY"


def write_markdown(path: Path, text: str) -> None:
    """Write a summary in place of what is there; append it to the file that $GITHUB_STEP_SUMMARY names.

    Half a surrogate pair, which an engine's text may hold and UTF-8 does not, is written as its escape.
    """
    summary = os.environ.get(_STEP_SUMMARY)
    append = summary is not None and Path(summary).absolute() == path.absolute()
    with path.open("a" if append else "w", encoding="utf-8", errors="backslashreplace") as file:
        file.write(text)


def run_markdown(report: Report) -> str:
    """One run: the verdict, every failure with its stage and command, areas, power, what was skipped."""
    word = "FAILED" if report.failed else "passed"
    counts = Counter(case.verdict for case in report.cases)
    told = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict])
    seconds = sum(case.seconds for case in report.cases)
    lines = [
        f"# {_text(report.title)}: {word}",
        "",
        f"Suite {_text(report.suite)}, {len(report.cases)} cases: {told or 'none'}; {seconds:.0f} s.",
        "",
    ]
    failed = sorted(
        (case for case in report.cases if case.verdict.fails_run),
        key=lambda case: (-case.verdict.severity, case.level != "must"),
    )
    for case in failed[:_IN_FULL]:
        lines += [*_failure(case), ""]
    lines += _named("More that failed", failed[_IN_FULL:])
    if report.stale_waivers:
        lines += ["## Stale waivers", ""]
        lines += [
            f"- line {one.line} ({_text(one.scenario)}): {_text(one.why)}" for one in report.stale_waivers
        ]
        lines.append("")
    lines += _areas(report.cases)
    lines += [*_power(report), ""]
    skipped = Counter(why_skipped(case.findings) for case in report.cases if case.verdict is Verdict.SKIP)
    if skipped:
        lines += ["## Skipped", ""]
        lines += [f"- {count}: {_text(why)}" for why, count in skipped.most_common(20)] + [""]
    return "\n".join(lines)


def compare_markdown(found: Comparison) -> str:
    """Two runs: what regressed in full, the rest by name."""
    worse = "regressed" if found.of(Kind.REGRESSION) else "a new case fails"
    words = {0: "no regression", 1: worse, 3: "nothing in common"}
    lines = [f"# Compared: {words[found.status]}", "", f"{_text(found.summary)}.", ""]
    if found.remarks:
        lines += [f"- {_text(remark)}" for remark in found.remarks] + [""]
    for kind in Kind:
        group = found.of(kind)
        if group:
            lines += [f"## {kind.value}", ""]
        for one in group[:_NAMED]:
            lines.append(f"- {_code(one.name)} {one.verdicts}" + (f"<br>{_text(one.why)}" if one.why else ""))
            if one.fails and one.reproduce:
                lines += _block(one.reproduce, "  ")
        if group[_NAMED:]:
            lines.append(f"- and {len(group) - _NAMED} more")
        lines += [""] if group else []
    return "\n".join(lines)


# ---- parts --------------------------------------------------------------------------------------


def _failure(case: SavedCase) -> Iterator[str]:
    should = " (should)" if case.level == "should" else ""
    yield f"## {case.verdict.value} {_code(case.label)}{should}"
    yield ""
    yield _text(case.requirement)
    yield ""
    told: set[tuple[str | None, str]] = set()
    for finding in telling(case.findings):
        who = f" {_code(finding.request)}" if finding.request else ""
        head = f"- {finding.verdict.value} **{_text(finding.check)}**{who}"
        yield f"{head}: {_text(finding.message)}{_size(finding)}"
        for line in _stage(finding):
            if (finding.request, line) not in told:
                told.add((finding.request, line))
                yield f"  - {line}"
    if case.reproduce:
        yield from _block(case.reproduce)


def _size(finding: Finding) -> str:
    where = "" if finding.position is None else f"generated position {finding.position}"
    size = "" if finding.size is None else f"{finding.size:.3g} × the yardstick"
    told = ", ".join(part for part in (where, size) if part)
    return f" ({told})" if told else ""


def _stage(finding: Finding) -> Iterator[str]:
    """What triage found: the first wrong stage, where, how far off, and its usual causes."""
    triage = finding.detail.get("triage")
    if triage is None:
        return
    found: Mapping[str, Any] = triage if isinstance(triage, Mapping) else {"text": triage}
    if found.get("stage") is None:
        yield f"triage: {_text(str(found['text']))}"
    else:
        facts = [f"first wrong stage {_code(str(found['stage']))}"]
        facts += [f"row {found['position']}"] if found.get("position") is not None else []
        facts += [f"token {found['token']}"] if found.get("token") is not None else []
        facts += [f"{found['size']:.3g} × the yardstick"] if found.get("size") is not None else []
        yield f"{', '.join(facts)}: {_text(str(found['text']))}"
    if found.get("causes"):
        yield "usual causes: " + "; ".join(_text(str(cause)) for cause in found["causes"])
    if found.get("note"):
        yield f"not looked into: {_text(str(found['note']))}"


def _areas(cases: Sequence[SavedCase]) -> Iterator[str]:
    used = [verdict for verdict in Verdict if any(case.verdict is verdict for case in cases)]
    areas: dict[str, list[SavedCase]] = defaultdict(list)
    for case in cases:
        areas[case.area].append(case)
    yield "## Areas"
    yield ""
    yield _row(["area", *(verdict.value for verdict in used), "seconds"])
    yield _row(["---", *("--:" for _ in used), "--:"])
    for area, group in sorted(areas.items()):
        counts = Counter(case.verdict for case in group)
        numbers = [str(counts[verdict] or "") for verdict in used]
        yield _row([_text(area), *numbers, f"{sum(case.seconds for case in group):.1f}"])
    yield ""


def _power(report: Report) -> Iterator[str]:
    yield "## Power"
    yield ""
    yield f"- {_text(report.power)}"
    if report.seeded_faults is not None:
        yield f"- {_text(report.seeded_faults)}"
    for one in report.engines if report.seeded_faults is None else ():
        if one.seeded_faults is not None:
            yield f"- {_text(f'{one} on {one.device}')}: {_text(one.seeded_faults)}"


def _named(title: str, cases: Sequence[SavedCase]) -> Iterator[str]:
    if not cases:
        return
    yield f"## {title}"
    yield ""
    yield from (f"- {case.verdict.value} {_code(case.label)}" for case in cases[:_NAMED])
    if cases[_NAMED:]:
        yield f"- and {len(cases) - _NAMED} more"
    yield ""


# ---- words of others ----------------------------------------------------------------------------


def _text(text: str) -> str:
    """Words of an engine or a scenario as words: no markup, no line of their own."""
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", html.escape(_one_line(text), quote=False))


def _code(text: str) -> str:
    text = _one_line(text)
    fence = "`" * (_longest_run(text) + 1)
    space = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{space}{text}{space}{fence}"


def _block(command: str, indent: str = "") -> Iterable[str]:
    fence = "`" * max(3, _longest_run(command) + 1)
    return [f"{indent}{line}" for line in ("", f"{fence}console", _one_line(command, None), fence)]


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _one_line(text: str, longest: int | None = _LONGEST) -> str:
    """On one line, without control characters, and not longer than a message should be."""
    text = re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: repr(found[0])[1:-1], text.strip())
    return text if longest is None or len(text) <= longest else f"{text[:longest]}…"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)
