"""What goes on inside a Hugging Face decoder, for the stages of traced records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from conformance.hf_models import NoTruth
from conformance.yardstick import forward

__all__ = ["traced_forward"]


def traced_forward(
    module: Any, ids: Sequence[int], keep: int, num_tokens: int
) -> tuple[torch.Tensor, dict[str, NDArray[Any]]]:
    """One forward pass that also returns the stages of a traced record, as float32.

    Raises:
        NoTruth: the model is not built like a decoder this function knows.
    """
    stages: dict[str, torch.Tensor] = {}
    cache = DynamicCache()  # without a config: keeps every position, also of sliding layers
    with _watching(module, stages):
        logits = forward(module, ids, cache=cache, keep=keep)
    for i, layer in enumerate(cache.layers):
        stages[f"k.{i}"] = layer.keys[0].transpose(0, 1)
        stages[f"v.{i}"] = layer.values[0].transpose(0, 1)
    stages["logits"] = logits[len(logits) - num_tokens :]
    arrays = {
        name: tensor.numpy() if name == "positions" else tensor.float().numpy()
        for name, tensor in stages.items()
    }
    return logits, arrays


@contextmanager
def _watching(module: Any, stages: dict[str, torch.Tensor]) -> Iterator[None]:
    decoder = module.get_decoder()
    lacking = [name for name in ("layers", "norm", "rotary_emb") if not hasattr(decoder, name)]
    if lacking:
        raise NoTruth(f"{type(decoder).__name__} has no {', '.join(lacking)}, so it cannot be traced")

    def keep(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            stages[name] = (output[0] if isinstance(output, tuple) else output)[0].clone()

        return hook

    def keep_positions(_module: Any, args: Any, kwargs: Any) -> None:
        stages["positions"] = (kwargs["position_ids"] if "position_ids" in kwargs else args[1])[0].clone()

    hooks = [
        module.get_input_embeddings().register_forward_hook(keep("embeddings")),
        decoder.rotary_emb.register_forward_pre_hook(keep_positions, with_kwargs=True),
        *(layer.register_forward_hook(keep(f"hidden.{i}")) for i, layer in enumerate(decoder.layers)),
        decoder.norm.register_forward_hook(keep("final")),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
