"""Reports on disk: what `--json` wrote, read back as values for comparing and for showing."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from conformance import EDITION, REPORT_SCHEMA
from conformance.digest import Digest
from conformance.report import power_words
from conformance.verdicts import Finding, Power, Verdict

__all__ = [
    "EngineName",
    "JudgedEngine",
    "Report",
    "ReportError",
    "SavedCase",
    "SavedWaiver",
    "StaleWaiver",
    "parse_report",
    "read_report",
]


class ReportError(ValueError):
    """A file is no report that this suite can read, or does not go with another; the message says why."""


@dataclass(frozen=True, slots=True)
class EngineName:
    """The engine that was judged."""

    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass(frozen=True, slots=True)
class JudgedEngine:
    """One engine on one device, of a run that may have several."""

    asked_for: str
    device: str
    name: str | None
    version: str | None
    seeded_faults: str | None

    def __str__(self) -> str:
        return self.asked_for if self.name is None else f"{self.name} {self.version}"


@dataclass(frozen=True, slots=True)
class SavedWaiver:
    """Why a failure was waived."""

    reason: str
    issue: str


@dataclass(frozen=True, slots=True)
class StaleWaiver:
    """A waiver that waives nothing: its line, the scenario it names, and why it is stale."""

    line: int
    scenario: str
    why: str


@dataclass(frozen=True, slots=True)
class SavedCase:
    """One scenario at one point, and its verdict.

    Attributes:
        label: the scenario's id and those values of the point that tell it from the others.
        reproduce: one command that shows the failure again, if it failed.
        digest: an extract of what happened; None if nothing ran.
        engine: as it was asked for; None where saved histories were judged.
    """

    scenario: str
    label: str
    area: str
    requirement: str
    source: tuple[str, ...]
    level: str
    point: Mapping[str, Any]
    verdict: Verdict
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    waiver: SavedWaiver | None
    reproduce: str | None
    power: Power
    findings: tuple[Finding, ...]
    digest: Digest | None
    engine: str | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """One run.

    Attributes:
        suite: the suite's edition; a verdict is meaningful only together with it.
        engine: None where several engines were judged.
        engines: every one, as it was asked for, and where; its name and version, if it told them.
        power, seeded_faults: what the run could have seen, in words.
        device: set in a part of a run (`by_engine`) whose engine ran on several devices.
    """

    schema: int
    suite: str
    failed: bool
    engine: EngineName | None
    environment: Mapping[str, str]
    cases: tuple[SavedCase, ...]
    stale_waivers: tuple[StaleWaiver, ...]
    power: str
    seeded_faults: str | None
    engines: tuple[JudgedEngine, ...] = ()
    device: str | None = None

    @property
    def title(self) -> str:
        """The engine and its version, or those of several, for headings."""
        if self.engine is not None:
            return str(self.engine) if self.device is None else f"{self.engine} on {self.device}"
        return ", ".join(dict.fromkeys(map(str, self.engines))) or "saved histories"

    @property
    def engine_name(self) -> str:
        """The engine without its version, to match runs by."""
        return "saved histories" if self.engine is None else self.engine.name

    def by_engine(self) -> list[Report]:
        """The run as one report per engine and device; itself if it has one.

        Stale waivers are the run's as a whole: they stay with its first part.
        """
        if len(self.engines) < 2:
            return [self]
        return [self._part(one, i == 0) for i, one in enumerate(self.engines)]

    def _part(self, one: JudgedEngine, first: bool) -> Report:
        cases = tuple(
            case
            for case in self.cases
            if (case.engine, str(case.point.get("device", "auto"))) == (one.asked_for, one.device)
        )
        namesakes = {other.asked_for for other in self.engines if other.name == one.name}
        name = one.name if one.name is not None and len(namesakes) == 1 else one.asked_for
        devices = {other.device for other in self.engines if other.asked_for == one.asked_for}
        return replace(
            self,
            failed=all(case.verdict is Verdict.SKIP for case in cases)
            or (self.failed and self._fails(cases)),
            engine=EngineName(name, one.version or "of unknown version"),
            engines=(one,),
            device=one.device if len(devices) > 1 else None,
            cases=cases,
            stale_waivers=self.stale_waivers if first else (),
            power=power_words([case.power for case in cases if case.verdict is not Verdict.SKIP]),
            seeded_faults=one.seeded_faults,
        )

    def _fails(self, cases: Sequence[SavedCase]) -> bool:
        """Whether these cases make the run fail. A failed `should` does where nothing else explains it."""
        if any(map(_must, cases)):
            return True
        explained = bool(self.stale_waivers) or any(map(_must, self.cases))
        return not explained and any(case.verdict.fails_run for case in cases)


def _must(case: SavedCase) -> bool:
    """Whether a case fails a run that takes a failed `should` for a wish."""
    return case.verdict.fails_run and not (case.level == "should" and case.verdict is Verdict.FAIL)


_REPORT = TypeAdapter(Report)

#: Half of a surrogate pair, which an engine's text may hold, and a strict reader of JSON refuses.
_HALF = re.compile(r"[\ud800-\udfff]")


def read_report(path: Path, *, other_editions: bool = False) -> Report:
    """Read what `conformance run --json` wrote.

    Args:
        other_editions: take reports of other editions of the suite, too.

    Raises:
        ReportError: not JSON, no report, or one of another schema or edition.
        OSError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ReportError(f"{path}: not JSON in UTF-8: {error}") from error
    return parse_report(text, str(path), other_editions=other_editions)


def parse_report(text: str, name: str, *, other_editions: bool = False) -> Report:
    """The same from the file's text; `name` is for messages."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{name}: not JSON: {error}") from error
    if not isinstance(data, dict) or not {"suite", "cases"} <= set(data):
        raise ReportError(f"{name}: not a report; conformance run --json FILE writes one")
    if type(data.get("schema")) is not int or data["schema"] != REPORT_SCHEMA:
        which = (
            f"report schema {data['schema']!r}" if "schema" in data else "a report without a schema number"
        )
        raise ReportError(f"{name}: {which}; this suite reads {REPORT_SCHEMA}: run again")
    if data["suite"] != EDITION and not other_editions:
        raise ReportError(
            f"{name}: of suite {data['suite']}, and this is {EDITION}: verdicts of two editions may differ "
            "without a change of the engine; run again, or take it as it is: --across-editions"
        )
    try:
        # As JSON again: pydantic is strict about types there, and still takes a list for a tuple.
        writable = _HALF.sub(lambda half: f"\\\\u{ord(half[0]):x}", json.dumps(data, ensure_ascii=False))
        return _REPORT.validate_json(writable, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ReportError(f"{name}: not a report: {where}: {first['msg']}") from error
