"""Stages against a traced golden."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.adapters.base import FEATURES
from conformance.checks import judge
from conformance.history import RequestRun
from conformance.records import ArmError, GoldenRecord
from conformance.testing import Spec, answer, make_history, make_pass, make_record, records_of
from conformance.verdicts import Finding, Verdict

CHECK = Spec("stages_within_band")
PLAIN = make_record("red")
PROMPT = len(PLAIN.prompt_token_ids)
ROWS = PROMPT + len(PLAIN.token_ids) - 1
RNG = np.random.default_rng(1)
STAGES: dict[str, Any] = {
    "pixels": RNG.normal(0, 1, 200),
    "positions": np.stack([np.arange(ROWS)] * 3, axis=1),
    "embeddings": RNG.normal(0, 1, (ROWS, 8)),
    "deepstack.0": RNG.normal(0, 1, (ROWS, 8)),
    "hidden.0": RNG.normal(0, 4, (ROWS, 8)),
    "hidden.1": RNG.normal(0, 4, (ROWS, 8)),
    "final": RNG.normal(0, 1, (ROWS, 8)),
}
BANDS = {name: ArmError(1e-6, 4e-6) for name in STAGES if name not in ("positions", "pixels")}
TRACED = replace(PLAIN, stages=STAGES, stage_bands=BANDS)
CAPTURED = ("positions", "embeddings", "deepstack.0", "hidden.0", "hidden.1")


def run(names: tuple[str, ...] = CAPTURED, base: RequestRun | None = None, **wrong: Any) -> RequestRun:
    """A sound run; `wrong` maps a stage (dots as underscores) to (row, error)."""
    stages = {name: np.array(STAGES[name]) for name in names}
    for name, (row, by) in wrong.items():
        stage = stages[name.replace("_", ".")]
        stage[row] = stage[row] + by
    return replace(base or answer(PLAIN), stages={n: v.tolist() for n, v in stages.items()})


def judged(one: RequestRun, record: GoldenRecord = TRACED, **history: Any) -> Finding:
    [finding] = judge(
        make_history([make_pass("free", [one])], **history), [CHECK], records_of(record)
    ).findings
    return finding


def test_a_sound_run_passes_and_tells_its_worst_stage() -> None:
    found = judged(run(hidden_0=(3, 2e-6)))
    assert found.verdict is Verdict.PASS
    assert "5 stages inside their bands, hidden.0 at 0.5 × its yardstick" in found.message


@pytest.mark.parametrize(("stage", "by"), [("positions", 1), *((n, 1e-3) for n in CAPTURED[1:])])
def test_each_stage_is_judged(stage: str, by: float) -> None:
    found = judged(run(**{stage.replace(".", "_"): (4, by)}))
    assert found.verdict is Verdict.FAIL
    assert found.message.startswith(f"{stage}: row 4")
    assert found.detail["stage"] == stage


def test_the_first_wrong_stage_is_named() -> None:
    assert judged(run(hidden_1=(2, 1.0), deepstack_0=(9, 1.0))).detail["stage"] == "deepstack.0"


def test_pixels_are_judged_where_the_engine_shows_them() -> None:
    names = ("pixels", *CAPTURED)
    assert judged(run(names)).verdict is Verdict.PASS
    assert judged(run(names, pixels=(150, 0.01))).detail["stage"] == "pixels"


def test_a_stage_the_engine_does_not_capture_makes_it_weak() -> None:
    found = judged(run(("positions", "embeddings")))
    assert found.verdict is Verdict.WEAK
    assert "not captured: deepstack.0, hidden.0, hidden.1" in found.message


def test_rows_after_a_divergence_are_no_evidence() -> None:
    base = answer(PLAIN, choices={2: 1})
    assert judged(run(base=base, hidden_0=(PROMPT + 2, 1.0))).verdict is Verdict.PASS
    assert judged(run(base=base, hidden_0=(PROMPT + 1, 1.0))).verdict is Verdict.FAIL


def test_rows_from_the_prefix_cache_were_never_captured() -> None:
    base = answer(PLAIN)
    assert base.output is not None
    base = replace(base, output=replace(base.output, num_cached_tokens=4))
    assert judged(run(base=base, hidden_0=(3, np.nan))).verdict is Verdict.PASS
    assert judged(run(base=base, hidden_0=(4, np.nan))).verdict is Verdict.FAIL


def test_other_prompt_ids_fail_before_any_stage() -> None:
    base = answer(PLAIN)
    assert base.output is not None
    base = replace(base, output=replace(base.output, prompt_token_ids=(1, 2)))
    assert "stage prompt ids" in judged(run(base=base)).message


def test_an_untraced_golden_or_an_empty_capture_is_an_error() -> None:
    found = judged(run(), PLAIN)
    assert found.verdict is Verdict.ERROR
    assert "holds no stages: record it with traced: true" in found.message
    assert "no stage of 'red' was captured" in judged(run(())).message


def test_an_engine_without_stages_is_skipped() -> None:
    found = judged(run(()), features=frozenset(FEATURES) - {"stages"})
    assert found.verdict is Verdict.SKIP
