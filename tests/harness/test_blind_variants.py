"""A small Llama is agreed with; ten that are each wrong in one subtle way are caught, and triage names where.

Whoever wrote the ten had read the documentation only, none of the checks, and wrote into the docstring of
each which stage should be named, before any of them ran.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from conformance.paths import data_root
from conformance.probes import ALONE
from conformance.retrace import explain
from conformance.scenario import load_scenario
from conformance.store import RecordStore
from conformance.suite import Case, Outcome, Selection, run_case, select

HERE = Path(__file__).parent
VARIANTS = HERE / "blind_variants"

#: Variant → the scenario that catches it here (most are caught by several), and the model.
CAUGHT_BY = {
    "block_without_history": ("prefix-cache/same-block-behind-another", "tiny-llama"),
    "coarse_frequencies": ("parity/rope-in-bfloat16", "recall-llama"),
    "default_epsilon": ("parity/tied-and-untied-heads", "tiny-llama"),
    "doubled_bos": ("parity/tiny-families", "tiny-llama"),
    "early_block": ("prefix-cache/next-turn", "tiny-llama"),
    "first_eos_only": ("stopping/last-of-several-eos", "recall-llama"),
    "hard_switched_rope": ("parity/rope-kinds", "tiny-llama"),
    "pads_seen_when_decoding": ("scheduling/one-token", "tiny-llama"),
    "peeking_chunk": ("parity/rope-kinds", "tiny-llama"),
    "top_only_logprobs": ("parity/tied-and-untied-heads", "tiny-llama"),
}

#: Relations of the probes, in the words of the page about triage.
RELATIONS = {ALONE: "alone", "batch=mixed": "in a batch"}


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    for directory in (HERE / "toy_engines", VARIANTS):
        monkeypatch.syspath_prepend(str(directory))


def case_of(scenario: str, model: str) -> Case:
    root = data_root() / "scenarios"
    [case] = select(
        [load_scenario(root / f"{scenario}.yaml", root)], Selection(ids=(scenario,), models=(model,))
    )
    return case


def named(outcome: Outcome) -> set[Any]:
    """What triage names as first wrong: a stage, or where only answers are seen, the relation that breaks."""
    told = [finding.detail.get("triage") for finding in outcome.judgement.findings]
    return {one["stage"] if one.get("exact") else RELATIONS.get(one.get("relation")) for one in told if one}


@pytest.mark.parametrize(("scenario", "model"), sorted(set(CAUGHT_BY.values())))
def test_the_right_engine_is_agreed_with(scenario: str, model: str) -> None:
    engine = importlib.import_module("small_llama").SmallLlama
    outcome = run_case(case_of(scenario, model), engine, RecordStore())
    assert outcome.verdict.is_agreement, [
        f.message for f in outcome.judgement.findings if f.verdict.fails_run
    ]


@pytest.mark.parametrize("variant", sorted(CAUGHT_BY))
def test_each_variant_is_caught_and_triage_names_the_declared_stage(variant: str) -> None:
    module, store = importlib.import_module(variant), RecordStore()
    outcome = run_case(case_of(*CAUGHT_BY[variant]), module.Engine, store)
    assert outcome.judgement.fails_run(), "it escaped"
    [declared] = re.findall(r"^Declared first wrong stage: (.+)$", module.__doc__ or "", re.MULTILINE)
    assert named(explain(outcome, module.Engine, store)) == {declared}


def test_every_variant_is_here() -> None:
    assert sorted(file.stem for file in VARIANTS.glob("*.py")) == sorted(CAUGHT_BY)
    assert len(CAUGHT_BY) == 10
