"""`conformance fuzz`: fuzz minivllm's control plane, or anybody's through the allocator contract.

Exit status: 0 every law held and every counter is above zero, 1 a law broke or a counter is zero,
2 the command is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from conformance.contracts.targets import OWN_TARGETS, Target, TargetNotFound, find_target
from conformance.fuzz.coverage import required
from conformance.fuzz.driver import Failure, replay
from conformance.fuzz.operations import to_plain
from conformance.fuzz.oplog import LogError, file_stem, load_log, save_log
from conformance.fuzz.scenario_file import NotAScenario, as_scenario
from conformance.fuzz.session import PROFILES, Limits, TargetReport, run_session
from conformance.terminal import Terminal, complain

__all__ = ["main", "parser", "run"]


def parser() -> argparse.ArgumentParser:
    """The command line of `conformance fuzz`."""
    root = argparse.ArgumentParser(
        prog="conformance fuzz",
        description="Random operations, tiny sizes, and a model that knows every KV value. See docs/fuzz.md.",
    )
    _fill(root)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run `conformance fuzz`; returns the exit status."""
    return run(parser().parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Carry out a parsed `fuzz` command; returns the exit status."""
    console = Terminal(soft_wrap=True)
    try:
        if args.replay is not None:
            return _replay(args, console)
        targets = [find_target(name) for name in args.allocator or OWN_TARGETS]
        limits = PROFILES[args.profile] if args.minutes is None else Limits(args.minutes * 60, 0)
        return _fuzz(targets, limits, args, console)
    except (TargetNotFound, LogError) as error:
        complain(error)
        return 2


def _fill(parser: argparse.ArgumentParser) -> None:
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=_positive, metavar="N", help="run for so long")
    length.add_argument(
        "--profile", choices=sorted(PROFILES), default="ci", help="run so many examples (default: ci)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="which examples (default: 0)")
    parser.add_argument(
        "--allocator",
        action="append",
        metavar="MODULE:CLASS",
        help="adapter of a block manager or scheduler, may be repeated (default: minivllm's)",
    )
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run the operation log in FILE again")
    parser.add_argument(
        "--out", type=Path, default=Path("fuzz-failures"), metavar="DIR", help="where failures are written"
    )


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _fuzz(targets: list[Target], limits: Limits, args: argparse.Namespace, console: Console) -> int:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Terminal(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        reports = run_session(
            targets,
            args.seed,
            limits,
            lambda done, text: bar.update(task, completed=done, description=text),
        )
    for report in reports:
        _print(report, args, console)
    return 0 if all(report.passed for report in reports) else 1


def _print(report: TargetReport, args: argparse.Namespace, console: Console) -> None:
    fuzzer = report.fuzzer
    rate = fuzzer.num_examples / report.seconds if report.seconds else 0.0
    operations = fuzzer.num_operations / max(1, fuzzer.num_examples)
    console.print(f"[bold]{report.target.name}[/bold]", highlight=False)
    console.print(
        f"  seed {fuzzer.seed}: {fuzzer.num_examples} examples of {operations:.0f} operations in"
        f" {report.seconds:.1f} s, {rate:.0f} examples per second"
    )
    if report.failure is not None and report.original is not None:
        _print_failure(report.failure, len(report.original.operations), args, console)
        return
    needed = set(required(report.target.can))
    for name in sorted(needed | {name for name, count in fuzzer.seen.items() if count}):
        empty = name in needed and not fuzzer.seen[name]
        line = f"  {fuzzer.seen[name]:>9}  {name}" + ("  <- never happened" if empty else "")
        console.print(line, style="red" if empty else None, markup=False)
    if report.not_reached:
        console.print(f"  FAIL: never happened: {', '.join(report.not_reached)}", style="red", markup=False)
    else:
        console.print("  every law held", style="green")


def _print_failure(failure: Failure, before: int, args: argparse.Namespace, console: Console) -> None:
    console.print(f"  FAIL: {failure.message}", style="red", markup=False)
    console.print(
        f"  example {failure.example}, {before} operations, shrunk to {len(failure.operations)}:",
        markup=False,
    )
    _print_operations(failure, console)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{file_stem(failure)}.json"
    save_log(failure, path)
    console.print(f"  replay: conformance fuzz --replay {path}", markup=False)
    if failure.target in OWN_TARGETS:
        scenario = args.out / "fuzz" / f"{file_stem(failure)}.yaml"
        try:
            text = as_scenario(failure, f"fuzz/{file_stem(failure)}")
        except NotAScenario as reason:
            console.print(f"  no scenario: {reason}", markup=False)
        else:
            scenario.parent.mkdir(exist_ok=True)
            scenario.write_text(text, encoding="utf-8")
            console.print(f"  as a scenario of the real engine: {scenario}", markup=False)


def _print_operations(failure: Failure, console: Console) -> None:
    console.print(f"    {failure.setup}", markup=False)
    for operation in failure.operations:
        fields = to_plain(operation)
        words = " ".join(f"{name}={value}" for name, value in fields.items() if name != "op")
        console.print(f"    {fields['op']} {words}".rstrip(), markup=False)


def _replay(args: argparse.Namespace, console: Console) -> int:
    failure = load_log(args.replay)
    names = args.allocator or [failure.target]
    status = 0
    for name in names:
        target = find_target(name)
        found = replay(target, failure.setup, failure.operations)
        console.print(f"[bold]{name}[/bold]: {len(failure.operations)} operations")
        if found is None:
            console.print("  every law held", style="green")
            continue
        status = 1
        console.print(f"  FAIL: {found[1]}", style="red", markup=False)
        if found[0] != failure.signature:
            console.print(f"  the file is about another failure: {failure.signature}", markup=False)
    return status


if __name__ == "__main__":
    sys.exit(main())
