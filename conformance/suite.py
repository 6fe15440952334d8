"""Selects scenarios and points, runs and judges them, and applies waivers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from conformance.adapters.base import Capabilities, request_of
from conformance.adapters.received import AdapterError, declared
from conformance.archive import write_history
from conformance.canonical import request_key
from conformance.checks import judge
from conformance.digest import Digest, digest_of
from conformance.history import History
from conformance.models import ModelUnavailable, resolve_model
from conformance.runner import EngineFactory, Skipped, run_scenario
from conformance.scenario import Scenario
from conformance.store import RecordStore
from conformance.verdicts import Finding, Judgement, Power, Verdict
from conformance.waivers import Waiver

__all__ = [
    "Case",
    "Outcome",
    "Selection",
    "SelectionError",
    "apply_waivers",
    "capabilities_of",
    "judge_history",
    "point_label",
    "run_case",
    "select",
    "select_matrix",
    "unjudged",
    "why_foreign",
]


class SelectionError(ValueError):
    """The selection names something that does not exist, or selects nothing."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which scenarios at which points; every given criterion must hold.

    Attributes:
        ids: ids or shell patterns; when given, the profile does not matter.
        device, dtype: run there instead of where the scenario says.
        point: option → value (as text) that the point must have.
    """

    profile: str = "default"
    ids: tuple[str, ...] = ()
    areas: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    device: str | None = None
    dtype: str | None = None
    point: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Case:
    """One scenario at one point: the unit that gets a verdict.

    Attributes:
        engine: its name as it was asked for; "" where nothing is to be run.
        has_twins: whether the run has the same on other engines or devices; its label then tells them.
    """

    scenario: Scenario
    point: Mapping[str, Any]
    engine: str = ""
    has_twins: bool = False

    @property
    def device(self) -> str:
        return str(self.point.get("device", "auto"))

    @property
    def label(self) -> str:
        apart = {"engine": self.engine, "device": self.device} if self.has_twins else {}
        return self.scenario.id + point_label(self.scenario, self.point, apart)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case. `waiver` is set where it was waived, `digest` where it ran."""

    case: Case
    judgement: Judgement
    seconds: float
    waiver: Waiver | None = None
    digest: Digest | None = None

    @property
    def verdict(self) -> Verdict:
        return self.judgement.verdict


def point_label(
    scenario: Scenario, point: Mapping[str, Any], apart: Mapping[str, str] = MappingProxyType({})
) -> str:
    """The point's values on axes that have several, as "[a=1, b=2]"; "" if there are none.

    Args:
        apart: shown before them.
    """
    axes = {"model": scenario.models, "dtype": scenario.dtypes, **scenario.matrix}
    shown = [f"{axis}={value}" for axis, value in apart.items()]
    shown += [
        f"{axis}={point[axis]}"
        for axis, values in axes.items()
        if len(values) > 1 and axis in point and axis not in apart
    ]
    return f"[{', '.join(shown)}]" if shown else ""


def select(scenarios: Sequence[Scenario], selection: Selection) -> list[Case]:
    """The cases a selection means, in order of scenario id.

    Raises:
        SelectionError: an id, pattern, area or model matches nothing, or nothing is left.
    """
    for pattern in selection.ids:
        if not any(fnmatchcase(s.id, pattern) for s in scenarios):
            raise SelectionError(f"no scenario matches {pattern!r}; see: conformance list")
    areas = {s.area for s in scenarios}
    for area in selection.areas:
        if area not in areas:
            raise SelectionError(f"no area {area!r}; areas are {', '.join(sorted(areas))}")
    known = {model for s in scenarios for model in s.models}
    for model in selection.models:
        if model not in known:
            raise SelectionError(f"no scenario runs model {model!r}; models are {', '.join(sorted(known))}")
    cases = []
    for scenario in scenarios:
        if selection.ids and not any(fnmatchcase(scenario.id, pattern) for pattern in selection.ids):
            continue
        if not selection.ids and not scenario.in_profile(selection.profile):
            continue
        if selection.areas and scenario.area not in selection.areas:
            continue
        cases += [Case(scenario, point) for point in _points(scenario, selection)]
    if not cases:
        raise SelectionError("nothing is selected: no scenario meets every criterion; see: conformance list")
    return cases


def select_matrix(
    scenarios: Sequence[Scenario],
    selection: Selection,
    engines: Sequence[str],
    devices: Sequence[str] = (),
) -> list[Case]:
    """The selected cases on each device of each engine, those of one scenario and point together.

    Args:
        devices: instead of the selection's; none leaves it as it is.

    Raises:
        SelectionError: see `select`; or an engine or a device is named twice.
    """
    for names in (engines, devices):
        if len(set(names)) < len(names):
            raise SelectionError(f"named twice: {', '.join(sorted(n for n in names if names.count(n) > 1))}")
    where: Sequence[str | None] = devices or [selection.device]
    places = [(engine, device) for engine in engines for device in where]
    order = {scenario.id: place for place, scenario in enumerate(scenarios)}
    cases = [
        replace(case, engine=engine, has_twins=len(places) > 1)
        for engine, device in places
        for case in select(scenarios, replace(selection, device=device))
    ]
    return sorted(cases, key=lambda case: order[case.scenario.id])


def _points(scenario: Scenario, selection: Selection) -> list[dict[str, Any]]:
    points: list[dict[str, Any]] = []
    for original in scenario.points():
        point = dict(original)
        if selection.dtype is not None:
            point["dtype"] = selection.dtype
        if point.get("device", "auto") == "auto":
            point["device"] = selection.device or "auto"
        elif selection.device is not None and point["device"] != selection.device:
            continue
        if selection.models and point["model"] not in selection.models:
            continue
        if any(str(point.get(name)) != value for name, value in selection.point.items()):
            continue
        if point not in points:
            points.append(point)
    return points


def run_case(
    case: Case,
    factory: EngineFactory,
    store: RecordStore,
    *,
    strict: bool = False,
    root: Path | None = None,
    histories: Path | None = None,
) -> Outcome:
    """Run and judge one case; never raises for what the engine or the scenario does.

    Args:
        root: directory with golden/ and scenarios/; the default is the suite's own.
        histories: save the history below this directory.
    """
    started = time.perf_counter()
    digest = None
    try:
        source = resolve_model(case.point["model"], root)
        history = run_scenario(case.scenario, case.point, factory, source, store)
    except (Skipped, ModelUnavailable) as reason:
        judgement = unjudged(case, Verdict.SKIP, str(reason))
    except AdapterError as mistake:
        judgement = unjudged(case, Verdict.ERROR, str(mistake))
    except Exception as crash:  # the harness's own trouble must fail this case, not end the run
        judgement = unjudged(case, Verdict.ERROR, f"the harness failed: {type(crash).__name__}: {crash}")
    else:
        if histories is not None:
            write_history(histories, history)
        judgement = judge_history(history, case.scenario, store, strict=strict)
        digest = digest_of(history, case.scenario, judgement, store.get)
    return Outcome(case, judgement, time.perf_counter() - started, digest=digest)


def capabilities_of(
    factory: EngineFactory, cases: Iterable[Case], root: Path | None = None
) -> Capabilities | None:
    """What the engine says of itself, for the report; None if no model of the cases is here."""
    for case in cases:
        try:
            source = resolve_model(case.point["model"], root)
        except (ModelUnavailable, OSError):
            continue
        options = {"dtype": case.point["dtype"], "device": case.point["device"]}
        with suppress(AdapterError):  # its cases have told
            return declared(factory, source, options)
    return None


def judge_history(
    history: History, scenario: Scenario, store: RecordStore, *, strict: bool = False
) -> Judgement:
    """Judge a history by the scenario's checks."""
    return judge(history, scenario.checks, store.get, scenario.level, strict=strict)


def why_foreign(history: History, scenario: Scenario) -> str | None:
    """Why a saved history cannot be judged by the scenario as it stands; None if it can.

    A history names its point and its goldens itself. It is believed only where the scenario says so.
    """
    point = dict(history.point)
    own = [_matrix_part(original) for original in scenario.points()]
    if _matrix_part(point) not in own or "dtype" not in point:
        return f"the scenario has no point {point}"
    if history.dtype != point["dtype"]:
        return f"it computed in {history.dtype}, and its point says {point['dtype']}"
    model = Path(point["model"])
    if history.model not in (point["model"], model.name, model.stem):
        return f"it is of model {history.model}, and its point says {point['model']}"
    for one in history.passes:
        for name, run in one.requests.items():
            request = scenario.requests.get(request_of(name))
            if request is None:
                return f"it answers {name!r}, which the scenario does not ask"
            if run.request_id != name:
                return f"it has the answer to {run.request_id!r} under {name!r}"
            if run.golden_key is None:
                continue
            if run.golden_key != request_key(request.canonical(point["model"], point["dtype"])):
                return f"{name!r} refers to the golden of another request than the scenario's"
    return None


def _matrix_part(point: Mapping[str, Any]) -> dict[str, Any]:
    """A point without what a selection may change."""
    return {name: value for name, value in point.items() if name not in ("device", "dtype")}


def apply_waivers(
    outcomes: Sequence[Outcome], waivers: Sequence[Waiver], known: Sequence[str]
) -> tuple[list[Outcome], list[tuple[Waiver, str]]]:
    """Turn waived failures into WAIVED, and find the waivers that are stale.

    A waiver is stale when it names no scenario of the suite (`known`), or when what it covers ran
    and nothing of it failed. Waivers about scenarios that were not selected are left alone.

    Returns:
        The outcomes in order, and (stale waiver, why).
    """
    results = []
    used: dict[int, list[Verdict]] = {}
    for outcome in outcomes:
        case = outcome.case
        point = {**case.point, "engine": case.engine} if case.has_twins else case.point
        covering = [w for w in waivers if w.covers(case.scenario.id, point)]
        for waiver in covering:
            used.setdefault(waiver.line, []).append(outcome.verdict)
        if covering and outcome.verdict is Verdict.FAIL:
            judgement = replace(outcome.judgement, verdict=Verdict.WAIVED)
            outcome = replace(outcome, judgement=judgement, waiver=covering[0])
        results.append(outcome)
    return results, list(_stale(waivers, used, outcomes, known))


def _stale(
    waivers: Sequence[Waiver],
    used: Mapping[int, Sequence[Verdict]],
    outcomes: Sequence[Outcome],
    known: Sequence[str],
) -> Iterator[tuple[Waiver, str]]:
    ran = [outcome.case.scenario.id for outcome in outcomes]
    for waiver in waivers:
        verdicts = used.get(waiver.line, ())
        if not waiver.names(known):
            yield waiver, "no scenario has this id"
        elif verdicts and all(verdict.is_agreement for verdict in verdicts):
            yield waiver, "what it waives passes"
        elif not verdicts and waiver.names(ran):
            yield waiver, f"its scenario ran at no point with {dict(waiver.point)}"


def unjudged(case: Case, verdict: Verdict, message: str) -> Judgement:
    """The judgement on a case that did not get as far as its checks."""
    finding = Finding(verdict, "scenario", None, message)
    return Judgement(verdict, (finding,), Power((), {}), case.scenario.level)
