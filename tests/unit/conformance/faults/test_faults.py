"""The table of faults as a whole; what finds each is judged by `nox -s faults`."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from conformance.checks import CHECKS
from conformance.faults import FAULTS, Fault, planted
from conformance.faults.laboratory import FUZZ, Laboratory
from conformance.kill_matrix import committed


@pytest.fixture(scope="module")
def laboratory() -> Laboratory:
    return Laboratory()


def test_ids_are_unique_and_no_two_share_patch_point_and_detector() -> None:
    assert max(Counter(fault.id for fault in FAULTS).values()) == 1
    assert max(Counter((fault.at, fault.detector) for fault in FAULTS).values()) == 1


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_a_fault_says_what_it_is_whence_and_who_should_find_it(fault: Fault, laboratory: Laboratory) -> None:
    assert re.fullmatch(r"[a-z0-9-]+/[a-z0-9-]+", fault.id)
    assert fault.about.endswith(".")
    assert fault.origin.startswith(("https://", "first principles: "))
    assert ": " in fault.at
    assert fault.detector in (*CHECKS, "history", "fuzz")
    assert fault.shown_by
    for spelling in fault.shown_by:
        assert spelling in FUZZ or laboratory.case(spelling)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_planting_alone_fires_nothing(fault: Fault) -> None:
    with planted(fault) as seam:
        assert seam.fired == 0


def test_the_committed_matrix_is_of_these_faults() -> None:
    told = {row.id: (row.about, row.origin, row.at) for row in committed()}
    assert told == {fault.id: (fault.about, fault.origin, fault.at) for fault in FAULTS}, (
        "make it anew: conformance faults --json conformance/faults/matrix.json"
    )
