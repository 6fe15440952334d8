"""What a report shows of a case beside its findings: a small extract of its history.

Plain frozen values: they go through pickle to another process, and into the JSON report. Taken right
after judging, as histories are large and are not kept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from pydantic import FiniteFloat

from conformance.checks.case import Case, CheckInputError, align, is_plain_greedy
from conformance.checks.logits import row_errors
from conformance.history import History, Operation, RequestRun
from conformance.records import GoldenRecord
from conformance.scenario import Scenario
from conformance.thumbnails import Thumbnail, thumbnails_of
from conformance.timeline import Timeline, timeline_of
from conformance.verdicts import Judgement, Verdict

__all__ = ["MOST_POSITIONS", "Digest", "Gap", "digest_of"]

#: Generated positions of a request that are kept.
MOST_POSITIONS = 200

#: Arms of same_under that get a timeline of their own, when they failed.
_MOST_ARMS = 2

#: Characters of one operation's outcome.
_LONGEST = 200

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Gap:
    """How far an engine's numbers lie from the truth, and how far the truth's two likeliest ids lie apart.

    Attributes:
        source: "logits", "logprobs", or "" where the engine shows no numbers.
        M, R: the case's yardstick, in logits. The band is 4 M; a position is decided above 8 M.
        errors: per generated position the largest error at the truth's top ids, in logits; None where
            there is none, infinite where the engine's number is NaN.
        margins: per generated position the truth's largest logit minus its second.
        other: positions at which the engine chose another id.
        num_positions: of the whole answer; the tuples hold the first `MOST_POSITIONS`.
    """

    request: str
    source: str
    M: FiniteFloat
    R: FiniteFloat
    errors: tuple[float | None, ...]
    margins: tuple[FiniteFloat, ...]
    other: tuple[int, ...]
    num_positions: int


@dataclass(frozen=True, slots=True)
class Digest:
    """The extract of one case's history.

    Attributes:
        operations: the scenario's steps as carried out, and what came of each.
        timelines: of the free pass, then of arms that failed; none without events.
        gaps: of the requests that a golden record judges.
        pictures: those of the requests, small.
        trouble: what could not be extracted, and why.
    """

    operations: tuple[str, ...] = ()
    timelines: tuple[Timeline, ...] = ()
    gaps: tuple[Gap, ...] = ()
    pictures: tuple[Thumbnail, ...] = ()
    trouble: tuple[str, ...] = ()


def digest_of(
    history: History,
    scenario: Scenario,
    judgement: Judgement,
    records: Callable[[str], GoldenRecord],
) -> Digest:
    """Extract what a report shows. Never raises: what cannot be had is told in `trouble`.

    Args:
        records: key → golden record.
    """
    trouble: list[str] = []

    def told(what: str, extract: Callable[[], Iterator[_T]]) -> tuple[_T, ...]:
        found: list[_T] = []
        try:
            for one in extract():
                found.append(one)
        except Exception as error:  # events and numbers are the engine's; the verdict stands without them
            trouble.append(f"no {what}: {type(error).__name__}: {error}")
        return tuple(found)

    case = Case(history, records, scenario.checks)
    return Digest(
        operations=told("operations", lambda: _operations(history)),
        timelines=told("timeline", lambda: _timelines(history, judgement)),
        gaps=told("logit gaps", lambda: _gaps(case)),
        pictures=told("pictures", lambda: thumbnails_of(scenario)),
        trouble=tuple(trouble),
    )


def _operations(history: History) -> Iterator[str]:
    free = history.find("free")
    for one in free.operations if free is not None else ():
        yield _words(one)


def _words(one: Operation) -> str:
    argument, outcome = (
        {name: item for name, item in value.items() if item} if isinstance(value, dict) else value
        for value in (one.argument, one.outcome)
    )
    if isinstance(argument, dict) and one.kind == "run" and "preempt" not in argument:
        argument.pop("period", None)  # of what is not done
    parts = [one.kind]
    parts += [] if argument in (None, [], {}, "") else [_short(argument)]
    parts += [] if outcome in (None, [], {}, "") else [f"→ {_short(outcome)}"]
    return " ".join(parts)


def _short(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        text = ", ".join(value)
    elif isinstance(value, dict):
        text = ", ".join(f"{name} {_short(item)}" for name, item in value.items() if item is not None)
    else:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _timelines(history: History, judgement: Judgement) -> Iterator[Timeline]:
    failed = [f for f in judgement.findings if f.verdict is Verdict.FAIL and "arm" in f.detail]
    arms = list(dict.fromkeys(str(f.detail["arm"]) for f in failed))[:_MOST_ARMS]
    for name in ("free", *arms):
        one = history.find(name)
        made = None if one is None else timeline_of(one)
        if made is not None:
            yield made


def _gaps(case: Case) -> Iterator[Gap]:
    free = case.history.find("free")
    for run in free.requests.values() if free is not None else ():
        output = run.output
        if run.golden_key is None or output is None or output.token_ids is None or not is_plain_greedy(run):
            continue
        try:
            record = case.golden(run)
        except CheckInputError:
            continue  # a finding of the checks says so
        if output.prompt_token_ids is not None and output.prompt_token_ids != record.prompt_token_ids:
            continue  # another prompt has another truth
        yield _gap(case, run, record)


def _gap(case: Case, run: RequestRun, record: GoldenRecord) -> Gap:
    count = min(len(record.token_ids), MOST_POSITIONS)
    errors: list[float | None] = [None] * count
    other: list[int] = []
    source = ""
    for position, speaker in align(case, run, record):
        if position >= count:
            break
        output = speaker.output
        ids = (output.choice_token_ids if speaker.forced else output.token_ids) if output else None
        if ids is not None and position < len(ids) and ids[position] != record.token_ids[position]:
            other.append(position)
        of, errors[position] = _error(speaker, record, position)
        source = source or of
    yardstick = record.yardstick
    margins = tuple(_round(float(margin)) for margin in record.output.margins[:count])
    return Gap(
        request=run.request_id,
        source=source,
        M=yardstick.M,
        R=yardstick.R,
        errors=tuple(errors),
        margins=margins,
        other=tuple(other),
        num_positions=len(record.token_ids),
    )


def _error(run: RequestRun, record: GoldenRecord, position: int) -> tuple[str, float | None]:
    """Where the numbers at a position come from, and the largest error among them."""
    table = record.output
    if position < len(run.output_rows):
        row = run.output_rows[position]
        return "logits", float("inf") if row.num_nan else _largest(row_errors(row, table, position)[:-1])
    listed = (run.output.logprobs if run.output else None) or ()
    if position >= len(listed):
        return "", None
    mine = {entry.token_id: entry.logprob for entry in listed[position]}
    truth = dict(zip(table.top_ids[position].tolist(), table.top_logits[position].tolist(), strict=True))
    shared = [i for i in truth if i in mine]
    if not shared:
        return "", None
    normal = float(table.logsumexp[position])
    return "logprobs", _largest(np.array([mine[i] - (truth[i] - normal) for i in shared]))


def _largest(errors: np.typing.NDArray[np.float64]) -> float:
    worst = float(np.max(np.abs(errors)))
    return _round(worst) if np.isfinite(worst) else float("inf")


def _round(value: float) -> float:
    """Three digits are enough for a drawing."""
    return float(f"{value:.3g}")
