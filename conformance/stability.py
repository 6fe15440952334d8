"""Runs a selection again and again under configurations that must not matter, and compares verdicts.

A verdict that depends on a seed, on the number of threads, on which block holds what, or on how
attention is summed, is no verdict about the engine: either the engine is not deterministic where it
must be, or the judge takes rounding for a fault. PASS, NOISE and WEAK are one class.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.adapters.base import Capabilities, EngineAdapter, ModelSource
from conformance.adapters.received import declared
from conformance.models import resolve_model
from conformance.outside import FROM_OUTSIDE
from conformance.runner import EngineFactory
from conformance.scenario import Scenario
from conformance.store import RecordStore
from conformance.suite import Case, Outcome, run_case
from conformance.verdicts import Verdict

__all__ = [
    "AXES",
    "Change",
    "Configuration",
    "NothingVaries",
    "Run",
    "Variation",
    "changes",
    "configurations",
    "configured",
    "options_for",
    "plan_variation",
    "repeat",
    "verdict_class",
    "why_refused",
]

#: Options that must not matter → what they are. An engine is varied by those of them it declares.
AXES: Mapping[str, str] = {
    "seed": "seed of requests that bring none",
    "prefix_cache_seed": "root of the prefix keys",
    "placement": "order in which free blocks are handed out",
    "threads": "threads inside operators",
    "attention_backend": "how attention is computed",
}

#: Axes whose values are numbers drawn afresh for every run.
_DRAWN = ("seed", "prefix_cache_seed", "placement")
#: An odd number of threads splits most sizes unevenly.
_THREADS = (1, 2, 3)


class NothingVaries(ValueError):
    """Nothing of the engine can be varied as asked, so that repeating it would prove nothing."""


@dataclass(frozen=True, slots=True)
class Variation:
    """What is varied of an engine.

    Attributes:
        values: option → the values it takes in turn; () where every run draws another number.
        fixed: axis → why it is not varied.
    """

    values: Mapping[str, tuple[Any, ...]]
    fixed: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to run an engine. The first has no options: the engine as it is."""

    number: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"run {self.number} ({told or 'as it is'})"


@dataclass(frozen=True, slots=True)
class Run:
    """What came of all cases under one configuration.

    Attributes:
        outcomes: by the cases' labels.
        refused: label of a case that has none → why the engine does not load it so.
    """

    configuration: Configuration
    outcomes: Mapping[str, Outcome]
    seconds: float
    refused: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """A case whose verdict is of another class than in the first run.

    Attributes:
        before, after: its outcomes in the first run and in the other one.
    """

    label: str
    first: Configuration
    before: Outcome
    other: Configuration
    after: Outcome

    @property
    def told(self) -> str:
        """What the worse of the two verdicts says."""
        worse = max(self.before, self.after, key=lambda outcome: outcome.verdict.severity)
        findings = [f for f in worse.judgement.findings if f.verdict is worse.verdict]
        return findings[0].message if findings else ""


def verdict_class(verdict: Verdict) -> str:
    """PASS, NOISE and WEAK are one class; every other verdict is one of its own."""
    return "agreement" if verdict.is_agreement else verdict.value


def plan_variation(
    capabilities: Capabilities,
    scenarios: Sequence[Scenario],
    *,
    given: Mapping[str, Any],
    asked: Mapping[str, Any],
) -> Variation:
    """What to vary of an engine: the axes it declares, but those that the user has settled.

    Args:
        scenarios: of the suite; their attention backends are tried.
        given: options of the command line for the adapter.
        asked: option → list of values, instead of the usual ones or beside the axes.

    Raises:
        NothingVaries: the engine declares no axis, or not an option that is asked for.
    """
    for option, values in asked.items():
        if option not in capabilities.options:
            raise NothingVaries(f"{capabilities.engine} does not declare the option {option}: cannot vary it")
        if option in ("dtype", "device"):
            raise NothingVaries(f"--vary {option}: each case has its own; select others with --{option}")
        if not isinstance(values, list) or len({repr(value) for value in values}) < 2:
            raise NothingVaries(f"--vary {option} takes a list of at least two values, got {values!r}")
    usual: Mapping[str, tuple[Any, ...]] = {
        **dict.fromkeys(_DRAWN, ()),
        "threads": _THREADS,
        "attention_backend": _backends(scenarios),
    }
    values, fixed = {option: tuple(asked[option]) for option in asked}, {}
    for axis in AXES:
        if axis in asked:
            continue
        if axis not in capabilities.options:
            fixed[axis] = f"{capabilities.engine} does not declare the option"
        elif axis in given:
            fixed[axis] = f"{given[axis]!r} on the command line"
        elif axis not in _DRAWN and len(usual[axis]) < 2:
            fixed[axis] = "the suite names fewer than two values"
        else:
            values[axis] = usual[axis]
    if not values:
        why = "; ".join(f"{axis}: {reason}" for axis, reason in fixed.items())
        raise NothingVaries(f"nothing of {capabilities.engine} can be varied: {why}")
    return Variation(values, fixed)


def _backends(scenarios: Sequence[Scenario]) -> tuple[str, ...]:
    """The attention backends that the suite knows, in order of name."""
    named: set[str] = set()
    for scenario in scenarios:
        named |= set(map(str, scenario.matrix.get("attention_backend", ())))
        for check in scenario.check("same_under"):
            named |= set(map(str, check.args.get("backend", ())))
    return tuple(sorted(named - {"auto"}))


def configurations(runs: int, variation: Variation) -> list[Configuration]:
    """The engine as it is, then another configuration each run; every pair of listed values meets."""
    made = [Configuration(1)]
    for number in range(2, runs + 1):
        options: dict[str, Any] = {}
        rest = number - 2
        for option, values in variation.values.items():
            if values:
                rest, index = divmod(rest, len(values))
                options[option] = values[index]
            else:
                options[option] = number
        made.append(Configuration(number, options))
    return made


def configured(factory: EngineFactory, configuration: Configuration) -> EngineFactory:
    """The same adapter under a configuration; where a scenario says otherwise, the scenario wins."""

    def make(model: ModelSource, given: Mapping[str, Any]) -> EngineAdapter:
        return factory(model, {**options_for(configuration, given), **given})

    return make


def options_for(configuration: Configuration, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a configuration that go with those of a scenario."""
    options = dict(configuration.options)
    if given.get("batch_invariant"):  # which settles how attention is computed
        options.pop("attention_backend", None)
    return options


def why_refused(
    case: Case, factory: EngineFactory, configuration: Configuration, root: Path | None = None
) -> str | None:
    """Why the engine does not load a case's model under a configuration.

    Returns:
        None if it does; or if it does not load as it is either, so that the configuration is not why.
    """
    given = {**case.scenario.engine, **{k: v for k, v in case.point.items() if k != "model"}}
    try:
        source = resolve_model(case.point["model"], root)
        honoured = {"dtype", "device"} | declared(factory, source, given).options
        options = {name: value for name, value in given.items() if name in honoured}
        with factory(source, options):
            pass
    except FROM_OUTSIDE:
        raise
    except BaseException:  # of the engine, or no model: its case has told
        return None
    try:
        with configured(factory, configuration)(source, options):
            return None
    except FROM_OUTSIDE:
        raise
    except BaseException as error:  # code of others
        return f"{type(error).__name__}: {error}"


def repeat(
    cases: Sequence[Case],
    factory: EngineFactory,
    store: RecordStore,
    plan: Sequence[Configuration],
    *,
    strict: bool = False,
    root: Path | None = None,
    more: Callable[[], bool] = lambda: True,
    tell: Callable[[Configuration, Case], None] = lambda _configuration, _case: None,
) -> Iterator[Run]:
    """Run all cases under one configuration after the other.

    A case that the engine refuses to load under another configuration than the first has no outcome.

    Args:
        more: asked before each run but the first two, whether there is time for it.
        tell: called before each case.
    """
    first: Mapping[str, Outcome] = {}
    for configuration in plan:
        if configuration.number > 2 and not more():
            return
        started = time.perf_counter()
        make = configured(factory, configuration)
        outcomes, refused = {}, {}
        for case in cases:
            tell(configuration, case)
            outcome = run_case(case, make, store, strict=strict, root=root)
            if _is_change(first.get(case.label, outcome), outcome):
                reason = why_refused(case, factory, configuration, root)
                if reason is not None:
                    refused[case.label] = reason
                    continue
            outcomes[case.label] = outcome
        first = first or outcomes
        yield Run(configuration, outcomes, time.perf_counter() - started, refused)


def _is_change(before: Outcome, after: Outcome) -> bool:
    return verdict_class(before.verdict) != verdict_class(after.verdict)


def changes(runs: Sequence[Run]) -> list[Change]:
    """Every case and run whose verdict is of another class than in the first run."""
    first = runs[0]
    found = []
    for run in runs[1:]:
        for label, after in run.outcomes.items():
            before = first.outcomes[label]
            if _is_change(before, after):
                found.append(Change(label, first.configuration, before, run.configuration, after))
    return found
