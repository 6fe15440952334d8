"""Tries what an engine declares, feature by feature."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from conformance.adapters.base import FEATURES, ModelSource
from conformance.adapters.received import declared
from conformance.doctor.bench import Bench, ProbeFailed
from conformance.doctor.probes import PROBES, SCENARIOS
from conformance.outside import FROM_OUTSIDE
from conformance.paths import data_root
from conformance.runner import EngineFactory
from conformance.scenario import load_scenarios
from conformance.store import RecordStore
from conformance.suite import Selection, run_case, select
from conformance.verdicts import Verdict

__all__ = ["DECLARED_BUT_FAILING", "NOT_TRIED", "Finding", "UNKNOWN", "WORKS", "examine_engine"]

WORKS, DECLARED_BUT_FAILING, NOT_TRIED, UNKNOWN = "ok", "FAIL", "not declared", "not tried"


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one feature.

    Attributes:
        state: WORKS, DECLARED_BUT_FAILING, NOT_TRIED (not declared, so never tried), or UNKNOWN (declared,
            and cannot be tried here).
        told: why not, or "".
    """

    feature: str
    state: str
    told: str = ""
    seconds: float = 0.0


def examine_engine(
    factory: EngineFactory, source: ModelSource, options: Mapping[str, Any], root: Path | None = None
) -> Iterator[Finding]:
    """Probe every feature the engine declares, on a small checkpoint; one finding per feature.

    Args:
        options: for the adapter; the dtype and the device among them.
        root: directory with golden/ and scenarios/; the default is the suite's own.

    Raises:
        AdapterError: the adapter cannot even tell its capabilities.
    """
    capabilities = declared(factory, source, options)
    if "batch_invariant" in capabilities.options:
        # A promise that is made in one mode only; the probe of it runs in that mode.
        there = declared(factory, source, {**options, "batch_invariant": True})
        promised = capabilities.features | (there.features & {"bitwise"})
        capabilities = replace(capabilities, features=promised)
    bench = Bench(factory, source, capabilities, options)
    for feature in FEATURES:
        if feature not in capabilities.features:
            yield Finding(feature, NOT_TRIED, capabilities.missing.get(feature, ""))
            continue
        began = time.perf_counter()
        if feature in PROBES:
            state, told = _probed(bench, feature)
        else:
            state, told = _by_scenario(bench, SCENARIOS[feature], root)
        yield Finding(feature, state, told, time.perf_counter() - began)


def _probed(bench: Bench, feature: str) -> tuple[str, str]:
    try:
        PROBES[feature](bench)
    except ProbeFailed as failure:
        return DECLARED_BUT_FAILING, str(failure)
    except FROM_OUTSIDE:
        raise
    except BaseException as error:  # code of others
        return DECLARED_BUT_FAILING, f"{type(error).__name__}: {error}"
    return WORKS, ""


def _by_scenario(bench: Bench, scenario_id: str, root: Path | None) -> tuple[str, str]:
    """The verdict of the first case of a scenario that runs here."""
    scenarios = load_scenarios((root or data_root()) / "scenarios")
    if all(scenario.id != scenario_id for scenario in scenarios):
        return UNKNOWN, f"{scenario_id} is not in this suite"
    device = bench.options.get("device")
    selection = Selection(ids=(scenario_id,), device=None if device == "auto" else device)
    told = ""
    for case in select(scenarios, selection):
        outcome = run_case(case, bench.factory, RecordStore(root), root=root)
        if outcome.verdict is Verdict.SKIP:
            told = told or "; ".join(f.message for f in outcome.judgement.findings)
        elif outcome.verdict in (Verdict.FAIL, Verdict.ERROR):
            wrong = [f.message for f in outcome.judgement.findings if f.verdict is outcome.verdict]
            return DECLARED_BUT_FAILING, f"{case.label}: {wrong[0]:.300}"
        else:
            return WORKS, f"by {case.label}"
    return UNKNOWN, told
