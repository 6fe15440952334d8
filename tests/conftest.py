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

TOY_SCENARIO = """requirement: It answers.
level: must
source: [https://example.org]
model: toy
profile: smoke
matrix: {block_size: [1, 4]}
requests:
  one: {token_ids: [3, 4, 5], max_tokens: 9}
steps: [{submit: one}, run]
checks:
  - tokens_match_golden
  - happened: {finished: "==1"}
"""


@pytest.fixture(scope="session")
def checkpoints() -> Path:
    """The directory of the committed tiny checkpoints."""
    return CHECKPOINTS


@pytest.fixture(scope="session")
def toy_suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite, not to be changed, of the scenarios toy/one and toy/two, each at block sizes 1 and 4."""
    from conformance.adapters.fake_model import write_toy_suite

    suite = {"toy/one": TOY_SCENARIO, "toy/two": TOY_SCENARIO}
    return write_toy_suite(tmp_path_factory.mktemp("toy-suite"), suite)


@pytest.fixture(scope="session")
def tiny_llama(checkpoints: Path) -> str:
    """Path of the tiny Llama checkpoint."""
    return str(checkpoints / "tiny-llama")
