"""Runs what is to show a fault, with the fault and without it."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType

from conformance.adapters.minivllm import MiniVLLMAdapter
from conformance.contracts import find_target
from conformance.evidence import EVIDENCE, only
from conformance.faults.base import Fault, planted
from conformance.fuzz.driver import Failure, Fuzzer
from conformance.fuzz.session import PROFILES
from conformance.history import History
from conformance.kill_matrix import Row
from conformance.models import resolve_model
from conformance.paths import data_root
from conformance.runner import run_scenario
from conformance.scenario import Scenario, load_scenarios
from conformance.store import RecordStore
from conformance.suite import Case, Selection, judge_history, select
from conformance.verdicts import Finding, Judgement, Verdict

__all__ = ["FUZZ", "FaultError", "Laboratory"]

#: Seconds after which what an engine with a fault does counts as hanging.
PATIENCE = 120

#: How a target of the fuzzer is spelt in `Fault.shown_by` → the target.
FUZZ = {
    f"fuzz:{short}": f"conformance.contracts.minivllm:MiniVLLM{name}"
    for short, name in (("allocator", "Allocator"), ("engine", "Engine"), ("tensors", "Tensors"))
}

_SPELLING = re.compile(r"(?P<id>[^\[\]]+)(\[(?P<point>.*)\])?")


class FaultError(ValueError):
    """The table of faults is wrong: nothing like this can be run, or it fails without the fault."""


class Hangs(RuntimeError):
    """The engine did not come back."""


class Laboratory:
    """Faults are run in the main thread of a process, one at a time."""

    def __init__(self) -> None:
        scenarios = load_scenarios(data_root() / "scenarios")
        self._scenarios = {scenario.id: scenario for scenario in scenarios}
        self._store = RecordStore(None)
        self._healthy: dict[str, History] = {}

    # ---- one fault ------------------------------------------------------------------------------

    def judge(self, fault: Fault) -> Row:
        """What became of one fault.

        Raises:
            FaultError: a scenario is unknown, or fails without the fault.
        """
        fired = 0
        for spelling in fault.shown_by:
            if spelling in FUZZ:
                row = self._by_fuzz(fault, spelling)
            elif fault.equivalent is not None:
                row = self._by_equality(fault, spelling)
            else:
                row = self._by_scenario(fault, spelling)
            fired += row.fired
            if row.outcome in ("killed", "equivalent"):
                return row
        return _row(fault, "survived" if fired else "not fired", fired)

    def _by_scenario(self, fault: Fault, spelling: str) -> Row:
        case = self.case(spelling)
        self.healthy(spelling)
        with planted(fault) as seam:
            history = self._run(case)
        judged = self._judge(case, history)
        failed = _failed(judged)
        if not failed or not seam.fired:
            return _row(fault, "survived" if seam.fired else "not fired", seam.fired)
        evidence = next(e for e in EVIDENCE if e == "all" or _failed(self._judge(case, only(history, e))))
        checks = list(dict.fromkeys(finding.check for finding in failed))
        checks.sort(key=lambda check: check != fault.detector)
        return Row(
            id=fault.id,
            about=fault.about,
            origin=fault.origin,
            at=fault.at,
            outcome="killed",
            fired=seam.fired,
            detected_by=tuple(checks),
            shown_by=spelling,
            evidence=evidence,
            dtype=history.dtype,
            needs=tuple(sorted(case.scenario.needs)),
            message=min(failed, key=lambda finding: finding.check != fault.detector).message[:300],
        )

    def _by_fuzz(self, fault: Fault, spelling: str) -> Row:
        with planted(fault) as seam:
            failure = self.fuzz(spelling)
        if failure is None or not seam.fired:
            return _row(fault, "survived" if seam.fired else "not fired", seam.fired)
        return Row(
            id=fault.id,
            about=fault.about,
            origin=fault.origin,
            at=fault.at,
            outcome="killed",
            fired=seam.fired,
            detected_by=("fuzz",),
            shown_by=spelling,
            evidence="contract",
            dtype="any",
            message=failure.message,
        )

    def _by_equality(self, fault: Fault, spelling: str) -> Row:
        case, healthy = self.case(spelling), self.healthy(spelling)
        with planted(fault) as seam:
            history = self._run(case)
        if not seam.fired:
            return _row(fault, "not fired", 0)
        if _answers(history) != _answers(healthy):
            return _row(fault, "survived", seam.fired)
        row = _row(fault, "equivalent", seam.fired)
        return replace(row, shown_by=spelling, message=str(fault.equivalent))

    # ---- pieces ---------------------------------------------------------------------------------

    def case(self, spelling: str) -> Case:
        """The first point of the scenario that has the values in brackets.

        Raises:
            FaultError: there is none.
        """
        scenario, point = self._parse(spelling)
        wanted = Selection(ids=(scenario.id,))
        for case in select([scenario], wanted):
            if all(str(case.point.get(axis)) == value for axis, value in point.items()):
                return case
        raise FaultError(f"{spelling}: the scenario has no such point")

    def _parse(self, spelling: str) -> tuple[Scenario, Mapping[str, str]]:
        match = _SPELLING.fullmatch(spelling)
        scenario = self._scenarios.get(match["id"]) if match else None
        if match is None or scenario is None:
            raise FaultError(f"{spelling!r} is neither a scenario nor one of {', '.join(FUZZ)}")
        axes = (item.strip().partition("=") for item in (match["point"] or "").split(",") if item)
        return scenario, {axis: value for axis, _, value in axes}

    def healthy(self, spelling: str) -> History:
        """The same without any fault, run once.

        Raises:
            FaultError: it fails, whatever of its evidence is judged.
        """
        if spelling not in self._healthy:
            case = self.case(spelling)
            history = self._run(case)
            for evidence in EVIDENCE:
                judged = self._judge(case, only(history, evidence))
                failed = _failed(judged)
                if evidence == "all":
                    failed += [f for f in judged.findings if f.verdict is Verdict.ERROR]
                if failed:
                    raise FaultError(f"{spelling} fails without a fault, by {evidence}: {failed[0].message}")
            self._healthy[spelling] = history
        return self._healthy[spelling]

    def fuzz(self, spelling: str) -> Failure | None:
        """What the fuzzer finds within its CI profile."""
        target = find_target(FUZZ[spelling])
        return Fuzzer(target, 0).run(PROFILES["ci"].examples_of(target))

    def _run(self, case: Case) -> History:
        source = resolve_model(case.point["model"])
        with _impatient():
            return run_scenario(case.scenario, case.point, MiniVLLMAdapter, source, self._store)

    def _judge(self, case: Case, history: History) -> Judgement:
        return judge_history(history, case.scenario, self._store)


def _failed(judgement: Judgement) -> list[Finding]:
    return [finding for finding in judgement.findings if finding.verdict is Verdict.FAIL]


def _row(fault: Fault, outcome: str, fired: int) -> Row:
    return Row(fault.id, fault.about, fault.origin, fault.at, outcome, fired)  # type: ignore[arg-type]


def _answers(history: History) -> list[object]:
    """Everything that is promised to be equal bit for bit."""
    return [
        (one.name, name, run.output, run.output_rows, run.prompt_rows)
        for one in history.passes
        for name, run in sorted(one.requests.items())
    ]


@contextmanager
def _impatient() -> Iterator[None]:
    """Raise `Hangs` inside the block after `PATIENCE` seconds; the runner takes it as a crash."""

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        raise Hangs(f"the engine did not end within {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
