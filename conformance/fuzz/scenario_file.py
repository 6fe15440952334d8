"""Turns a failing engine log into a scenario of the real engine, where the steps can say it.

The fake KV becomes a model's, and the tokens the log's model would sample become forced ones, so
every request keeps its length and the schedule stays the same. What a scenario's steps cannot say
(anything inside a step, a failing computation, a step that breaks off, forks, images) is not written
at all: a scenario that leaves out the cause would prove nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from conformance.contracts.base import Span, Tags
from conformance.fuzz.driver import Failure
from conformance.fuzz.engine_jobs import EOS, EngineSetup, Job, why_rejected
from conformance.fuzz.kv import Story
from conformance.fuzz.operations import Abort, Add, BreakOff, Commit, Operation, PlanStep, Preempt, Reset
from conformance.paths import data_root

__all__ = ["NotAScenario", "as_scenario"]

_MODEL = "tiny-llama"


class NotAScenario(ValueError):
    """Why a log cannot be a scenario."""


def as_scenario(failure: Failure, scenario_id: str) -> str:
    """The text of a scenario file that `conformance run` replays.

    Raises:
        NotAScenario: the log does what no step of a scenario says.
    """
    setup = failure.setup
    if not isinstance(setup, EngineSetup):
        raise NotAScenario("it drives a block manager alone, without an engine")
    requests: dict[str, dict[str, Any]] = {}
    reasons: dict[str, str] = {}
    for operation in failure.operations:
        if isinstance(operation, Add):
            requests[operation.request], reasons[operation.request] = _request(operation, setup)
    steps = list(_steps(failure.operations, reasons))
    checks: list[Any] = ["pool_conserved"]
    if served := {name: reason for name, reason in reasons.items() if reason != "refused"}:
        checks.append({"finish_reason": served})
    if any(reason not in ("refused", "abort") for reason in reasons.values()):
        checks.append({"same_under": {"batch": ["alone"]}})
    scenario = {
        "schema": 1,
        "id": scenario_id,
        "requirement": f"Found by the fuzzer: {failure.signature.partition(' @')[0]}.",
        "level": "must",
        "source": [f"conformance fuzz --seed {failure.seed}, example {failure.example} of {failure.target}"],
        "needs": ["stepped", "token_ids", "forced_decode", "bitwise"],
        "model": _MODEL,
        "engine": _engine(setup),
        "profile": "full",
        "requests": requests,
        "steps": steps,
        "checks": checks,
    }
    return yaml.safe_dump(scenario, sort_keys=False, default_flow_style=None, width=110)


def _request(add: Add, setup: EngineSetup) -> tuple[dict[str, Any], str]:
    """The request, and how it ends if nobody interferes."""
    if add.spans or add.n > 1 or add.prompt_logprobs:
        raise NotAScenario("it has images, several sequences per prompt, or prompt logprobs")
    story = Story(add.tokens, Tags(add.salt, tuple(Span(*span) for span in add.spans)))
    limit = min(setup.max_model_len, len(add.tokens) + add.max_tokens)
    job = Job(add.request, "", add, story, limit, 0)
    if why_rejected(add, setup, whole_prompts=not setup.chunked_prefill):
        job.reason = "refused"
    while job.reason is None:
        job.append(story.next_token(setup.vocabulary))
    stops = [*([] if add.ignore_eos else [EOS]), *add.stop_ids]
    request: dict[str, Any] = {
        "token_ids": list(add.tokens),
        "max_tokens": add.max_tokens,
        "ignore_eos": True,  # the model's own EOS is another token
        "forced_token_ids": job.generated,
    }
    optional = {
        "stop_token_ids": stops,
        "min_tokens": add.min_tokens,
        "cache_salt": add.salt,
        "priority": add.priority,
    }
    return request | {name: value for name, value in optional.items() if value}, str(job.reason)


def _steps(operations: tuple[Operation, ...], reasons: dict[str, str]) -> Iterator[Any]:
    """Steps; `reasons` learns who is aborted."""
    inside = False
    for operation in operations:
        match operation:
            case PlanStep():
                if inside:
                    raise NotAScenario("it plans a step twice")
                inside = True
            case Commit(fail=None):
                if inside:
                    yield {"advance": 1}
                inside = False
            case Commit():
                raise NotAScenario("a computation fails")
            case BreakOff():
                raise NotAScenario("a step breaks off")
            case Add(request=name):
                yield {"expect_error": {name: "any"}} if reasons[name] == "refused" else {"submit": [name]}
            case Abort(request=name) if not inside:
                reasons[name] = "abort"
                yield {"abort": [name]}
            case Preempt(request=name) if not inside:
                yield {"preempt": [name]}
            case Reset() if not inside:
                yield "reset_cache"
            case _:
                raise NotAScenario(f"{type(operation).__name__.lower()} happens inside a step")
    yield "run"


def _engine(setup: EngineSetup) -> dict[str, Any]:
    options: dict[str, Any] = {
        "block_size": setup.block_size,
        "num_kv_blocks": setup.num_blocks + 1,
        "max_num_seqs": setup.max_num_seqs,
        "max_num_batched_tokens": setup.max_num_batched_tokens,
        "max_model_len": setup.max_model_len,
        "enable_prefix_caching": setup.prefix_caching,
        "enable_chunked_prefill": setup.chunked_prefill,
        "scheduling_policy": setup.policy,
        "batch_invariant": True,
    }
    if setup.preemption != "recompute":
        config = json.loads((data_root() / "golden/checkpoints" / _MODEL / "config.json").read_text())
        per_token = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
        options["preemption_mode"] = setup.preemption
        options["swap_space_bytes"] = setup.num_host_blocks * setup.block_size * per_token * 4
    return options
