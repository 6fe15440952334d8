"""Two runs side by side: which cases are fixed, which regressed, which changed, which are new or gone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from conformance.saved_report import Report, ReportError, SavedCase, read_report
from conformance.verdicts import Verdict

__all__ = ["Comparison", "Difference", "Kind", "compare", "read_side"]


class Kind(Enum):
    """What became of a case, in the order they are told.

    REGRESSION  it did not fail, and now does.
    FIX         it failed or was waived, and now agrees.
    CHANGE      another class of verdict, but neither of these: a failure that is now skipped or waived,
                an agreement that is now skipped, FAIL that is now ERROR.
    NEW         only in the new run; one that fails counts as a REGRESSION does.
    GONE        only in the old run.
    """

    REGRESSION = "REGRESSION"
    FIX = "FIX"
    CHANGE = "CHANGE"
    NEW = "NEW"
    GONE = "GONE"


@dataclass(frozen=True, slots=True)
class Difference:
    """One case that is not as it was. `old` or `new` is None where the case is not in that run.

    Attributes:
        engine: set where several engines are compared at once.
        why: the worst finding of the new run, or of the old one if that is gone; "" if it agrees.
    """

    kind: Kind
    label: str
    engine: str | None
    old: Verdict | None
    new: Verdict | None
    why: str
    reproduce: str | None

    @property
    def fails(self) -> bool:
        """Whether it makes the comparison fail: it fails now, and did not, or was not there."""
        new_failure = self.kind is Kind.NEW and self.new is not None and self.new.fails_run
        return self.kind is Kind.REGRESSION or new_failure

    @property
    def verdicts(self) -> str:
        """The two verdicts, "-" for a case that is not there."""
        return " → ".join("-" if v is None else v.value for v in (self.old, self.new))

    @property
    def name(self) -> str:
        """The case, with its engine where there are several."""
        return self.label if self.engine is None else f"{self.engine}: {self.label}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two runs, side by side.

    Attributes:
        differences: by kind as in `Kind`, then by name.
        unchanged: cases of the same class in both.
        remarks: what else is not the same: edition, engine, versions.
    """

    differences: tuple[Difference, ...]
    unchanged: int
    remarks: tuple[str, ...]

    def of(self, kind: Kind) -> list[Difference]:
        """The differences of one kind."""
        return [one for one in self.differences if one.kind is kind]

    @property
    def status(self) -> int:
        """The exit status: 3 where no case is in both runs, else 1 where a difference fails, else 0."""
        if not self.unchanged and all(one.kind in (Kind.NEW, Kind.GONE) for one in self.differences):
            return 3
        return int(any(one.fails for one in self.differences))

    @property
    def summary(self) -> str:
        """The counts in one line."""
        counts = Counter(one.kind for one in self.differences)
        told = [f"{counts[kind]} {kind.value}" for kind in Kind]
        return f"{', '.join(told)}, {self.unchanged} as before"


def compare(old: Sequence[Report], new: Sequence[Report], *, ignore: Sequence[str] = ()) -> Comparison:
    """Compare runs, one report per engine on each side.

    Args:
        ignore: options of the point that may differ between the two sides, such as "device".

    Raises:
        ReportError: two cases of one side cannot be told apart.
    """
    several = len(old) > 1 or len(new) > 1
    before, after = (_cases(side, several, ignore) for side in (old, new))
    differences = []
    for key in {**before, **after}:
        kind = _kind(before.get(key), after.get(key))
        if kind is not None:
            differences.append(_difference(kind, key[0], before.get(key), after.get(key)))
    order = list(Kind)
    differences.sort(key=lambda one: (order.index(one.kind), one.name))
    unchanged = len({**before, **after}) - len(differences)
    return Comparison(tuple(differences), unchanged, tuple(_remarks(old, new)))


_Key = tuple[str | None, str, str]


def _cases(reports: Sequence[Report], several: bool, ignore: Sequence[str]) -> dict[_Key, SavedCase]:
    found: dict[_Key, SavedCase] = {}
    for report in reports:
        for case in report.cases:
            point = {name: value for name, value in case.point.items() if name not in ignore}
            engine = report.engine_name if several else None
            key = (engine, case.scenario, json.dumps(point, sort_keys=True))
            if key in found:
                more = f" without {', '.join(ignore)}" if ignore else ""
                raise ReportError(
                    f"{report.title}: {case.label} is there twice{more}: nothing tells which is which"
                )
            found[key] = case
    return found


def _kind(old: SavedCase | None, new: SavedCase | None) -> Kind | None:
    if old is None:
        return Kind.NEW
    if new is None:
        return Kind.GONE
    if new.verdict.fails_run and not old.verdict.fails_run:
        return Kind.REGRESSION
    if new.verdict.is_agreement and (old.verdict.fails_run or old.verdict is Verdict.WAIVED):
        return Kind.FIX
    same = new.verdict is old.verdict or (new.verdict.is_agreement and old.verdict.is_agreement)
    return None if same else Kind.CHANGE


def _difference(kind: Kind, engine: str | None, old: SavedCase | None, new: SavedCase | None) -> Difference:
    told = new or old
    assert told is not None, "a key comes from one side at least"
    wrong = [f for f in told.findings if f.verdict not in (Verdict.PASS, Verdict.NOISE)]
    worst = max(wrong, key=lambda f: f.verdict.severity, default=None)
    why = "" if worst is None or told.verdict.is_agreement else f"{worst.check}: {worst.message}"
    verdicts = [None if case is None else case.verdict for case in (old, new)]
    return Difference(kind, told.label, engine, verdicts[0], verdicts[1], why, told.reproduce)


def _remarks(old: Sequence[Report], new: Sequence[Report]) -> list[str]:
    """What makes the two sides differ for other reasons than the engine's code."""
    remarks = []
    editions = [{report.suite for report in side} for side in (old, new)]
    if editions[0] != editions[1]:
        before, after = (", ".join(sorted(side)) for side in editions)
        remarks.append(f"the editions of the suite differ, so verdicts may too: {before} and {after}")
    engines = [[report.title for report in side] for side in (old, new)]
    if engines[0] != engines[1]:
        remarks.append(f"engine: {', '.join(engines[0])} → {', '.join(engines[1])}")
    if len(old) == len(new) == 1:
        facts = {**old[0].environment, **new[0].environment}
        for name in facts:
            was, is_now = (side[0].environment.get(name, "not set") for side in (old, new))
            if was != is_now and name != "suite":
                remarks.append(f"{name}: {was} → {is_now}")
    return remarks


def read_side(path: Path, *, other_editions: bool = False) -> list[Report]:
    """A report, or every report of a directory: one per engine, and per device of an engine.

    Raises:
        ReportError: a file is no report, the directory holds none, or two of one engine.
    """
    paths = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not paths:
        raise ReportError(f"{path}: no reports here; conformance run --json FILE writes one")
    read = [read_report(one, other_editions=other_editions) for one in paths]
    reports = [part for report in read for part in report.by_engine()]
    names = Counter(report.engine_name + (f" on {d}" if (d := report.device) else "") for report in reports)
    twice = [name for name, count in names.items() if count > 1]
    if twice:
        raise ReportError(f"{path}: {names[twice[0]]} reports of {twice[0]}; keep one per engine")
    return reports
