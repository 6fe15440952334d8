"""The command that shows a case again: the user's own spelling of the engine, and whatever else decides.

A finding names a command by itself, from its history. That one knows the engine's name for itself,
and not how the user reached it: its options, its data, the strict bar. `with_commands` says it whole.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.suite import Case, Outcome
from conformance.verdicts import Verdict

__all__ = ["Invocation", "command_for", "invocation_of", "with_commands"]


@dataclass(frozen=True, slots=True)
class Invocation:
    """What a command line says, beside the selection, that can change a verdict.

    Attributes:
        engine, variant: as given.
        options: NAME=VALUE items for the adapter, as given.
        data: directory with golden/ and scenarios/; None: the suite's own.
        where: options that have a worker run the case, as a worker has other threads than the command.
        resources: WHO=NAME items for a cluster; those about the case's engine and device are said again.
    """

    engine: str
    variant: str | None = None
    options: tuple[str, ...] = ()
    strict: bool = False
    data: Path | None = None
    where: tuple[str, ...] = ()
    resources: tuple[str, ...] = ()


def invocation_of(args: argparse.Namespace, engine: str) -> Invocation:
    """What the parsed arguments of a command say that runs this engine, perhaps beside others."""
    strict = getattr(args, "strict", False)
    resources = tuple(getattr(args, "ray_resource", ()))
    return Invocation(
        engine, args.variant, tuple(args.engine_option), strict, args.data, tuple(_where(args)), resources
    )


def _where(args: argparse.Namespace) -> Iterator[str]:
    if getattr(args, "ray", None) is not None:
        yield from ("--ray", args.ray)
    elif getattr(args, "jobs", 1) > 1:
        yield from ("--jobs", str(args.jobs))
        if args.case_timeout is not None:
            yield from ("--case-timeout", f"{args.case_timeout:g}")


def command_for(case: Case, invocation: Invocation) -> str:
    """One shell command that runs exactly this case on this engine."""
    return shlex.join(["conformance", "run", case.scenario.id, *_options(case, invocation)])


def _options(case: Case, invocation: Invocation) -> Iterator[str]:
    point = dict(case.point)
    yield from ("--engine", invocation.engine)
    if invocation.variant:
        yield from ("--variant", invocation.variant)
    for item in invocation.options:
        yield from ("--engine-option", item)
    yield from ("--model", str(point.pop("model")))
    yield from ("--device", str(point.pop("device", "auto")))
    yield from ("--dtype", str(point.pop("dtype")))
    for name, value in sorted(point.items()):
        yield from ("--point", f"{name}={value}")
    if invocation.strict:
        yield "--strict"
    if invocation.data is not None:
        yield from ("--data", str(invocation.data))
    yield from invocation.where
    for item in invocation.resources:
        if item.rpartition("=")[0] in (case.engine, case.device):
            yield from ("--ray-resource", item)


def with_commands(outcome: Outcome, invocation: Invocation) -> Outcome:
    """The outcome, with this invocation's command in its findings: errors, and those that have one."""
    command = command_for(outcome.case, invocation)
    findings = tuple(
        replace(one, reproduce=command) if one.reproduce or one.verdict is Verdict.ERROR else one
        for one in outcome.judgement.findings
    )
    return replace(outcome, judgement=replace(outcome.judgement, findings=findings))
