"""Command line: `python -m conformance.recipes list | build NAME --out DIR | search NAME`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from conformance.recipes.build import MECHANICS, build
from conformance.recipes.search import search


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (2: wrong usage)."""
    parser = argparse.ArgumentParser(prog="python -m conformance.recipes", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name every checkpoint and what it is for")
    builder = commands.add_parser("build", help="build a checkpoint of random weights, equal to the bit")
    builder.add_argument("name", choices=sorted(MECHANICS))
    builder.add_argument("--out", type=Path, required=True, help="directory to create")
    searcher = commands.add_parser("search", help="score seeds of a recipe")
    searcher.add_argument("name", choices=sorted(MECHANICS))
    searcher.add_argument("--seeds", type=int, default=10, help="how many seeds to try, from 0")
    options = parser.parse_args(arguments)

    if options.command == "list":
        for recipe in MECHANICS.values():
            print(f"{recipe.name:20} {recipe.summary}")
    elif options.command == "build":
        build(options.name, options.out)
        print(f"wrote {options.out}")
    else:
        for result in search(MECHANICS[options.name], range(options.seeds)):
            print(f"seed {result.seed}: smallest margin {result.min_margin:.4f}, distinct {result.distinct}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
