"""Command line: `python -m conformance.recipes list | build | train | search | pictures`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from conformance.manifest import sign
from conformance.recipes.build import MECHANICS, build
from conformance.recipes.pictures import write_pictures
from conformance.recipes.search import search
from conformance.recipes.trained import TRAINED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (2: wrong usage)."""
    parser = argparse.ArgumentParser(prog="python -m conformance.recipes", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name every checkpoint and what it is for")
    builder = commands.add_parser("build", help="build a checkpoint of random weights, equal to the bit")
    builder.add_argument("name", choices=sorted(MECHANICS))
    builder.add_argument("--out", type=Path, required=True, help="directory to create")
    trainer = commands.add_parser("train", help="train a checkpoint anew; the weights will differ")
    trainer.add_argument("name", choices=sorted(TRAINED))
    trainer.add_argument("--out", type=Path, required=True, help="directory to create")
    trainer.add_argument("--steps", type=int, help="optimiser steps of the longest phase")
    trainer.add_argument("--seed", type=int, default=0, help="of initial weights and data")
    searcher = commands.add_parser("search", help="score seeds of a recipe")
    searcher.add_argument("name", choices=sorted(MECHANICS))
    searcher.add_argument("--seeds", type=int, default=10, help="how many seeds to try, from 0")
    pictures = commands.add_parser("pictures", help="draw the pictures of the scenarios, and list them")
    pictures.add_argument("--out", type=Path, required=True, help="directory to write to: scenarios/assets")
    pictures.add_argument(
        "--reason", default="drawn", help="written to the manifest of what is new or changed"
    )
    options = parser.parse_args(arguments)

    if options.command == "list":
        for recipe in MECHANICS.values():
            print(f"{recipe.name:20} {recipe.summary}")
        for name, trained in TRAINED.items():
            print(f"{name:20} {trained.summary}")
    elif options.command == "build":
        build(options.name, options.out)
        print(f"wrote {options.out}")
    elif options.command == "train":
        TRAINED[options.name].train(options.out, options.seed, options.steps, _report)
        print(f"wrote {options.out}")
    elif options.command == "pictures":
        paths = write_pictures(options.out)
        changed = sign(options.out, options.reason)
        print(f"wrote {len(paths)} pictures to {options.out}, {len(changed)} of them new or changed")
    else:
        for result in search(MECHANICS[options.name], range(options.seeds)):
            print(f"seed {result.seed}: smallest margin {result.min_margin:.4f}, distinct {result.distinct}")
    return 0


def _report(phase: str, step: int, loss: float) -> None:
    print(f"{phase}, step {step}: loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
