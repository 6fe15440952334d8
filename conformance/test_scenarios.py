"""The scenarios as tests, for `pytest --pyargs conformance`; see `conformance.pytest_plugin`."""

from __future__ import annotations

from collections.abc import Callable

from conformance.suite import Case

__all__ = ["test_scenario"]


def test_scenario(conformance_case: Case, judge_case: Callable[[Case], None]) -> None:
    """The engine does what the scenario demands."""
    judge_case(conformance_case)
