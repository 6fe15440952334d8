"""Runs one scenario at one matrix point on one engine, and returns the history of it.

Nothing is judged here. A scenario the engine cannot run raises `Skipped` with the reason; what the
engine does wrong, a crash included, is written into the history for the checks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from conformance import EDITION, HISTORY_SCHEMA
from conformance.adapters.base import (
    STAGES,
    Capabilities,
    Controlled,
    EngineAdapter,
    EngineError,
    EngineOutput,
    EngineRequest,
    Media,
    ModelSource,
    PoolState,
    Stages,
    request_of,
    sequence_names,
)
from conformance.adapters.received import declared, received_pool
from conformance.arms import PassPlan, expand_arms, plan_arm, why_not_offered
from conformance.canonical import request_key
from conformance.damage import damaged_copy
from conformance.drive import Drive, step_features
from conformance.environment import describe_environment
from conformance.history import History, Operation, Pass, RequestRun
from conformance.media import engine_chat
from conformance.observe import OWN_TOP, kv_digests, reduce_logits
from conformance.outside import FROM_OUTSIDE
from conformance.records import GoldenRecord, media_embeddings, prompt_embeddings
from conformance.scenario import RequestSpec, Scenario
from conformance.store import RecordError, Records

__all__ = [
    "EngineFactory",
    "Retrace",
    "Skipped",
    "engine_requests",
    "retrace_scenario",
    "run_scenario",
    "skip_reason",
]

#: Makes an adapter, not yet entered, for a model and options (dtype and device among them).
EngineFactory = Callable[[ModelSource, Mapping[str, Any]], EngineAdapter]

#: What a request asks for → the feature that serves it.
_REQUEST_FEATURES = {
    "logprobs": "logprobs",
    "prompt_logprobs": "prompt_logprobs",
    "stop": "stop_strings",
    "presence_penalty": "penalties",
    "frequency_penalty": "penalties",
    "repetition_penalty": "penalties",
    "logit_bias": "logit_control",
    "bad_words": "logit_control",
    "min_tokens": "logit_control",
    "forced_token_ids": "forced_decode",
    "n": "parallel_sampling",
}


#: Options that are a reason to refuse a request: without them nothing is due where one is to be refused.
_REFUSING = frozenset({"encoder_cache_embeddings", "limit_mm_per_prompt", "max_model_len"})


class Skipped(Exception):
    """The engine cannot run this scenario at this point; the message says why."""


@dataclass(frozen=True)
class _Golden:
    """The record of one request, or why there is none."""

    record: GoldenRecord | None
    error: str | None


def skip_reason(scenario: Scenario, point: Mapping[str, Any], capabilities: Capabilities) -> str | None:
    """Why the engine cannot run the scenario at this point; None if it can."""
    if point["dtype"] not in capabilities.dtypes:
        offered = ", ".join(capabilities.dtypes)
        return f"{capabilities.engine} does not offer {point['dtype']}; it offers {offered}"
    wanted = {*scenario.needs, *step_features(scenario.steps)}
    if {**scenario.engine, **point}.get("batch_invariant"):
        wanted.add("bitwise")
    for request in scenario.requests.values():
        wanted |= {feature for name, feature in _REQUEST_FEATURES.items() if name in request.sampling}
        wanted |= {"sampling"} if request.sampling["temperature"] > 0 else set()
        wanted |= _media_features(request) | ({"media_settings"} if request.mm_processor_kwargs else set())
    for feature in sorted(wanted - capabilities.features):
        reason = capabilities.missing.get(feature)
        return f"{capabilities.engine} lacks {feature}" + (f": {reason}" if reason else "")
    for option in sorted(
        _REFUSING & set(scenario.engine) - capabilities.options if scenario.must_fail else ()
    ):
        return f"{capabilities.engine} does not honour the option {option}"
    for option, values in scenario.matrix.items():
        # An engine without the option runs the first value's point, once, and skips its copies.
        if option not in capabilities.options and point[option] != values[0]:
            return f"{capabilities.engine} does not honour the option {option}"
    return None


def _media_features(request: RequestSpec) -> set[str]:
    if request.prompt_as == "embeddings":
        return {"prompt_embeds"}
    return {"image_embeds"} if request.media_as == "embeddings" else {ref.modality for ref in request.media}


def run_scenario(
    scenario: Scenario,
    point: Mapping[str, Any],
    factory: EngineFactory,
    source: ModelSource,
    store: Records,
) -> History:
    """Run every pass of one scenario at one point.

    Args:
        point: one of `scenario.points()`, perhaps with another device.
        source: the model named in the point.
        store: the golden records.

    Raises:
        Skipped: the engine lacks something the scenario needs.
        DamageError: the scenario damages something this checkpoint does not have.
    """
    return _history(scenario, point, factory, source, store, _ScenarioRun.all_passes)


@dataclass(frozen=True, slots=True)
class Retrace:
    """What to run again, and what to capture of it.

    Attributes:
        requests: capture every stage of these, where the engine captures stages.
        arms: names of the arms of same_under to run beside the free pass and, after a divergence, the
            forced one.
    """

    requests: frozenset[str]
    arms: frozenset[str] = frozenset()


def retrace_scenario(
    scenario: Scenario,
    point: Mapping[str, Any],
    factory: EngineFactory,
    source: ModelSource,
    store: Records,
    retrace: Retrace,
) -> History:
    """Run a scenario again to look inside. Its history holds stages as arrays: it is not for a disk.

    Raises:
        Skipped, DamageError: as `run_scenario`.
    """

    def passes(run: _ScenarioRun, options: Mapping[str, Any]) -> list[Pass]:
        return run.some_passes(options, retrace.arms)

    return _history(scenario, point, factory, source, store, passes, retrace.requests)


def _history(
    scenario: Scenario,
    point: Mapping[str, Any],
    factory: EngineFactory,
    source: ModelSource,
    store: Records,
    execute: Callable[[_ScenarioRun, Mapping[str, Any]], list[Pass]],
    traced: frozenset[str] = frozenset(),
) -> History:
    options = {**scenario.engine, **{k: v for k, v in point.items() if k != "model"}}
    capabilities = declared(factory, source, options)
    reason = skip_reason(scenario, point, capabilities)
    if reason is not None:
        raise Skipped(reason)
    with damaged_copy(source, scenario.damage) if scenario.damage else nullcontext(source) as actual:
        goldens = _goldens(scenario, point, source, store)
        run = _ScenarioRun(scenario, point, factory, actual, capabilities, goldens, traced)
        passes = execute(run, {k: v for k, v in options.items() if k in _ALWAYS or k in capabilities.options})
    return History(
        schema=HISTORY_SCHEMA,
        edition=EDITION,
        scenario=scenario.id,
        point=dict(point),
        model=source.name,
        weights_sha256=actual.sha256,
        dtype=point["dtype"],
        device=str(point.get("device", "auto")),
        capabilities=capabilities,
        environment=describe_environment(),
        passes=tuple(passes),
    )


def engine_requests(
    scenario: Scenario,
    point: Mapping[str, Any],
    factory: EngineFactory,
    source: ModelSource,
    store: Records,
) -> dict[str, EngineRequest]:
    """The scenario's requests as the engine gets them in the free pass, by name.

    Raises:
        Skipped: the engine lacks something the scenario needs.
    """
    options = {**scenario.engine, **{k: v for k, v in point.items() if k != "model"}}
    capabilities = declared(factory, source, options)
    reason = skip_reason(scenario, point, capabilities)
    if reason is not None:
        raise Skipped(reason)
    goldens = _goldens(scenario, point, source, store)
    return _ScenarioRun(scenario, point, factory, source, capabilities, goldens).requests


_ALWAYS = ("dtype", "device")

#: Either is enough to judge positions after a divergence.
_FORCING = frozenset({"forced_decode", "forced_prompt"})


def _goldens(
    scenario: Scenario, point: Mapping[str, Any], source: ModelSource, store: Records
) -> dict[str, _Golden]:
    goldens = {}
    for name, request in scenario.requests.items():
        if not request.has_golden or name in scenario.must_fail:
            goldens[name] = _Golden(None, None)
            continue
        try:
            key = request_key(request.canonical(point["model"], point["dtype"]))
            goldens[name] = _Golden(store.get(key, source.sha256), None)
        except RecordError as error:
            goldens[name] = _Golden(None, str(error))
    return goldens


class _ScenarioRun:
    """One scenario at one point: what all its passes share."""

    def __init__(
        self,
        scenario: Scenario,
        point: Mapping[str, Any],
        factory: EngineFactory,
        source: ModelSource,
        capabilities: Capabilities,
        goldens: Mapping[str, _Golden],
        traced: frozenset[str] = frozenset(),
    ) -> None:
        self.scenario, self.point, self.factory, self.source = scenario, point, factory, source
        self.capabilities, self.goldens, self.traced = capabilities, goldens, traced
        self.requests = {name: self._request(spec) for name, spec in scenario.requests.items()}

    def all_passes(self, options: Mapping[str, Any]) -> list[Pass]:
        """The free pass, the forced one if something diverged, and the arms."""
        plan = PassPlan("free", options, self.scenario.steps)
        free, drive = self._execute(plan)
        arms = expand_arms(self.scenario, drive.live_after)
        not_offered = [(arm, why_not_offered(arm, self.scenario, self.capabilities)) for arm in arms]
        notes = [
            Operation("arm_not_offered", {"axis": arm.axis, "value": arm.value}, reason)
            for arm, reason in not_offered
            if reason is not None
        ]
        unused = sorted(set(self.scenario.engine) - set(options))
        if unused:
            notes.append(Operation("options_not_honoured", unused))
        passes = [replace(free, operations=(*notes, *free.operations))]
        if free.error is not None:
            return passes
        if _FORCING & self.capabilities.features and self._diverged(free):
            passes.append(self._execute(replace(plan, name="forced", forced=True))[0])
        for arm, reason in not_offered:
            if reason is None:
                passes.append(self._execute(plan_arm(arm, self.scenario, options, self.requests))[0])
        return passes

    def some_passes(self, options: Mapping[str, Any], arms: Set[str]) -> list[Pass]:
        """The free pass, the forced one if something diverged, and the arms of these names."""
        plan = PassPlan("free", options, self.scenario.steps)
        free, drive = self._execute(plan)
        passes = [free]
        if _FORCING & self.capabilities.features and self._diverged(free):
            passes.append(self._execute(replace(plan, name="forced", forced=True))[0])
        for arm in expand_arms(self.scenario, drive.live_after):
            if arm.name in arms and why_not_offered(arm, self.scenario, self.capabilities) is None:
                passes.append(self._execute(plan_arm(arm, self.scenario, options, self.requests))[0])
        return passes

    def _diverged(self, free: Pass) -> bool:
        for spec in self.scenario.judged_by_golden():
            record = self.goldens[spec.name].record
            for name in sequence_names(spec.name, spec.sampling):
                output = free.requests[name].output if name in free.requests else None
                if record is None or output is None or output.token_ids is None:
                    continue
                if any(a != b for a, b in zip(output.token_ids, record.token_ids, strict=False)):
                    return True
        return False

    # ---- one pass -------------------------------------------------------------------------------

    def _execute(self, plan: PassPlan) -> tuple[Pass, Drive]:
        started = time.perf_counter()
        requests = {**self.requests, **plan.extra}
        if plan.forced:
            requests |= {name: self._forced(name) for name in self.requests}
        adapter = self.factory(self.source, plan.options)
        drive = Drive(adapter, self.capabilities, requests, plan.options, plan.preempt_at)
        error: EngineError | None = None
        before = after = None
        runs: dict[str, RequestRun] = {}
        try:
            with adapter:
                before = self._pool(adapter)
                try:
                    drive.execute(plan.steps)
                except FROM_OUTSIDE:
                    raise
                except BaseException as failure:  # a crash of the judged engine is an observation
                    error = EngineError(type(failure).__name__, str(failure))
                drive.note_events()
                outputs = drive.outputs()
                for name in self._names(self.requests if plan.judged is None else plan.judged, drive):
                    runs[name] = self._run(name, requests[request_of(name)], outputs.get(name), drive)
                after = self._pool(adapter)
        except FROM_OUTSIDE:
            raise
        except BaseException as failure:  # the same while loading, or while telling what it did
            error = error or EngineError(type(failure).__name__, str(failure))
        one = Pass(
            name=plan.name,
            options=dict(plan.options),
            operations=tuple(drive.operations),
            requests=runs,
            events=tuple(drive.events),
            pool_before=before,
            pool_after=after,
            seconds=time.perf_counter() - started,
            error=error,
        )
        return one, drive

    def _pool(self, adapter: EngineAdapter) -> PoolState | None:
        if "pool" not in self.capabilities.features:
            return None
        return received_pool(cast("Controlled", adapter).pool())

    # ---- requests -------------------------------------------------------------------------------

    def _names(self, requests: Iterable[str], drive: Drive) -> Iterator[str]:
        """The requests' sequences; a refused request has none but its own name."""
        for name in requests:
            yield from [name] if name in drive.refused else sequence_names(name, self.requests[name].sampling)

    def _request(self, spec: RequestSpec) -> EngineRequest:
        record = self.goldens[spec.name].record
        ids: Sequence[int] | None = spec.prompt.get("token_ids")
        text = spec.prompt.get("text")
        chat = None
        if "chat" in spec.prompt or "messages" in spec.prompt:
            canonical = spec.canonical(self.point["model"], self.point["dtype"])
            chat = engine_chat(canonical["prompt"]["messages"])
        # A scenario that needs the engine's own tokenizer or template gets no ids to lean on.
        own = {"text", "chat"} & set(self.scenario.needs)
        if (ids is None or spec.media) and record is not None and not own:
            ids = record.prompt_token_ids
        return EngineRequest(
            request_id=spec.name,
            sampling=self._sampling(spec),
            prompt_token_ids=None if ids is None else tuple(ids),
            text=text,
            chat=chat,
            cache_salt=spec.cache_salt,
            priority=spec.priority,
            capture=self._capture(spec),
            media=tuple(self._media(spec)),
            mm_processor_kwargs=spec.mm_processor_kwargs,
            prompt_embeds=self._prompt_embeds(spec),
        )

    def _media(self, spec: RequestSpec) -> Iterator[Media]:
        """The request's pictures: their files, or what the golden record says a model sees in them."""
        record = self.goldens[spec.name].record
        for i, ref in enumerate(spec.media):
            paths = tuple(asset.path for asset in ref.assets)
            if spec.media_as == "embeddings":
                if record is None:
                    raise RecordError(f"{spec.name}: {self.goldens[spec.name].error or 'it has no golden'}")
                rows, *deepstack = media_embeddings(record, i)
                facts = record.media.items[i] if record.media else {}
                yield Media(ref.modality, paths, ref.fps, rows, tuple(deepstack), facts)
            else:
                yield Media(ref.modality, paths, ref.fps)

    def _prompt_embeds(self, spec: RequestSpec) -> NDArray[np.float32] | None:
        if spec.prompt_as == "tokens":
            return None
        record = self.goldens[spec.name].record
        if record is None:
            raise RecordError(f"{spec.name}: {self.goldens[spec.name].error or 'it has no golden'}")
        return prompt_embeddings(record)

    def _sampling(self, spec: RequestSpec) -> dict[str, Any]:
        """What the scenario asks; and logprobs, where they are the only numbers the engine shows, or
        the scenario judges numbers."""
        sampling = dict(spec.sampling)
        features = self.capabilities.features
        numbers = "stages" not in features or bool(self.scenario.check("logits_within_yardstick"))
        if numbers and spec in self.scenario.judged_by_golden():
            if "logprobs" in features:
                sampling.setdefault("logprobs", OWN_TOP)
            elif "chosen_logprobs" in features:
                sampling.setdefault("logprobs", 0)
        return sampling

    def _capture(self, spec: RequestSpec) -> frozenset[str]:
        if "stages" not in self.capabilities.features or spec.name in self.scenario.must_fail:
            return frozenset()
        if spec.name in self.traced:
            return frozenset(STAGES) - {"prompt_logits"}
        capture = {"logits"}
        if spec.sampling.get("prompt_logprobs") is not None:
            capture.add("prompt_logits")
        if self.scenario.check("same_under") and "bitwise" in self.capabilities.features:
            capture.add("kv")
        if self.scenario.check("stages_within_band"):
            kinds = {name.partition(".")[0] for name in self._stages_to_keep(spec.name)}
            capture |= {"kv" if kind in ("k", "v") else kind for kind in kinds}
        return frozenset(capture)

    def _stages_to_keep(self, name: str) -> list[str]:
        """Stages that the golden holds too, and that the engine captures row by row."""
        record = self.goldens[request_of(name)].record
        kinds = ("pixels", "positions", "embeddings", "deepstack", "hidden", "k", "v")
        return [stage for stage in (record.stages if record else ()) if stage.partition(".")[0] in kinds]

    def _forced(self, name: str) -> EngineRequest:
        record = self.goldens[name].record
        request = self.requests[name]
        return request if record is None else replace(request, forced_token_ids=record.token_ids)

    def _run(
        self, name: str, request: EngineRequest, output: EngineOutput | None, drive: Drive
    ) -> RequestRun:
        refused = drive.refused.get(name)
        stages = {}
        if request.capture and output is not None and refused is None:
            stages = dict(cast("Stages", drive.adapter).stages(name))
        golden = self.goldens[request_of(name)]
        record = golden.record
        return RequestRun(
            request_id=name,
            sampling=dict(request.sampling),
            output=None if refused is not None else output,
            golden_key=None if record is None else record.key,
            golden_error=golden.error,
            prompt_token_ids=request.prompt_token_ids,
            forced=request.forced_token_ids is not None,
            texts=tuple(drive.texts.get(name, ())),
            output_rows=reduce_logits(stages.get("logits"), None if record is None else record.output),
            prompt_rows=reduce_logits(stages.get("prompt_logits"), None if record is None else record.prompt),
            kv_digests=kv_digests(stages),
            stages=stages
            if request_of(name) in self.traced
            else {n: stages[n].tolist() for n in self._stages_to_keep(name) if n in stages},
            refused=refused,
        )
