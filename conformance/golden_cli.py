"""`conformance golden`: record what scenarios need, verify it, or record it again with a reason."""

from __future__ import annotations

import argparse
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import yaml

from conformance.adapters.base import ModelSource
from conformance.canonical import CanonicalError, parse_canonical, request_key
from conformance.hf_models import NoTruth
from conformance.models import ModelUnavailable, resolve_model
from conformance.paths import data_root
from conformance.records import GoldenRecord
from conformance.reference import Reference
from conformance.scenario import load_scenarios
from conformance.store import RecordError, RecordStore, WrongWeights

__all__ = ["GoldenRequest", "case_name", "main", "parser", "run", "scenario_requests"]

_FILE_FIELDS = {"label", "traced", "request"}


@dataclass(frozen=True, slots=True)
class GoldenRequest:
    """A request that needs a golden record, and who asked for it."""

    label: str
    request: Mapping[str, Any]
    traced: bool = False


def parser() -> argparse.ArgumentParser:
    """The command line of `conformance golden`."""
    root = argparse.ArgumentParser(
        prog="conformance golden",
        description="Golden records are the answers of Hugging Face in float64; see golden/MANIFEST.json.",
    )
    _fill(root)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Run `conformance golden`. Returns the exit status: 0 only if nothing was wrong."""
    return run(parser().parse_args(argv))


def run(args: argparse.Namespace) -> int:
    """Carry out a parsed `golden` command; returns the exit status."""
    torch.set_num_threads(args.threads)
    actions = {"record": _record, "verify": _verify, "update": _update}
    try:
        return actions[args.golden_command](args)
    except (RecordError, ModelUnavailable, CanonicalError) as error:
        print(f"error: {error}")
        return 1


def scenario_requests(root: Path) -> list[GoldenRequest]:
    """Every request of every scenario below `root`/scenarios that a golden check judges."""
    return [
        GoldenRequest(label, request, scenario.requests[label.rpartition(":")[2]].traced)
        for scenario in load_scenarios(root / "scenarios")
        for label, request in scenario.golden_requests()
    ]


def case_name(label: str, key: str) -> str:
    """File name of a record: the label as a slug, and the start of the key to keep it unique."""
    slug = re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-") or "case"
    return f"{slug}-{key[:8]}"


def _fill(parser: argparse.ArgumentParser) -> None:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--model", action="append", default=[], help="only this model; may be repeated")
    common.add_argument("--only", default="*", metavar="GLOB", help="only labels or cases that match")
    common.add_argument("--root", type=Path, default=None, help="directory with golden/ and scenarios/")
    common.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    commands = parser.add_subparsers(dest="golden_command", required=True)
    record = commands.add_parser("record", parents=[common], help="record what is not recorded yet")
    record.add_argument(
        "--requests", type=Path, help="YAML or JSON file of requests, instead of the scenarios"
    )
    record.add_argument("--traced", metavar="GLOB", help="keep stage arrays of labels that match (large)")
    record.add_argument("--reason", default="recorded", help="written to the manifest")
    commands.add_parser("verify", parents=[common], help="compute the recorded numbers again and compare")
    update = commands.add_parser("update", parents=[common], help="record existing records again")
    update.add_argument("--reason", required=True, help="why; written to the manifest")


def _record(args: argparse.Namespace) -> int:
    root = args.root or data_root()
    store = RecordStore(root)
    wanted = _file_requests(args.requests) if args.requests else scenario_requests(root)
    todo: dict[tuple[ModelSource, str], dict[str, GoldenRequest]] = {}
    tally: Counter[str] = Counter()
    for item in wanted:
        if not fnmatchcase(item.label, args.only) or not _has_model(args, item.request["model"]):
            continue
        try:
            source = resolve_model(item.request["model"], root)
        except ModelUnavailable as error:
            tally["failed"] += 1
            print(f"FAILED {item.label}: {error}")
            continue
        # A model given as a path is recorded under its own name.
        request = parse_canonical({**item.request, "model": source.name})
        traced = item.traced or (args.traced is not None and fnmatchcase(item.label, args.traced))
        key = request_key(request)
        if key in store:
            tally[_known(store, key, source, item.label, traced)] += 1
            continue
        group = todo.setdefault((source, request["dtype"]), {})
        known = group.get(key)
        if known is not None:
            traced, item = traced or known.traced, known
        group[key] = GoldenRequest(item.label, request, traced)
    count = sum(map(len, todo.values()))
    for (source, _), items in todo.items():
        reference = Reference(source, root)
        for key, item in items.items():
            number = f"[{tally['recorded'] + tally['failed'] + 1}/{count}]"
            done = _record_one(
                reference, store, item.request, case_name(item.label, key), item.traced, args.reason, number
            )
            tally["recorded" if done else "failed"] += 1
    return _finish(tally, ("recorded", "already there", "failed"), bool(tally["failed"]))


def _known(store: RecordStore, key: str, source: ModelSource, label: str, traced: bool) -> str:
    try:
        record = store.get(key, source.sha256)
        if traced and not record.stages:
            name = f"{record.model}/{record.case}"
            raise RecordError(f"{name} is recorded without stages; ask a traced request something else")
    except RecordError as error:
        print(f"FAILED {label}: {error}")
        return "failed"
    return "already there"


def _record_one(
    reference: Reference,
    store: RecordStore,
    request: Mapping[str, Any],
    case: str,
    traced: bool,
    reason: str,
    number: str,
) -> bool:
    start = time.perf_counter()
    name = f"{number} {reference.source.name}/{case}"
    try:
        record = reference.record(request, case, traced=traced)
    except NoTruth as error:
        print(f"{name}: FAILED: {error}")
        return False
    store.save(record, reason)
    yardstick = record.yardstick
    # The oracle's rule: a position is decided when the margin exceeds 2B, and B = 4M.
    decided = float((record.output.margins > 8 * yardstick.M).mean())
    print(
        f"{name}: {len(record.prompt_token_ids)} + {len(record.token_ids)} tokens, "
        f"{record.finish_reason}, R {yardstick.R:.2g}, M {yardstick.M:.2g}, decided {decided:.0%}, "
        f"{time.perf_counter() - start:.1f} s",
        flush=True,
    )
    if record.dtype == "float32" and decided < 0.9:
        print(f"{name}: warning: fewer than 90 % of positions are decided; this case will not pass")
    return True


def _verify(args: argparse.Namespace) -> int:
    root = args.root or data_root()
    store = RecordStore(root)
    tally: Counter[str] = Counter()
    for fault in store.manifest.faults(store.golden):
        tally["manifest faults"] += 1
        print(f"MANIFEST {fault}")
    for reference, record in _chosen(args, root, store, tally):
        try:
            stages = reference.verify(record)
        except (NoTruth, WrongWeights) as error:
            tally["errors"] += 1
            print(f"ERROR {record.model}/{record.case}: {error}")
            continue
        worst = next(v for v in ("changed", "inside band", "same") if v in {s.verdict for s in stages})
        tally[worst] += 1
        details = ", ".join(
            f"{s.stage} {s.verdict}" + (f" (rms {s.error.rms:.2g}, max {s.error.max:.2g})" if s.error else "")
            for s in stages
            if s.verdict != "same"
        )
        print(f"{worst:11} {record.model}/{record.case}" + (f": {details}" if details else ""), flush=True)
    checked = tally["same"] + tally["inside band"] + tally["changed"]
    if not checked:
        print("nothing was verified: no record matches, or none could be read, or no model is here")
    bad = not checked or any(tally[n] for n in ("changed", "errors", "manifest faults"))
    return _finish(tally, ("same", "inside band", "changed", "skipped", "errors", "manifest faults"), bad)


def _update(args: argparse.Namespace) -> int:
    root = args.root or data_root()
    store = RecordStore(root)
    tally: Counter[str] = Counter()
    for reference, record in _chosen(args, root, store, tally):
        done = _record_one(
            reference, store, record.request, record.case, bool(record.stages), args.reason, "again"
        )
        tally["recorded" if done else "errors"] += 1
    if not tally["recorded"]:
        print("nothing was recorded: no record matches, or none could be read, or no model is here")
    bad = not tally["recorded"] or bool(tally["errors"] or tally["skipped"])
    return _finish(tally, ("recorded", "skipped", "errors"), bad)


def _chosen(
    args: argparse.Namespace, root: Path, store: RecordStore, tally: Counter[str]
) -> Iterator[tuple[Reference, GoldenRecord]]:
    """Readable records that the filters choose, with a reference; others are tallied and told."""
    records = []
    for key in store:
        try:
            record = store.get(key)
        except RecordError as error:
            tally["errors"] += 1
            print(f"ERROR {error}")
            continue
        label = f"{record.model}/{record.case}"
        chosen = fnmatchcase(record.case, args.only) or fnmatchcase(label, args.only)
        if chosen and _has_model(args, record.model):
            records.append(record)
    reference: Reference | None = None
    for record in sorted(records, key=lambda r: (r.model, r.dtype)):
        if reference is None or reference.source.name != record.model:
            try:
                reference = Reference(_source(args, record.model, root), root)
            except ModelUnavailable as error:
                tally["skipped"] += 1
                print(f"skipped     {record.model}/{record.case}: {error}")
                continue
        yield reference, record


def _source(args: argparse.Namespace, model: str, root: Path) -> ModelSource:
    """A record's checkpoint; one given by path (`--model PATH`) goes by its own name."""
    paths = {source.name: source for m in args.model if (source := resolve_model(m, root)).name != m}
    return paths[model] if model in paths else resolve_model(model, root)


def _has_model(args: argparse.Namespace, model: str) -> bool:
    return not args.model or model in args.model or model in {Path(m).stem for m in args.model}


def _file_requests(path: Path) -> list[GoldenRequest]:
    """Requests from a file: a list of {label, request: {canonical fields}, traced: bool}."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise CanonicalError(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(content, list):
        raise CanonicalError(f"{path} must hold a list of requests, got {type(content).__name__}")
    items = []
    for number, item in enumerate(content, start=1):
        if not isinstance(item, Mapping) or not {"label", "request"} <= set(item) <= _FILE_FIELDS:
            raise CanonicalError(f"{path}: request {number} must hold label, request and maybe traced")
        try:
            request = parse_canonical(item["request"])
        except CanonicalError as error:
            raise CanonicalError(f"{path}: request {number}: {error}") from error
        items.append(GoldenRequest(str(item["label"]), request, bool(item.get("traced", False))))
    return items


def _finish(tally: Mapping[str, int], names: Sequence[str], bad: bool) -> int:
    print(", ".join(f"{tally.get(name, 0)} {name}" for name in names))
    return 1 if bad else 0
