"""Fixtures every test may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import Phase, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# One profile for all machines: the same examples every run, and no deadline, since times are noisy here.
settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
# For `nox -s mutation`: whether an example fails is all that matters there, not which is the smallest.
settings.register_profile(
    "mutation",
    settings.get_profile("repeatable"),
    max_examples=25,
    database=None,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile("repeatable")

CHECKPOINTS = Path(__file__).parent.parent / "golden" / "checkpoints"


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """The directory of the committed tiny checkpoints."""
    return CHECKPOINTS


@pytest.fixture(scope="session")
def tiny_llama(checkpoints: Path) -> str:
    """Path of the tiny Llama checkpoint."""
    return str(checkpoints / "tiny-llama")
