"""Command line: `python -m conformance.recipes list | build | train | search | pictures`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from conformance.manifest import sign
from conformance.recipes.build import MECHANICS, build
from conformance.recipes.pictures import write_pictures
from conformance.recipes.recall import NAME as RECALL
from conformance.recipes.recall import SUMMARY as RECALL_SUMMARY
from conformance.recipes.recall_training import Settings, make_recall_model, train, write_recall
from conformance.recipes.search import search


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (2: wrong usage)."""
    parser = argparse.ArgumentParser(prog="python -m conformance.recipes", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="name every checkpoint and what it is for")
    builder = commands.add_parser("build", help="build a checkpoint of random weights, equal to the bit")
    builder.add_argument("name", choices=sorted(MECHANICS))
    builder.add_argument("--out", type=Path, required=True, help="directory to create")
    trainer = commands.add_parser("train", help=f"train {RECALL} anew, in minutes; the weights will differ")
    trainer.add_argument("--out", type=Path, required=True, help="directory to create")
    trainer.add_argument("--steps", type=int, default=Settings.steps, help="optimiser steps")
    trainer.add_argument("--seed", type=int, default=Settings.seed, help="of initial weights and data")
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
        print(f"{RECALL:20} {RECALL_SUMMARY}")
    elif options.command == "build":
        build(options.name, options.out)
        print(f"wrote {options.out}")
    elif options.command == "train":
        settings = Settings(steps=options.steps, seed=options.seed)
        model = make_recall_model(settings.seed)
        losses = train(model, settings, lambda step, loss: print(f"step {step}: loss {loss:.4f}", flush=True))
        write_recall(options.out, model, settings, losses)
        print(f"wrote {options.out}")
    elif options.command == "pictures":
        paths = write_pictures(options.out)
        changed = sign(options.out, options.reason)
        print(f"wrote {len(paths)} pictures to {options.out}, {len(changed)} of them new or changed")
    else:
        for result in search(MECHANICS[options.name], range(options.seeds)):
            print(f"seed {result.seed}: smallest margin {result.min_margin:.4f}, distinct {result.distinct}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
