"""The command `conformance stability`: what it takes, prints and writes.

Exit status: 0 no verdict changed its class, 1 one did, 2 nothing of the engine can be varied, it refuses
what it is varied by, or the command is wrong, 3 nothing was judged.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from conformance import EDITION
from conformance.adapters.base import Capabilities
from conformance.again import Invocation, command_for
from conformance.engines import parse_options
from conformance.environment import describe_environment
from conformance.output_files import must_be_writable, output_path
from conformance.runner import EngineFactory
from conformance.scenario import Scenario
from conformance.stability import (
    Change,
    Configuration,
    NothingVaries,
    Run,
    Variation,
    changes,
    configurations,
    options_for,
    plan_variation,
    repeat,
    why_refused,
)
from conformance.store import RecordStore
from conformance.suite import Case
from conformance.terminal import Terminal, abridged, complain
from conformance.verdicts import Verdict

__all__ = ["add_stability_options", "as_plain", "print_stability", "run_stability"]


def add_stability_options(parser: argparse.ArgumentParser) -> None:
    """What the command takes beside a selection and an engine."""
    parser.add_argument("--runs", type=int, default=20, metavar="N", help="how often, at least 2 (20)")
    parser.add_argument(
        "--vary",
        action="append",
        default=[],
        metavar="OPTION=[VALUES]",
        help="take these values of an engine option in turn; a YAML list; may be repeated",
    )
    parser.add_argument("--minutes", type=_minutes, metavar="M", help="begin no further run after so long")
    parser.add_argument("--strict", action="store_true", help="minivllm's own bar: 2 × the eager cached arm")
    parser.add_argument("--json", type=output_path, metavar="FILE", help="write everything as JSON")


def _minutes(text: str) -> float:
    number = float(text)
    if not number >= 0:  # nor is "nan" a time
        raise ValueError
    return number


_minutes.__name__ = "number of minutes"  # what argparse calls it


def run_stability(
    args: argparse.Namespace,
    console: Console,
    cases: Sequence[Case],
    scenarios: Sequence[Scenario],
    factory: EngineFactory,
    capabilities: Capabilities,
    invocation: Invocation,
) -> int:
    """Run the command; returns the exit status."""
    try:
        if args.runs < 2:
            raise NothingVaries(f"--runs must be at least 2, to have something to compare; got {args.runs}")
        given, asked = parse_options(args.engine_option), parse_options(args.vary, "--vary")
        variation = plan_variation(capabilities, scenarios, given=given, asked=asked)
        for option in asked:
            _must_be_taken(option, variation.values[option], cases, factory, capabilities, args.data)
    except NothingVaries as error:
        complain(error)
        return 2
    must_be_writable(args.json)
    started = time.perf_counter()

    def more() -> bool:
        return args.minutes is None or time.perf_counter() - started < 60 * args.minutes

    def tell(configuration: Configuration, case: Case) -> None:
        status.update(f"{configuration.number} of {args.runs}: {escape(case.label)}")

    runs: list[Run] = []
    plan = configurations(args.runs, variation)
    console.print(_varied(capabilities, variation), markup=False, highlight=False, soft_wrap=True)
    with Terminal(stderr=True).status("") as status:
        for run in repeat(
            cases,
            factory,
            RecordStore(args.data),
            plan,
            strict=args.strict,
            root=args.data,
            more=more,
            tell=tell,
        ):
            runs.append(run)
            changed = len(changes([runs[0], run]))
            counts = ", ".join(f"{n} {verdict}" for verdict, n in _counts(run).items())
            refused = f", {len(run.refused)} refused" if run.refused else ""
            text = f"{run.configuration}: {counts or 'none judged'}; {changed} changed{refused}; "
            text += f"{run.seconds:.0f} s"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
            if args.json:
                plain = as_plain(runs, args.runs, capabilities, variation, invocation)
                args.json.write_text(json.dumps(plain, indent=1), encoding="utf-8")
    print_stability(console, runs, args.runs, capabilities, invocation)
    if changes(runs):
        return 1
    if not any(run.outcomes for run in runs[1:]):
        complain(f"{capabilities.engine} refuses everything it was varied by: nothing was compared")
        return 2
    return 3 if set(_counts(*runs)) == {Verdict.SKIP.value} else 0


def _must_be_taken(
    option: str,
    values: Sequence[Any],
    cases: Sequence[Case],
    factory: EngineFactory,
    engine: Capabilities,
    root: Path | None,
) -> None:
    """Raise NothingVaries for a value that the engine refuses, in the first case that leaves the option."""
    free = [case for case in cases if option not in {**case.scenario.engine, **case.point}]
    for case in free[:1]:
        for value in values:
            reason = why_refused(case, factory, Configuration(0, {option: value}), root)
            if reason is not None:
                raise NothingVaries(
                    f"--vary {option}: {engine.engine} refuses {value!r} for {case.label}: {reason}"
                )


def print_stability(
    console: Console, runs: Sequence[Run], asked: int, engine: Capabilities, invocation: Invocation
) -> None:
    """A row per run, then each change with its two configurations, then the number of changes."""
    used = [verdict.value for verdict in Verdict if verdict.value in _counts(*runs)]
    options = list(dict.fromkeys(name for run in runs for name in run.configuration.options))
    table = Table(box=None, pad_edge=False)
    refusing = any(run.refused for run in runs)
    for name in ("run", *options, *used, "changed", *(["refused"] if refusing else []), "seconds"):
        table.add_column(name, justify="right")
    for run in runs:
        given, counts = run.configuration.options, _counts(run)
        table.add_row(
            str(run.configuration.number),
            *(escape(str(given.get(name, ""))) for name in options),
            *(str(counts.get(verdict, "")) for verdict in used),
            str(len(changes([runs[0], run])) or ""),
            *([str(len(run.refused) or "")] if refusing else []),
            f"{run.seconds:.1f}",
        )
    console.print()
    console.print(table, soft_wrap=True)
    found = changes(runs)
    for change in found:
        console.print(f"CHANGED {change.label}", markup=False, highlight=False, soft_wrap=True)
        sides = ((change.before, change.first), (change.after, change.other))
        for outcome, configuration in sides:
            text = f"  {outcome.verdict.value} in {configuration}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        console.print(f"  {change.told}", markup=False, highlight=False, soft_wrap=True)
        for line in _commands(change, invocation):
            console.print(f"  again: {line}", markup=False, highlight=False, soft_wrap=True)
    refusals = Counter(reason for run in runs for reason in run.refused.values())
    for reason, count in refusals.items():
        text = f"left out, as {engine.engine} does not load so ({count} times): {abridged(reason)}"
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    failing = sorted(label for label, outcome in runs[0].outcomes.items() if outcome.verdict.fails_run)
    cases = len(runs[0].outcomes)
    text = f"{engine.engine} {engine.version}, suite {EDITION}: {len(found)} verdict changes over "
    text += f"{len(runs)} runs of {cases} cases"
    text += f"; {asked - len(runs)} of the {asked} runs asked for were not begun" if len(runs) < asked else ""
    text += f"; {len(failing)} fail in the first run already: {', '.join(failing[:5])}" if failing else ""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def as_plain(
    runs: Sequence[Run], asked: int, engine: Capabilities, variation: Variation, invocation: Invocation
) -> dict[str, Any]:
    """The same for programs."""
    return {
        "suite": EDITION,
        "engine": {"name": engine.engine, "version": engine.version},
        "environment": describe_environment(),
        "runs_asked": asked,
        "varied": {option: list(values) or "another number each run" for option, values in _items(variation)},
        "not_varied": dict(variation.fixed),
        "runs": [
            {
                "run": run.configuration.number,
                "options": dict(run.configuration.options),
                "seconds": round(run.seconds, 3),
                "verdicts": {label: outcome.verdict.value for label, outcome in run.outcomes.items()},
                "refused": dict(run.refused),
            }
            for run in runs
        ],
        "changes": [
            {
                "case": change.label,
                "verdicts": [change.before.verdict.value, change.after.verdict.value],
                "runs": [change.first.number, change.other.number],
                "told": change.told,
                "reproduce": list(_commands(change, invocation)),
            }
            for change in changes(runs)
        ],
    }


def _items(variation: Variation) -> list[tuple[str, tuple[Any, ...]]]:
    return list(variation.values.items())


def _varied(engine: Capabilities, variation: Variation) -> str:
    told = [f"{o} ({', '.join(map(str, values)) or 'another each run'})" for o, values in _items(variation)]
    lines = [f"varied of {engine.engine}: {', '.join(told)}; where a scenario settles one, the scenario wins"]
    lines += [f"not varied: {axis}: {why}" for axis, why in variation.fixed.items()]
    return "\n".join(lines)


def _counts(*runs: Run) -> Mapping[str, int]:
    """Verdict → number of cases, from best to worst."""
    found = Counter(outcome.verdict.value for run in runs for outcome in run.outcomes.values())
    return {verdict.value: found[verdict.value] for verdict in Verdict if verdict.value in found}


def _commands(change: Change, invocation: Invocation) -> tuple[str, str]:
    """How to run the case under each of the two configurations."""
    case = change.before.case
    plain = command_for(case, invocation)
    varied = options_for(change.other, {**case.scenario.engine, **case.point})
    options = [f"--engine-option={name}={value}" for name, value in varied.items()]
    return plain, f"{plain} {shlex.join(options)}" if options else plain
