"""What a run prints: one line per case judged, then what was skipped, and what the run could have seen."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any
from xml.etree import ElementTree

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from conformance import EDITION, REPORT_SCHEMA
from conformance.adapters.base import Capabilities
from conformance.distribute.run import Declared
from conformance.power import KINDS, seeded_power
from conformance.suite import Outcome
from conformance.terminal import abridged
from conformance.triage import as_lines
from conformance.verdicts import Finding, Power, Verdict
from conformance.waivers import Waiver

__all__ = [
    "as_json",
    "as_junit",
    "nothing_judged",
    "print_case",
    "print_summary",
    "run_fails",
    "why_skipped",
]

#: Reasons for skipping that are told; an engine may have one for every case.
_MOST_REASONS = 20

#: What XML 1.0 has no way to write: control characters, halves of surrogate pairs.
_NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

_COLOURS: Mapping[Verdict, str] = {
    Verdict.PASS: "green",
    Verdict.NOISE: "green",
    Verdict.WEAK: "yellow",
    Verdict.SKIP: "dim",
    Verdict.WAIVED: "yellow",
    Verdict.STALE: "red",
    Verdict.FAIL: "bold red",
    Verdict.ERROR: "bold magenta",
}


def run_fails(
    outcomes: Sequence[Outcome], stale: Sequence[tuple[Waiver, str]], *, strict_should: bool = False
) -> bool:
    """Whether the run as a whole failed; one in which nothing was judged has proven nothing."""
    return (
        nothing_judged(outcomes)
        or bool(stale)
        or any(outcome.judgement.fails_run(strict_should) for outcome in outcomes)
    )


def nothing_judged(outcomes: Sequence[Outcome]) -> bool:
    """Whether no case got a verdict: all were skipped, or there is none."""
    return all(outcome.verdict is Verdict.SKIP for outcome in outcomes)


def print_case(console: Console, outcome: Outcome) -> None:
    """One line, and for anything but an agreement the reasons below it."""
    head = f"{_word(outcome.verdict)} {escape(outcome.case.label)}  [dim]{outcome.seconds:.1f} s[/dim]"
    console.print(head, highlight=False, soft_wrap=True)
    if outcome.waiver is not None:
        waiver = outcome.waiver
        console.print(f"       waived: {escape(waiver.reason)} ({escape(waiver.issue)})", soft_wrap=True)
    told: set[tuple[str | None, str]] = set()
    for finding in telling(outcome.judgement.findings):
        text = abridged(_sentence(finding), " " * 9)
        console.print(f"       {escape(text)}", highlight=False, soft_wrap=True)
        for line in _triage_lines(finding):
            if (finding.request, line) in told:
                continue  # two checks of one request have one triage
            told.add((finding.request, line))
            text = abridged(line, " " * 11)
            console.print(f"         {escape(text)}", highlight=False, soft_wrap=True)
    command = reproduce(outcome)
    if command is not None:
        console.print(f"       again: {escape(command)}", highlight=False, soft_wrap=True)


def print_summary(
    console: Console,
    outcomes: Sequence[Outcome],
    stale: Sequence[tuple[Waiver, str]],
    declared: Declared,
    *,
    strict_should: bool = False,
) -> None:
    """The table by area, why cases were skipped, stale waivers, the power line and the last word.

    Args:
        declared: (engine, device) as asked for → what the engine says of itself there.
    """
    used = [verdict for verdict in Verdict if any(o.verdict is verdict for o in outcomes)]
    table = Table(box=None, pad_edge=False)
    table.add_column("area")
    for verdict in used:
        table.add_column(verdict.value, justify="right", style=_COLOURS[verdict])
    table.add_column("seconds", justify="right")
    areas: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        areas[outcome.case.scenario.area].append(outcome)
    for area, group in [*sorted(areas.items()), ("all", list(outcomes))]:
        counts = Counter(outcome.verdict for outcome in group)
        numbers = [str(counts[verdict] or "") for verdict in used]
        table.add_row(area, *numbers, f"{sum(outcome.seconds for outcome in group):.1f}")
    console.print()
    console.print(table)
    for line in _skipped_lines(outcomes):
        console.print(escape(line), highlight=False, soft_wrap=True)
    for waiver, why in stale:
        text = f"waiver on line {waiver.line} ({escape(waiver.scenario)}): {escape(why)}"
        console.print(f"{_word(Verdict.STALE)} {text}", soft_wrap=True)
    console.print(power_line(outcomes), highlight=False, soft_wrap=True)
    for (name, device), engine in declared.items():
        own = _of_place(outcomes, name, device) if len(declared) > 1 else outcomes
        if len(declared) > 1:
            counted = Counter(outcome.verdict for outcome in own)
            told = ", ".join(f"{counted[v]} {v.value}" for v in used if counted[v])
            console.print(escape(f"{name} on {device}: {told}."), highlight=False, soft_wrap=True)
        if engine is not None:
            console.print(seeded_line(own, engine), highlight=False, soft_wrap=True)
    name = ", ".join(_names(declared)) or "saved histories"
    if nothing_judged(outcomes):
        word = f"FAILED: nothing was judged, all of {len(outcomes)} cases were skipped"
    else:
        word = "FAILED" if run_fails(outcomes, stale, strict_should=strict_should) else "passed"
    console.print(f"{escape(name)}, suite {EDITION}: {word}", highlight=False)


def why_skipped(findings: Sequence[Finding]) -> str:
    """Why a case was not judged."""
    return next((one.message for one in findings if one.verdict is Verdict.SKIP), "no reason is given")


def _skipped_lines(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """How many cases were skipped for which reason, the commonest first."""
    skipped = [outcome for outcome in outcomes if outcome.verdict is Verdict.SKIP]
    reasons = Counter(why_skipped(outcome.judgement.findings) for outcome in skipped)
    told = reasons.most_common(_MOST_REASONS)
    if skipped:
        yield f"Skipped ({len(skipped)} cases; --json FILE or --html FILE names each):"
        yield from (f"{count:>7}  {abridged(reason, ' ' * 9)}" for reason, count in told)
    if len(reasons) > len(told):
        rest = len(skipped) - sum(count for _, count in told)
        yield f"{rest:>7}  {len(reasons) - len(told)} other reasons"


def power_line(outcomes: Sequence[Outcome]) -> str:
    """What the run could have seen: kinds of fault by the number of cases that would show them."""
    return power_words([o.judgement.power for o in outcomes if o.verdict is not Verdict.SKIP])


def power_words(judged: Sequence[Power]) -> str:
    """The same from the power of every case that was not skipped."""
    judged = [power for power in judged if power.is_known]
    kinds = Counter(kind for power in judged for kind in power.kinds)
    positions = sum(power.judged for power in judged)
    shown = ", ".join(f"{kind} in {count}" for kind, count in kinds.most_common()) or "nothing"
    text = f"Power: of {len(judged)} cases judged, a fault would have shown by {shown}"
    if positions:
        decided, unjudged = (sum(getattr(p, name) for p in judged) for name in ("decided", "unjudged"))
        text += f"; {decided} of {positions} positions had one right answer, {unjudged} were not judged"
    blind = Counter(reason for power in judged if not power.kinds for reason in power.blind.values())
    if blind:
        text += f"; blind: {'; '.join(reason for reason, _ in blind.most_common(3))}"
    return text + "."


def seeded_line(outcomes: Sequence[Outcome], engine: Capabilities) -> str:
    """Which of the seeded faults of the kill matrix the run would have shown."""
    looked = [o for o in outcomes if o.verdict is not Verdict.SKIP and o.judgement.power.is_known]
    judged = {(o.case.scenario.id, o.case.point["dtype"]) for o in looked}
    # What an engine offers may depend on its options (bitwise): evidence that was seen proves it.
    seen = {kind for o in looked for kind in o.judgement.power.kinds}
    proved = {feature for kind in seen for feature in KINDS[kind]}
    power = seeded_power(replace(engine, features=engine.features | proved), judged)
    total = len(power.shown) + len(power.blind)
    text = f"Seeded faults: {len(power.shown)} of {total} would have shown"
    reasons = Counter(power.blind.values()).most_common(3)
    if reasons:
        text += "; not shown: " + ", ".join(f"{count} because {reason}" for reason, count in reasons)
    return text + "."


def telling(findings: Sequence[Finding]) -> list[Finding]:
    """Those that explain a verdict other than PASS; the worst first, each message once."""
    wanted = [f for f in findings if f.verdict not in (Verdict.PASS, Verdict.NOISE)]
    wanted.sort(key=lambda f: -f.verdict.severity)
    return list({(f.verdict, f.check, f.request, f.message): f for f in wanted}.values())


def reproduce(outcome: Outcome) -> str | None:
    """The one command that shows a failure again."""
    return next((f.reproduce for f in outcome.judgement.findings if f.reproduce), None)


def as_json(
    outcomes: Sequence[Outcome],
    stale: Sequence[tuple[Waiver, str]],
    declared: Declared,
    environment: Mapping[str, str],
    *,
    strict_should: bool = False,
) -> str:
    """The whole run as JSON, for programs; `conformance.saved_report` reads it."""
    [engine] = declared.values() if len(declared) == 1 else [None]
    head = {
        "schema": REPORT_SCHEMA,
        "suite": EDITION,
        "failed": run_fails(outcomes, stale, strict_should=strict_should),
        "engine": None if engine is None else {"name": engine.engine, "version": engine.version},
        "engines": [
            _plain_place(_of_place(outcomes, *place) if len(declared) > 1 else outcomes, place, found)
            for place, found in declared.items()
        ],
        "environment": dict(environment),
        "stale_waivers": [{"line": w.line, "scenario": w.scenario, "why": why} for w, why in stale],
        "power": power_line(outcomes),
        "seeded_faults": None if engine is None else seeded_line(outcomes, engine),
    }
    # A line per case: short, and two runs can be told apart line by line.
    cases = ",\n".join(json.dumps(_plain_case(outcome), default=_plain) for outcome in outcomes)
    return json.dumps(head, indent=1, default=_plain)[:-2] + f',\n "cases": [\n{cases}\n ]\n}}\n'


def _of_place(outcomes: Sequence[Outcome], engine: str, device: str) -> list[Outcome]:
    return [o for o in outcomes if (o.case.engine, o.case.device) == (engine, device)]


def _names(declared: Declared) -> list[str]:
    """Every engine with its version, once; as it was asked for where it could not tell."""
    told = (name if e is None else f"{e.engine} {e.version}" for (name, _), e in declared.items())
    return list(dict.fromkeys(name for name in told if name))


def _plain_place(
    own: Sequence[Outcome], place: tuple[str, str], found: Capabilities | None
) -> dict[str, Any]:
    return {
        "asked_for": place[0],
        "device": place[1],
        "name": None if found is None else found.engine,
        "version": None if found is None else found.version,
        "seeded_faults": None if found is None else seeded_line(own, found),
    }


def as_junit(outcomes: Sequence[Outcome], stale: Sequence[tuple[Waiver, str]]) -> str:
    """The run as JUnit XML: one suite per area, one case per scenario and point.

    A character that XML cannot hold, such as those of a terminal's colours, is written as its escape.
    """
    root = ElementTree.Element("testsuites", name="conformance")
    areas: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        areas[outcome.case.scenario.area].append(outcome)
    for area, group in sorted(areas.items()):
        suite = ElementTree.SubElement(root, "testsuite", name=area, tests=str(len(group)))
        for outcome in group:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=outcome.case.scenario.id.replace("/", "."),
                name=outcome.case.label,
                time=f"{outcome.seconds:.3f}",
            )
            text = "\n".join(_sentence(finding) for finding in telling(outcome.judgement.findings))
            tag = {
                Verdict.FAIL: "failure",
                Verdict.ERROR: "error",
                Verdict.SKIP: "skipped",
                Verdict.WAIVED: "skipped",
            }.get(outcome.verdict)
            if tag is not None:
                ElementTree.SubElement(case, tag, message=outcome.verdict.value).text = text
            elif text:
                ElementTree.SubElement(case, "system-out").text = text
    if stale:
        suite = ElementTree.SubElement(root, "testsuite", name="waivers", tests=str(len(stale)))
        for waiver, why in stale:
            case = ElementTree.SubElement(suite, "testcase", classname="waivers", name=waiver.scenario)
            ElementTree.SubElement(case, "failure", message=Verdict.STALE.value).text = why
    ElementTree.indent(root)
    text = ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
    return _NOT_XML.sub(lambda found: ascii(found[0])[1:-1], text)


def _word(verdict: Verdict) -> str:
    return f"[{_COLOURS[verdict]}]{verdict.value:<6}[/]"


def _sentence(finding: Finding) -> str:
    who = f" {finding.request}" if finding.request else ""
    return f"{finding.verdict.value} {finding.check}{who}: {finding.message}"


def _triage_lines(finding: Finding) -> list[str]:
    triage = finding.detail.get("triage")
    if isinstance(triage, Mapping):
        return as_lines(triage)
    return [] if triage is None else [f"triage: {triage}"]


def _plain_case(outcome: Outcome) -> dict[str, Any]:
    case, judgement = outcome.case, outcome.judgement
    return {
        "scenario": case.scenario.id,
        "label": case.label,
        "engine": case.engine or None,
        "area": case.scenario.area,
        "requirement": case.scenario.requirement,
        "source": list(case.scenario.source),
        "level": judgement.level,
        "point": dict(case.point),
        "verdict": outcome.verdict.value,
        "seconds": round(outcome.seconds, 3),
        "waiver": None if outcome.waiver is None else asdict(outcome.waiver),
        "reproduce": reproduce(outcome),
        "power": asdict(judgement.power),
        "findings": [{**asdict(f), "verdict": f.verdict.value} for f in judgement.findings],
        "digest": None if outcome.digest is None else asdict(outcome.digest),
    }


def _plain(value: Any) -> Any:
    """Numbers of numpy, and whatever else a check put into its details."""
    return value.item() if hasattr(value, "item") else str(value)
