"""Hugging Face Transformers as an engine to be judged: one request at a time, eager or sdpa.

It decodes with `generate` and its cache, so it is not the reference it is judged by: that one is
computed in float64, in one forward pass.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, ClassVar

import torch
import transformers
from PIL import Image
from torch import Tensor

from conformance.adapters.base import (
    Capabilities,
    EngineError,
    EngineOutput,
    EngineRequest,
    Media,
    ModelSource,
    TokenLogprob,
)
from conformance.hf_models import HFModel, NoTruth, load_config, load_hf, text_model
from conformance.hf_prompts import OpenedMedia, Prompt, PromptMaker, open_picture
from conformance.yardstick import forward, full_logits

__all__ = ["HFAdapter", "HFSdpaAdapter"]

#: How many loaded models are kept, as one scenario loads the same model for each of its passes.
KEPT_MODELS = 2

#: Sampling parameters of a request that `generate` serves here; greedy only.
_SERVED = frozenset(
    {
        "temperature",
        "max_tokens",
        "ignore_eos",
        "stop",
        "stop_token_ids",
        "logprobs",
        "prompt_logprobs",
        "seed",
        "detokenize",
        "skip_special_tokens",
        "include_stop_str_in_output",
    }
)

_NOT_ENTERED = "the adapter is not entered: use it in a `with` statement"

_models: OrderedDict[tuple[str, str, str], tuple[HFModel, PromptMaker]] = OrderedDict()


@dataclass(frozen=True, slots=True)
class _Answer:
    """Generated ids and the float32 logits that chose each, [generated, vocab]."""

    tokens: list[int]
    logits: Tensor


class HFAdapter:
    """Transformers with eager attention.

    Options: "dtype"; "threads" (inside operators); "device" must be auto or cpu.
    """

    attention: ClassVar[str] = "eager"
    name: ClassVar[str] = "hf"

    def __init__(self, model: ModelSource, options: Mapping[str, Any]) -> None:
        self._source = model
        self._dtype = str(options.get("dtype", "float32"))
        self._device = str(options.get("device", "auto"))
        self._threads: int | None = options.get("threads")
        self._model: HFModel | None = None
        self._make_prompt: PromptMaker | None = None

    def __enter__(self) -> HFAdapter:
        if self._device not in ("auto", "cpu"):
            raise ValueError(f"this adapter runs on the cpu only, got device {self._device!r}")
        transformers.utils.logging.disable_progress_bar()
        self._load()
        self._threads_before = torch.get_num_threads()
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        return self

    def _load(self) -> None:
        key = (str(self._source.path), self._dtype, self.attention)
        if key not in _models:
            loaded = load_hf(self._source.path, getattr(torch, self._dtype), self.attention)
            _models[key] = (loaded, PromptMaker(self._source.path, load_config(self._source.path)))
            while len(_models) > KEPT_MODELS:
                _models.popitem(last=False)
        _models.move_to_end(key)
        self._model, self._make_prompt = _models[key]
        if self._source.sha256.startswith("damaged-"):
            del _models[key]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._model = self._make_prompt = None
        torch.set_num_threads(self._threads_before)

    def capabilities(self) -> Capabilities:
        return Capabilities(
            engine=self.name,
            version=transformers.__version__,
            dtypes=("float32", "bfloat16"),
            features=frozenset(
                {
                    "token_ids",
                    "text",
                    "chat",
                    "output_ids",
                    "logprobs",
                    "prompt_logprobs",
                    "forced_decode",
                    "stop_strings",
                    "sliding_windows",
                    "image",
                    "media_settings",
                    "video",
                }
            ),
            options=frozenset({"threads"}),
            missing={"sampling": "greedy only: its random numbers are not ours"},
        )

    def generate(self, requests: Sequence[EngineRequest]) -> list[EngineOutput]:
        return [self._serve(request) for request in requests]

    @torch.no_grad()
    def _serve(self, request: EngineRequest) -> EngineOutput:
        try:
            unknown = sorted(set(request.sampling) - _SERVED)
            if unknown:
                raise NoTruth(f"sampling parameters {unknown} are not served by this adapter")
            prompt = self._prompt(request)
            answer = (
                self._forced(request, prompt) if request.forced_token_ids else self._decode(request, prompt)
            )
        except NoTruth as error:
            refusal = EngineError(type(error).__name__, str(error))
            return EngineOutput(request.request_id, "", True, error=refusal)
        text, reason, stop_reason = self._ending(request, answer.tokens)
        return EngineOutput(
            request_id=request.request_id,
            text=text,
            finished=True,
            prompt_token_ids=prompt.token_ids,
            token_ids=tuple(answer.tokens),
            choice_token_ids=tuple(answer.logits.argmax(dim=-1).tolist()),
            logprobs=_logprobs(answer.logits, answer.tokens, request.sampling.get("logprobs")),
            prompt_logprobs=self._prompt_logprobs(request, prompt),
            finish_reason=reason,
            stop_reason=stop_reason,
            num_cached_tokens=0,
        )

    # ---- computing ------------------------------------------------------------------------------

    def _decode(self, request: EngineRequest, prompt: Prompt) -> _Answer:
        """Greedy decoding with the cache, by `generate`."""
        sampling = request.sampling
        config = transformers.GenerationConfig(
            do_sample=False,
            max_new_tokens=sampling["max_tokens"],
            eos_token_id=sorted(self._ends(request)) or None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        module = self._loaded.module
        ids = torch.tensor([list(prompt.token_ids)])
        answer = (module if prompt.inputs else text_model(module)).generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),  # without one, pad ids in a prompt count as padding
            generation_config=config,
            stopping_criteria=transformers.StoppingCriteriaList(
                [self._stop_string_reached(request, ids.shape[1])]
            ),
            **prompt.inputs_for(ids.shape[1], module.dtype),
        )
        tokens = answer.sequences[0, ids.shape[1] :].tolist()
        return _Answer(tokens, torch.cat(answer.logits).float())

    def _stop_string_reached(self, request: EngineRequest, start: int) -> Callable[..., Tensor]:
        """A stopping criterion for `generate`.

        Transformers' own `stop_strings` matches token by token and refuses some tokenizers.
        """

        def reached(ids: Tensor, *_: Any, **__: Any) -> Tensor:
            text = self._text(request, ids[0, start:].tolist())
            return torch.tensor([any(stop in text for stop in _stop_strings(request))])

        return reached

    def _forced(self, request: EngineRequest, prompt: Prompt) -> _Answer:
        """One full forward pass along the forced ids."""
        forced = list(request.forced_token_ids or ())[: request.sampling["max_tokens"]]
        return _Answer(forced, full_logits(self._loaded.module, prompt, forced).float())

    def _prompt_logprobs(
        self, request: EngineRequest, prompt: Prompt
    ) -> tuple[tuple[TokenLogprob, ...] | None, ...] | None:
        count = request.sampling.get("prompt_logprobs")
        if count is None:
            return None
        rows = forward(self._loaded.module, prompt.token_ids, prompt=prompt)
        entries = _logprobs(rows[:-1].float(), prompt.token_ids[1:], count)
        return (None, *(entries or ()))

    # ---- words ----------------------------------------------------------------------------------

    def _prompt(self, request: EngineRequest) -> Prompt:
        if self._make_prompt is None:
            raise RuntimeError(_NOT_ENTERED)
        ids = request.prompt_token_ids
        if ids is not None and not request.media:
            if not ids:
                raise NoTruth("the prompt is empty: give at least one token")
            return Prompt(ids)
        form: dict[str, Any] = {"text": request.text}
        if request.chat is not None:
            form = {"messages": [dict(m) for m in request.chat]}
        elif request.text is None:
            form = {"token_ids": ids}
        media = [_opened(one) for one in request.media]
        return self._make_prompt(form, media, request.mm_processor_kwargs)

    def _ends(self, request: EngineRequest) -> set[int]:
        eos = set() if request.sampling.get("ignore_eos") else set(self._loaded.eos_token_ids)
        return eos | set(request.sampling.get("stop_token_ids") or ())

    def _ending(self, request: EngineRequest, tokens: Sequence[int]) -> tuple[str, str, int | str | None]:
        """Text, finish reason and stop reason of generated ids."""
        eos = () if request.sampling.get("ignore_eos") else self._loaded.eos_token_ids
        stopped = bool(tokens) and tokens[-1] in self._ends(request)
        text = self._text(request, tokens[:-1] if stopped else tokens)
        if stopped:
            return text, "stop", None if tokens[-1] in eos else tokens[-1]
        found = [(text.find(stop), stop) for stop in _stop_strings(request) if stop in text]
        if found:
            at, stop = min(found, key=lambda item: (item[0] + len(item[1]), item[0]))
            kept = at + len(stop) if request.sampling.get("include_stop_str_in_output") else at
            return text[:kept], "stop", stop
        return text, "length", None

    def _text(self, request: EngineRequest, tokens: Sequence[int]) -> str:
        tokenizer = self._make_prompt.tokenizer if self._make_prompt else None
        if tokenizer is None or request.sampling.get("detokenize") is False:
            return ""
        text: str = tokenizer.decode(
            list(tokens),
            skip_special_tokens=request.sampling.get("skip_special_tokens", True),
            clean_up_tokenization_spaces=False,
        )
        return text

    @property
    def _loaded(self) -> HFModel:
        if self._model is None:
            raise RuntimeError(_NOT_ENTERED)
        return self._model


class HFSdpaAdapter(HFAdapter):
    """Transformers with torch's scaled dot product attention."""

    attention: ClassVar[str] = "sdpa"
    name: ClassVar[str] = "hf-sdpa"


def _opened(media: Media) -> OpenedMedia:
    try:
        pictures = tuple(open_picture(path) for path in media.paths)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise NoTruth(f"{media.paths[0].name} is no picture: {error}") from error
    return OpenedMedia(media.modality, pictures, media.fps)


def _stop_strings(request: EngineRequest) -> list[str]:
    stop = request.sampling.get("stop") or []
    return [stop] if isinstance(stop, str) else list(stop)


def _logprobs(
    logits: Tensor, tokens: Sequence[int], count: int | None
) -> tuple[tuple[TokenLogprob, ...], ...] | None:
    """Per row the `count` most likely tokens, and the row's own token if it is not among them."""
    if count is None:
        return None
    table = torch.log_softmax(logits.float(), dim=-1)
    rows = []
    for row, token in zip(table, tokens, strict=True):
        order = torch.sort(row, descending=True, stable=True).indices.tolist()
        kept = order if count == -1 else order[:count]
        ids = kept if token in kept else [*kept, token]
        rank = {i: n for n, i in enumerate(order, 1)}
        rows.append(tuple(TokenLogprob(i, float(row[i]), rank[i]) for i in ids))
    return tuple(rows)
