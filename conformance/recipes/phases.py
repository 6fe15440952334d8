"""Training a small model: how it begins, and one phase (AdamW, a short rise of the rate, then a cosine)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from conformance.recipes.qwen_vl import QWEN_VL_IDS

__all__ = ["Report", "run_phase", "untrained_qwen2_vl"]

#: Called every 100 steps with the phase's name, the steps done in it, and their mean loss.
Report = Callable[[str, int, float], None]

_RISE = 100


def untrained_qwen2_vl(
    seed: int, text_config: Mapping[str, Any], vision_config: Mapping[str, Any], *, tied: bool
) -> Any:
    """A Qwen2-VL whose matrices have standard deviation 1 / sqrt(fan in), and whose biases are zero."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen2VLConfig(
        text_config=dict(text_config),
        vision_config=dict(vision_config),
        **QWEN_VL_IDS,
        tie_word_embeddings=tied,
    )
    config._attn_implementation = "sdpa"
    model = transformers.Qwen2VLForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(std=1 / math.sqrt(parameter[0].numel()))
    return model


def run_phase(
    name: str,
    loss: Callable[[int, Random], Tensor],
    parameters: Sequence[nn.Parameter],
    *,
    steps: int,
    rate: float,
    seed: int,
    held: float = 0.0,
    report: Report | None = None,
) -> list[float]:
    """Train `parameters`; returns the loss of every step.

    Args:
        loss: takes the number of the step and the phase's random numbers.
        rate: the learning rate's peak, held until this part `held` of the steps is done.
    """
    optimiser = torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    rng = Random(f"{name} {seed}")
    losses: list[float] = []
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = rate * _share(step, steps, held)
        value = loss(step, rng)
        optimiser.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        losses.append(value.item())
        if report is not None and len(losses) % 100 == 0:
            report(name, len(losses), sum(losses[-100:]) / 100)
    return losses


def _share(step: int, steps: int, held: float) -> float:
    if step < _RISE:
        return (step + 1) / _RISE
    start = max(_RISE, held * steps)
    if step < start:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (step - start) / max(1, steps - start)))
