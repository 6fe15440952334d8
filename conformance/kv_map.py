"""`conformance kv-map`: look at a KV cache: who holds which block, what is shared, cached and free,
and which part of which picture.

Exit status: 0 drawn, 2 the command, the snapshot or the scenario is wrong, or the engine shows nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from conformance.adapters.base import Snapshots
from conformance.adapters.received import AdapterError, declared
from conformance.drive import Drive, NoProgress, StepFailed
from conformance.engines import EngineNotFound, find_engine
from conformance.kv_drawing import draw_svg, print_map
from conformance.kv_snapshot import SnapshotError, parse_snapshot
from conformance.models import ModelUnavailable, resolve_model
from conformance.output_files import OutputClash, must_not_clash
from conformance.paths import DataMissing, data_root
from conformance.runner import Skipped, engine_requests
from conformance.scenario import Scenario, ScenarioError, load_scenarios
from conformance.store import RecordError, RecordStore
from conformance.terminal import Terminal, complain

__all__ = ["MapError", "add_parser", "main", "parser", "run", "snapshot_of"]


class MapError(ValueError):
    """There is nothing to draw; the message says why."""


def add_parser(subcommands: Any) -> argparse.ArgumentParser:
    """Add `kv-map` to an argparse subcommand table; `run` carries out what it parsed."""
    made: argparse.ArgumentParser = subcommands.add_parser("kv-map", help="draw a KV cache")
    _fill(made)
    return made


def parser() -> argparse.ArgumentParser:
    """The command line of `conformance kv-map`."""
    made = argparse.ArgumentParser(prog="conformance kv-map", description=__doc__)
    _fill(made)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kv-map` on its own; returns the exit status."""
    return run(parser().parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Carry out a parsed `kv-map` command; returns the exit status."""
    try:
        must_not_clash({"--svg": args.svg, "--json": args.json}, [Path(args.source)])
        data, title = _snapshot(args)
        snapshot = parse_snapshot(data)
        if args.json:
            args.json.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        if args.svg:
            args.svg.write_text(draw_svg(snapshot, title=title), encoding="utf-8")
        console = Terminal()
        console.print(title, markup=False)
        print_map(console, snapshot, blocks=args.blocks, columns=args.columns)
    except (
        AdapterError,
        DataMissing,
        EngineNotFound,
        MapError,
        ModelUnavailable,
        NoProgress,
        OSError,
        OutputClash,
        RecordError,
        ScenarioError,
        Skipped,
        SnapshotError,
        StepFailed,
    ) as error:
        complain(f"error: {error}")
        return 2
    return 0


def snapshot_of(
    scenario: Scenario,
    step: int | None,
    *,
    engine: str = "minivllm",
    point: Mapping[str, Any] | None = None,
    root: Path | None = None,
) -> tuple[Mapping[str, Any], int]:
    """Run a scenario up to an engine step, and take a snapshot after it.

    Args:
        step: number of the step, from 1; None: the first one after which most blocks are in use.
        point: one of the scenario's points; None takes the first.

    Returns:
        The snapshot, and the number of the step.

    Raises:
        MapError: the engine shows no snapshot, or the scenario ended before the step.
        Skipped: the engine lacks something the scenario needs.
    """
    chosen = point or scenario.points()[0]
    factory, source = find_engine(engine), resolve_model(chosen["model"], root)
    requests = engine_requests(scenario, chosen, factory, source, RecordStore(root))
    wanted = {**scenario.engine, **{k: v for k, v in chosen.items() if k != "model"}}
    capabilities = declared(factory, source, wanted)
    if "snapshot" not in capabilities.features or "stepped" not in capabilities.features:
        raise MapError(f"{engine} does not show its KV cache step by step (features snapshot and stepped)")
    options = {k: v for k, v in wanted.items() if k in ("dtype", "device") or k in capabilities.options}
    adapter = factory(source, options)
    drive = _Watch(adapter, capabilities, requests, options, stop_at=step)
    with adapter, suppress(_Reached):
        drive.execute(scenario.steps)
    if drive.seen is None or (step is not None and drive.seen[1] != step):
        raise MapError(f"{scenario.id} has no step {step}: it ended after {len(drive.live_after)} steps")
    return drive.seen


class _Reached(Exception):
    """The step has been taken; the rest of the scenario does not matter."""


@dataclass
class _Watch(Drive):
    """A drive that takes a snapshot after one step, or after the one that uses most blocks."""

    stop_at: int | None = None
    seen: tuple[Mapping[str, Any], int] | None = field(default=None, init=False)
    _most: int = field(default=-1, init=False)

    def _advance(self) -> None:
        super()._advance()
        step = len(self.live_after)
        if self.stop_at is not None and step < self.stop_at:
            return
        snapshot = cast("Snapshots", self.adapter).kv_snapshot()
        in_use = sum(block["state"] == "in_use" for block in snapshot["blocks"])
        if self.stop_at is not None or in_use > self._most:
            self.seen, self._most = (snapshot, step), in_use
        if self.stop_at is not None:
            raise _Reached


def _snapshot(args: argparse.Namespace) -> tuple[Any, str]:
    """The snapshot as plain data, and what it is a snapshot of."""
    path = Path(args.source)
    if path.suffix == ".json":
        try:
            return json.loads(path.read_text(encoding="utf-8")), f"KV cache of {path.name}"
        except (ValueError, RecursionError) as error:
            raise SnapshotError(f"{path} is not JSON: {error}") from error
    if args.step is not None and args.step < 1:
        raise MapError(f"--step counts from 1, got {args.step}")
    scenarios = {s.id: s for s in load_scenarios((args.data or data_root()) / "scenarios")}
    if args.source not in scenarios:
        raise MapError(f"no scenario {args.source!r}, and no .json file; see: conformance list")
    scenario = scenarios[args.source]
    data, step = snapshot_of(scenario, args.step, engine=args.engine, root=args.data)
    why = "" if args.step else ", when most blocks are in use"
    return data, f"KV cache of {args.engine} in {scenario.id}, after step {step}{why}"


def _fill(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", help="a snapshot (.json), or the id of a scenario to run")
    parser.add_argument("--step", type=int, help="after this engine step, from 1; default: the fullest one")
    parser.add_argument("--engine", default="minivllm", help="whose cache (default minivllm)")
    parser.add_argument("--blocks", action="store_true", help="also print a line per block")
    parser.add_argument("--columns", type=int, default=16, help="blocks per row (default 16)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a drawing, with tokens on hover")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the snapshot")
    parser.add_argument("--data", type=Path, metavar="DIR", help="directory with golden/ and scenarios/")
