"""Triage: where a wrong answer first went wrong, stage by stage.

Order: prompt ids → pixels → positions → embeddings (those of pictures in their places) → deepstack
rows → hidden state after layer i → logits → sampling. The first stage outside of its band names the
component to look at.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.checks.case import BAND, Case, align
from conformance.checks.logits import row_errors
from conformance.history import RequestRun
from conformance.records import GoldenRecord

__all__ = ["Suspect", "ordered_stages", "stage_error", "triage"]


@dataclass(frozen=True, slots=True)
class Suspect:
    """The first stage outside of its band.

    Attributes:
        stage: its name.
        position: row of the stage (a sequence position; a generated position for logits and
            sampling), or None.
        size: error in multiples of the yardstick; None where equality is the rule.
        exact: whether all earlier stages were compared; else the fault may lie before.
        text: one sentence for the report.
    """

    stage: str
    position: int | None
    size: float | None
    exact: bool
    text: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def triage(case: Case, request: str) -> Suspect | None:
    """Find the first stage outside of its band; None when nothing numeric is wrong or known.

    Stages in between are compared where both the record (traced cases) and the run hold them.
    """
    run = case.run_of(request)
    if run.golden_key is None or run.output is None:
        return None
    record = case.golden(run)
    for ids in (run.output.prompt_token_ids, run.prompt_token_ids):
        if ids is not None and tuple(ids) != record.prompt_token_ids:
            return Suspect("prompt ids", None, None, True, "the prompt ids differ from the golden's")
    names = [n for n in ordered_stages(record.stages) if n in run.stages]
    for name in names:
        found = stage_error(name, run, record)
        if isinstance(found, Suspect):
            return found
    traced = bool(names)
    return _logits(case, run, record, traced) or _sampling(case, run, record)


def ordered_stages(stages: Iterable[str]) -> list[str]:
    """Stage names in the order of computation; others are not compared."""

    def numbered(prefix: str) -> list[str]:
        return sorted((n for n in stages if n.startswith(prefix)), key=lambda n: int(n.removeprefix(prefix)))

    first = [n for n in ("pixels", "positions", "embeddings") if n in stages]
    last = [n for n in ("final",) if n in stages]
    return [*first, *numbered("deepstack."), *numbered("hidden."), *last]


def stage_error(name: str, run: RequestRun, record: GoldenRecord) -> Suspect | float:
    """What is wrong with a stage of a run, or its largest error in multiples of its yardstick.

    Rows are compared as far as the run's context is the golden's; rows it took from its prefix
    cache were never captured.
    """
    mine, truth = np.asarray(run.stages[name]), np.asarray(record.stages[name])
    if mine.shape[1:] != truth.shape[1:]:
        text = f"{name}: rows of shape {mine.shape[1:]}, the truth's are {truth.shape[1:]}"
        return Suspect(name, None, None, True, text)
    first, last = (0, len(truth)) if name == "pixels" else _shared_rows(run, record)
    last = min(last, len(mine), len(truth))
    if last <= first:
        return 0.0
    mine, truth = mine[first:last].reshape(last - first, -1), truth[first:last].reshape(last - first, -1)
    if name == "positions":
        wrong = np.flatnonzero((mine != truth).any(axis=1))
        if wrong.size:
            at = int(wrong[0])
            text = f"positions: row {first + at} is {mine[at].tolist()}, not {truth[at].tolist()}"
            return Suspect(name, first + at, None, True, text)
        return 0.0
    scale = stage_yardstick(record, name, np.asarray(record.stages[name]))
    errors = np.abs(mine.astype(np.float64) - truth.astype(np.float64))
    # NaN compares false both ways, so the band is written as what must hold.
    outside = np.flatnonzero(~(errors <= BAND * scale).all(axis=1))
    if not outside.size:
        return float(errors.max() / scale)
    at = int(outside[0])
    size = float(np.max(errors[at]) / scale)
    text = f"{name}: row {first + at} is off by {size:.3g} × what rounding explains ({scale:.3g})"
    return Suspect(name, first + at, size, True, text)


def _shared_rows(run: RequestRun, record: GoldenRecord) -> tuple[int, int]:
    """First and last row (exclusive) that the run computed in the golden's context."""
    output = run.output
    ids = (output.token_ids if output else None) or ()
    # Zip on purpose: a run that merely stops early agrees as far as it goes.
    pairs = enumerate(zip(ids, record.token_ids, strict=False))
    agreed = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(record.token_ids)))
    cached = (output.num_cached_tokens if output else None) or 0
    return cached, len(record.prompt_token_ids) + agreed


def stage_yardstick(record: GoldenRecord, name: str, truth: NDArray[Any]) -> float:
    """Largest error that rounding explains in a stage: the record's own band where it has one.

    Otherwise the logits' yardstick, relative to the largest logit, carried over to the magnitude
    of the stage. Earlier stages err less, so this is an upper bound for them.
    """
    floor = float(np.finfo(np.float32).eps) * max(float(np.max(np.abs(truth))), 1e-300)
    if name in record.stage_bands:
        return max(record.stage_bands[name].max, floor)
    largest = float(np.max(np.abs(record.output.top_logits)))
    return max(record.yardstick.M / max(largest, 1e-300) * float(np.max(np.abs(truth))), floor)


def _logits(case: Case, run: RequestRun, record: GoldenRecord, traced: bool) -> Suspect | None:
    for position, speaker in align(case, run, record):
        if position >= len(speaker.output_rows):
            continue
        row = speaker.output_rows[position]
        errors = np.abs(row_errors(row, record.output, position))
        worst = float(np.max(errors))
        if row.num_nan or not worst <= BAND * record.yardstick.M:
            size = worst / max(record.yardstick.M, 1e-300)
            where = "logits" if traced else "logits or earlier"
            return Suspect(
                "logits",
                position,
                size,
                traced,
                f"{where}: generated position {position} is off by {size:.3g} M",
            )
    return None


def _sampling(case: Case, run: RequestRun, record: GoldenRecord) -> Suspect | None:
    """The logits are right and name the right id, yet another one came out."""
    for position, speaker in align(case, run, record):
        output = speaker.output
        ids = (output.choice_token_ids if speaker.forced else output.token_ids) if output else None
        if ids is None or position >= len(ids) or position >= len(speaker.output_rows):
            continue
        argmax = speaker.output_rows[position].argmax
        if ids[position] != argmax:
            return Suspect(
                "sampling",
                position,
                None,
                True,
                f"sampling: the logits' largest is id {argmax}, id {ids[position]} came out",
            )
    return None
