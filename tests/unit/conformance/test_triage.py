"""Triage: the first stage outside of its band, in order of computation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.checks import judge
from conformance.checks.case import Case
from conformance.history import RequestRun
from conformance.records import ArmError, GoldenRecord
from conformance.testing import M, Spec, answer, make_history, make_pass, make_record, records_of
from conformance.triage import Suspect, triage
from conformance.verdicts import Verdict

ROWS = 30
STAGES: dict[str, Any] = {
    "positions": np.arange(ROWS),
    "embeddings": np.random.default_rng(1).normal(0, 1, (ROWS, 8)),
    **{f"hidden.{i}": np.random.default_rng(2 + i).normal(0, 4, (ROWS, 8)) for i in range(11)},
    "final": np.random.default_rng(99).normal(0, 1, (ROWS, 8)),
}
BANDS = {name: ArmError(1e-6, 4e-6) for name in STAGES if name != "positions"}
PLAIN = make_record("red")
TRACED = replace(PLAIN, stages=STAGES, stage_bands=BANDS)


def look(run: RequestRun, record: GoldenRecord = TRACED) -> Suspect | None:
    return triage(Case(make_history([make_pass("free", [run])]), records_of(record)), "red")


def traced(**wrong: Any) -> RequestRun:
    """A sound traced run; `wrong` maps a stage (dots as underscores) to (row, error)."""
    stages = {name: np.array(values) for name, values in STAGES.items()}
    for name, (row, by) in wrong.items():
        stage = stages[name.replace("_", ".")]
        stage[row] = stage[row] + by
    return replace(answer(PLAIN), stages={n: v.tolist() for n, v in stages.items()})


def test_a_sound_run_has_no_suspect() -> None:
    assert look(traced()) is None


def test_prompt_ids_come_before_everything() -> None:
    run = replace(traced(embeddings=(0, 1.0)), prompt_token_ids=(9, 9))
    found = look(run)
    assert found is not None
    assert found.stage == "prompt ids"


@pytest.mark.parametrize("stage", ["positions", "embeddings", "hidden.0", "hidden.9", "hidden.10", "final"])
def test_the_wrong_stage_is_named_with_its_row(stage: str) -> None:
    found = look(traced(**{stage.replace(".", "_"): (7, 1.0)}))
    assert found is not None
    assert (found.stage, found.position) == (stage, 7)


def test_the_earliest_of_several_wrong_stages_is_named() -> None:
    # hidden.9 is computed before hidden.10, though "hidden.10" sorts first as text.
    found = look(traced(hidden_10=(2, 1.0), hidden_9=(5, 1.0), final=(0, 1.0)))
    assert found is not None
    assert (found.stage, found.position) == ("hidden.9", 5)


def test_size_is_in_multiples_of_the_stages_own_band() -> None:
    found = look(traced(hidden_3=(4, 5 * 4e-6)))
    assert found is not None
    assert found.size == pytest.approx(5, rel=0.01)
    assert look(traced(hidden_3=(4, 3.5 * 4e-6))) is None


def test_without_bands_the_yardstick_of_the_logits_is_carried_over() -> None:
    record = replace(TRACED, stage_bands={})
    scale = M / np.abs(record.output.top_logits).max() * np.abs(STAGES["hidden.0"]).max()
    assert look(traced(hidden_0=(4, 3 * scale)), record) is None
    found = look(traced(hidden_0=(4, 5 * scale)), record)
    assert found is not None
    assert found.size == pytest.approx(5, rel=0.01)


def test_nan_in_a_stage_is_outside_of_every_band() -> None:
    found = look(traced(hidden_2=(11, float("nan"))))
    assert found is not None
    assert (found.stage, found.position) == ("hidden.2", 11)


def test_rows_of_another_shape_are_named() -> None:
    run = traced()
    found = look(replace(run, stages={**run.stages, "embeddings": np.zeros((ROWS, 4)).tolist()}))
    assert found is not None
    assert found.stage == "embeddings"
    assert "shape" in found.text


def shifted_logits(run: RequestRun, position: int = 6) -> RequestRun:
    rows = list(run.output_rows)
    rows[position] = replace(rows[position], values=tuple(v + 10 * M for v in rows[position].values))
    return replace(run, output_rows=tuple(rows))


def test_right_stages_and_wrong_logits_blame_the_logits() -> None:
    found = look(shifted_logits(traced()))
    assert found is not None
    assert (found.stage, found.position, found.exact) == ("logits", 6, True)


def test_without_traced_stages_the_fault_may_lie_before_the_logits() -> None:
    found = look(shifted_logits(answer(PLAIN)), PLAIN)
    assert found is not None
    assert (found.stage, found.exact) == ("logits", False)
    assert "or earlier" in found.text


def test_right_logits_and_another_token_blame_the_sampling() -> None:
    run = answer(PLAIN, choices={5: int(PLAIN.output.top_ids[5, 1])})
    found = look(run, PLAIN)
    assert found is not None
    assert (found.stage, found.position) == ("sampling", 5)


def test_a_failure_carries_its_triage() -> None:
    h = make_history([make_pass("free", [shifted_logits(traced())])])
    found = judge(h, [Spec("logits_within_yardstick")], records_of(TRACED))
    assert found.verdict is Verdict.FAIL
    assert found.findings[0].detail["triage"]["stage"] == "logits"


def test_a_crashing_triage_leaves_the_failure_standing() -> None:
    h = make_history(
        [
            make_pass(
                "free", [replace(shifted_logits(answer(PLAIN)), stages={"embeddings": [[1.0], [1.0, 2.0]]})]
            )
        ]
    )
    found = judge(h, [Spec("logits_within_yardstick")], records_of(TRACED))
    assert found.verdict is Verdict.FAIL
    assert "triage crashed" in str(found.findings[0].detail["triage"])


def test_a_request_without_a_golden_has_no_triage() -> None:
    assert look(replace(answer(PLAIN), golden_key=None)) is None
