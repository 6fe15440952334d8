"""minivllm as an engine to be judged: every feature, through its public interface only.

Loaded models are kept in the process, because a scenario loads the same one for each of its many
passes. The KV cache, the scheduler and all else are new each time.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import minivllm
from conformance.adapters.base import (
    FEATURES,
    Capabilities,
    EngineError,
    EngineOutput,
    EngineRequest,
    ModelSource,
    PoolState,
    TokenLogprob,
    request_of,
    sequence_names,
)
from conformance.adapters.prompts import chat_messages, shared_prompt
from minivllm.build import resolve
from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine
from minivllm.errors import MiniVLLMError
from minivllm.layers import make_ops
from minivllm.models import LanguageModel, load_model, load_model_config
from minivllm.request import CompletionOutput, Logprob, MediaSpan, RequestOutput, SamplingParams
from minivllm.trace import Event

__all__ = ["DEFAULT_POOL_BYTES", "KEPT_MODELS", "MiniVLLMAdapter"]

#: Size of the KV pool of a scenario that does not say: enough for a thousand tokens of SmolLM2.
DEFAULT_POOL_BYTES = 64 * 2**20

#: How many loaded models are kept; the one used longest ago goes first.
KEPT_MODELS = 24

#: Stages that this engine calls by another name, one per picture.
_CAPTURES = {"pixels": "pixel_values"}
_PIXELS = "pixel_values."
#: Stages that this engine does not capture while it computes.
_NOT_CAPTURED = frozenset({"spans", "final"})

_ModelKey = tuple[str, str, str, int]
_models: OrderedDict[_ModelKey, LanguageModel] = OrderedDict()
#: (model, dtype, device, most rows) whose probe has passed.
_probed: set[tuple[str, str, str, int]] = set()


class MiniVLLMAdapter:
    """See `conformance.adapters.base` for the methods.

    Args:
        options: `EngineConfig` fields; "threads" (CPU threads inside operators); "num_host_blocks"
            (swap_space_bytes in blocks, which other engines count too); "placement" (a seed: free blocks
            are handed out in an order drawn from it).
    """

    def __init__(self, model: ModelSource, options: Mapping[str, Any]) -> None:
        self._source = model
        self._options = dict(options)
        self._threads: int | None = self._options.pop("threads", None)
        self._host_blocks: int | None = self._options.pop("num_host_blocks", None)
        self._placement: int | None = self._options.pop("placement", None)
        if not {"num_kv_blocks", "kv_cache_memory_bytes"} & set(self._options):
            self._options["kv_cache_memory_bytes"] = DEFAULT_POOL_BYTES
        self._engine: LLMEngine | None = None
        self._outputs: dict[str, EngineOutput] = {}
        self._without_ids: set[str] = set()
        self._events: list[Event] = []
        self._spans: dict[str, NDArray[np.generic]] = {}
        self._weights_changed = False
        self._threads_before = torch.get_num_threads()

    # ---- a minimal adapter ----------------------------------------------------------------------

    def __enter__(self) -> MiniVLLMAdapter:
        self._threads_before = torch.get_num_threads()
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        try:
            config = self._config()
            self._engine = LLMEngine(config, trace=self._events.append, model=self._model(config))
            if self._placement is not None:
                self._engine.shuffle_free_blocks(self._placement)
        except BaseException:  # nobody calls __exit__ then
            torch.set_num_threads(self._threads_before)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine = None
        torch.set_num_threads(self._threads_before)
        if self._weights_changed:
            for key in [key for key in _models if key[0] == str(self._source.path)]:
                del _models[key]

    def capabilities(self) -> Capabilities:
        missing = {"strict_windows": "it has sliding windows", **self._why_not_bitwise()}
        return Capabilities(
            engine="minivllm",
            version=minivllm.__version__,
            dtypes=("float32", "bfloat16"),
            features=frozenset(FEATURES) - frozenset(missing),
            options=frozenset(EngineConfig.__dataclass_fields__) - {"model"}
            | {"threads", "num_host_blocks", "placement"},
            missing=missing,
        )

    def generate(self, requests: Sequence[EngineRequest]) -> list[EngineOutput]:
        refused = {}
        for request in requests:
            error = self.submit(request)
            if error is not None:
                refused[request.request_id] = EngineOutput(request.request_id, "", True, error=error)
        while self.advance():
            pass
        names = [name for r in requests for name in sequence_names(r.request_id, r.sampling)]
        return [
            refused.get(name) or self._outputs[name] for name in names if name in {**refused, **self._outputs}
        ]

    # ---- step by step ---------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> EngineError | None:
        sampling = dict(request.sampling)
        if request.forced_token_ids is not None:
            sampling["forced_token_ids"] = request.forced_token_ids
        try:
            self._loaded.add_request(
                request.request_id,
                self._prompt(request),
                SamplingParams.from_dict(sampling),
                priority=request.priority,
                cache_salt=request.cache_salt,
                capture={_CAPTURES.get(name, name) for name in request.capture - _NOT_CAPTURED},
            )
            if "spans" in request.capture:
                self._spans[request.request_id] = _span_table(self._loaded.media(request.request_id).media)
        except MiniVLLMError as error:
            return EngineError(type(error).__name__, str(error))
        if request.prompt_embeds is not None:
            self._without_ids.add(request.request_id)
        for name in sequence_names(request.request_id, sampling):
            self._outputs[name] = EngineOutput(name, "", False)
        return None

    def advance(self) -> bool:
        for output in self._loaded.step():
            self._take(output)
        return self._loaded.has_unfinished_requests()

    def abort(self, request_id: str) -> None:
        self._take(self._loaded.abort_request(request_id))

    def outputs(self) -> list[EngineOutput]:
        return list(self._outputs.values())

    # ---- hooks ----------------------------------------------------------------------------------

    def preempt(self, request_id: str) -> bool:
        return self._loaded.preempt_request(request_id)

    def swap(self, request_id: str) -> bool:
        return self._loaded.preempt_request(request_id, "swap")

    def reset_prefix_cache(self) -> bool:
        return self._loaded.reset_prefix_cache()

    def poison(self) -> int:
        return self._loaded.poison()

    def pool(self) -> PoolState:
        counts = self._loaded.pool_counts()
        return PoolState(counts.total, counts.free, counts.cached, counts.in_use)

    def kv_snapshot(self) -> Mapping[str, Any]:
        return self._loaded.kv_snapshot().as_dict()

    def drain_events(self) -> list[Mapping[str, Any]]:
        events: list[Mapping[str, Any]] = [
            {"event": _snake_case(type(event).__name__), **asdict(event)} for event in self._events
        ]
        self._events.clear()
        return events

    def stages(self, request_id: str) -> Mapping[str, NDArray[np.generic]]:
        stages = dict(self._loaded.stages(request_id))
        spans = self._spans.get(request_of(request_id))
        if spans is not None and spans.size:
            stages["spans"] = spans
        numbers = sorted(int(n.removeprefix(_PIXELS)) for n in stages if n.startswith(_PIXELS))
        if numbers:
            stages["pixels"] = np.concatenate([stages.pop(f"{_PIXELS}{n}").reshape(-1) for n in numbers])
        return stages

    def read_kv(self, request_id: str) -> list[tuple[NDArray[np.generic], NDArray[np.generic]]]:
        return [(_numpy(k), _numpy(v)) for k, v in self._loaded.read_kv(request_id)]

    def swap_weights(self, first: str, second: str) -> None:
        parameters = dict(self._loaded.model.named_parameters())
        unknown = sorted({first, second} - set(parameters))
        if unknown:
            raise ValueError(f"no parameter {unknown}; the model has {sorted(parameters)}")
        a, b = parameters[first], parameters[second]
        if a.shape != b.shape:
            raise ValueError(f"{first} is {tuple(a.shape)} and {second} is {tuple(b.shape)}: cannot swap")
        self._weights_changed = True
        self._loaded.update_weights({first: b.clone(), second: a.clone()})

    # ---- pieces ---------------------------------------------------------------------------------

    @property
    def _loaded(self) -> LLMEngine:
        if self._engine is None:
            raise RuntimeError("the adapter is not entered: use it in a `with` statement")
        return self._engine

    def _take(self, output: RequestOutput) -> None:
        for one in _convert(output):
            # Ids in the place of supplied embeddings are nobody's.
            without_ids = request_of(one.request_id) in self._without_ids
            self._outputs[one.request_id] = replace(one, prompt_token_ids=None) if without_ids else one

    def _config(self) -> EngineConfig:
        options = {"model": str(self._source.path), **self._options}
        if self._host_blocks:
            # A block's size does not depend on how much memory there is to swap to.
            plain = EngineConfig.from_dict({**options, "preemption_mode": "recompute"})
            block = resolve(plain, load_model_config(self._source.path)).kv_block_bytes
            options["swap_space_bytes"] = self._host_blocks * block
        return EngineConfig.from_dict(options)

    def _model(self, config: EngineConfig) -> LanguageModel:
        resolved = resolve(config, load_model_config(self._source.path))
        key = (config.model, resolved.dtype, resolved.device, resolved.max_model_len)
        if key in _models:
            _models.move_to_end(key)
            return _models[key]
        device = torch.device(resolved.device)
        model = load_model(
            self._source.path,
            dtype=getattr(torch, resolved.dtype),
            device=device,
            ops=make_ops(resolved.ops_backend, device),
            max_model_len=resolved.max_model_len,
        )
        if not self._source.sha256.startswith("damaged-"):
            _models[key] = model
            while len(_models) > KEPT_MODELS:
                _models.popitem(last=False)
        return model

    def _why_not_bitwise(self) -> dict[str, str]:
        """{"bitwise": reason}, or nothing when the probe of this model passes."""
        if not self._options.get("batch_invariant"):
            return {"bitwise": "batch_invariant is off"}
        try:
            config = self._config()
            model = self._model(config)
            resolved = resolve(config, model.config)
            probe = (config.model, resolved.dtype, resolved.device, config.max_num_batched_tokens)
            if probe not in _probed:
                ops = make_ops(resolved.ops_backend, torch.device(resolved.device))
                ops.prepare(model.batched, max_rows=config.max_num_batched_tokens)
                _probed.add(probe)
        except MiniVLLMError as error:
            return {"bitwise": str(error)}
        return {}

    def _prompt(self, request: EngineRequest) -> Mapping[str, Any]:
        if request.chat is None or request.prompt_token_ids is not None or request.prompt_embeds is not None:
            return shared_prompt(request)
        prompt = self._loaded.chat_prompt(chat_messages(request))
        assert isinstance(prompt, Mapping), "a chat is made to ids"
        settings = {"mm_processor_kwargs": dict(request.mm_processor_kwargs)}
        return {**prompt, **(settings if request.mm_processor_kwargs else {})}


def _span_table(spans: Sequence[MediaSpan]) -> NDArray[np.generic]:
    """Start, length, item, first row of each span; an item begins where its rows do."""
    item, rows = -1, []
    for span in sorted(spans, key=lambda span: span.start):
        item += span.first_row == 0
        rows.append((span.start, span.length, item, span.first_row))
    return np.array(rows, np.int64).reshape(-1, 4)


def _convert(output: RequestOutput) -> list[EngineOutput]:
    """One output per sequence."""
    names = sequence_names(output.request_id, {"n": len(output.outputs)})
    return [_convert_one(output, c, name) for c, name in zip(output.outputs, names, strict=True)]


def _convert_one(output: RequestOutput, completion: CompletionOutput, name: str) -> EngineOutput:
    logprobs, prompt_logprobs = completion.logprobs, output.prompt_logprobs
    failed = completion.finish_reason == "error" and output.error is not None
    return EngineOutput(
        request_id=name,
        text=completion.text,
        finished=completion.finish_reason is not None,
        prompt_token_ids=tuple(output.prompt_token_ids),
        token_ids=tuple(completion.token_ids),
        choice_token_ids=tuple(completion.choice_token_ids),
        logprobs=None if logprobs is None else tuple(_entries(row) for row in logprobs),
        prompt_logprobs=None
        if prompt_logprobs is None
        else tuple(None if row is None else _entries(row) for row in prompt_logprobs),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        num_cached_tokens=output.num_cached_tokens,
        num_preemptions=output.num_preemptions,
        error=EngineError("RequestFailed", str(output.error)) if failed else None,
    )


def _entries(row: Mapping[int, Logprob]) -> tuple[TokenLogprob, ...]:
    """Most likely first; equal ones in order of id."""
    ordered = sorted(row.items(), key=lambda item: (-item[1].logprob, item[0]))
    return tuple(TokenLogprob(token, entry.logprob, entry.rank) for token, entry in ordered)


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def _numpy(tensor: torch.Tensor) -> NDArray[np.generic]:
    # numpy has no bfloat16; float32 holds each of its values exactly.
    exact = tensor.float() if tensor.dtype is torch.bfloat16 else tensor
    array: NDArray[np.generic] = exact.cpu().numpy()
    return array
