"""The command `conformance`.

Exit status: 0 something was judged and nothing failed, 1 something failed (or whoever read the output
has gone), 2 the command or one of its files is wrong or cannot be written, 3 nothing was judged (every
case was skipped), 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import NamedTemporaryFile

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from conformance import EDITION
from conformance.adapters.base import Capabilities
from conformance.again import Invocation, invocation_of, with_commands
from conformance.archive import ArchiveError, read_histories
from conformance.catalogue import lint_suite, print_explanation, print_list
from conformance.digest import digest_of
from conformance.distribute import ClusterError, Declared, LabelError, Settings
from conformance.distribute.options import NoWorkers, add_distribution_options, doing, runner_for
from conformance.engines import (
    EngineNotFound,
    EngineOptionError,
    engine_names,
    find_engine,
    parse_options,
    with_options,
)
from conformance.environment import shared_environment
from conformance.models import ModelUnavailable, export_models, list_models, resolve_model
from conformance.output_files import OutputClash, must_be_writable, output_path
from conformance.paths import DataMissing, data_root
from conformance.report import nothing_judged, print_case, print_summary, reproduce, run_fails
from conformance.report_files import add_report_options, report_files, write_reports
from conformance.retrace import TriageError
from conformance.runner import EngineFactory
from conformance.scenario import PROFILES, Scenario, ScenarioError, load_scenarios
from conformance.stability_report import add_stability_options, run_stability
from conformance.store import RecordError, RecordStore
from conformance.suite import (
    Case,
    Outcome,
    Selection,
    SelectionError,
    apply_waivers,
    capabilities_of,
    judge_history,
    run_case,
    select,
    select_matrix,
    why_foreign,
)
from conformance.terminal import Terminal, complain
from conformance.triage_report import look_into, plain, print_examined
from conformance.verdicts import Verdict
from conformance.waivers import Waiver, WaiverError, load_waivers

__all__ = ["main", "parser"]

#: Commands with a command line of their own: the module whose `main` and `parser` they are, and what for.
_PARTS = {
    "golden": ("conformance.golden_cli", "record, verify or update golden records"),
    "kv-map": ("conformance.kv_map", "draw who holds which block of a KV cache"),
    "faults": ("conformance.faults.cli", "put public bugs into minivllm, and see which check finds each"),
    "doctor": ("conformance.doctor.cli", "try what an engine declares; or look at the reference here"),
    "compare": ("conformance.compare_cli", "tell two runs apart: what is fixed, what regressed"),
    "diff": ("conformance.diff_cli", "compare two engines on one prompt; no scenario needed"),
    "report": ("conformance.report_cli", "show saved reports as a page, several engines side by side"),
    "fuzz": ("conformance.fuzz.cli", "fuzz a block manager or scheduler: minivllm's or your own"),
}

_USAGE_ERRORS = (
    ArchiveError,
    ClusterError,
    DataMissing,
    EngineNotFound,
    EngineOptionError,
    LabelError,
    ModelUnavailable,
    NoWorkers,
    OutputClash,
    RecordError,
    ScenarioError,
    SelectionError,
    WaiverError,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character
    try:
        status = _command(arguments)
        sys.stdout.flush()
        return status
    except (*_USAGE_ERRORS, OSError) as error:
        _give_up_unwritable_output()
        if isinstance(error, BrokenPipeError):
            return 1
        complain(error)
        return 2
    except KeyboardInterrupt:
        Terminal(stderr=True).print("interrupted: nothing is judged as a whole", style="red")
        return 130


def _give_up_unwritable_output() -> None:
    """Drop what cannot be written, or Python would try again on leaving, and complain."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _command(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] in _PARTS:
        # Imported when asked for: recording needs torch and Transformers; nothing else here does.
        return int(import_module(_PARTS[arguments[0]][0]).main(arguments[1:]))
    args = parser().parse_args(arguments)
    return int(args.command(args, Terminal()))


# ---- commands -----------------------------------------------------------------------------------


def _run(args: argparse.Namespace, console: Console) -> int:
    scenarios = _scenarios(args)
    waivers = load_waivers(args.waivers) if args.waivers else []
    engines = args.engine or ["minivllm"]
    names = [_engine_name(args, name) for name in engines]
    cases = select_matrix(scenarios, _selection(args), names, args.devices)
    settings = Settings(parse_options(args.engine_option), args.strict, args.data, limit=args.case_timeout)
    outcomes: dict[int, Outcome] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with ExitStack() as stack:
        runner = runner_for(args, cases, RecordStore(args.data), partial(_factory, args), stack)
        _must_be_writable(args, args.history)
        progress = stack.enter_context(Progress(*columns, console=Terminal(stderr=True), transient=True))
        task = progress.add_task(doing(runner, cases, 0), total=len(cases))
        for index, outcome in runner.outcomes(cases, settings, triage=args.triage, histories=args.history):
            given = engines[0] if len(engines) == 1 else outcome.case.engine
            outcome = with_commands(outcome, invocation_of(args, given))
            outcomes[index] = outcome
            progress.update(task, advance=1, description=doing(runner, cases, len(outcomes)))
            _tell(console, outcome, waivers)
        declared = runner.declared(cases, settings)
    ordered = [outcomes[index] for index in range(len(cases))]
    return _finish(args, console, ordered, waivers, [s.id for s in scenarios], declared)


def _recheck(args: argparse.Namespace, console: Console) -> int:
    scenarios, store = _scenarios(args), RecordStore(args.data)
    waivers = load_waivers(args.waivers) if args.waivers else []
    by_id = {scenario.id: scenario for scenario in scenarios}
    _must_be_writable(args)
    outcomes = []
    engines: list[Capabilities] = []
    environments: list[Mapping[str, str]] = []
    for history in read_histories(args.directory):
        if history.scenario not in by_id:
            raise SelectionError(f"a history is about {history.scenario!r}, which the suite does not have")
        scenario = by_id[history.scenario]
        if (why := why_foreign(history, scenario)) is not None:
            raise SelectionError(f"a history of {scenario.id} does not fit the scenario: {why}; run it again")
        judgement = judge_history(history, scenario, store, strict=args.strict)
        seconds = sum(p.seconds for p in history.passes)
        digest = digest_of(history, scenario, judgement, store.get)
        outcome = Outcome(Case(scenario, history.point), judgement, seconds, digest=digest)
        options = tuple(args.engine_option)
        told = Invocation(history.capabilities.engine, options=options, strict=args.strict, data=args.data)
        outcome = with_commands(outcome, told)
        outcomes.append(outcome)
        engines.append(history.capabilities)
        environments.append(history.environment)
        _tell(console, outcome, waivers)
    one = len({(engine.engine, engine.version) for engine in engines}) == 1
    engine, environment = engines[0] if one else None, shared_environment(environments)
    return _finish(args, console, outcomes, waivers, list(by_id), {("", ""): engine}, environment)


def _tell(console: Console, outcome: Outcome, waivers: Sequence[Waiver]) -> None:
    """A judged case as it ends; those skipped are told together."""
    [waived], _ = apply_waivers([outcome], waivers, [])
    if waived.verdict is not Verdict.SKIP:
        print_case(console, waived)


def _must_be_writable(args: argparse.Namespace, directory: Path | None = None) -> None:
    """Raise for a report that could not be written, before a run instead of after it.

    Raises:
        OSError: it cannot be written.
        OutputClash: it would be written over another file of the command.
    """
    for path in report_files(args):
        must_be_writable(path)
    if directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=directory):
            pass


def _finish(
    args: argparse.Namespace,
    console: Console,
    outcomes: Sequence[Outcome],
    waivers: Sequence[Waiver],
    known: Sequence[str],
    declared: Declared,
    environment: Mapping[str, str] | None = None,
) -> int:
    final, stale = apply_waivers(outcomes, waivers, known)
    should: Mapping[str, bool] = {"strict_should": args.strict_should}
    print_summary(console, final, stale, declared, **should)
    write_reports(args, final, stale, declared, environment)
    failed = run_fails(final, stale, **should)
    return 3 if nothing_judged(final) and not stale else int(failed)


def _triage(args: argparse.Namespace, console: Console) -> int:
    store, factory = RecordStore(args.data), _factory(args, _engine_name(args, args.engine))
    must_be_writable(args.json)
    results, failed = [], False
    for case in select(_scenarios(args), _selection(args)):
        outcome = run_case(case, factory, store, strict=args.strict, root=args.data)
        failed = failed or outcome.judgement.fails_run()
        found, error = [], None
        try:
            found = look_into(outcome, factory, store, requests=args.request, root=args.data)
        except TriageError as reason:
            error = str(reason)
        outcome = with_commands(outcome, invocation_of(args, args.engine))
        print_case(console, outcome)
        print_examined(console, found)
        if error is not None:
            console.print(f"  {error}", markup=False, soft_wrap=True)
        results.append(plain(outcome, found, error, reproduce(outcome)))
    if args.json:
        args.json.write_text(json.dumps(results, indent=1), encoding="utf-8")
    return int(failed)


def _stability(args: argparse.Namespace, console: Console) -> int:
    scenarios, factory = _scenarios(args), _factory(args, _engine_name(args, args.engine))
    cases = select(scenarios, _selection(args))
    capabilities = capabilities_of(factory, cases, args.data)
    if capabilities is None:
        raise ModelUnavailable("none of the selected models is here, or the engine tells no capabilities")
    return run_stability(
        args, console, cases, scenarios, factory, capabilities, invocation_of(args, args.engine)
    )


def _list(args: argparse.Namespace, console: Console) -> int:
    print_list(console, select(_scenarios(args), _selection(args)), cost=args.cost)
    return 0


def _explain(args: argparse.Namespace, console: Console) -> int:
    scenarios = _scenarios(args)
    select(scenarios, Selection(ids=(args.id,)))  # an unknown id is told as everywhere
    for scenario in scenarios:
        if scenario.id == args.id:
            print_explanation(console, scenario)
    return 0


def _lint(args: argparse.Namespace, console: Console) -> int:
    scenarios = _scenarios(args)
    problems = lint_suite(scenarios, RecordStore(args.data), args.data)
    for problem in problems:
        console.print(problem, markup=False, soft_wrap=True)
    console.print(f"{len(scenarios)} scenarios, {len(problems)} problems")
    return 1 if problems else 0


def _models(args: argparse.Namespace, console: Console) -> int:
    if args.action == "list":
        for listing in list_models(args.data):
            where = listing.missing if listing.path is None else str(listing.path)
            console.print(f"{listing.name}  {where}", markup=False, soft_wrap=True)
    elif args.action == "path":
        console.print(str(resolve_model(args.name, args.data).path), markup=False, soft_wrap=True)
    else:
        for path in export_models(args.directory, args.names, args.data):
            console.print(str(path), markup=False, soft_wrap=True)
    return 0


# ---- arguments ----------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """The command line: every command and option."""
    root = argparse.ArgumentParser(prog="conformance", description=__doc__)
    root.add_argument("--version", action="version", version=f"conformance suite {EDITION}")
    commands = root.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run scenarios on an engine and judge it")
    run.set_defaults(command=_run)
    _add_selection(run, several=True)
    _add_engine(run, several=True)
    add_distribution_options(run)
    run.add_argument("--history", type=output_path, metavar="DIR", help="save what happened, for recheck")
    _add_reporting(run)

    run.add_argument(
        "--triage", type=_count, default=5, metavar="N", help="look into the first N failing cases (5)"
    )

    triage = commands.add_parser("triage", help="find the first stage at which scenarios go wrong")
    triage.set_defaults(command=_triage)
    _add_selection(triage)
    _add_engine(triage)
    triage.add_argument("--request", action="append", default=[], help="look into this one; may be repeated")
    triage.add_argument("--strict", action="store_true", help="minivllm's own bar: 2 × the eager cached arm")
    triage.add_argument("--json", type=output_path, metavar="FILE", help="write what was found as JSON")

    stability = commands.add_parser("stability", help="repeat a selection under what must not matter")
    stability.set_defaults(command=_stability)
    _add_selection(stability)
    _add_engine(stability)
    add_stability_options(stability)

    recheck = commands.add_parser("recheck", help="judge saved histories again, without an engine")
    recheck.set_defaults(command=_recheck)
    recheck.add_argument("directory", type=Path)
    recheck.add_argument(
        "--engine-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what the run had, for the commands that are told; may be repeated",
    )
    _add_reporting(recheck)

    listing = commands.add_parser("list", help="list scenarios")
    listing.set_defaults(command=_list)
    _add_selection(listing)
    listing.add_argument("--cost", action="store_true", help="show passes and tokens to compute")

    explain = commands.add_parser("explain", help="tell what a scenario demands, and whose rule it is")
    explain.set_defaults(command=_explain)
    explain.add_argument("id")

    lint = commands.add_parser("lint", help="check the scenario files and that their goldens exist")
    lint.set_defaults(command=_lint)

    models = commands.add_parser("models", help="list, find or copy the checkpoints")
    models.set_defaults(command=_models)
    actions = models.add_subparsers(dest="action", required=True, metavar="ACTION")
    names = actions.add_parser("list", help="every model, and where it is or how to get it")
    path = actions.add_parser("path", help="print where a model is")
    path.add_argument("name")
    export = actions.add_parser("export", help="copy models to a directory")
    export.add_argument("directory", type=Path)
    export.add_argument("names", nargs="*", help="which; none means all that are here")

    for name, (_module, text) in _PARTS.items():
        commands.add_parser(name, help=text, add_help=False)
    for command in (run, triage, stability, recheck, listing, explain, lint, names, path, export):
        command.add_argument(
            "--data", type=Path, metavar="DIR", help="directory with golden/ and scenarios/ (the suite's own)"
        )
    return root


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number


_count.__name__ = "number of cases"  # what argparse calls it


def _add_selection(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    parser.add_argument("ids", nargs="*", help="scenario ids or patterns; with any, --profile is ignored")
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="the same as an id")
    parser.add_argument("--profile", choices=PROFILES, default="default")
    parser.add_argument("--area", action="append", default=[], help="first part of the id; may be repeated")
    parser.add_argument("--model", action="append", default=[], help="only these models; may be repeated")
    text = "where device is auto: this one (cpu, cuda, mps)"
    if several:
        parser.add_argument(
            "--device", dest="devices", action="append", default=[], help=f"{text}; may be repeated"
        )
        parser.set_defaults(device=None)
    else:
        parser.add_argument("--device", help=text)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="instead of the scenario's")
    parser.add_argument(
        "--point", action="append", default=[], metavar="OPTION=VALUE", help="only points with this value"
    )


def _add_engine(parser: argparse.ArgumentParser, *, several: bool = False) -> None:
    text = f"{', '.join(engine_names())}, or package.module:Class"
    if several:
        parser.add_argument("--engine", action="append", help=f"{text}; may be repeated")
    else:
        parser.add_argument("--engine", default="minivllm", help=text)
    parser.add_argument("--variant", help="of the engine: --engine hf --variant sdpa is --engine hf-sdpa")
    parser.add_argument(
        "--engine-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the adapter (base_url of openai); VALUE is YAML; may be repeated",
    )


def _add_reporting(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--strict", action="store_true", help="minivllm's own bar: 2 × the eager cached arm")
    parser.add_argument("--strict-should", action="store_true", help="a failed `should` fails the run")
    parser.add_argument("--waivers", type=Path, metavar="FILE", help="known failures of this engine")
    add_report_options(parser)


def _engine_name(args: argparse.Namespace, name: str) -> str:
    if args.variant and isinstance(args.engine, list) and len(args.engine) > 1:
        raise EngineOptionError("--variant is of one engine; of several, name each in full, such as hf-sdpa")
    return f"{name}-{args.variant}" if args.variant else name


def _factory(args: argparse.Namespace, name: str) -> EngineFactory:
    """The engine's adapter, with the options of the command line under those of the scenarios."""
    return with_options(find_engine(name), parse_options(args.engine_option))


def _selection(args: argparse.Namespace) -> Selection:
    point = {}
    for item in args.point:
        option, equals, value = item.partition("=")
        if not equals:
            raise SelectionError(f"--point takes OPTION=VALUE, got {item!r}")
        point[option] = value
    return Selection(
        profile=args.profile,
        ids=(*args.ids, *args.only),
        areas=tuple(args.area),
        models=tuple(args.model),
        device=args.device,
        dtype=args.dtype,
        point=point,
    )


def _scenarios(args: argparse.Namespace) -> list[Scenario]:
    return load_scenarios((args.data or data_root()) / "scenarios")
