"""What happened when a scenario ran. Checks judge a history, never an engine.

A history is plain data: written to disk as JSON, read back, judged again by
`conformance recheck`. Large arrays are reduced when observed, to the values some check needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from conformance.adapters.base import Capabilities, EngineError, EngineOutput, PoolState

__all__ = ["History", "LogitRow", "Operation", "Pass", "RequestRun"]


@dataclass(frozen=True, slots=True)
class LogitRow:
    """The engine's raw logits at one position, reduced.

    Attributes:
        ids, values: logits at the golden's top ids (or the engine's own top 20 without golden).
        logsumexp: over the whole vocabulary, float64.
        argmax: lowest id among the largest logits.
        num_nan: how many logits are NaN.
        digest: SHA-256 of the row's bytes: equal digests are equal bits.
    """

    ids: tuple[int, ...]
    values: tuple[float, ...]
    logsumexp: float
    argmax: int
    num_nan: int
    digest: str


@dataclass(frozen=True, slots=True)
class RequestRun:
    """One request in one pass.

    Attributes:
        golden_key: key of the golden record of this request, or None.
        golden_error: why there is no golden ("no golden for this request", …), or None.
        prompt_token_ids: ids the runner handed over, if it did.
        forced: whether this pass forced the golden continuation.
        texts: the text after each step in which it changed (streaming engines).
        output_rows: one LogitRow per generated position, for engines with stages.
        prompt_rows: one per prompt position when prompt logits were captured.
        kv_digests: SHA-256 of K and V per layer over all computed positions when it last ran.
        stages: stage name → rows (nested lists), only those that a traced golden holds too.
        refused: the error at submission.
    """

    request_id: str
    sampling: Mapping[str, Any]
    output: EngineOutput | None
    golden_key: str | None = None
    golden_error: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    forced: bool = False
    texts: tuple[str, ...] = ()
    output_rows: tuple[LogitRow, ...] = ()
    prompt_rows: tuple[LogitRow, ...] = ()
    kv_digests: tuple[str, ...] = ()
    stages: Mapping[str, Any] = field(default_factory=dict)
    refused: EngineError | None = None


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of the scenario as carried out. `outcome` is what came of it."""

    kind: str
    argument: Any = None
    outcome: Any = None


@dataclass(frozen=True, slots=True)
class Pass:
    """One execution of the scenario's steps on a fresh engine.

    Attributes:
        name: "free" (engine decides), "forced" (golden continuation forced), or the name of an
            arm of a same_under check, such as "chunk=7".
        options: the engine options used.
        events: the engine's events in order.
        error: error while loading or running the engine as a whole.
    """

    name: str
    options: Mapping[str, Any]
    operations: tuple[Operation, ...]
    requests: Mapping[str, RequestRun]
    events: tuple[Mapping[str, Any], ...] = ()
    pool_before: PoolState | None = None
    pool_after: PoolState | None = None
    seconds: float = 0.0
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class History:
    """All passes of one scenario at one matrix point on one engine."""

    schema: int
    edition: str
    scenario: str
    point: Mapping[str, Any]
    model: str
    weights_sha256: str
    dtype: str
    device: str
    capabilities: Capabilities
    environment: Mapping[str, str]
    passes: tuple[Pass, ...] = field(default_factory=tuple)

    def find(self, name: str) -> Pass | None:
        """The pass of that name, or None."""
        return next((p for p in self.passes if p.name == name), None)
