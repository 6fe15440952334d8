"""Parts of vLLM that can be exchanged for others, so that a wrong answer tells which part it came from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from importlib import import_module
from typing import Any

__all__ = ["EXCHANGES", "exchange"]

#: Option of the adapter → what it exchanges.
EXCHANGES: Mapping[str, str] = {
    "slow_detokenizer": "vLLM's detokenizer in Python instead of the one on top of Rust",
    "short_tower_names": "weights of CLIP and SigLIP are found by the names that Transformers 5 saves: "
    "vision_tower.encoder, not vision_tower.vision_model.encoder "
    "(https://github.com/huggingface/transformers/pull/44431)",
    "plain_newlines": "Gemma 3's newlines around a picture stay single tokens, for tokenizers that have no "
    "tokens of several newlines, as that of tiny-gemma3-vision",
    "pillow_pictures": "Pillow resizes pictures instead of torchvision, as where the goldens were made",
}

#: Models whose vision tower (CLIP or SigLIP) has weights with a shorter name in newer checkpoints.
_TOWERS = (
    ("vllm.model_executor.models.llava", "LlavaForConditionalGeneration"),
    ("vllm.model_executor.models.llava_onevision", "LlavaOnevisionForConditionalGeneration"),
    ("vllm.model_executor.models.gemma3_mm", "Gemma3ForConditionalGeneration"),
)
_TOWER, _LEVEL = "vision_tower.", "vision_tower.vision_model."

#: Where vLLM's Gemma 3 joins newlines beside a picture into one token, and takes them apart again.
_NEWLINES = (
    "_apply_token_matches",
    "_apply_token_matches_with_placeholders",
    "_find_mm_placeholders",
)

#: What of vLLM's was exchanged, as it was.
_vllms_choice: dict[str, Any] = {}


def exchange(names: Set[str]) -> None:
    """Exchange these parts and put back all others; before an engine is loaded, and again for its requests.

    Args:
        names: some of `EXCHANGES`.
    """
    for name, choose in _CHOOSE.items():
        if name in names or name in _exchanged:  # else vLLM's module need not even be imported
            choose(name in names)
            _exchanged.add(name)


def _detokenizer(slow: bool) -> None:
    from vllm.v1.engine import detokenizer

    chosen = _vllms_choice.setdefault("uses_fast_detokenizer", detokenizer.uses_fast_detokenizer)
    detokenizer.uses_fast_detokenizer = (lambda _tokenizer: False) if slow else chosen


def _tower_names(short: bool) -> None:
    from vllm.model_executor.models.utils import WeightsMapper

    level = WeightsMapper(orig_to_new_prefix={_TOWER: _LEVEL})
    for module, name in _TOWERS:
        model = getattr(import_module(module), name)
        chosen = _vllms_choice.setdefault(name, model.hf_to_vllm_mapper)
        model.hf_to_vllm_mapper = chosen | level if short else chosen


def _newlines(plain: bool) -> None:
    from vllm.model_executor.models.gemma3_mm import Gemma3MultiModalProcessor as Gemma

    parent = Gemma.__mro__[1]
    for name in _NEWLINES:
        chosen = _vllms_choice.setdefault(name, getattr(Gemma, name))
        setattr(Gemma, name, getattr(parent, name) if plain else chosen)


def _image_backend(pillow: bool) -> None:
    from transformers.models.auto import image_processing_auto

    chosen = _vllms_choice.setdefault("_resolve_backend", image_processing_auto._resolve_backend)
    image_processing_auto._resolve_backend = (lambda *_: "pil") if pillow else chosen


_CHOOSE: Mapping[str, Callable[[bool], None]] = {
    "slow_detokenizer": _detokenizer,
    "short_tower_names": _tower_names,
    "plain_newlines": _newlines,
    "pillow_pictures": _image_backend,
}
#: Those that were in force at some time in this process.
_exchanged: set[str] = set()
