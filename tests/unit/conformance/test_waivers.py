"""Waivers: closed format, scope, expiry. What they do to verdicts is `conformance.suite`'s."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pytest

from conformance.waivers import Waiver, WaiverError, load_waivers

TODAY = datetime.date(2026, 6, 1)
GOOD = """\
- scenario: prefix-cache/image
  reason: known
  issue: https://example.org/1
  expiry: 2027-01-31
  scope: {device: cpu, block_size: 16}
"""


def read(tmp_path: Path, text: str, today: datetime.date = TODAY) -> list[Waiver]:
    path = tmp_path / "waivers.yaml"
    path.write_text(text, encoding="utf-8")
    return load_waivers(path, today)


def waiver(scenario: str = "a/b", **scope: Any) -> Waiver:
    return Waiver(scenario, scope, "known", "#1", datetime.date(2027, 1, 31), 1)


def test_a_good_file_is_read(tmp_path: Path) -> None:
    [one] = read(tmp_path, "# a comment\n" + GOOD)
    assert one == Waiver(
        "prefix-cache/image",
        {"device": "cpu", "block_size": 16},
        "known",
        "https://example.org/1",
        datetime.date(2027, 1, 31),
        2,
    )


def test_an_empty_file_waives_nothing(tmp_path: Path) -> None:
    assert read(tmp_path, "[]\n") == []
    assert read(tmp_path, "# none\n") == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\n", "list"),
        ("- prefix-cache/image\n", "dictionary"),
        (GOOD.replace("reason", "reson"), "reson"),
        (GOOD.replace("  issue: https://example.org/1\n", ""), "issue"),
        (GOOD.replace("  expiry: 2027-01-31\n", ""), "expiry"),
        (GOOD.replace("2027-01-31", "soon"), "2027-01-31, not 'soon'"),
        (GOOD.replace("2027-01-31", "20270131"), "expiry"),
        (GOOD.replace("reason: known", "reason: '  '"), "reason"),
        (GOOD.replace("{device: cpu, block_size: 16}", "cpu"), "scope"),
        (GOOD + GOOD, ":6: prefix-cache/image is waived in line 1 already"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(WaiverError) as caught:
        read(tmp_path, text)
    assert words in str(caught.value)
    assert "waivers.yaml:" in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WaiverError):
        load_waivers(tmp_path / "none.yaml")


def test_all_problems_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(WaiverError) as caught:
        read(tmp_path, GOOD.replace("reason: known\n  ", "") + GOOD.replace("expiry: 2027-01-31\n  ", ""))
    assert len(str(caught.value).splitlines()) == 2


def test_a_waiver_holds_on_its_last_day_and_is_an_error_from_the_next(tmp_path: Path) -> None:
    last = datetime.date(2027, 1, 31)
    assert len(read(tmp_path, GOOD, last)) == 1
    with pytest.raises(WaiverError) as caught:
        read(tmp_path, GOOD, last + datetime.timedelta(days=1))
    assert "waivers.yaml:1: the waiver of prefix-cache/image expired on 2027-01-31" in str(caught.value)
    assert "https://example.org/1" in str(caught.value)


def test_without_a_day_today_counts(tmp_path: Path) -> None:
    path = tmp_path / "waivers.yaml"
    path.write_text(GOOD.replace("2027-01-31", "2001-01-01"), encoding="utf-8")
    with pytest.raises(WaiverError):
        load_waivers(path)


@pytest.mark.parametrize(
    ("pattern", "scenario", "covered"),
    [("a/b", "a/b", True), ("a/*", "a/b", True), ("a/*", "b/b", False), ("a/b", "a/bc", False)],
)
def test_a_waiver_names_scenarios_by_id_or_pattern(pattern: str, scenario: str, covered: bool) -> None:
    assert waiver(pattern).covers(scenario, {}) is covered
    assert waiver(pattern).names(["z/z", scenario]) is covered


@pytest.mark.parametrize(
    ("scope", "covered"),
    [
        ({}, True),
        ({"device": "cpu"}, True),
        ({"device": "cpu", "block_size": 16}, True),
        ({"device": "cuda"}, False),
        ({"device": "cpu", "block_size": 4}, False),
        ({"nothing": 1}, False),
    ],
)
def test_every_value_of_the_scope_must_be_the_points(scope: dict[str, Any], covered: bool) -> None:
    assert waiver(**scope).covers("a/b", {"device": "cpu", "block_size": 16}) is covered
