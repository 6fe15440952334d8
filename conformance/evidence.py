"""What a history would have looked like from an engine that shows less."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from conformance.adapters.base import EngineOutput
from conformance.history import History, Pass, RequestRun

__all__ = ["EVIDENCE", "only"]

_TRACE = frozenset({"traced", "pool", "snapshot"})
_LOGPROBS = frozenset({"logprobs", "prompt_logprobs"})
_STAGES = frozenset({"stages", "kv"})
_BITS = frozenset({"bitwise"})

#: Sets of evidence from small to large → the features that an engine with only this set does not have.
#: "tokens" is what every engine gives: ids, text, reasons, refusals, counts of cached tokens.
EVIDENCE: Mapping[str, frozenset[str]] = {
    "tokens": _TRACE | _LOGPROBS | _STAGES | _BITS,
    "logprobs": _TRACE | _STAGES | _BITS,
    "stages": _TRACE | _BITS,
    "bits": _TRACE,
    "trace": _LOGPROBS | _STAGES | _BITS,
    "all": frozenset(),
}


def only(history: History, evidence: str) -> History:
    """The history as an engine with only this set of `EVIDENCE` would have left it."""
    lacking = EVIDENCE[evidence]
    capabilities = history.capabilities
    reasons = dict.fromkeys(sorted(lacking), f"judged by {evidence} only")
    return replace(
        history,
        capabilities=replace(
            capabilities,
            features=capabilities.features - lacking,
            missing={**capabilities.missing, **reasons},
        ),
        passes=tuple(_pass(one, lacking) for one in history.passes),
    )


def _pass(one: Pass, lacking: frozenset[str]) -> Pass:
    hidden = "pool" in lacking
    return replace(
        one,
        events=() if "traced" in lacking else one.events,
        pool_before=None if hidden else one.pool_before,
        pool_after=None if hidden else one.pool_after,
        requests={name: _run(run, lacking) for name, run in one.requests.items()},
    )


def _run(run: RequestRun, lacking: frozenset[str]) -> RequestRun:
    without_stages = "stages" in lacking
    return replace(
        run,
        output=None if run.output is None else _output(run.output, lacking),
        output_rows=() if without_stages else run.output_rows,
        prompt_rows=() if without_stages else run.prompt_rows,
        kv_digests=() if "kv" in lacking else run.kv_digests,
        stages={} if without_stages else run.stages,
    )


def _output(output: EngineOutput, lacking: frozenset[str]) -> EngineOutput:
    return replace(
        output,
        logprobs=None if "logprobs" in lacking else output.logprobs,
        prompt_logprobs=None if "prompt_logprobs" in lacking else output.prompt_logprobs,
    )
