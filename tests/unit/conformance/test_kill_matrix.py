"""The kill matrix on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from conformance.evidence import EVIDENCE
from conformance.kill_matrix import Row, committed, load, save

ROW = Row(
    id="area/b",
    about="x",
    origin="https://example.org",
    at="f: g",
    outcome="killed",
    fired=3,
    detected_by=("tokens_match_golden",),
    shown_by="area/scenario[a=1]",
    evidence="tokens",
    dtype="float32",
    needs=("stepped",),
    message="m",
)
OTHER = Row("area/a", "y", "first principles: z", "h: i", "survived", 1)


def test_rows_come_back_as_they_were_in_order_of_id(tmp_path: Path) -> None:
    save(tmp_path / "m.json", [ROW, OTHER])
    assert load(tmp_path / "m.json") == (OTHER, ROW)


def test_another_outcome_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "m.json", [ROW])
    text = (tmp_path / "m.json").read_text().replace('"killed"', '"wounded"')
    (tmp_path / "m.json").write_text(text)
    with pytest.raises(ValidationError):
        load(tmp_path / "m.json")


def test_in_the_committed_matrix_no_fault_survived_or_did_nothing() -> None:
    for row in committed():
        assert row.outcome in ("killed", "equivalent"), row.id
        assert row.fired > 0, row.id
        if row.outcome == "killed":
            assert row.detected_by, row.id
            assert row.evidence in (*EVIDENCE, "contract"), row.id
