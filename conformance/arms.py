"""The arms of `same_under`: how one scenario runs again under another configuration.

An arm that the engine cannot be put into is not run. Whether an arm that ran did what its name says
(a prompt was split, a request was preempted) is judged from its history, by `conformance.checks.claims`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from conformance.adapters.base import Capabilities, EngineRequest
from conformance.checks.arguments import AXES, arm_name
from conformance.drive import ANCILLARY, filler, step_features
from conformance.scenario import Scenario, Step

__all__ = ["Arm", "PassPlan", "expand_arms", "plan_arm", "why_not_offered"]


#: Host blocks of a swapping arm where the scenario does not say how large its pool is.
_HOST_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class Arm:
    """One value on one axis of a same_under check."""

    axis: str
    value: Any

    @property
    def name(self) -> str:
        return arm_name(self.axis, self.value)


@dataclass(frozen=True)
class PassPlan:
    """One pass to execute.

    Attributes:
        options: engine options, dtype and device included.
        extra: requests beside the scenario's: neighbours and warm-ups.
        judged: names of the requests to record; None records all of the scenario's.
        preempt_at: preempt everything after this many steps.
    """

    name: str
    options: Mapping[str, Any]
    steps: tuple[Step, ...]
    forced: bool = False
    extra: Mapping[str, EngineRequest] = field(default_factory=dict)
    judged: tuple[str, ...] | None = None
    preempt_at: int | None = None


def expand_arms(scenario: Scenario, live_after: Sequence[int]) -> list[Arm]:
    """All arms of the scenario, with an arm per step that left a request alive for `preempt: every`
    and for each mode of `preemption`."""
    arms = []
    for check in scenario.check("same_under"):
        for axis, values in check.args.items():
            if axis not in AXES:
                continue
            for value in values if isinstance(values, list) else [values]:
                alive = [k for k, live in enumerate(live_after, 1) if live]
                if axis == "preempt" and value == "every":
                    arms += [Arm(axis, k) for k in alive]
                elif axis == "preemption":
                    arms += [Arm(axis, f"{value}@{k}") for k in alive]
                else:
                    arms.append(Arm(axis, value))
    return list(dict.fromkeys(arms))


def why_not_offered(arm: Arm, scenario: Scenario, capabilities: Capabilities) -> str | None:
    """Why the engine cannot run this arm; None if it can."""
    features = set(_NEEDS[arm.axis])
    if arm.axis == "batch" and arm.value in ("late", "aborted_neighbour"):
        features.add("stepped")
    if arm.axis not in ("batch", "order"):
        features |= step_features(scenario.steps)
    for feature in sorted(features - capabilities.features):
        reason = capabilities.missing.get(feature)
        return f"{capabilities.engine} lacks {feature}" + (f": {reason}" if reason else "")
    options = _OPTIONS.get(arm.axis, ())
    if arm.axis == "preemption" and str(arm.value).startswith("swap"):
        options = (*options, "num_host_blocks")
    for option in options:
        if option not in capabilities.options:
            return f"{capabilities.engine} does not honour the option {option}"
    return None


def plan_arm(
    arm: Arm, scenario: Scenario, options: Mapping[str, Any], requests: Mapping[str, EngineRequest]
) -> PassPlan:
    """How to run one arm.

    Args:
        options: of the free pass.
        requests: the scenario's, with prompt ids where known.
    """
    plan = PassPlan(arm.name, options, scenario.steps)
    return _PLANS[arm.axis](plan, arm.value, scenario, requests)


# ---- one function per axis ----------------------------------------------------------------------


def _chunk(plan: PassPlan, value: Any, _s: Scenario, _r: Mapping[str, EngineRequest]) -> PassPlan:
    options = {**plan.options, "max_num_batched_tokens": value, "enable_chunked_prefill": True}
    return replace(plan, options=options)


def _block_size(plan: PassPlan, value: Any, scenario: Scenario, _r: Mapping[str, EngineRequest]) -> PassPlan:
    options = {**plan.options, "block_size": value}
    if "num_kv_blocks" in options:
        # The same room in tokens, plus the half-empty last block of each request.
        tokens = (options["num_kv_blocks"] - 1) * plan.options.get("block_size", 16)
        options["num_kv_blocks"] = 1 + -(-tokens // value) + len(scenario.requests)
    return replace(plan, options=options)


def _backend(plan: PassPlan, value: Any, _s: Scenario, _r: Mapping[str, EngineRequest]) -> PassPlan:
    return replace(plan, options={**plan.options, "attention_backend": value, "batch_invariant": False})


def _threads(plan: PassPlan, value: Any, _s: Scenario, _r: Mapping[str, EngineRequest]) -> PassPlan:
    return replace(plan, options={**plan.options, "threads": value})


def _preempt(plan: PassPlan, value: Any, _s: Scenario, _r: Mapping[str, EngineRequest]) -> PassPlan:
    return replace(plan, preempt_at=value)


def _preemption(plan: PassPlan, value: Any, _s: Scenario, _r: Mapping[str, EngineRequest]) -> PassPlan:
    """`value` is "<mode>@<step>"; a host pool as large as the device's has room for whatever leaves it."""
    mode, _, step = str(value).partition("@")
    options = {**plan.options, "preemption_mode": mode}
    if mode == "swap" and not {"num_host_blocks", "swap_space_bytes"} & set(options):
        options["num_host_blocks"] = options.get("num_kv_blocks", _HOST_BLOCKS)
    return replace(plan, options=options, preempt_at=int(step))


def _poison(plan: PassPlan, _v: Any, _s: Scenario, _r: Mapping[str, EngineRequest]) -> PassPlan:
    steps = tuple(
        replace(step, argument={**step.argument, "poison": True}) if step.kind == "run" else step
        for step in plan.steps
    )
    return replace(plan, steps=steps)


def _order(plan: PassPlan, _v: Any, scenario: Scenario, _r: Mapping[str, EngineRequest]) -> PassPlan:
    names = _served(scenario)[::-1]
    return _together(plan, names, {}, names)


def _prefix_cache(
    plan: PassPlan, value: Any, scenario: Scenario, requests: Mapping[str, EngineRequest]
) -> PassPlan:
    options = {**plan.options, "enable_prefix_caching": value in ("on", "hit", True)}
    if value != "hit":
        return replace(plan, options=options)
    warm = {}
    for name in _served(scenario):
        sampling = {**requests[name].sampling, "max_tokens": 1}
        # Prompt logprobs make an engine skip its cache, and a warm-up must fill it.
        for unwanted in ("n", "prompt_logprobs", "min_tokens", "logprobs", "forced_token_ids"):
            sampling.pop(unwanted, None)
        warm[f"{ANCILLARY}warm.{name}"] = replace(
            requests[name],
            request_id=f"{ANCILLARY}warm.{name}",
            sampling=sampling,
            capture=frozenset(),
            forced_token_ids=None,
        )
    steps = (_submit(list(warm)), _run(), *scenario.steps)
    return replace(plan, options=options, steps=steps, extra=warm)


def _batch(plan: PassPlan, value: Any, scenario: Scenario, _r: Mapping[str, EngineRequest]) -> PassPlan:
    names = _served(scenario)
    if value == "alone":
        steps = [step for name in names for step in (_submit([name]), _run())]
        return replace(plan, steps=tuple(steps), judged=tuple(names))
    neighbours = _neighbours(plan.options)
    first, *others = neighbours
    if value == "mixed":
        mixed = [name for pair in zip(names, _cycle(others, len(names)), strict=True) for name in pair]
        order = list(dict.fromkeys([first, *mixed, *others]))
        return _together(plan, order, neighbours, names)
    if value == "late":
        steps = [_submit(list(neighbours)), Step("advance", 2, 0), _submit(names), _run()]
    else:
        aborted = [first, others[0]]
        steps = [
            _submit([first, *names, others[0]]),
            Step("advance", 2, 0),
            Step("abort", aborted, 0),
            _run(),
        ]
        neighbours = {name: neighbours[name] for name in aborted}
    return replace(plan, steps=tuple(steps), extra=neighbours, judged=tuple(names))


# ---- pieces -------------------------------------------------------------------------------------


def _together(
    plan: PassPlan, order: list[str], extra: Mapping[str, EngineRequest], judged: Sequence[str]
) -> PassPlan:
    return replace(plan, steps=(_submit(order), _run()), extra=extra, judged=tuple(judged))


def _submit(names: list[str]) -> Step:
    return Step("submit", names, 0)


def _run() -> Step:
    return Step("run", {"preempt": None, "period": 1, "poison": False}, 0)


def _served(scenario: Scenario) -> list[str]:
    """Requests that are to run to their end, in order of submission."""
    aborted = {name for step in scenario.steps if step.kind == "abort" for name in step.argument}
    submitted = [name for step in scenario.steps if step.kind == "submit" for name in step.argument]
    return [name for name in submitted if name not in aborted and name not in scenario.must_fail]


def _neighbours(options: Mapping[str, Any]) -> dict[str, EngineRequest]:
    """Three requests of unequal length, small enough for a small pool."""
    room = (options.get("num_kv_blocks", 1025) - 1) * options.get("block_size", 16)
    longest = max(1, min(33, room // 4 - 8, options.get("max_model_len", 2048) - 9))
    lengths = (min(5, longest), min(17, longest), longest)
    made = [filler(100 + i, length, 8) for i, length in enumerate(lengths)]
    return {request.request_id: request for request in made}


def _cycle(names: Sequence[str], count: int) -> Iterator[str]:
    return (names[i % len(names)] for i in range(count))


_NEEDS: Mapping[str, tuple[str, ...]] = {
    "chunk": ("chunked_prefill",),
    "block_size": ("block_size",),
    "batch": (),
    "prefix_cache": ("prefix_cache",),
    "preempt": ("stepped", "preempt"),
    "preemption": ("stepped", "preempt"),
    "backend": (),
    "threads": (),
    "poison": ("stepped", "poison"),
    "order": (),
}
_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "chunk": ("max_num_batched_tokens",),
    "block_size": ("block_size",),
    "prefix_cache": ("enable_prefix_caching",),
    "preemption": ("preemption_mode",),
    "backend": ("attention_backend",),
    "threads": ("threads",),
}
_PLANS: Mapping[str, Callable[[PassPlan, Any, Scenario, Mapping[str, EngineRequest]], PassPlan]] = {
    "chunk": _chunk,
    "block_size": _block_size,
    "batch": _batch,
    "prefix_cache": _prefix_cache,
    "preempt": _preempt,
    "preemption": _preemption,
    "backend": _backend,
    "threads": _threads,
    "poison": _poison,
    "order": _order,
}
