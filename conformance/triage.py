"""Triage: where a wrong answer first went wrong, stage by stage.

Order: prompt ids → spans → pixels → embeddings of pictures → deepstack rows → embeddings, those of
pictures in their places → positions → keys, values and hidden state of each layer → last norm →
logits → sampling → text. The first stage outside of its band names the component to look at.

Pure functions of a history and its records. `conformance.retrace` runs a failing case again with
every stage captured, so that there is something to look at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.adapters.base import EngineOutput
from conformance.causes import kind_of, usual_causes
from conformance.checks.case import BAND, Case, align, wrong_text
from conformance.checks.logits import logprob_band, row_errors
from conformance.history import RequestRun
from conformance.records import GoldenRecord, media_embeddings

__all__ = [
    "TEXT",
    "StageLine",
    "Suspect",
    "as_lines",
    "differing_stage",
    "ordered_stages",
    "stage_error",
    "stage_table",
    "triage",
    "truth_stages",
]

#: What the ids of a right answer spell: nothing of the model's is wrong.
TEXT = "text"

#: Stages that are compared for equality: they hold no rounding.
_EXACT = frozenset({"positions", "spans"})

#: Stages that are about whole pictures, so that a prefix hit takes no rows from them.
_WHOLE = frozenset({"pixels", "spans", "vision"})

#: Fewer log-probabilities than this say nothing about the gaps between them.
_GAPS = 3


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
        token: the token at the position, or the one that came out; None where there is no such.
    """

    stage: str
    position: int | None
    size: float | None
    exact: bool
    text: str
    token: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a report, the usual causes of the stage among it."""
        causes = usual_causes(self.stage) if self.exact else ()
        return {**asdict(self), "causes": [str(cause) for cause in causes]}


@dataclass(frozen=True, slots=True)
class StageLine:
    """One stage of a comparison: its largest error in multiples of its yardstick, and whether that is
    inside the band. `size` is None where equality is the rule, or shapes differ."""

    stage: str
    size: float | None
    inside: bool


def triage(case: Case, request: str, of: str = "free") -> Suspect | None:
    """Find the first stage outside of its band; None when nothing numeric is wrong or known.

    Stages in between are compared where both the record (traced cases) and the run hold them.

    Args:
        of: the pass to look at: "free", or the arm of a same_under check.
    """
    run = case.run_of(request, case.history.find(of))
    if run.golden_key is None or run.output is None:
        return None
    record = case.golden(run)
    for ids in (run.output.prompt_token_ids, run.prompt_token_ids):
        if ids is not None and tuple(ids) != record.prompt_token_ids:
            return _wrong_prompt(tuple(ids), record.prompt_token_ids)
    # A forced run is in the truth's context to its end, the free one only up to its divergence.
    forced = case.history.find("forced") if of == "free" else None
    runs = [run, *([forced.requests[request]] if forced and request in forced.requests else [])]
    truth = truth_stages(record)
    compared = False
    for one in runs:
        for name in [n for n in ordered_stages(truth) if n in one.stages]:
            found = stage_error(name, one, record, truth[name])
            compared = compared or kind_of(name) in ("hidden", "final")
            if isinstance(found, Suspect):
                return found
    return _answer(case, run, record, compared)


def stage_table(run: RequestRun, record: GoldenRecord) -> tuple[StageLine, ...]:
    """Every stage that both hold, in order of computation."""
    truth = truth_stages(record)
    lines = []
    for name in ordered_stages(truth):
        if name in run.stages:
            found = stage_error(name, run, record, truth[name])
            suspect = isinstance(found, Suspect)
            size = found.size if isinstance(found, Suspect) else found
            lines.append(StageLine(name, None if kind_of(name) in _EXACT else size, not suspect))
    return tuple(lines)


def truth_stages(record: GoldenRecord) -> dict[str, NDArray[Any]]:
    """The record's stages, and what follows from them: spans, and the embeddings of each picture."""
    truth = dict(record.stages)
    if record.media is None:
        return truth
    spans = sorted(record.media.spans, key=lambda span: span.start)
    truth["spans"] = np.array([(s.start, s.length, s.item, s.first_row) for s in spans], np.int64)
    if "embeddings" in truth:
        for item in range(len(record.media.items)):
            truth[f"vision.{item}"] = media_embeddings(record, item)[0]
    return truth


def ordered_stages(stages: Iterable[str]) -> list[str]:
    """Stage names in the order of computation; others are not compared."""
    kinds = ("spans", "pixels", "vision", "deepstack", "embeddings", "positions", "k", "v", "hidden", "final")

    def place(name: str) -> tuple[int, int, int]:
        kind, _, number = name.partition(".")
        layer = int(number) if number else 0
        order = kinds.index(kind)
        # Layer by layer: keys and values of a layer, then what leaves it.
        return (kinds.index("k"), layer, order) if kind in ("k", "v", "hidden") else (order, layer, 0)

    return sorted((name for name in stages if name.partition(".")[0] in kinds), key=place)


def stage_error(
    name: str, run: RequestRun, record: GoldenRecord, truth: NDArray[Any] | None = None
) -> Suspect | float:
    """What is wrong with a stage of a run, or its largest error in multiples of its yardstick.

    Rows are compared as far as the run's context is the golden's; rows it took from its prefix
    cache were never captured.

    Args:
        truth: the stage's true values; those of the record when left out.
    """
    mine = np.asarray(run.stages[name])
    truth = np.asarray(record.stages[name] if truth is None else truth)
    kind = kind_of(name)
    if mine.shape[1:] != truth.shape[1:] or (kind in _WHOLE and len(mine) != len(truth)):
        text = f"{name}: its shape is {mine.shape}, the truth's is {truth.shape}"
        return Suspect(name, None, None, True, text)
    first, last = (0, len(truth)) if kind in _WHOLE else _shared_rows(run, record)
    if kind == "kv":
        first = 0  # what a prefix hit brought stands in the cache as well
    last = min(last, len(mine), len(truth))
    if last <= first:
        return 0.0
    mine, truth = mine[first:last].reshape(last - first, -1), truth[first:last].reshape(last - first, -1)
    if kind in _EXACT:
        wrong = np.flatnonzero((mine != truth).any(axis=1))
        if not wrong.size:
            return 0.0
        at = int(wrong[0])
        text = f"{name}: row {first + at} is {mine[at].tolist()}, not {truth[at].tolist()}"
        token = _token_at(record, first + at) if kind == "positions" else None
        return Suspect(name, first + at, None, True, text, token)
    scale = stage_yardstick(record, name, truth)
    if kind == "deepstack":  # rows of steps without any picture are not captured
        seen = ~np.isnan(mine).all(axis=1)
        mine, truth = np.where(seen[:, None], mine, 0.0), np.where(seen[:, None], truth, 0.0)
    scales = _row_yardsticks(name, scale, truth, first)
    errors = np.abs(mine.astype(np.float64) - truth.astype(np.float64)).max(axis=1) / scales
    # NaN compares false both ways, so the band is written as what must hold.
    outside = np.flatnonzero(~(errors <= BAND))
    if not outside.size:
        return float(errors.max())
    at = int(outside[0])
    size, scale = float(errors[at]), float(scales[at])
    row = first + at
    off = "holds NaN" if np.isnan(size) else f"is off by {size:.3g} × what rounding explains ({scale:.3g})"
    if kind in _WHOLE:
        what = "value" if kind == "pixels" else "row"
        return Suspect(name, row, size, True, f"{name}: {what} {row} {off}")
    return Suspect(
        name,
        row,
        size,
        True,
        f"{name}: row {row} ({_what_stands(record, row)}) {off}",
        _token_at(record, row),
    )


def differing_stage(a: RequestRun, b: RequestRun) -> Suspect | None:
    """The first stage in which two runs of one engine differ by a bit, where both captured it.

    Rows that one of them took from its prefix cache are left out; those of the KV cache are not.
    """
    for name in ordered_stages(set(a.stages) & set(b.stages)):
        x, y = np.asarray(a.stages[name]), np.asarray(b.stages[name])
        if x.shape[1:] != y.shape[1:]:
            return Suspect(name, None, None, True, f"{name}: shapes {x.shape} and {y.shape}")
        first = 0 if kind_of(name) in (*_WHOLE, "kv") else max(_cached(a), _cached(b))
        count = min(len(x), len(y), _shared_context(a, b))
        if kind_of(name) in _WHOLE:
            count = min(len(x), len(y))
        if count <= first:
            continue
        x, y = x[first:count].reshape(count - first, -1), y[first:count].reshape(count - first, -1)
        same = (x == y) | ((x != x) & (y != y))
        wrong = np.flatnonzero(~same.all(axis=1))
        if wrong.size:
            at = int(wrong[0])
            by = float(np.nanmax(np.abs(x[at].astype(np.float64) - y[at].astype(np.float64))))
            text = f"{name}: row {first + at} differs between the two passes, by up to {by:.3g}"
            return Suspect(name, first + at, None, True, text)
    return None


def stage_yardstick(record: GoldenRecord, name: str, truth: NDArray[Any]) -> float:
    """Largest error that rounding explains in a stage: the record's own band where it has one.

    Otherwise the logits' yardstick, relative to the largest logit, carried over to the magnitude
    of the stage. Earlier stages err less, so this is an upper bound for them.
    """
    floor = float(np.finfo(np.float32).eps) * max(float(np.max(np.abs(truth))), 1e-300)
    banded = "embeddings" if kind_of(name) == "vision" else name
    if banded in record.stage_bands:
        return max(record.stage_bands[banded].max, floor)
    largest = float(np.max(np.abs(record.output.top_logits)))
    return max(record.yardstick.M / max(largest, 1e-300) * float(np.max(np.abs(truth))), floor)


def _row_yardsticks(name: str, scale: float, truth: NDArray[Any], first: int) -> NDArray[np.float64]:
    """The yardstick of each row of a stage, [rows]: for keys it grows with the position.

    All arms of the reference share one float32 table of frequencies, so their keys agree better than
    correct ones must. An angle is at most its position; rounding the frequency and the product once
    each moves a key by up to two units in the last place of the angle, times the key.
    """
    rows = np.full(len(truth), scale)
    if not name.startswith("k."):
        return rows
    angles = 2 * float(np.finfo(np.float32).eps) * (first + np.arange(len(truth)))
    keys: NDArray[np.float64] = np.maximum(rows, angles * np.abs(truth).max(axis=1) / BAND)
    return keys


def _wrong_prompt(mine: tuple[int, ...], truth: tuple[int, ...]) -> Suspect:
    at = next((i for i, (a, b) in enumerate(zip(mine, truth, strict=False)) if a != b), None)
    if at is None:
        at = min(len(mine), len(truth))
    text = (
        f"prompt ids: the prompt ids differ from the golden's at {at}: {list(mine[at : at + 3])} for "
        f"{list(truth[at : at + 3])}, {len(mine)} for {len(truth)} tokens"
    )
    return Suspect("prompt ids", at, None, True, text, mine[at] if at < len(mine) else None)


def _shared_rows(run: RequestRun, record: GoldenRecord) -> tuple[int, int]:
    """First and last row (exclusive) that the run computed in the golden's context."""
    ids = (run.output.token_ids if run.output else None) or ()
    # Zip on purpose: a run that merely stops early agrees as far as it goes.
    pairs = enumerate(zip(ids, record.token_ids, strict=False))
    agreed = next((i for i, (a, b) in pairs if a != b), min(len(ids), len(record.token_ids)))
    return _cached(run), len(record.prompt_token_ids) + agreed


def _shared_context(a: RequestRun, b: RequestRun) -> int:
    """How many tokens of prompt and answer two runs of one request have in common."""
    mine, theirs = ((run.output.token_ids if run.output else None) or () for run in (a, b))
    pairs = enumerate(zip(mine, theirs, strict=False))
    agreed = next((i for i, (x, y) in pairs if x != y), min(len(mine), len(theirs)))
    output = a.output
    prompt = (output.prompt_token_ids if output else None) or a.prompt_token_ids or ()
    return len(prompt) + agreed


def _cached(run: RequestRun) -> int:
    return (run.output.num_cached_tokens if run.output else None) or 0


def _token_at(record: GoldenRecord, row: int) -> int | None:
    ids = (*record.prompt_token_ids, *record.token_ids)
    return ids[row] if row < len(ids) else None


def _what_stands(record: GoldenRecord, row: int) -> str:
    """What stands at a row of the sequence, in words."""
    prompt = len(record.prompt_token_ids)
    if row >= prompt:
        return f"generated token {row - prompt}, id {_token_at(record, row)}"
    for span in record.media.spans if record.media else ():
        if span.start <= row < span.start + span.length:
            return f"picture {span.item}, its row {span.first_row + row - span.start}"
    return f"prompt token {row}, id {record.prompt_token_ids[row]}"


def _answer(case: Case, run: RequestRun, record: GoldenRecord, traced: bool) -> Suspect | None:
    """The first generated position with wrong logits, or with right ones and yet another token."""
    aligned = align(case, run, record)
    for position, speaker in aligned:
        output = speaker.output
        if position >= len(speaker.output_rows):
            found = None if output is None else _logprobs(record, output, position, speaker.forced)
            if found is not None:
                return found
            continue
        row = speaker.output_rows[position]
        worst = float(np.max(np.abs(row_errors(row, record.output, position))))
        if row.num_nan or not worst <= BAND * record.yardstick.M:
            size = worst / max(record.yardstick.M, 1e-300)
            where = "logits" if traced else "logits or earlier"
            text = f"{where}: generated position {position} is off by {size:.3g} M"
            return Suspect("logits", position, size, traced, text, record.token_ids[position])
        ids = (output.choice_token_ids if speaker.forced else output.token_ids) if output else None
        if ids is not None and position < len(ids) and ids[position] != row.argmax:
            text = (
                f"sampling: at generated position {position} the logits' largest is id {row.argmax}, "
                f"id {ids[position]} came out"
            )
            return Suspect("sampling", position, None, True, text, ids[position])
    return None if aligned.divergence is not None else _ending(case, run, record) or _text(case, run, record)


def _logprobs(record: GoldenRecord, output: EngineOutput, position: int, forced: bool) -> Suspect | None:
    """The same for an engine that shows log-probabilities only.

    Logits are known from them up to a constant: where every entry is off by the same amount, the
    logits are right and what made probabilities of them is not.
    """
    listed = output.logprobs or ()
    mine = {e.token_id: e.logprob for e in listed[position]} if position < len(listed) else {}
    table = record.output
    at = [i for i, token in enumerate(table.top_ids[position].tolist()) if token in mine]
    if not at:
        return None
    truth = table.top_logits[position][at] - table.logsumexp[position]
    errors = np.array([mine[int(token)] for token in table.top_ids[position][at]]) - truth
    worst, unit = float(np.max(np.abs(errors))), max(record.yardstick.M, 1e-300)
    if not worst <= logprob_band(record, float(np.max(np.abs(truth)))):
        if len(at) >= _GAPS and float(np.ptp(errors)) <= 2 * BAND * record.yardstick.M:
            text = (
                f"sampling: at generated position {position} all {len(at)} log-probabilities are off by "
                f"{float(np.median(errors)):+.3g} and the gaps between them are right: they are not "
                "normalised over the vocabulary"
            )
            return Suspect("sampling", position, worst / unit, True, text, record.token_ids[position])
        off = f"has a log-probability that is off by {worst / unit:.3g} M"
        text = f"logits or earlier: generated position {position} {off}"
        return Suspect("logits", position, worst / unit, False, text, record.token_ids[position])
    ids, best = output.choice_token_ids if forced else output.token_ids, max(mine, key=lambda i: mine[i])
    if ids is not None and position < len(ids) and mine.get(ids[position], mine[best]) < mine[best]:
        text = (
            f"sampling: at generated position {position} id {best} is the likeliest, {ids[position]} came out"
        )
        return Suspect("sampling", position, None, True, text, ids[position])
    return None


def _ending(case: Case, run: RequestRun, record: GoldenRecord) -> Suspect | None:
    """An answer whose ids are the truth's, but that goes on after its end, or ends before it."""
    ids, last = (run.output.token_ids if run.output else None) or (), len(record.token_ids)
    if len(ids) == last or not ids or case.may_end_early(run, record):
        return None
    if len(ids) > last:
        text = f"sampling: id {record.token_ids[-1]} ends the answer, and {len(ids) - last} more ids came out"
        return Suspect("sampling", last, None, True, text, ids[last])
    text = f"sampling: the answer stops at id {ids[-1]}, {last - len(ids)} ids too early"
    return Suspect("sampling", len(ids) - 1, None, True, text, ids[-1])


def _text(case: Case, run: RequestRun, record: GoldenRecord) -> Suspect | None:
    wrong = wrong_text(case, run, record)
    if wrong is None:
        return None
    return Suspect(TEXT, None, None, True, f"{TEXT}: not what the ids spell: {wrong}")


def as_lines(found: Mapping[str, Any]) -> list[str]:
    """A suspect's plain data in words: the sentence, the usual causes, and why there is no more."""
    lines = [f"triage: {found['text']}"]
    causes = found.get("causes") or ()
    if causes:
        lines.append("usual causes: " + "; ".join(str(cause) for cause in causes))
    if found.get("note"):
        lines.append(f"not looked into: {found['note']}")
    return lines
