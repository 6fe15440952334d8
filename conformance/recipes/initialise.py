"""Random weights that make mistakes visible.

Weights drawn the usual way (normal, 0.02) give nearly flat logits, unit norms and zero biases:
ignoring rope scaling or dropping a bias then changes no token. Here every matrix keeps the size
of its input (standard deviation gain / sqrt(fan in)), attention is sharp, norm weights and biases
are far from 1 and 0, and logits spread over about ±15.

Numbers are made from the raw bits of NumPy's Philox counter, whose stream NumPy keeps stable, by
exact arithmetic, keyed by (seed, parameter name). So they do not depend on the version of any
library, the processor, or the order of parameters.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

__all__ = ["initialise", "standard_normal"]

_MATRIX_GAIN = 1.25
_ATTENTION_GAIN = 2.0
_QK_NORM = 1.7
_LOGIT_STD = 5.0
_TIED_EMBEDDING_STD = 0.1
_TIED_FINAL_NORM = 8.0
_SPECIAL_SCALE = 0.25

#: Gemma 3: its norms multiply by 1 + weight, and its embeddings are scaled by √hidden.
_GEMMA_ATTENTION_GAIN = 1.5
_GEMMA_QK_NORM = 2.0
_GEMMA_EMBEDDING_STD = 0.03
_GEMMA_FINAL_NORM = 20.0

#: Where the decoder of a vision-language model is.
_DECODERS = ("model.language_model.", "model.text_model.", "language_model.model.")

_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "post_self_attn_layernorm",
    "post_mlp_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "self_attn_layer_norm",
    "final_layer_norm",
)
_MATRICES = (
    "v_proj",
    "o_proj",
    "out_proj",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "down_proj",
    "fc1",
    "fc2",
)
_EMBEDDINGS = ("model.embed_tokens.weight", "model.decoder.embed_tokens.weight")

#: Parameters of a tower that are added to its rows, or are rows.
_LIKE_TOKENS = (
    "class_embedding",
    "cls_token",
    "image_newline",
    "pos_embed",
    "position_embedding",
    "position_embeddings",
    "query_tokens",
)


def standard_normal(seed: int, name: str, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Almost normal numbers, mean 0 and variance 1, equal on every machine.

    Each is a sum of twelve uniform 16-bit integers, centred and scaled: exact in float64, and
    within ±6.
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], "little")
    count = math.prod(shape)
    raw = np.random.Philox(key=key).random_raw(3 * count).astype("<u8", copy=False)
    sums: NDArray[np.float64] = raw.view("<u2").reshape(*shape, 12).sum(axis=-1, dtype=np.float64)
    sums -= 12 * 65535 / 2
    sums /= 65536.0
    return sums


def initialise(model: nn.Module, seed: int, *, special_ids: Collection[int] = ()) -> None:
    """Fill every parameter of a Transformers model in place.

    Args:
        model: a causal language model, or a vision-language one that holds a decoder, with
            `config.tie_word_embeddings`.
        seed: with equal configurations, equal seeds give equal bits.
        special_ids: ids whose output rows are made small, so that greedy decoding seldom picks
            them although a logit bias still can.

    Raises:
        ValueError: a parameter has a name this recipe has no rule for.
    """
    names = [name for name, _ in model.named_parameters()]
    prefix = next((p for p in _DECODERS if any(name.startswith(p) for name in names)), "model.")
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight  # type: ignore[operator]
    qk_norm = any(name.endswith("q_norm.weight") for name in names)
    gemma = type(model).__name__.startswith("Gemma3")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            z = standard_normal(seed, name, tuple(parameter.shape))
            inner = _name_in_decoder(name, prefix)
            if inner is None:
                value = _scaled_tower(name, z)
            elif gemma:
                value = _scaled_gemma(inner, z)
            else:
                value = _scaled(inner, z, tied=tied, qk_norm=qk_norm)
            if inner in (_EMBEDDINGS if tied else ("lm_head.weight",)):
                value[sorted(special_ids)] *= _SPECIAL_SCALE
            parameter.copy_(torch.from_numpy(value).to(parameter.dtype))


def _name_in_decoder(name: str, prefix: str) -> str | None:
    """What the parameter `name` would be called in a model of text; None: it belongs to the vision side."""
    if name.startswith(prefix):
        return "model." + name.removeprefix(prefix)
    return name if name == "lm_head.weight" or prefix == "model." else None


def _scaled_tower(name: str, z: NDArray[np.float64]) -> NDArray[np.float64]:
    """A parameter of a vision tower or of what joins it to the decoder."""
    if name.endswith(".bias"):
        return 0.1 * z
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if z.ndim == 1 and any(word in kind.lower() for word in ("norm", "ln_q", "lambda_")):
        return 1 + 0.2 * z
    if kind in _LIKE_TOKENS:
        return z
    if z.ndim not in (2, 4, 5):  # a matrix, or a convolution over patches
        raise ValueError(f"no rule for parameter {name!r} of shape {z.shape}; add one to initialise.py")
    fan_in = math.prod(z.shape[1:])
    value = _MATRIX_GAIN / math.sqrt(fan_in) * z
    if kind == "qkv":
        value[: 2 * fan_in] *= _ATTENTION_GAIN / _MATRIX_GAIN  # the rows of q and k
    if kind in ("q_proj", "k_proj", "query", "key"):
        value *= _ATTENTION_GAIN / _MATRIX_GAIN
    return value


def _scaled_gemma(name: str, z: NDArray[np.float64]) -> NDArray[np.float64]:
    """A parameter of a tied Gemma 3 decoder."""
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if kind in ("q_norm", "k_norm"):
        return _GEMMA_QK_NORM * (1 + 0.2 * z) - 1
    if name == "model.norm.weight":
        return _GEMMA_FINAL_NORM * (1 + 0.2 * z) - 1
    if kind in _NORMS:
        return 0.2 * z
    if kind == "embed_tokens":
        return _GEMMA_EMBEDDING_STD * z
    if kind in ("q_proj", "k_proj"):
        return _GEMMA_ATTENTION_GAIN / math.sqrt(z.shape[1]) * z
    return _scaled(name, z, tied=True, qk_norm=True)


def _scaled(name: str, z: NDArray[np.float64], *, tied: bool, qk_norm: bool) -> NDArray[np.float64]:
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if name.endswith(".bias"):
        return 0.1 * z
    if kind in ("q_norm", "k_norm"):
        return _QK_NORM * (1 + 0.2 * z)
    if name in ("model.norm.weight", "model.decoder.final_layer_norm.weight"):
        # A tied model needs small embeddings (else it repeats its input) and makes up for it here.
        return (_TIED_FINAL_NORM if tied else 1.0) * (1 + 0.2 * z)
    if kind in _NORMS:
        return 1 + 0.2 * z
    if kind in ("embed_tokens", "embed_positions"):
        return (_TIED_EMBEDDING_STD if tied else 1.0) * z
    if z.ndim != 2:
        raise ValueError(f"no rule for parameter {name!r} of shape {z.shape}; add one to initialise.py")
    fan_in = z.shape[1]
    if kind == "lm_head":
        return _LOGIT_STD / math.sqrt(fan_in) * z
    if kind in ("q_proj", "k_proj"):
        return (1.0 if qk_norm else _ATTENTION_GAIN) / math.sqrt(fan_in) * z
    if kind in _MATRICES:
        return _MATRIX_GAIN / math.sqrt(fan_in) * z
    raise ValueError(f"no rule for parameter {name!r} of shape {z.shape}; add one to initialise.py")
