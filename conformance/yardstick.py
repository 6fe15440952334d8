"""Correct ways to compute the same logits, and how far each lies from the truth.

Every arm is Hugging Face itself in the record's dtype. An engine that is right lies about as far
from the truth as they do; the bands of the oracle are multiples of their errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache

from conformance.hf_models import NoTruth, text_decoder, text_model
from conformance.hf_prompts import Prompt
from conformance.records import ArmError, Yardstick

__all__ = [
    "ARMS",
    "cached_logits",
    "error_between",
    "exact_rope",
    "forward",
    "full_logits",
    "measure_yardstick",
]

#: What each arm is, for reports.
ARMS = {
    "eager_cached": "eager attention, the prompt at once, then token by token along the cache",
    "eager_full": "eager attention, one forward pass over prompt and continuation",
    "sdpa": "torch's scaled_dot_product_attention, one forward pass",
    "eager_rope64": "eager_cached with rope angles computed in float64",
}

#: A prompt, or the token ids of one that is only text.
PromptLike: TypeAlias = Prompt | Sequence[int]

#: Returns a model ready for one use: ("eager" | "sdpa") → Transformers module in the arm's dtype.
Loader = Callable[[str], Any]


def forward(
    module: Any, token_ids: Sequence[int], *, prompt: Prompt | None = None, cache: Any = None, keep: int = 0
) -> torch.Tensor:
    """Logits [kept rows, vocab] of one forward pass over one sequence.

    Args:
        token_ids: the sequence, or what follows what is in the cache.
        prompt: the prompt it begins with, for the pictures in it.
        cache: a Transformers cache that is read and extended; None computes without one.
        keep: how many of the last positions to return; 0 means all.
    """
    ids = torch.tensor([list(token_ids)], dtype=torch.long)
    inputs = prompt.inputs_for(len(token_ids), module.dtype) if prompt is not None else {}
    options: dict[str, Any] = {"use_cache": cache is not None, "logits_to_keep": keep}
    if not inputs:
        module = text_model(module)
    if cache is not None:
        options[_cache_argument(module)] = cache
    with torch.no_grad():
        logits: torch.Tensor = module(input_ids=ids, **inputs, **options).logits
    return logits[0]


def full_logits(module: Any, prompt: PromptLike, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [len(tokens), vocab] that choose each of `tokens`, from one forward pass.

    From two, of the prompt and of the rest, where the rest holds a placeholder: in one pass
    Transformers would look for its picture.
    """
    prompt = as_prompt(prompt)
    if prompt.placeholder_ids & set(tokens[:-1]):
        cache = new_cache(module)
        return torch.cat([_prefill(module, prompt, cache), forward(module, tokens[:-1], cache=cache)])
    return forward(module, [*prompt.token_ids, *tokens[:-1]], prompt=prompt, keep=len(tokens))


def cached_logits(module: Any, prompt: PromptLike, tokens: Sequence[int]) -> torch.Tensor:
    """The same logits from a whole prefill, then one position at a time with the cache."""
    prompt = as_prompt(prompt)
    cache = new_cache(module)
    rows = [_prefill(module, prompt, cache)]
    rows += [forward(module, [token], cache=cache, keep=1) for token in tokens[:-1]]
    return torch.cat(rows)


def _prefill(module: Any, prompt: Prompt, cache: Any) -> torch.Tensor:
    """Logits [1, vocab] after the prompt; what follows in the cache gets the positions that follow.

    The position delta that Transformers keeps counts from the largest position. `generate` and a
    longer forward pass count from the last token's, and so must the arms.
    """
    last: list[int] = []

    def note(_module: Any, args: Any, kwargs: Any) -> None:
        last.append(int((kwargs["position_ids"] if "position_ids" in kwargs else args[1])[..., -1].max()))

    hooks = [one.register_forward_pre_hook(note, with_kwargs=True) for one in rotary_embeddings(module)]
    try:
        logits = forward(module, prompt.token_ids, prompt=prompt, cache=cache, keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    wrapper = getattr(module, "model", module)
    if getattr(wrapper, "rope_deltas", None) is not None:
        wrapper.rope_deltas = torch.full_like(wrapper.rope_deltas, last[0] + 1 - len(prompt.token_ids))
    return logits


def new_cache(module: Any) -> Any:
    """An empty cache for the module's decoder."""
    return DynamicCache(config=module.config.get_text_config(decoder=True))


def as_prompt(prompt: PromptLike) -> Prompt:
    """Token ids as a prompt without pictures."""
    return prompt if isinstance(prompt, Prompt) else Prompt(tuple(prompt))


def _cache_argument(module: Any) -> str:
    # Transformers renamed it within 5.x, and both names are in the supported range. A wrapper that
    # only passes it on says nothing; its decoder does.
    for one in (module, getattr(module, "language_model", module)):
        for name in ("cache", "past_key_values"):
            if name in inspect.signature(one.forward).parameters:
                return name
    raise NoTruth(f"{type(module).__name__}.forward takes no cache")


@contextmanager
def exact_rope(module: Any) -> Iterator[None]:
    """Within the block, position × inv_freq, cos and sin are computed in float64.

    inv_freq itself stays the float32 buffer: its values are part of the model. Only the decoder's
    angles are meant; a vision tower's positions are small.

    Raises:
        NoTruth: there is no rotary class, or its angles do not come out in float64.
    """
    rotary = rotary_embeddings(module)
    if not rotary:
        raise NoTruth(f"{type(module).__name__} has no rotary embedding for the arm eager_rope64")
    try:
        for layer in rotary:
            layer.forward = _exact_forward(layer)
        yield
    finally:
        for layer in rotary:
            layer.__dict__.pop("forward", None)


def rotary_embeddings(module: Any) -> list[Any]:
    """The rotary embeddings of the module's decoder."""
    decoder = text_decoder(module) if hasattr(module, "get_decoder") else module
    return [m for m in decoder.modules() if type(m).__name__.endswith("RotaryEmbedding")]


def error_between(values: NDArray[Any], truth: NDArray[Any]) -> ArmError:
    """Root mean square and largest difference over all elements, in float64."""
    delta = np.abs(values.astype(np.float64) - truth.astype(np.float64))
    return ArmError(rms=float(np.sqrt(np.mean(delta**2))), max=float(delta.max()))


def measure_yardstick(
    load: Loader,
    prompt: PromptLike,
    tokens: Sequence[int],
    top_ids: NDArray[np.int64],
    truth: NDArray[np.float64],
) -> Yardstick:
    """Error of each arm over (generated positions × truth's top ids).

    A model without rotary embeddings has no arm eager_rope64.

    Args:
        top_ids, truth: [positions, k] the truth's most likely ids and their logits.
    """
    ids = torch.from_numpy(top_ids)

    def error(logits: torch.Tensor) -> ArmError:
        return error_between(logits.double().gather(1, ids).numpy(), truth)

    arms = {
        "eager_cached": error(cached_logits(load("eager"), prompt, tokens)),
        "eager_full": error(full_logits(load("eager"), prompt, tokens)),
        "sdpa": error(full_logits(load("sdpa"), prompt, tokens)),
    }
    module = load("eager")
    if rotary_embeddings(module):
        with exact_rope(module):
            arms["eager_rope64"] = error(cached_logits(module, prompt, tokens))
    return Yardstick(arms)


class _ToDouble(TorchFunctionMode):
    """Within it, `Tensor.float` and `Tensor.to(float32)`, which angles are computed in, make float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        elif func is torch.Tensor.to:
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()}
        return func(*args, **kwargs)


def _exact_forward(rotary: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The class's own forward, its angles in float64."""
    plain = type(rotary).forward

    def forward_exact(x: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        with _ToDouble():
            cos, sin = plain(rotary, x.double(), *args, **kwargs)
        angles_are_float32 = torch.equal(cos, cos.float().double()) and bool((cos != 1).any())
        if cos.dtype is not torch.float64 or angles_are_float32:
            raise NoTruth(f"the arm eager_rope64 is not written for {type(rotary).__name__}")
        return cos.to(x.dtype), sin.to(x.dtype)

    return forward_exact
