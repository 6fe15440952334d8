"""One phase of training a small model: AdamW, a short rise of the rate, then a cosine down to zero."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random

import torch
from torch import Tensor, nn

__all__ = ["Report", "run_phase"]

#: Called every 100 steps with the phase's name, the steps done in it, and their mean loss.
Report = Callable[[str, int, float], None]

_RISE = 100


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
