"""What the suite holds, told to people: list, explain, lint."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from conformance.canonical import request_key
from conformance.checks import CHECKS
from conformance.checks.arguments import AXES
from conformance.models import ModelUnavailable, list_models, resolve_model
from conformance.scenario import CheckSpec, Scenario
from conformance.store import RecordStore
from conformance.suite import Case

__all__ = ["cost_of", "lint_suite", "passes_of", "print_explanation", "print_list", "tokens_of"]


def passes_of(scenario: Scenario) -> int:
    """Passes of one point on an engine that offers every arm and does not diverge."""
    count = 1
    for check in scenario.check("same_under"):
        for axis, values in check.args.items():
            if axis in AXES:
                steps = max(r.max_tokens for r in scenario.requests.values())
                if axis == "preemption":
                    count += steps * len(values)
                else:
                    count += steps if axis == "preempt" and "every" in values else len(values)
    return count


def tokens_of(scenario: Scenario) -> int:
    """Tokens to compute over all points and passes; text prompts count as 32 tokens."""
    tokens = 0
    for request in scenario.requests.values():
        ids = request.prompt.get("token_ids")
        tokens += (32 if ids is None else len(ids)) + request.max_tokens
    return tokens * passes_of(scenario) * len(scenario.points())


def cost_of(case: Case, root: Path | None = None) -> float:
    """How long a case takes, roughly and without a unit: tokens to compute × bytes of weights to read."""
    tokens = tokens_of(case.scenario) / len(case.scenario.points())
    return tokens * _weight_bytes(case.point["model"], root)


@cache
def _weight_bytes(model: str, root: Path | None) -> int:
    try:
        path = resolve_model(model, root).path
    except (ModelUnavailable, OSError):
        return 0  # its cases are skipped
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


def print_list(console: Console, cases: Sequence[Case], *, cost: bool = False) -> None:
    """One line per scenario, with its cost if asked."""
    table = Table(box=None, pad_edge=False)
    table.add_column("scenario", no_wrap=True)
    for column in ("profile", "level", "models"):
        table.add_column(column)
    columns = ("points", "passes", "tokens") if cost else ("points",)
    for column in columns:
        table.add_column(column, justify="right")
    points: dict[str, int] = {}
    for case in cases:
        points[case.scenario.id] = points.get(case.scenario.id, 0) + 1
    scenarios = {case.scenario.id: case.scenario for case in cases}
    total = 0
    for name, scenario in scenarios.items():
        row = [name, scenario.profile, scenario.level, ", ".join(scenario.models), str(points[name])]
        if cost:
            tokens = tokens_of(scenario) * points[name] // max(1, len(scenario.points()))
            total += tokens
            row += [str(passes_of(scenario) * points[name]), str(tokens)]
        table.add_row(*row)
    console.print(table)
    summary = f"{len(scenarios)} scenarios, {len(cases)} cases"
    console.print(summary + (f", about {total} tokens to compute" if cost else ""), highlight=False)


def print_explanation(console: Console, scenario: Scenario) -> None:
    """What one scenario demands, who says so, what it runs, and the command to run it alone."""

    def line(text: str, indent: int = 2) -> None:
        console.print(" " * indent + escape(text), highlight=False, soft_wrap=True)

    console.print(f"[bold]{escape(scenario.id)}[/bold] ({scenario.level}, profile {scenario.profile})")
    line(scenario.requirement)
    line("Whose rule:")
    for source in scenario.source:
        line(source, 4)
    if scenario.needs:
        line(f"Needs: {', '.join(scenario.needs)}")
    line(f"Models: {', '.join(scenario.models)} in {', '.join(scenario.dtypes)}")
    if scenario.damage:
        line(f"Damages the checkpoint first: {scenario.damage}")
    if scenario.engine:
        line("Engine: " + ", ".join(f"{name}={value}" for name, value in scenario.engine.items()))
    for option, values in scenario.matrix.items():
        line(f"For {option} of {', '.join(map(str, values))}")
    line(f"Runs ({len(scenario.points())} points, {passes_of(scenario)} passes each):")
    for request in scenario.requests.values():
        form, value = next(iter(request.prompt.items()))
        prompt = f"{len(value)} token ids" if form == "token_ids" else f"{form} {value!r}"
        settings = ", ".join(f"{name}={setting}" for name, setting in request.sampling.items())
        line(f"{request.name}: {prompt}; {settings}", 4)
    for number, step in enumerate(scenario.steps, 1):
        argument = step.argument
        if step.kind == "run":
            argument = {k: v for k, v in argument.items() if v and (k != "period" or argument["preempt"])}
        line(f"{number}. {step.kind}{f' {argument}' if argument else ''}", 4)
    line("Checks:")
    for check in scenario.checks:
        line(f"{check.name}{'' if check.args is None else f': {check.args}'}", 4)
    line("Run it alone:")
    line(f"conformance run {scenario.id}", 4)


def lint_suite(scenarios: Sequence[Scenario], store: RecordStore, root: Path | None = None) -> list[str]:
    """What is wrong with the suite beyond its schema: lines of "file:line: problem".

    Every golden must be recorded, every model known, and every scenario must prove that what it
    is about really happened.
    """
    known = {listing.name for listing in list_models(root)}
    problems = []
    for scenario in scenarios:
        problems += [f"{scenario.path}:1: unknown model {m!r}" for m in scenario.models if m not in known]
        if not _proves_itself(scenario):
            problems.append(
                f"{scenario.path}:1: nothing proves that its path ran: add a check happened (or error), "
                f"for example happened: {{finished: '=={len(scenario.requests)}'}}"
            )
        for label, request in scenario.golden_requests():
            if request_key(request) not in store:
                line = scenario.requests[label.rpartition(":")[2]].line
                problems.append(
                    f"{scenario.path}:{line}: no golden for {label} on {request['model']} in "
                    f"{request['dtype']}; record it with: conformance golden record"
                )
    return problems


def _proves_itself(scenario: Scenario) -> bool:
    return any(_is_proof(check) for check in scenario.checks)


def _is_proof(check: CheckSpec) -> bool:
    assert check.name in CHECKS
    return check.name in ("happened", "error")
