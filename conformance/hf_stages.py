"""What goes on inside a Hugging Face decoder, for the stages of traced records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from conformance.hf_models import NoTruth, text_decoder, text_model
from conformance.hf_prompts import Prompt
from conformance.yardstick import PromptLike, as_prompt, forward

__all__ = ["prompt_positions", "traced_forward"]


def traced_forward(
    module: Any, prompt: PromptLike, tokens: Sequence[int], keep: int
) -> tuple[torch.Tensor, dict[str, NDArray[Any]]]:
    """One forward pass along prompt and tokens that also returns the stages of a traced record, as float32.

    Args:
        keep: as in `yardstick.forward`.

    Raises:
        NoTruth: the model is not built like a decoder this function knows, or a generated token is a
            placeholder for a picture.
    """
    prompt = as_prompt(prompt)
    if prompt.placeholder_ids & set(tokens[:-1]):
        raise NoTruth("a placeholder was generated, so one forward pass cannot tell the stages")
    ids = [*prompt.token_ids, *tokens[:-1]]
    stages: dict[str, torch.Tensor] = {}
    cache = DynamicCache()  # without a config: keeps every position, also of sliding layers
    with _watching(module, stages, len(ids)):
        logits = forward(module, ids, prompt=prompt, cache=cache, keep=keep)
    for i, layer in enumerate(cache.layers):
        stages[f"k.{i}"] = layer.keys[0].transpose(0, 1)
        stages[f"v.{i}"] = layer.values[0].transpose(0, 1)
    stages["logits"] = logits[len(logits) - len(tokens) :]
    pixels = [v for name, v in prompt.inputs.items() if name.startswith("pixel_values")]
    if pixels:
        stages["pixels"] = torch.cat([_without_padding(values).flatten() for values in pixels])
    arrays = {
        name: tensor.numpy() if name == "positions" else tensor.float().numpy()
        for name, tensor in stages.items()
    }
    return logits, arrays


def prompt_positions(module: Any, prompt: Prompt) -> tuple[NDArray[Any] | None, int]:
    """Positions [prompt tokens, 3] and delta under M-RoPE; (None, 0) for a model without it."""
    stages: dict[str, torch.Tensor] = {}
    with _watching(module, stages, len(prompt.token_ids)):
        forward(module, prompt.token_ids, prompt=prompt, keep=1)
    positions = stages["positions"]
    if positions.ndim == 1:
        return None, 0
    # As `generate` goes on, and a longer forward pass too: from the last token, not from the largest.
    return positions.numpy(), int(positions[-1].max()) + 1 - len(positions)


def _without_padding(pixels: torch.Tensor) -> torch.Tensor:
    """Pixels of real crops: [prompts, crops, channels, height, width] is filled up with zeros."""
    if pixels.ndim != 5:
        return pixels
    crops = pixels.flatten(0, 1)
    return crops[crops.flatten(1).any(dim=1)]


@contextmanager
def _watching(module: Any, stages: dict[str, torch.Tensor], length: int) -> Iterator[None]:
    """Within the block, a forward pass over `length` tokens fills `stages`."""
    decoder = text_decoder(module)
    norm = getattr(decoder, "norm", None) or getattr(decoder, "final_layer_norm", None)
    if norm is None or not hasattr(decoder, "layers"):
        raise NoTruth(f"{type(decoder).__name__} has no layers and norm, so it cannot be traced")
    stages["positions"] = torch.arange(length)  # unless rotary embeddings say otherwise

    def keep_output(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            stages[name] = (output[0] if isinstance(output, tuple) else output)[0].clone()

        return hook

    def keep_input(name: str) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any) -> None:
            stages[name] = (args[0] if args else kwargs["hidden_states"])[0].clone()

        return hook

    def keep_positions(_module: Any, args: Any, kwargs: Any) -> None:
        positions = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        # [batch, tokens], or [axes, batch, tokens] under M-RoPE.
        stages["positions"] = (positions[0] if positions.ndim == 2 else positions[:, 0].T).clone()

    def keep_inputs(_module: Any, _args: Any, kwargs: Any) -> None:
        merged = kwargs.get("inputs_embeds")
        if merged is not None:
            stages["embeddings"] = merged[0].clone()
        seen = kwargs.get("visual_pos_masks")
        for i, rows in enumerate(kwargs.get("deepstack_visual_embeds") or ()):
            full = torch.zeros_like(stages["embeddings"])
            full[seen[0]] = rows
            stages[f"deepstack.{i}"] = full

    # What leaves layer i is what enters the next one: a family may add to it in between.
    after = [*decoder.layers[1:], norm]
    hooks = [
        text_model(module).get_input_embeddings().register_forward_hook(keep_output("embeddings")),
        decoder.register_forward_pre_hook(keep_inputs, with_kwargs=True),
        *(
            one.register_forward_pre_hook(keep_input(f"hidden.{i}"), with_kwargs=True)
            for i, one in enumerate(after)
        ),
        norm.register_forward_hook(keep_output("final")),
    ]
    if hasattr(decoder, "rotary_emb"):
        hooks.append(decoder.rotary_emb.register_forward_pre_hook(keep_positions, with_kwargs=True))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
