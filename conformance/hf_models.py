"""Loads Hugging Face models and tokenizers exactly as the golden files need them.

A model is built at its dtype by Transformers' own class, never cast afterwards: `.to(dtype)` would
cast the rotary buffers too. No device map and no accelerate.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.initialization import no_init_weights
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

__all__ = [
    "STATELESS_ROPE",
    "HFModel",
    "NoTruth",
    "eos_token_ids",
    "has_stateless_rope",
    "load_config",
    "load_hf",
    "load_tokenizer",
    "prompt_token_ids",
    "text_decoder",
    "text_model",
]

#: Rope kinds whose buffers no forward pass changes, so that one model object may serve many cases.
STATELESS_ROPE = frozenset({"default", "linear", "llama3", "yarn"})

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


class NoTruth(RuntimeError):
    """Hugging Face cannot answer this request, or contradicts itself on it."""


@dataclass(frozen=True, slots=True)
class HFModel:
    """A loaded model and what it was told about ending a text.

    Attributes:
        module: the Transformers model, in eval mode, its generation_config emptied so that no
            sampling default of the checkpoint (repetition_penalty, …) can touch the truth.
        eos_token_ids: ids that end a sequence, from generation_config, else from config.
    """

    module: Any
    eos_token_ids: tuple[int, ...]


def load_config(path: Path) -> Any:
    """The Transformers config of a checkpoint directory or .gguf file.

    Raises:
        NoTruth: Transformers cannot read it.
    """
    directory, options = _place(path)
    if not options:
        try:
            return transformers.AutoConfig.from_pretrained(directory)
        except Exception as error:  # whatever Transformers' own code trips over
            told = f"{type(error).__name__}: {error}"
            raise NoTruth(f"Transformers cannot read the configuration of {path}: {told}") from error
    # Parsing GGUF metadata takes seconds (its vocabulary, value by value), so once a process.
    return copy.deepcopy(_gguf_config(path, path.stat().st_mtime_ns))


def load_hf(path: Path, dtype: torch.dtype, attn_implementation: str = "eager") -> HFModel:
    """Load a checkpoint with the Transformers class its config names.

    Args:
        path: directory with config.json and safetensors, or a .gguf file.
        dtype: dtype to build it in. Norms, softmax and rope angles stay float32 inside, as
            Transformers has it.

    Raises:
        NoTruth: no such class, or weights that do not fit the model exactly.
    """
    config = load_config(path)
    model_class = _model_class(path, config)
    if path.suffix == ".gguf":
        module = _from_gguf(path, model_class, config, dtype, attn_implementation)
    else:
        module, report = model_class.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attn_implementation,
            ignore_mismatched_sizes=True,  # so that the report below names them, too
            output_loading_info=True,
        )
        wrong = {kind: sorted(map(str, names)) for kind, names in report.items() if names}
        if wrong:
            raise NoTruth(f"{path} does not fit {model_class.__name__}: {wrong}")
    eos = module.generation_config.eos_token_id
    eos = config.eos_token_id if eos is None else eos
    module.generation_config = transformers.GenerationConfig()
    module.eval()
    module.requires_grad_(False)
    return HFModel(module, eos_token_ids(eos))


def has_stateless_rope(config: Any) -> bool:
    """Whether no forward pass changes the rotary buffers of a model with this config."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        return False
    # Either one table, or one per layer type (models with full and sliding layers).
    tables = [parameters] if "rope_type" in parameters else list(parameters.values())
    kinds = {t.get("rope_type", "default") if isinstance(t, Mapping) else "unknown" for t in tables}
    return bool(kinds) and kinds <= STATELESS_ROPE


def text_decoder(module: Any) -> Any:
    """The stack of decoder layers inside a model, whatever wraps it."""
    inner = module.get_decoder()
    while inner is not module:
        module, inner = inner, inner.get_decoder()
    return module


def text_model(module: Any) -> Any:
    """The model that answers a prompt without pictures: itself, but for one that insists on some."""
    parameters = inspect.signature(module.forward).parameters
    needs_pixels = parameters.get("pixel_values")
    if needs_pixels is not None and needs_pixels.default is inspect.Parameter.empty:
        return module.language_model
    return module


def eos_token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """A config's eos_token_id as a sorted tuple; None is the empty one."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(sorted(set(value)))


def load_tokenizer(path: Path) -> Any | None:
    """The tokenizer of a checkpoint, or None if the checkpoint has none."""
    directory, options = _place(path)
    if not options and not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        return None
    return transformers.AutoTokenizer.from_pretrained(directory, **options)


def prompt_token_ids(tokenizer: Any | None, prompt: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids of a canonical request's prompt.

    Text gets the special tokens the tokenizer adds; a chat gets those its template writes, and no
    second BOS.

    Raises:
        NoTruth: the prompt needs a tokenizer or a chat template that is not there, or is
            empty.
    """
    if "token_ids" in prompt:
        return tuple(prompt["token_ids"])
    if tokenizer is None:
        raise NoTruth("this checkpoint has no tokenizer: give the prompt as token_ids")
    if "text" in prompt:
        ids = tokenizer(prompt["text"])["input_ids"]
    elif tokenizer.chat_template is None:
        raise NoTruth("this tokenizer has no chat template: give the prompt as text or token_ids")
    else:
        text = tokenizer.apply_chat_template(prompt["messages"], tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise NoTruth(f"the prompt {json.dumps(prompt)} has no tokens; the truth needs at least one")
    return tuple(ids)


def _place(path: Path) -> tuple[Path, dict[str, str]]:
    if path.suffix == ".gguf":
        return path.parent, {"gguf_file": path.name}
    return path, {}


def _model_class(path: Path, config: Any) -> Any:
    if not config.architectures:  # GGUF metadata name a kind of model, not a class
        return transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    name = config.architectures[0]
    model_class = getattr(transformers, name, None)
    if model_class is None:
        raise NoTruth(f"{path} names architecture {name!r}, which Transformers does not have")
    return model_class


@functools.lru_cache(maxsize=2)
def _gguf_config(path: Path, changed: int) -> Any:  # noqa: ARG001  (changed: part of the cache's key)
    return transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)


@functools.lru_cache(maxsize=1)  # the truth and its yardstick arms load the same file in a row
def _gguf_tensors(path: Path, changed: int) -> Any:  # noqa: ARG001  (changed: part of the cache's key)
    config = load_config(path)
    with no_init_weights():
        names = _model_class(path, config)._from_config(config, dtype=torch.bfloat16)
    return load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=names)["tensors"]


def _from_gguf(path: Path, model_class: Any, config: Any, dtype: torch.dtype, attn: str) -> Any:
    # from_pretrained(gguf_file=…) would need accelerate; this is the same reader without it.
    with no_init_weights():
        module = model_class._from_config(config, dtype=dtype, attn_implementation=attn)
    tensors = _gguf_tensors(path, path.stat().st_mtime_ns)
    missing, unexpected = module.load_state_dict(tensors, strict=False)
    module.tie_weights()
    missing = sorted(set(missing) - set(module.all_tied_weights_keys))
    if missing or unexpected:
        raise NoTruth(f"{path} does not fit {model_class.__name__}: {missing=}, {unexpected=}")
    return module
