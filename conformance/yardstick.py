"""Correct ways to compute the same logits, and how far each lies from the truth.

Every arm is Hugging Face itself in the record's dtype. An engine that is right lies about as far
from the truth as they do; the bands of the oracle are multiples of their errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from conformance.hf_models import NoTruth
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

#: Returns a model ready for one use: ("eager" | "sdpa") → Transformers module in the arm's dtype.
Loader = Callable[[str], Any]


def forward(module: Any, token_ids: Sequence[int], *, cache: Any = None, keep: int = 0) -> torch.Tensor:
    """Logits [kept rows, vocab] of one forward pass over one sequence.

    Args:
        cache: a Transformers cache that is read and extended; None computes without one.
        keep: how many of the last positions to return; 0 means all.
    """
    ids = torch.tensor([list(token_ids)], dtype=torch.long)
    options: dict[str, Any] = {"use_cache": cache is not None, "logits_to_keep": keep}
    if cache is not None:
        # Transformers renamed this argument within 5.x; both names are in the supported range.
        parameters = inspect.signature(module.forward).parameters
        options["cache" if "cache" in parameters else "past_key_values"] = cache
    with torch.no_grad():
        logits: torch.Tensor = module(input_ids=ids, **options).logits
    return logits[0]


def full_logits(module: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """Logits [len(tokens), vocab] that choose each of `tokens`, from one forward pass."""
    return forward(module, [*prompt, *tokens[:-1]], keep=len(tokens))


def cached_logits(module: Any, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """The same logits from a whole prefill, then one position at a time with the cache."""
    cache = DynamicCache(config=module.config)
    rows = [forward(module, prompt, cache=cache, keep=1)]
    rows += [forward(module, [token], cache=cache, keep=1) for token in tokens[:-1]]
    return torch.cat(rows)


@contextmanager
def exact_rope(module: Any) -> Iterator[None]:
    """Within the block, position × inv_freq, cos and sin are computed in float64.

    inv_freq itself stays the float32 buffer: its values are part of the model.

    Raises:
        NoTruth: the rotary class computes something else, seen at positions 0…3.
    """
    rotary = [m for m in module.modules() if type(m).__name__.endswith("RotaryEmbedding")]
    if not rotary:
        raise NoTruth(f"{type(module).__name__} has no rotary embedding for the arm eager_rope64")
    for layer in rotary:
        _check_exact(layer)
    try:
        for layer in rotary:
            layer.forward = _exact_forward(layer)
        yield
    finally:
        for layer in rotary:
            layer.__dict__.pop("forward", None)


def error_between(values: NDArray[Any], truth: NDArray[Any]) -> ArmError:
    """Root mean square and largest difference over all elements, in float64."""
    delta = np.abs(values.astype(np.float64) - truth.astype(np.float64))
    return ArmError(rms=float(np.sqrt(np.mean(delta**2))), max=float(delta.max()))


def measure_yardstick(
    load: Loader,
    prompt: Sequence[int],
    tokens: Sequence[int],
    top_ids: NDArray[np.int64],
    truth: NDArray[np.float64],
) -> Yardstick:
    """Error of each arm over (generated positions × truth's top ids).

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
    with exact_rope(module):
        arms["eager_rope64"] = error(cached_logits(module, prompt, tokens))
    return Yardstick(arms)


def _exact_forward(rotary: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    def forward_exact(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = position_ids[..., None].double() * rotary.inv_freq.double()
        angle = torch.cat((half, half), dim=-1)
        scale = rotary.attention_scaling
        return (angle.cos() * scale).to(x.dtype), (angle.sin() * scale).to(x.dtype)

    return forward_exact


def _check_exact(rotary: Any) -> None:
    name = type(rotary).__name__
    x, positions = torch.zeros(1, 4, 1), torch.arange(4)[None]
    try:
        pairs = list(zip(rotary.forward(x, positions), _exact_forward(rotary)(x, positions), strict=True))
    except (AttributeError, TypeError) as error:
        raise NoTruth(f"the arm eager_rope64 is not written for {name}: {error}") from error
    if not all(a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in pairs):
        raise NoTruth(f"the arm eager_rope64 is not written for {name}: its angles differ")
