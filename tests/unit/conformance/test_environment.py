"""A report tells what could have changed an answer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from conformance import EDITION
from conformance.environment import _cpu_name, describe_environment, shared_environment


def test_it_names_the_suite_and_the_versions_that_matter() -> None:
    facts = describe_environment()
    assert facts["suite"] == EDITION
    assert facts["numpy"] == np.__version__
    assert {"python", "system", "cpu", "cpus", "torch", "transformers"} <= set(facts)
    assert all(isinstance(value, str) and value for value in facts.values())


def test_it_tells_the_variables_that_are_set_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("MKL_CBWR", raising=False)
    facts = describe_environment()
    assert facts["OMP_NUM_THREADS"] == "3"
    assert "MKL_CBWR" not in facts


def test_a_package_that_is_not_there_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.environment._PACKAGES", ("no-such-package-anywhere",))
    assert describe_environment()["no-such-package-anywhere"] == "not installed"


def test_the_processor_is_read_where_linux_tells_it(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor\t: 0\nmodel name\t: Fast Chip 9000: turbo\n", encoding="utf-8")
    assert _cpu_name(info) == "Fast Chip 9000: turbo"
    assert _cpu_name(tmp_path / "absent")


def test_of_several_runs_it_tells_what_they_share_and_every_value_where_they_differ() -> None:
    one, other = {"cpu": "a", "torch": "2"}, {"cpu": "b", "torch": "2", "MKL_CBWR": "x"}
    assert shared_environment([one, other, one]) == {
        "cpu": "a | b",
        "torch": "2",
        "MKL_CBWR": "not told | x",
    }
    assert shared_environment([one]) == one
