"""`conformance compare`: what became better or worse between two runs, case by case.

PASS, NOISE and WEAK are one class: which of them a case gets may depend on the machine. A case that did
not fail and now does is a REGRESSION, whatever it was before.

Exit status: 0 neither a regression nor a new case that fails, 1 at least one, 2 the command or a file is
wrong, 3 no case is in both.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from conformance.compare import Comparison, Kind, compare, read_side
from conformance.markdown import compare_markdown, write_markdown
from conformance.output_files import OutputClash, must_not_clash
from conformance.saved_report import ReportError
from conformance.terminal import Terminal, abridged, complain

__all__ = ["main", "parser"]

_COLOURS = {
    Kind.REGRESSION: "bold red",
    Kind.FIX: "green",
    Kind.CHANGE: "yellow",
    Kind.NEW: "cyan",
    Kind.GONE: "dim",
}


def parser() -> argparse.ArgumentParser:
    """The command line of `conformance compare`."""
    made = argparse.ArgumentParser(
        prog="conformance compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("old", type=Path, help="report (--json) of the earlier run, or a directory of them")
    made.add_argument("new", type=Path, help="the same of the later run; directories match by engine")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the differences as JSON")
    made.add_argument("--markdown", type=Path, metavar="FILE", help="write a summary as Markdown")
    made.add_argument(
        "--across-editions", action="store_true", help="compare reports of other editions of the suite, too"
    )
    made.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="OPTION",
        help="match points that differ in it (device)",
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run `compare`; returns the exit status."""
    args = parser().parse_args(argv)
    console = Terminal()
    try:
        must_not_clash({"--json": args.json, "--markdown": args.markdown}, [args.old, args.new])
        old, new = (read_side(side, other_editions=args.across_editions) for side in (args.old, args.new))
        found = compare(old, new, ignore=args.ignore)
        if args.json:
            args.json.write_text(json.dumps(_plain(found), indent=1) + "\n", encoding="utf-8")
        if args.markdown:
            write_markdown(args.markdown, compare_markdown(found))
    except (OutputClash, ReportError, OSError) as error:
        complain(error)
        return 2
    _print(console, found)
    return found.status


def _print(console: Console, found: Comparison) -> None:
    for remark in found.remarks:
        console.print(remark, style="dim", markup=False, soft_wrap=True)
    for one in found.differences:
        kind = f"[{_COLOURS[one.kind]}]{one.kind.value:<10}[/]"
        console.print(f"{kind} {escape(one.name)}  {one.verdicts}", soft_wrap=True)
        if one.why:
            console.print(f"           {escape(abridged(one.why, ' ' * 13))}", soft_wrap=True)
        if one.fails and one.reproduce:
            console.print(f"           again: {escape(one.reproduce)}", soft_wrap=True)
    if found.status == 3:
        console.print("no case is in both runs: nothing was compared", style="bold red")
    console.print(found.summary)


def _plain(found: Comparison) -> Mapping[str, Any]:
    return {
        "failed": found.status == 1,
        "regressed": bool(found.of(Kind.REGRESSION)),
        "unchanged": found.unchanged,
        "counts": {kind.value: len(found.of(kind)) for kind in Kind},
        "remarks": list(found.remarks),
        "differences": [
            {
                "kind": one.kind.value,
                "case": one.label,
                "engine": one.engine,
                "old": None if one.old is None else one.old.value,
                "new": None if one.new is None else one.new.value,
                "why": one.why,
                "reproduce": one.reproduce,
            }
            for one in found.differences
        ],
    }
