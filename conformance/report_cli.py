"""`conformance report`: one page or summary of what runs wrote with --json, several side by side.

Exit status: 0 written, 2 the command or a file is wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from conformance.html.page import write_page
from conformance.markdown import run_markdown, write_markdown
from conformance.output_files import OutputClash, must_not_clash
from conformance.saved_report import ReportError, read_report
from conformance.terminal import complain

__all__ = ["main", "parser"]


def parser() -> argparse.ArgumentParser:
    """The command line of `conformance report`."""
    made = argparse.ArgumentParser(
        prog="conformance report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("reports", type=Path, nargs="+", metavar="RUN.json", help="written by --json")
    made.add_argument("--html", type=Path, metavar="FILE", help="write a page, a column per run")
    made.add_argument("--markdown", type=Path, metavar="FILE", help="write a summary of each run")
    made.add_argument(
        "--across-editions", action="store_true", help="show reports of other editions of the suite, too"
    )
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run `report`; returns the exit status."""
    made = parser()
    args = made.parse_args(argv)
    if args.html is None and args.markdown is None:
        made.error("nothing to write: give --html FILE or --markdown FILE")
    try:
        must_not_clash({"--html": args.html, "--markdown": args.markdown}, args.reports)
        reports = [read_report(path, other_editions=args.across_editions) for path in args.reports]
        if args.html is not None:
            write_page(args.html, reports)
        if args.markdown is not None:
            write_markdown(args.markdown, "\n".join(run_markdown(report) for report in reports))
    except (OutputClash, ReportError, OSError) as error:
        complain(error)
        return 2
    return 0
