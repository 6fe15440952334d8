"""A phase trains what it is given, reports, and is a function of its seed."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor, nn

from conformance.recipes.phases import run_phase


def fit(steps: int, seed: int, held: float = 0.0) -> tuple[list[float], list[tuple[str, int, float]]]:
    """Find 3 from noisy hints."""
    weight = nn.Parameter(torch.zeros(()))
    reported: list[tuple[str, int, float]] = []

    def loss(step: int, rng: Random) -> Tensor:
        assert step >= 0
        return (weight - 3 - rng.random() / 100).square()

    losses = run_phase(
        "fit",
        loss,
        [weight],
        steps=steps,
        rate=0.1,
        seed=seed,
        held=held,
        report=lambda name, step, mean: reported.append((name, step, mean)),
    )
    return losses, reported


@pytest.mark.parametrize("held", [0.0, 0.5])
def test_the_loss_falls_and_is_reported_every_hundred_steps(held: float) -> None:
    losses, reported = fit(250, 0, held)
    assert len(losses) == 250
    assert losses[0] > 8
    assert losses[-1] < 0.01
    assert [(name, step) for name, step, _ in reported] == [("fit", 100), ("fit", 200)]
    assert reported[1][2] == pytest.approx(sum(losses[100:200]) / 100)


def test_the_rate_is_held_before_it_falls() -> None:
    # Up to step 100 it rises alike; then the one falls at once, the other does not.
    falling, held = fit(300, 0)[0], fit(300, 0, 0.9)[0]
    assert falling[:100] == held[:100]
    assert falling[110:130] != held[110:130]


def test_it_is_a_function_of_the_seed() -> None:
    assert fit(20, 1)[0] == fit(20, 1)[0]
    assert fit(20, 1)[0] != fit(20, 2)[0]
