"""The reports that a run writes to files, and the options that ask for them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from conformance.distribute import Declared
from conformance.environment import describe_environment
from conformance.html.page import write_page
from conformance.markdown import run_markdown, write_markdown
from conformance.output_files import must_not_clash, output_path
from conformance.report import as_json, as_junit
from conformance.saved_report import parse_report
from conformance.suite import Outcome
from conformance.waivers import Waiver

__all__ = ["add_report_options", "report_files", "write_reports"]

_OPTIONS = ("json", "junit", "markdown", "html")


def add_report_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that name files to write."""
    parser.add_argument("--json", type=output_path, metavar="FILE", help="write everything as JSON")
    parser.add_argument("--junit", type=output_path, metavar="FILE", help="write JUnit XML")
    parser.add_argument(
        "--markdown",
        type=output_path,
        metavar="FILE",
        help="write a summary; appended to $GITHUB_STEP_SUMMARY",
    )
    parser.add_argument(
        "--html", type=output_path, metavar="FILE", help="write a page that needs nothing else"
    )


def report_files(args: argparse.Namespace) -> list[Path]:
    """The files that will be written.

    Raises:
        OutputClash: two of them are one, or one is the file of waivers.
    """
    files = {f"--{name}": getattr(args, name) for name in _OPTIONS}
    must_not_clash(files, [args.waivers])
    return [path for path in files.values() if path is not None]


def write_reports(
    args: argparse.Namespace,
    outcomes: Sequence[Outcome],
    stale: Sequence[tuple[Waiver, str]],
    declared: Declared,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Write every report that was asked for; all tell the same as the JSON one.

    Args:
        environment: where the engine ran; None: here.
    """
    if not report_files(args):
        return
    where = describe_environment() if environment is None else environment
    text = as_json(outcomes, stale, declared, where, strict_should=args.strict_should)
    if args.json:
        args.json.write_text(text, encoding="utf-8")
    if args.junit:
        args.junit.write_text(as_junit(outcomes, stale), encoding="utf-8")
    if args.markdown:
        write_markdown(args.markdown, run_markdown(parse_report(text, "this run")))
    if args.html:
        write_page(args.html, [parse_report(text, "this run")])
