"""`conformance faults`: put public bugs into minivllm one at a time, and see which check finds each.

Exit status: 0 every fault was found or is argued to be equivalent, 1 one survived or never fired, 2 the
command or the table of faults is wrong.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from conformance.faults.laboratory import FaultError
from conformance.faults.matrix import choose, judge_all
from conformance.kill_matrix import Row, save
from conformance.output_files import must_be_writable, output_path
from conformance.terminal import Terminal, complain

__all__ = ["main", "parser"]

#: Columns of the matrix in a file or a log, where nothing says how wide a line may be.
_WIDTH = 190

_COLOURS = {"killed": "green", "equivalent": "cyan", "survived": "red", "not fired": "red"}


def parser() -> argparse.ArgumentParser:
    """The command line of `conformance faults`."""
    root = argparse.ArgumentParser(
        prog="conformance faults",
        description="Put public bugs into minivllm, one at a time, and see which check finds each. "
        "See docs/faults.md.",
    )
    root.add_argument(
        "--only", action="append", default=[], metavar="AREA|ID", help="these faults; may be repeated"
    )
    root.add_argument("--jobs", type=int, default=2, metavar="N", help="processes (default: 2)")
    root.add_argument("--list", action="store_true", help="list the faults and judge none")
    root.add_argument("--json", type=output_path, metavar="FILE", help="write the kill matrix as JSON")
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run `conformance faults`; returns the exit status."""
    args = parser().parse_args(argv)
    console = Terminal()
    if not console.is_terminal:
        console = Terminal(width=_WIDTH)
    try:
        faults = choose(args.only)
        if args.list:
            for fault in faults:
                console.print(f"{fault.id}: {fault.about}", markup=False, soft_wrap=True)
            return 0
        must_be_writable(args.json)
        began = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Terminal(stderr=True), transient=True) as bar:
            task = bar.add_task("faults", total=len(faults))
            rows = judge_all(faults, args.jobs, lambda row: bar.update(task, advance=1, description=row.id))
    except (LookupError, FaultError) as error:
        complain(error)
        return 2
    print_matrix(console, rows)
    console.print(f"{_tally(rows)} in {time.monotonic() - began:.0f} s")
    if args.json is not None:
        save(args.json, rows)
    return 0 if all(row.outcome in ("killed", "equivalent") for row in rows) else 1


def print_matrix(console: Console, rows: Sequence[Row]) -> None:
    """The kill matrix: a line per fault, and what was wrong with those that were not found."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("fault", "", "fired", "needs", "dtype", "found by", "in"):
        table.add_column(name, justify="right" if name == "fired" else "left", overflow="fold")
    for row in rows:
        table.add_row(
            row.id,
            f"[{_COLOURS[row.outcome]}]{row.outcome}[/]",
            str(row.fired),
            row.evidence,
            row.dtype,
            ", ".join(row.detected_by[:2]),
            row.shown_by.replace("[", r"\["),
        )
    console.print(table)
    for row in rows:
        if row.outcome in ("survived", "not fired"):
            console.print(f"{row.outcome}: {row.id}: {row.about}", style="red", markup=False, soft_wrap=True)


def _tally(rows: Sequence[Row]) -> str:
    outcomes = Counter(row.outcome for row in rows)
    evidence = Counter(row.evidence for row in rows if row.outcome == "killed")
    told = ", ".join(f"{count} by {name}" for name, count in evidence.most_common())
    rest = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items() if outcome != "killed")
    return f"{len(rows)} faults: {outcomes['killed']} found ({told})" + (f", {rest}" if rest else "")
