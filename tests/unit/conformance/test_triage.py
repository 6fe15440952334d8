"""Triage: the first stage outside of its band, in order of computation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance.adapters.base import TokenLogprob
from conformance.checks import judge
from conformance.checks.case import Case
from conformance.history import RequestRun
from conformance.records import ArmError, GoldenRecord, MediaRecord, SpanRecord
from conformance.testing import M, Spec, answer, make_history, make_pass, make_record, records_of
from conformance.triage import (
    Suspect,
    as_lines,
    differing_stage,
    ordered_stages,
    stage_table,
    triage,
    truth_stages,
)
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


def with_logprobs(run: RequestRun, by: Mapping[int, float], at: int = 3) -> RequestRun:
    """A run that shows log-probabilities only: the truth's top five, those of position `at` off."""
    table, lists = PLAIN.output, []
    for position in range(len(table)):
        ids = table.top_ids[position, :5].tolist()
        values = table.top_logits[position, :5] - table.logsumexp[position]
        off = by if position == at else {}
        lists.append(
            tuple(TokenLogprob(token, float(values[i]) + off.get(i, 0.0)) for i, token in enumerate(ids))
        )
    assert run.output is not None
    return replace(run, output_rows=(), output=replace(run.output, logprobs=tuple(lists)))


def test_right_logprobs_have_no_suspect() -> None:
    assert look(with_logprobs(answer(PLAIN), {}), PLAIN) is None


def test_logprobs_that_are_all_off_alike_blame_what_normalises_them() -> None:
    found = look(with_logprobs(answer(PLAIN), dict.fromkeys(range(5), 0.25)), PLAIN)
    assert found is not None
    assert (found.stage, found.position, found.exact) == ("sampling", 3, True)
    assert "+0.25" in found.text


@pytest.mark.parametrize("off", [{2: 0.25}, {0: float("nan")}])
def test_one_wrong_logprob_blames_the_logits_or_what_comes_before(off: dict[int, float]) -> None:
    found = look(with_logprobs(answer(PLAIN), off), PLAIN)
    assert found is not None
    assert (found.stage, found.position, found.exact) == ("logits", 3, False)


def test_right_logprobs_and_another_token_blame_the_sampling() -> None:
    run = answer(PLAIN, choices={5: int(PLAIN.output.top_ids[5, 1])})
    found = look(with_logprobs(run, {}), PLAIN)
    assert found is not None
    assert (found.stage, found.position) == ("sampling", 5)


@pytest.mark.parametrize(("more", "position"), [((7, 8), len(PLAIN.token_ids)), (None, 3)])
def test_an_answer_of_another_length_blames_the_sampling(more: tuple[int, ...] | None, position: int) -> None:
    run = replace(answer(PLAIN), output_rows=())
    assert run.output is not None
    ids = PLAIN.token_ids[:4] if more is None else (*PLAIN.token_ids, *more)
    found = look(replace(run, output=replace(run.output, token_ids=ids, logprobs=None)), PLAIN)
    assert found is not None
    assert (found.stage, found.position) == ("sampling", position)


def test_right_ids_and_another_text_blame_what_spells_them() -> None:
    run = traced()
    assert run.output is not None
    found = look(replace(run, output=replace(run.output, text=f"prompt{PLAIN.text}")))
    assert found is not None
    assert (found.stage, found.position, found.exact) == ("text", None, True)
    assert f"'prompt{PLAIN.text}' for '{PLAIN.text}'" in found.text


def test_a_text_without_ids_blames_nothing() -> None:
    run = replace(answer(PLAIN), output_rows=())
    assert run.output is not None
    assert (
        look(replace(run, output=replace(run.output, text="x", token_ids=None, logprobs=None)), PLAIN) is None
    )


def test_the_yardstick_of_keys_grows_with_the_position() -> None:
    keys = np.random.default_rng(5).normal(0, 1, (ROWS, 2, 4))
    record = replace(PLAIN, stages={"k.0": keys}, stage_bands={"k.0": ArmError(1e-9, 1e-9)})
    by = 2 * float(np.finfo(np.float32).eps) * np.abs(keys).max(axis=(1, 2))  # of one position

    def off(row: int, positions: float) -> Suspect | None:
        wrong = keys.copy()
        wrong[row, 0, 0] += positions * by[row]
        return look(replace(answer(PLAIN), stages={"k.0": wrong.tolist()}), record)

    assert off(20, 19.0) is None
    found = off(20, 21.0)
    assert found is not None
    assert (found.stage, found.position) == ("k.0", 20)
    assert off(2, 19.0) is not None


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


def test_keys_of_a_layer_come_before_what_leaves_it() -> None:
    names = [
        "hidden.10",
        "hidden.1",
        "v.1",
        "k.1",
        "k.0",
        "positions",
        "embeddings",
        "deepstack.0",
        "vision.0",
    ]
    assert ordered_stages([*names, "pixels", "spans", "final", "logits"]) == [
        *("spans", "pixels", "vision.0", "deepstack.0", "embeddings", "positions"),
        *("k.0", "k.1", "v.1", "hidden.1", "hidden.10", "final"),
    ]


def test_what_a_prefix_hit_brought_is_compared_in_the_cache_only() -> None:
    rows = np.zeros((ROWS, 2, 4))
    record = replace(
        TRACED, stages={**STAGES, "k.0": rows}, stage_bands={**BANDS, "k.0": ArmError(1e-6, 4e-6)}
    )
    run = traced(hidden_0=(3, 1.0))
    assert run.output is not None
    run = replace(run, output=replace(run.output, num_cached_tokens=8))
    stale = rows.copy()
    stale[3] = 1.0
    assert look(replace(run, stages={**run.stages, "k.0": rows}), record) is None
    found = look(replace(run, stages={**run.stages, "k.0": stale}), record)
    assert found is not None
    assert (found.stage, found.position, found.token) == ("k.0", 3, record.prompt_token_ids[3])


def test_spans_and_the_embeddings_of_a_picture_follow_from_the_record() -> None:
    media = MediaRecord(({"rows": 3},), (SpanRecord(2, 3, 0, 0),), "P", "I")
    truth = truth_stages(replace(TRACED, media=media))
    assert truth["spans"].tolist() == [[2, 3, 0, 0]]
    assert np.array_equal(truth["vision.0"], STAGES["embeddings"][2:5].astype(np.float32))
    run = traced()
    moved = replace(run, stages={**run.stages, "spans": np.array([[1, 3, 0, 0]])})
    found = look(moved, replace(TRACED, media=media))
    assert found is not None
    assert (found.stage, found.size) == ("spans", None)


def test_the_table_holds_every_stage_and_which_are_outside() -> None:
    lines = {line.stage: line for line in stage_table(traced(hidden_3=(4, 1.0)), TRACED)}
    assert list(lines) == ordered_stages(STAGES)
    assert lines["positions"].size is None
    assert [name for name, line in lines.items() if not line.inside] == ["hidden.3"]


def test_two_runs_differ_where_their_bits_do() -> None:
    run = traced()
    assert differing_stage(run, traced()) is None
    found = differing_stage(run, traced(hidden_5=(6, 1e-12), hidden_7=(1, 1.0)))
    assert found is not None
    assert (found.stage, found.position) == ("hidden.5", 6)


def test_the_sampler_is_blamed_before_the_logits_that_follow_from_it() -> None:
    run = answer(PLAIN, choices={5: int(PLAIN.output.top_ids[5, 1])})
    found = look(shifted_logits(run, 6), PLAIN)
    assert found is not None
    assert (found.stage, found.position) == ("sampling", 5)


def test_causes_are_told_only_where_the_stage_is_known() -> None:
    found = look(shifted_logits(answer(PLAIN)), PLAIN)
    assert found is not None
    assert found.as_dict()["causes"] == []
    found = look(traced(hidden_3=(4, 1.0)))
    assert found is not None
    assert as_lines(found.as_dict())[1].startswith("usual causes: rope")
