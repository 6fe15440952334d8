"""Where two runs of one request first differ, to the bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from conformance.history import LogitRow, RequestRun

__all__ = ["Difference", "answer_difference", "bit_difference", "first_difference", "row_difference"]


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that two runs do not share.

    Attributes:
        message: what differs, and where.
        position: the generated position, if it is at one.
        detail: the same for programs.
    """

    message: str
    position: int | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)


def answer_difference(base: RequestRun, other: RequestRun) -> Difference | None:
    """The first difference of what the user sees. Both were answered."""
    a, b = base.output, other.output
    assert a is not None
    assert b is not None
    if a.token_ids is not None and b.token_ids is not None and a.token_ids != b.token_ids:
        at = first_difference(a.token_ids, b.token_ids)
        mine, theirs = list(a.token_ids[at : at + 3]), list(b.token_ids[at : at + 3])
        return Difference(f"tokens differ from position {at}: {mine} and {theirs}", at)
    for what in ("text", "finish_reason", "stop_reason"):
        if getattr(a, what) != getattr(b, what):
            return Difference(f"{what} differs: {getattr(a, what)!r} and {getattr(b, what)!r}")
    return None


def bit_difference(base: RequestRun, other: RequestRun) -> tuple[Difference | None, int]:
    """The first difference of answers, logits, KV cache or logprobs, and how many digests agreed.

    Both were answered. What neither run holds is not compared.
    """
    difference = answer_difference(base, other)
    if difference is not None:
        return difference, 0
    compared = 0
    for what, mine, theirs in (
        ("logits", [r.digest for r in base.output_rows], [r.digest for r in other.output_rows]),
        ("prompt logits", [r.digest for r in base.prompt_rows], [r.digest for r in other.prompt_rows]),
        ("KV cache", list(base.kv_digests), list(other.kv_digests)),
    ):
        if mine != theirs:
            at = first_difference(mine, theirs)
            where = f"layer {at // 2} {'KV'[at % 2]}" if what == "KV cache" else f"position {at}"
            message = f"bits of the {what} differ at {where}{_distance(what, at, base, other)}"
            return Difference(message, at if what == "logits" else None, {"what": what, "at": at}), compared
        compared += len(mine)
    for what in ("logprobs", "prompt_logprobs"):
        # repr tells every bit, and NaN from NaN.
        if repr(getattr(base.output, what)) != repr(getattr(other.output, what)):
            return Difference(f"{what} differ"), compared
    return None, compared


def row_difference(a: LogitRow, b: LogitRow) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Differences of the logits that both rows list."""
    theirs = dict(zip(b.ids, b.values, strict=True))
    pairs = [(v, theirs[i]) for i, v in zip(a.ids, a.values, strict=True) if i in theirs]
    return np.array([x - y for x, y in pairs], dtype=np.float64)


def first_difference(a: Sequence[Any], b: Sequence[Any]) -> int:
    """The first index at which two unequal sequences differ; the shorter one's length if at none."""
    shared = min(len(a), len(b))
    return next((i for i in range(shared) if a[i] != b[i]), shared)


def _distance(what: str, at: int, base: RequestRun, other: RequestRun) -> str:
    if what != "logits" or at >= min(len(base.output_rows), len(other.output_rows)):
        return ""
    errors = row_difference(base.output_rows[at], other.output_rows[at])
    return f" (largest difference of a listed logit {np.max(np.abs(errors)):.3g})" if len(errors) else ""
