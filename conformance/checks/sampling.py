"""sampled_within_kept_set: an independent sampler, fed the engine's own logits, agrees.

The history holds each row's top logits and its logsumexp, not the whole vocabulary, so every
quantity of the filters is computed as an interval. A token is called wrong only if it is outside
of the kept set wherever in the intervals the rest of the row lies.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.checks.case import Case, CheckFailed, CheckInputError
from conformance.history import LogitRow, RequestRun
from conformance.verdicts import Finding, Verdict

__all__ = ["kept", "sampled_within_kept_set"]

CHECK = "sampled_within_kept_set"

#: Relative slack for an engine that filters in float32.
SLACK = 1e-4


@dataclass(frozen=True)
class _Row:
    """Adjusted logits of the listed ids, and a bound on those of all other ids."""

    ids: tuple[int, ...]
    values: NDArray[np.float64]
    rest_at_most: float
    rest_mass: float
    largest: float


def sampled_within_kept_set(case: Case, args: Any) -> list[Finding]:
    """Judge every sampled token of every request (or those named) against the engine's own logits.

    Greedy: it must be the argmax after penalties, lowest id first on exact ties. Otherwise it must
    survive temperature → min_p → top_k → top_p (the order of vLLM's sampler).
    """
    names = list(case.free.requests) if args in (None, True) else case.golden_requests(args)
    names = [n for n in names if n not in case.error_expected()]
    if not names:
        raise CheckInputError("no request to judge")
    if not case.has("stages"):
        return [Finding(Verdict.SKIP, CHECK, None, case.why_missing("stages"))]
    findings: list[Finding] = []
    for name in names:
        try:
            findings.append(_judge(case, case.run_of(name)))
        except CheckFailed as failed:
            findings.append(failed.finding)
    return findings


def _judge(case: Case, run: RequestRun) -> Finding:
    output, name = case.output(CHECK, run), run.request_id
    ids = output.choice_token_ids if run.forced else output.token_ids
    if ids is None:
        return Finding(Verdict.SKIP, CHECK, name, case.why_missing("output_ids"))
    if len(run.output_rows) != len(ids):
        return case.fail(CHECK, name, f"{len(run.output_rows)} rows of logits for {len(ids)} tokens")
    prompt = output.prompt_token_ids or run.prompt_token_ids or ()
    judged = 0
    for position, (token, row) in enumerate(zip(ids, run.output_rows, strict=True)):
        if row.num_nan:
            return case.fail(
                CHECK,
                name,
                f"position {position}: {row.num_nan} logits are NaN, yet {token} was sampled",
                position=position,
                saw="logits",
            )
        answer = kept(row, token, run.sampling, prompt, (output.token_ids or ())[:position])
        if answer is False:
            return case.fail(
                CHECK,
                name,
                f"position {position}: id {token} cannot be chosen from the engine's own logits "
                f"(largest: id {row.argmax})",
                position=position,
                saw="logits",
                detail={"token": token, "argmax": row.argmax},
            )
        judged += answer is True
    if not judged:
        return Finding(Verdict.WEAK, CHECK, name, "no position could be decided from the logits kept")
    message = f"{judged} of {len(ids)} tokens are what the logits allow"
    verdict = Verdict.PASS if judged == len(ids) else Verdict.WEAK
    return Finding(verdict, CHECK, name, message, saw="logits")


def kept(
    row: LogitRow, token: int, sampling: Mapping[str, Any], prompt: Sequence[int], history: Sequence[int]
) -> bool | None:
    """Whether a sampler may choose `token`: True, False, or None where the row does not tell."""
    temperature = float(sampling.get("temperature", 1.0))
    if sampling.get("bad_words") or len(history) < int(sampling.get("min_tokens") or 0):
        return None  # these mask ids that only the engine's tokenizer knows
    if temperature == 0 and not _adjusts(sampling):
        return token == row.argmax
    adjusted = _adjust(row, sampling, prompt, history)
    if adjusted is None:
        return None
    listed = token in adjusted.ids
    # An id that is not listed lies at most as high as the lowest that is.
    mine = float(adjusted.values[adjusted.ids.index(token)]) if listed else adjusted.rest_at_most
    if temperature == 0:
        if mine < adjusted.largest:
            return False
        return True if listed and mine > adjusted.rest_at_most else None
    answers = [
        _survives_min_p(adjusted, mine, temperature, float(sampling.get("min_p") or 0)),
        _survives_top_k(adjusted, mine, int(sampling.get("top_k") or 0)),
        _survives_top_p(adjusted, mine, temperature, sampling),
    ]
    if False in answers:
        return False
    return None if None in answers or not listed else True


def _adjusts(sampling: Mapping[str, Any]) -> bool:
    return bool(
        sampling.get("logit_bias")
        or sampling.get("presence_penalty")
        or sampling.get("frequency_penalty")
        or (sampling.get("repetition_penalty") or 1.0) != 1.0
    )


def _adjust(
    row: LogitRow, sampling: Mapping[str, Any], prompt: Sequence[int], history: Sequence[int]
) -> _Row | None:
    """Apply bias and penalties to the listed ids; None if an unlisted id might have been raised."""
    listed = set(row.ids)
    bias: Mapping[int, float] = {int(k): float(v) for k, v in (sampling.get("logit_bias") or {}).items()}
    presence = float(sampling.get("presence_penalty") or 0)
    frequency = float(sampling.get("frequency_penalty") or 0)
    repetition = float(sampling.get("repetition_penalty") or 1.0)
    unlisted_seen = (set(history) - listed, (set(prompt) | set(history)) - listed)
    if any(b > 0 and i not in listed for i, b in bias.items()):
        return None
    if (min(presence, frequency) < 0 and unlisted_seen[0]) or (repetition < 1 and unlisted_seen[1]):
        return None
    values = []
    for token, raw in zip(row.ids, row.values, strict=True):
        value = raw + bias.get(token, 0.0)
        if repetition != 1.0 and (token in prompt or token in history):
            value = value / repetition if value > 0 else value * repetition
        count = history.count(token)
        values.append(value - frequency * count - (presence if count else 0.0))
    mass = 1.0 - sum(math.exp(v - row.logsumexp) for v in row.values)
    lowest = min(row.values)
    largest = max(values)
    # exp(logsumexp) may overflow for large logits, so everything is kept relative to `lowest`.
    rest_mass = max(mass, 0.0) * math.exp(min(row.logsumexp - lowest, 700.0))
    return _Row(row.ids, np.array(values, dtype=np.float64), lowest, rest_mass, largest)


def _survives_min_p(row: _Row, mine: float, temperature: float, min_p: float) -> bool | None:
    if not min_p:
        return True
    ratio = math.exp((mine - row.largest) / temperature)
    if ratio < min_p * (1 - SLACK):
        return False
    # An unlisted id may exceed the largest only if penalties pushed that below the listed range.
    return True if ratio >= min_p * (1 + SLACK) and row.largest >= row.rest_at_most else None


def _survives_top_k(row: _Row, mine: float, top_k: int) -> bool | None:
    if top_k <= 0:
        return True
    above = int(np.sum(row.values > mine + SLACK * max(1.0, abs(mine)) * 1e-2))
    if above >= top_k:
        return False
    not_below = int(np.sum(row.values >= mine - SLACK * max(1.0, abs(mine)) * 1e-2))
    return True if not_below <= top_k and mine >= row.rest_at_most else None


def _survives_top_p(row: _Row, mine: float, temperature: float, sampling: Mapping[str, Any]) -> bool | None:
    """Kept while the probability of all likelier ids, among those still kept, is below top_p."""
    top_p, top_k = float(sampling.get("top_p") or 1.0), int(sampling.get("top_k") or 0)
    if top_p >= 1:
        return True
    min_p = float(sampling.get("min_p") or 0)
    values = np.sort(row.values)[::-1]
    if min_p:
        values = values[np.exp((values - row.largest) / temperature) >= min_p * (1 - SLACK)]
    exact = 0 < top_k <= len(values) and (values[top_k - 1] >= row.rest_at_most)
    if exact:
        values = values[:top_k]
    weights = np.exp((values - row.rest_at_most) / temperature)
    low = high = float(np.sum(weights))
    if not exact:
        # Each unlisted weight is exp(x / T) with x ≤ 0 relative to the lowest listed logit, and
        # the weights at T = 1 sum to rest_mass. For T ≤ 1, exp(x / T) ≤ exp(x) bounds it above.
        high += row.rest_mass if temperature <= 1 else math.inf
    likelier = float(np.sum(weights[values > mine + 1e-9]))
    if likelier / high >= top_p + SLACK:
        return False
    return True if likelier / low < top_p - SLACK and mine >= row.rest_at_most else None
