"""Reduces what an engine shows to what a history keeps: rows of logits and digests of the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.history import LogitRow
from conformance.records import LogitTable

__all__ = ["OWN_TOP", "kv_digests", "reduce_logits"]

#: How many of an engine's own top ids are kept where no golden says which matter.
OWN_TOP = 20


def reduce_logits(logits: NDArray[Any] | None, truth: LogitTable | None) -> tuple[LogitRow, ...]:
    """Reduce captured logits, row by row.

    Args:
        logits: [positions, vocab]; None (not captured) gives no rows.
        truth: the golden's table for these positions; rows beyond it keep the engine's own top
            ids. A golden id outside the engine's vocabulary reads as NaN.
    """
    if logits is None:
        return ()
    return tuple(
        _reduce(row, truth.top_ids[i] if truth is not None and i < len(truth) else None)
        for i, row in enumerate(logits)
    )


def kv_digests(stages: Mapping[str, NDArray[Any]]) -> tuple[str, ...]:
    """SHA-256 of K then V of each layer, from the stages "k.i" and "v.i" in order of i."""
    layers = sorted(int(name.removeprefix("k.")) for name in stages if name.startswith("k."))
    return tuple(_digest(stages[f"{kind}.{layer}"]) for layer in layers for kind in ("k", "v"))


def _reduce(row: NDArray[Any], ids: Sequence[int] | NDArray[np.int64] | None) -> LogitRow:
    exact = row.astype(np.float64)
    num_nan = int(np.isnan(exact).sum())
    order = np.where(np.isnan(exact), -np.inf, exact)
    if ids is None:
        top = min(OWN_TOP, len(order))
        ids = np.argsort(-order, kind="stable")[:top]
    values = [float(exact[i]) if 0 <= i < len(exact) else float("nan") for i in ids]
    # NaN rows keep NaN here: a sum over what is left would look like a healthy number.
    highest = float("nan") if num_nan else float(order.max())
    if np.isfinite(highest):
        highest += float(np.log(np.exp(exact - highest).sum()))
    return LogitRow(
        ids=tuple(int(i) for i in ids),
        values=tuple(values),
        logsumexp=highest,
        argmax=int(order.argmax()),
        num_nan=num_nan,
        digest=_digest(row),
    )


def _digest(array: NDArray[Any]) -> str:
    frame = f"{array.dtype.str}{array.shape}".encode()
    return hashlib.sha256(frame + np.ascontiguousarray(array).tobytes()).hexdigest()
