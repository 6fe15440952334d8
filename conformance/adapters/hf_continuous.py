"""Transformers' continuous batching (`generate_batch`) as an engine to be judged. Text only.

One manager lives as long as the adapter is entered: requests of one `generate` share its steps, its
paged cache and its prefix sharing. It tells the log-probability of each generated token and no other.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar

import transformers

from conformance.adapters.base import (
    Capabilities,
    EngineError,
    EngineOutput,
    EngineRequest,
    ModelSource,
    TokenLogprob,
)
from conformance.adapters.hf import HFAdapter
from conformance.hf_models import NoTruth

__all__ = ["HFContinuousAdapter"]

#: Sampling parameters that continuous batching serves per request; greedy only.
_SERVED = frozenset(
    {"temperature", "max_tokens", "ignore_eos", "stop_token_ids", "logprobs", "seed"}
    | {"detokenize", "skip_special_tokens"}
)

#: Tokens per page; Transformers refuses fewer than 4.
_PAGE_SIZE, _SMALLEST_PAGE = 16, 4
#: Pages and tokens per step where a scenario does not say.
_NUM_BLOCKS, _BATCH_TOKENS = 512, 512
#: Seconds without any result after which a request counts as lost.
_PATIENCE = 900.0


class HFContinuousAdapter(HFAdapter):
    """Transformers' `ContinuousBatchingManager` with paged eager attention, on the cpu.

    Options: "dtype"; "block_size" (at least 4), "num_kv_blocks", "max_num_batched_tokens",
    "max_num_seqs", "enable_prefix_caching".
    """

    attention: ClassVar[str] = "paged|eager"
    name: ClassVar[str] = "hf-continuous-batching"

    def __init__(self, model: ModelSource, options: Mapping[str, Any]) -> None:
        super().__init__(model, options)
        self._options = dict(options)
        self._manager: Any = None

    def __enter__(self) -> HFContinuousAdapter:
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
        super().__enter__()
        self._manager = self._loaded.module.init_continuous_batching(
            generation_config=transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            continuous_batching_config=transformers.ContinuousBatchingConfig(
                page_size=self._options.get("block_size", _PAGE_SIZE) if self._pages_fit() else _PAGE_SIZE,
                num_blocks=self._options.get("num_kv_blocks", _NUM_BLOCKS),
                max_batch_tokens=self._options.get("max_num_batched_tokens", _BATCH_TOKENS),
                max_requests_per_batch=self._options.get("max_num_seqs"),
                allow_block_sharing=self._options.get("enable_prefix_caching", True),
                auto_switch_to_flash=False,
                return_logprobs=True,
            ),
        )
        self._manager.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._manager is not None:
            self._manager.stop(block=True, timeout=10, hard_stop=True)
            self._manager.destroy()
            self._manager = None
        super().__exit__(kind, error, trace)

    def capabilities(self) -> Capabilities:
        options = {"num_kv_blocks", "max_num_batched_tokens", "max_num_seqs", "enable_prefix_caching"}
        features = {"token_ids", "text", "chat", "output_ids", "chosen_logprobs", "sliding_windows"}
        features |= {"chunked_prefill", "pool_size"}
        missing = {
            "sampling": "greedy only: its random numbers are not ours",
            "logprobs": "it tells the log-probability of the generated token only",
            "prefix_cache": "it shares prefixes, but does not tell how many tokens it reused",
            "image": "continuous batching takes text only",
            "media_settings": "continuous batching takes text only",
            "video": "continuous batching takes text only",
        }
        if self._pages_fit():
            options.add("block_size")
            features.add("block_size")
        else:
            missing["block_size"] = f"a page holds at least {_SMALLEST_PAGE} tokens"
        return Capabilities(
            engine=self.name,
            version=transformers.__version__,
            dtypes=("float32", "bfloat16"),
            features=frozenset(features),
            options=frozenset(options),
            missing=missing,
        )

    def generate(self, requests: Sequence[EngineRequest]) -> list[EngineOutput]:
        refused: dict[str, EngineOutput] = {}
        prompts: dict[str, tuple[int, ...]] = {}
        for request in requests:
            try:
                prompts[request.request_id] = self._submit(request)
            except NoTruth as error:
                refusal = EngineError(type(error).__name__, str(error))
                refused[request.request_id] = EngineOutput(request.request_id, "", True, error=refusal)
        results = self._results(set(prompts))
        return [
            refused.get(r.request_id) or self._output(r, prompts[r.request_id], results.get(r.request_id))
            for r in requests
        ]

    # ---- pieces ---------------------------------------------------------------------------------

    def _pages_fit(self) -> bool:
        return int(self._options.get("block_size", _PAGE_SIZE)) >= _SMALLEST_PAGE

    def _submit(self, request: EngineRequest) -> tuple[int, ...]:
        """Queue one request; returns its prompt ids."""
        unknown = sorted(set(request.sampling) - _SERVED)
        if unknown:
            raise NoTruth(f"sampling parameters {unknown} are not served by continuous batching")
        if request.sampling["temperature"] != 0:
            raise NoTruth("continuous batching is asked for greedy decoding only")
        if request.media:
            raise NoTruth("continuous batching takes text only")
        prompt = self._prompt(request)
        added = self._manager.add_request(
            list(prompt.token_ids),
            request_id=request.request_id,
            max_new_tokens=request.sampling["max_tokens"],
            eos_token_id=sorted(self._ends(request)) or -1,
        )
        if added is None:
            raise RuntimeError("the continuous batching manager accepts no requests any more")
        return prompt.token_ids

    def _results(self, names: set[str]) -> dict[str, Any]:
        """Finished results by name.

        Raises:
            RuntimeError: the manager's thread died, or gave nothing for a long time.
        """
        results: dict[str, Any] = {}
        waited = 0.0
        while names - set(results):
            result = self._manager.get_result(timeout=1.0)
            if result is not None and result.is_finished():
                results[result.request_id] = result
                waited = 0.0
            elif result is None:
                waited += 1.0
                if not self._manager.is_running() or waited > _PATIENCE:
                    why = "gave no result" if self._manager.is_running() else "died"
                    raise RuntimeError(f"continuous batching {why} with {sorted(names - set(results))} left")
        return results

    def _output(self, request: EngineRequest, prompt: tuple[int, ...], result: Any) -> EngineOutput:
        if result.error is not None:
            error = EngineError("RequestFailed", str(result.error))
            return EngineOutput(request.request_id, "", True, prompt, error=error)
        tokens = [int(token) for token in result.generated_tokens]
        text, reason, stop_reason = self._ending(request, tokens)
        asked = request.sampling.get("logprobs") is not None
        return EngineOutput(
            request_id=request.request_id,
            text=text,
            finished=True,
            prompt_token_ids=prompt,
            token_ids=tuple(tokens),
            logprobs=tuple(
                (TokenLogprob(token, float(value)),)
                for token, value in zip(tokens, result.logprobs, strict=True)
            )
            if asked
            else None,
            finish_reason=reason,
            stop_reason=stop_reason,
        )
