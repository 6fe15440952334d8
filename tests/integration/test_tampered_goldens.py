"""Who tampers with a golden, with weights, or with the loaded engine is told apart, by name.

Works on a copy of one small record; the requests and the engine are the real ones.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import numpy as safetensors

from conformance.adapters.base import ModelSource
from conformance.checks import judge
from conformance.engines import find_engine
from conformance.manifest import sign
from conformance.models import resolve_model
from conformance.paths import data_root
from conformance.runner import run_scenario
from conformance.scenario import Scenario, load_scenario
from conformance.store import RecordStore
from conformance.verdicts import Judgement, Verdict

MODEL = "tiny-llama"
SCENARIO = """\
schema: 1
id: tampered/one
requirement: One request of the suite, judged in full.
level: must
source: [this test]
model: tiny-llama
engine: {num_kv_blocks: 64, block_size: 4}
profile: smoke
requests:
  one: {generate: [{kind: random, length: 20, seed: 4, low: 3, high: 400}], max_tokens: 16, ignore_eos: true}
steps:
  - submit: one
  - run
checks: [tokens_match_golden, logits_within_yardstick, {happened: {finished: "==1"}}]
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A data directory with the records of one model."""
    shutil.copytree(data_root() / "golden" / "records" / MODEL, tmp_path / "golden" / "records" / MODEL)
    sign(tmp_path / "golden", reason="copied for a test", licence="Apache-2.0", author="a test")
    return tmp_path


@pytest.fixture
def scenario(tmp_path: Path) -> Scenario:
    path = tmp_path / "scenarios" / "tampered" / "one.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(SCENARIO)
    return load_scenario(path, tmp_path / "scenarios")


def run(root: Path, scenario: Scenario, source: ModelSource | None = None) -> Judgement:
    store = RecordStore(root)
    [point] = scenario.points()
    history = run_scenario(scenario, point, find_engine("minivllm"), source or resolve_model(MODEL), store)
    return judge(history, scenario.checks, store.get, scenario.level)


def messages(judgement: Judgement, verdict: Verdict) -> str:
    return "\n".join(
        f"{f.check} {f.request}: {f.message}" for f in judgement.findings if f.verdict is verdict
    )


def files(root: Path, scenario: Scenario) -> tuple[Path, Path]:
    """The record of the scenario's request: its JSON and its tables."""
    [(_, request)] = scenario.golden_requests()
    record = next(r for r in RecordStore(root).all(MODEL) if r.request == request)
    stem = root / "golden" / "records" / MODEL / record.case
    return stem.with_name(stem.name + ".json"), stem.with_name(stem.name + ".safetensors")


def test_untouched_it_passes(root: Path, scenario: Scenario) -> None:
    assert run(root, scenario).verdict is Verdict.PASS


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("where", [0.1, 0.5, 0.99])
def test_a_flipped_byte_is_corruption_and_no_divergence(
    root: Path, scenario: Scenario, which: int, where: float
) -> None:
    file = files(root, scenario)[which]
    content = bytearray(file.read_bytes())
    content[int(len(content) * where)] ^= 1
    file.write_bytes(content)
    judgement = run(root, scenario)
    assert judgement.verdict is Verdict.ERROR
    assert "corrupted" in messages(judgement, Verdict.ERROR)
    assert not messages(judgement, Verdict.FAIL)


def _other_token(plain: Path, tables: Path) -> None:
    content = json.loads(plain.read_text())
    arrays = safetensors.load_file(tables)
    # Swap first and second choice at position 7, in ids and numbers: a record that contradicts nobody.
    content["token_ids"][7] = int(arrays["output.top_ids"][7, 1])
    arrays["output.top_ids"][7, :2] = arrays["output.top_ids"][7, 1::-1]
    plain.write_text(json.dumps(content))
    safetensors.save_file(arrays, tables)


def _other_logit(plain: Path, tables: Path) -> None:
    size = max(arm["max"] for arm in json.loads(plain.read_text())["yardstick"].values())
    arrays = safetensors.load_file(tables)
    arrays["output.top_logits"][7, 19] -= 6 * size
    safetensors.save_file(arrays, tables)


@pytest.mark.parametrize(
    ("tamper", "check"),
    [(_other_token, "tokens_match_golden"), (_other_logit, "logits_within_yardstick")],
)
def test_a_changed_value_under_a_new_signature_fails_at_its_position(
    root: Path, scenario: Scenario, tamper: Callable[[Path, Path], None], check: str
) -> None:
    plain, tables = files(root, scenario)
    tamper(plain, tables)
    sign(root / "golden", reason="signed again by a test", licence="Apache-2.0", author="a test")
    judgement = run(root, scenario)
    assert judgement.verdict is Verdict.FAIL
    finding = next(f for f in judgement.findings if f.verdict is Verdict.FAIL and f.check == check)
    assert finding.position == 7
    assert finding.request == "one"
    assert f"{MODEL}/{plain.stem}" in finding.message
    assert finding.size is not None
    assert finding.size > 4


def test_two_weights_swapped_in_the_loaded_engine_fail_by_logits(root: Path, scenario: Scenario) -> None:
    path = scenario.path
    names = "[model.layers.0.self_attn.q_proj.weight, model.layers.1.self_attn.q_proj.weight]"
    path.write_text(SCENARIO.replace("steps:\n", f"steps:\n  - swap_weights: {names}\n"))
    swapped = load_scenario(path, path.parents[1])
    judgement = run(root, swapped)
    assert judgement.verdict is Verdict.FAIL
    assert "logits_within_yardstick one" in messages(judgement, Verdict.FAIL)
    assert run(root, scenario).verdict is Verdict.PASS, "the swap must not outlive its scenario"


def test_other_weights_are_named_and_nothing_is_judged(
    root: Path, scenario: Scenario, tmp_path: Path
) -> None:
    source = resolve_model(MODEL)
    other = tmp_path / "other" / MODEL
    shutil.copytree(source.path, other)
    arrays = safetensors.load_file(other / "model.safetensors")
    arrays["model.norm.weight"] = arrays["model.norm.weight"] * np.float32(1.0001)
    safetensors.save_file(arrays, other / "model.safetensors", metadata={"format": "pt"})
    judgement = run(root, scenario, replace(source, path=other, sha256="0" * 64))
    assert judgement.verdict is Verdict.ERROR
    assert "recorded for other weights" in messages(judgement, Verdict.ERROR)
    assert not messages(judgement, Verdict.FAIL)
