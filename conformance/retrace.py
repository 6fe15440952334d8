"""Runs a failing case again with every stage captured, and finds the first that is wrong.

The truth about the stages comes from the golden record; where it holds none, they are computed from
the reference here, if it can be loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from conformance.adapters.received import AdapterError
from conformance.checks import CHECKS, judge
from conformance.checks.case import Case as Evidence
from conformance.checks.case import CheckInputError
from conformance.history import History
from conformance.models import ModelUnavailable, resolve_model
from conformance.probes import probe
from conformance.records import GoldenRecord
from conformance.runner import EngineFactory, Retrace, Skipped, retrace_scenario
from conformance.store import RecordStore
from conformance.suite import Case, Outcome
from conformance.triage import TEXT, StageLine, Suspect, differing_stage, stage_table, triage
from conformance.verdicts import Finding, Verdict

__all__ = ["Examined", "Subject", "TriageError", "examine", "explain", "noted", "subjects_of"]


class TriageError(RuntimeError):
    """The case cannot be run again, or there is nothing in it to look into; the message says why."""


class NoStages(TriageError):
    """The engine shows nothing between the prompt and the answer."""


@dataclass(frozen=True, slots=True)
class Subject:
    """What to look into: a request, in the free pass or in an arm of same_under."""

    request: str
    arm: str = "free"


@dataclass(frozen=True, slots=True)
class Examined:
    """What a closer look at one request showed.

    Attributes:
        suspect: the first stage outside of its band, None if all are inside.
        stages: every stage compared, in order of computation.
        truth: where the stages' truth comes from, or why there is none.
        again: whether the FAIL showed again when the case was run again; None if there was none.
    """

    subject: Subject
    suspect: Suspect | None
    stages: tuple[StageLine, ...]
    truth: str
    again: bool | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a report: the suspect's, with the table of stages."""
        found = {"text": self.sentence} if self.suspect is None else self.suspect.as_dict()
        return {
            **found,
            "arm": self.subject.arm,
            "truth": self.truth,
            "again": self.again,
            "stages": [asdict(line) for line in self.stages],
        }

    @property
    def sentence(self) -> str:
        """What was found, in one sentence."""
        if self.suspect is not None:
            return self.suspect.text
        where = (
            f"all {len(self.stages)} stages are inside their bands" if self.stages else "no stage to compare"
        )
        if self.again is False:
            return f"{where}, and it did not fail again: the engine is not deterministic"
        return where


def subjects_of(findings: Sequence[Finding]) -> list[Subject]:
    """The requests whose numbers a FAIL is about, each once."""
    found = []
    for finding in findings:
        if finding.verdict is not Verdict.FAIL or finding.request is None or finding.check not in CHECKS:
            continue
        if "arm" in finding.detail:
            found.append(Subject(finding.request, str(finding.detail["arm"])))
        elif CHECKS[finding.check].golden:
            found.append(Subject(finding.request))
    return list(dict.fromkeys(found))


def examine(
    case: Case,
    subjects: Sequence[Subject],
    factory: EngineFactory,
    store: RecordStore,
    *,
    failed: Sequence[Subject] = (),
    root: Path | None = None,
) -> list[Examined]:
    """Run a case again with stages captured, and look into each subject.

    Args:
        failed: those of the subjects that a FAIL was about.

    Raises:
        TriageError: the engine captures no stages, or the case cannot be run.
    """
    requests = frozenset(subject.request.partition("/")[0] for subject in subjects)
    arms = frozenset(subject.arm for subject in subjects) - {"free"}
    try:
        source = resolve_model(case.point["model"], root)
        retrace = Retrace(requests, arms)
        history = retrace_scenario(case.scenario, case.point, factory, source, store, retrace)
    except (AdapterError, Skipped, ModelUnavailable) as reason:
        raise TriageError(str(reason)) from reason
    capabilities = history.capabilities
    if "stages" not in capabilities.features:
        why = capabilities.missing.get("stages", "it does not declare the feature")
        raise NoStages(f"{capabilities.engine} captures no stages: {why}")
    again = subjects_of(judge(history, case.scenario.checks, store.get).findings)
    traced = _TracedRecords(store.get, case, root)
    evidence = Evidence(history, traced.get, case.scenario.checks)
    return [
        _look(evidence, history, subject, traced, subject in again if subject in failed else None)
        for subject in subjects
    ]


def explain(
    outcome: Outcome, factory: EngineFactory, store: RecordStore, *, root: Path | None = None
) -> Outcome:
    """The outcome, each FAIL about numbers with its triage; unchanged if there is none. Never raises."""
    subjects = subjects_of(outcome.judgement.findings)
    if not subjects:
        return outcome
    relation: str | None = None
    try:
        found = {
            one.subject: one.as_dict()
            for one in examine(outcome.case, subjects, factory, store, failed=subjects, root=root)
        }
    except NoStages as lacking:
        found = {}
        numeric = [subject for subject in subjects if not _is_text_alone(outcome, subject)]
        if not numeric:
            return outcome
        told, relation = _probed(outcome, numeric[0], factory, store, root)
        note = f"{lacking}; {told}"
    except Exception as trouble:  # triage explains a FAIL; if it breaks, the FAIL must stand
        kind = "" if isinstance(trouble, TriageError) else f"triage crashed: {type(trouble).__name__}: "
        found = {}
        note = f"{kind}{trouble}"
    else:
        note = ""
    return _annotated(outcome, found, note, relation)


def _is_text_alone(outcome: Outcome, subject: Subject) -> bool:
    """Whether triage found nothing but the text wrong: alone or in a batch, no number would tell more."""
    found = [
        finding.detail.get("triage")
        for finding in outcome.judgement.findings
        if finding.verdict is Verdict.FAIL and subjects_of([finding]) == [subject]
    ]
    return all(isinstance(one, Mapping) and one.get("stage") == TEXT for one in found)


def noted(outcome: Outcome, note: str) -> Outcome:
    """The outcome, each FAIL about numbers with the reason why nothing looked into it."""
    return _annotated(outcome, {}, note, None)


def _annotated(
    outcome: Outcome, found: dict[Subject, dict[str, Any]], note: str, relation: str | None
) -> Outcome:
    findings = [_with(finding, found, note, relation) for finding in outcome.judgement.findings]
    return replace(outcome, judgement=replace(outcome.judgement, findings=tuple(findings)))


def _probed(
    outcome: Outcome, subject: Subject, factory: EngineFactory, store: RecordStore, root: Path | None
) -> tuple[str, str | None]:
    """Which relation breaks first, in words and by name; or why the probes say nothing."""
    request = subject.request.partition("/")[0]
    try:
        probed = probe(outcome.case, request, factory, store, root)
    except Exception as trouble:  # as above: the FAIL must stand
        return f"no probes: {type(trouble).__name__}: {trouble}", None
    return f"probes: {request}: {probed.text}", probed.first


def _with(finding: Finding, found: dict[Subject, dict[str, Any]], note: str, relation: str | None) -> Finding:
    subjects = subjects_of([finding])
    if not subjects and "triage" in finding.detail and finding.request is not None:
        subjects = [Subject(finding.request)]  # about something else, of a request that was looked into
        if subjects[0] not in found:
            return finding
    if not subjects:
        return finding
    told = found.get(subjects[0])
    if told is None:
        known = finding.detail.get("triage")
        told = {**known, "note": note} if isinstance(known, dict) else {"text": note}
        told |= {"relation": relation} if relation else {}
    return replace(finding, detail={**finding.detail, "triage": told})


def _look(
    evidence: Evidence, history: History, subject: Subject, traced: _TracedRecords, again: bool | None
) -> Examined:
    one = history.find(subject.arm)
    run = one.requests.get(subject.request) if one else None
    if run is None:
        raise TriageError(f"{subject.request} did not run again in pass {subject.arm!r}")
    suspect = triage(evidence, subject.request, subject.arm)
    stages: tuple[StageLine, ...] = ()
    if run.golden_key is not None:
        try:
            stages = stage_table(run, evidence.golden(run))
        except CheckInputError as error:
            raise TriageError(str(error)) from error
    if suspect is None and subject.arm != "free":
        suspect = differing_stage(evidence.run_of(subject.request), run)
    truth = traced.told.get(run.golden_key or "", "this request has no golden record")
    return Examined(subject, suspect, stages, truth, again)


class _TracedRecords:
    """Records with stages; those that hold none get them from the reference, once."""

    def __init__(self, get: Callable[[str], GoldenRecord], case: Case, root: Path | None) -> None:
        self._get, self._case, self._root = get, case, root
        self._known: dict[str, GoldenRecord] = {}
        self.told: dict[str, str] = {}

    def get(self, key: str) -> GoldenRecord:
        if key not in self._known:
            record = self._get(key)
            if record.stages:
                self.told[key] = "the golden record"
            else:
                record = self._computed(key, record)
            self._known[key] = record
        return self._known[key]

    def _computed(self, key: str, record: GoldenRecord) -> GoldenRecord:
        try:
            # Imported when needed: it brings torch and Transformers, and a third party may have neither.
            from transformers.utils.logging import disable_progress_bar

            from conformance.reference import Reference

            disable_progress_bar()
            source = resolve_model(self._case.point["model"], self._root)
            traced = Reference(source, self._root).trace(record)
        except Exception as reason:  # whatever keeps the reference away, the rest can still be told
            self.told[key] = f"none: the reference cannot be computed here: {type(reason).__name__}: {reason}"
            return record
        self.told[key] = "computed from the reference"
        return traced
