"""The command `conformance doctor`.

With --engine: is each capability that the engine declares really there? Without: can the reference be
loaded here, and which goldens and checkpoints are there? Exit status: 0 all is well, 1 something that
is declared fails, or the reference cannot be loaded, 2 the command is wrong.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from conformance.adapters.base import FEATURES
from conformance.adapters.received import AdapterError
from conformance.doctor.engine import DECLARED_BUT_FAILING, NOT_TRIED, UNKNOWN, WORKS, examine_engine
from conformance.doctor.reference import examine_reference
from conformance.engines import engine_names, find_engine, parse_options, with_options
from conformance.models import resolve_model
from conformance.terminal import Terminal, abridged

__all__ = ["main", "parser"]

_COLOURS = {WORKS: "green", DECLARED_BUT_FAILING: "bold red", NOT_TRIED: "dim", UNKNOWN: "yellow"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parser().parse_args(argv)
    console = Terminal()
    return _engine(args, console) if args.engine else _reference(args, console)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    root = argparse.ArgumentParser(prog="conformance doctor", description=__doc__)
    root.add_argument("--engine", help=f"{', '.join(engine_names())}, or package.module:Class")
    root.add_argument("--variant", help="of the engine: --engine hf --variant sdpa is --engine hf-sdpa")
    root.add_argument("--engine-option", action="append", default=[], metavar="NAME=VALUE")
    root.add_argument("--model", default="tiny-llama", help="name or directory of a small checkpoint")
    root.add_argument("--device", default="auto", help="cpu, cuda or mps")
    root.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    root.add_argument("--data", type=Path, metavar="DIR", help="directory with golden/ and scenarios/")
    return root


def _engine(args: argparse.Namespace, console: Console) -> int:
    name = f"{args.engine}-{args.variant}" if args.variant else args.engine
    factory = with_options(find_engine(name), parse_options(args.engine_option))
    source = resolve_model(args.model, args.data)
    counts: Counter[str] = Counter()
    console.print(f"{escape(name)} on {escape(source.name)}, {args.dtype}, device {args.device}")
    width = max(map(len, FEATURES))
    try:
        options = {"dtype": args.dtype, "device": args.device}
        for finding in examine_engine(factory, source, options, args.data):
            counts[finding.state] += 1
            colour = _COLOURS[finding.state]
            told = escape(abridged(finding.told or FEATURES[finding.feature], " " * 13))
            console.print(
                f"[{colour}]{finding.state:<12}[/] {finding.feature:<{width}}  {told}", soft_wrap=True
            )
    except AdapterError as error:
        console.print(f"[bold red]FAIL[/] {escape(str(error))}", soft_wrap=True)
        return 1
    console.print(
        f"{counts[WORKS]} capabilities work, {counts[DECLARED_BUT_FAILING]} are declared and fail, "
        f"{counts[UNKNOWN]} cannot be tried here, {counts[NOT_TRIED]} are not declared",
        soft_wrap=True,
    )
    return 1 if counts[DECLARED_BUT_FAILING] else 0


def _reference(args: argparse.Namespace, console: Console) -> int:
    wrong = []
    for fact in examine_reference(args.data):
        word = {True: "[green]ok  [/]", False: "[bold red]FAIL[/]", None: "    "}[fact.ok]
        console.print(f"{word} {escape(fact.what)}: {escape(fact.told)}", soft_wrap=True)
        wrong += [] if fact.ok is not False else [fact.what]
    if not wrong:
        console.print("The reference can be loaded here: goldens can be recorded and verified.")
        return 0
    console.print(
        f"The reference cannot be trusted here ({escape(', '.join(wrong))}). Judging needs none of it: "
        "`conformance run --engine …` compares with the goldens listed above. Only `conformance golden` "
        "and the engines hf… need it.",
        soft_wrap=True,
    )
    return 1
