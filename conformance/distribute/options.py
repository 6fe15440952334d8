"""The options that say where cases run, and who runs them then."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from conformance.distribute.cluster import Cluster
from conformance.distribute.labels import parse_labels
from conformance.distribute.local import Processes
from conformance.distribute.run import Distributed, Here, Runner
from conformance.runner import EngineFactory
from conformance.store import RecordStore
from conformance.suite import Case

__all__ = ["NoWorkers", "add_distribution_options", "doing", "runner_for"]


class NoWorkers(ValueError):
    """An option is about worker processes, and the run has none; the message names both."""


def add_distribution_options(parser: argparse.ArgumentParser) -> None:
    """Add `--jobs`, `--ray` and what belongs to them."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--jobs", type=_positive, default=1, metavar="N", help="run on N processes (1)")
    parser.add_argument(
        "--case-timeout",
        type=_seconds,
        metavar="SECONDS",
        help="with --jobs: end the worker of a case that takes longer (never)",
    )
    where.add_argument("--ray", metavar="ADDRESS", help="run on the Ray cluster at HOST:PORT, or auto")
    parser.add_argument(
        "--ray-resource",
        action="append",
        default=[],
        metavar="WHO=NAME[:AMOUNT]",
        help="what a case of this device or engine asks for (cuda=GPU:1, mps=mps:1); may be repeated",
    )
    parser.add_argument(
        "--ray-timeout", type=_seconds, default=60.0, metavar="SECONDS", help="how long to wait for it (60)"
    )


def runner_for(
    args: argparse.Namespace,
    cases: Sequence[Case],
    store: RecordStore,
    factory_of: Callable[[str], EngineFactory],
    stack: ExitStack,
) -> Runner:
    """Who runs the cases; what it holds is given back when the stack ends.

    Args:
        factory_of: an engine's adapter by its name. On a cluster, an engine need not be here.

    Raises:
        LabelError, ClusterError: with `--ray`.
        EngineNotFound: without.
        NoWorkers: a time limit without processes that can be ended.
    """
    if args.case_timeout is not None and args.jobs < 2:
        raise NoWorkers(
            "--case-timeout needs --jobs 2 or more: what hangs is ended with its process, and without "
            "--jobs that is this one"
        )
    engines = list(dict.fromkeys(case.engine for case in cases))
    if args.ray is not None:
        labels = parse_labels(args.ray_resource, engines, sorted({case.device for case in cases}))
        cluster = Cluster(args.ray, labels, timeout=args.ray_timeout, root=args.data)
        stack.enter_context(cluster).check(cases)
        return Distributed(cluster)
    factories = {name: factory_of(name) for name in engines}
    if args.jobs > 1:
        return Distributed(stack.enter_context(Processes(args.jobs)))
    return Here(factories, store)


def doing(runner: Runner, cases: Sequence[Case], done: int) -> str:
    """What a progress bar says when so many are done: the case that runs now, where it is one."""
    return cases[done].label if isinstance(runner, Here) and done < len(cases) else ""


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number < math.inf:
        raise ValueError
    return number


_seconds.__name__ = "number of seconds"
_positive.__name__ = "positive number"  # what argparse calls it
