"""What a fault's row says, for faults made up here."""

from __future__ import annotations

import pytest

from conformance.faults import Fault, Seam
from conformance.faults.laboratory import FaultError, Laboratory
from minivllm.cache import BlockManager
from minivllm.sampling.sampler import Sampler

ONE_TOKEN = "scheduling/one-token"


@pytest.fixture(scope="module")
def laboratory() -> Laboratory:
    return Laboratory()


def fault(plant: object, *shown_by: str, detector: str = "tokens_match_golden", **more: object) -> Fault:
    return Fault("area/x", "a", "first principles: b", "c: d", detector, shown_by, plant, **more)  # type: ignore[arg-type]


def lowest_id(seam: Seam) -> None:
    """Greedy answers are id 5."""

    def largest(self: Sampler, logits: object) -> object:
        seam.fire()
        values, greedy = genuine(self, logits)
        return values, [5] * len(greedy)

    genuine = seam.set(Sampler, "_largest", largest)


def harmless(seam: Seam) -> None:
    seam.set(BlockManager, "stats", property(lambda _: seam.fire()))


def test_a_fault_that_shows_in_tokens_is_killed_by_tokens(laboratory: Laboratory) -> None:
    row = laboratory.judge(fault(lowest_id, ONE_TOKEN))
    assert (row.outcome, row.evidence, row.dtype, row.shown_by) == ("killed", "tokens", "float32", ONE_TOKEN)
    assert row.detected_by[0] == "tokens_match_golden"
    assert row.fired > 0
    assert "truth" in row.message


def test_the_next_scenario_is_tried_when_one_does_not_show_it(laboratory: Laboratory) -> None:
    row = laboratory.judge(fault(lowest_id, "streaming/emoji-and-cjk", ONE_TOKEN))
    assert (row.outcome, row.shown_by) == ("killed", ONE_TOKEN)


def test_a_fault_that_does_nothing_has_not_fired(laboratory: Laboratory) -> None:
    assert laboratory.judge(fault(lambda _: None, ONE_TOKEN)).outcome == "not fired"


def test_a_fault_that_fires_and_changes_nothing_survives(laboratory: Laboratory) -> None:
    def fires(seam: Seam) -> None:
        genuine = seam.set(BlockManager, "free", lambda *a: (seam.fire(), genuine(*a)))

    row = laboratory.judge(fault(fires, ONE_TOKEN))
    assert (row.outcome, row.detected_by, row.fired > 0) == ("survived", (), True)
    argued = laboratory.judge(fault(fires, ONE_TOKEN, equivalent="nothing is changed"))
    assert (argued.outcome, argued.message) == ("equivalent", "nothing is changed")


def test_an_argument_does_not_help_where_outputs_differ(laboratory: Laboratory) -> None:
    assert laboratory.judge(fault(lowest_id, ONE_TOKEN, equivalent="it is not")).outcome == "survived"


def test_the_fuzzer_needs_the_contract(laboratory: Laboratory) -> None:
    def leaks(seam: Seam) -> None:
        seam.set(BlockManager, "free", lambda *_: seam.fire())

    row = laboratory.judge(fault(leaks, "fuzz:allocator", detector="fuzz"))
    assert (row.outcome, row.evidence, row.detected_by) == ("killed", "contract", ("fuzz",))


@pytest.mark.parametrize(
    ("spelling", "message"),
    [
        ("scheduling/none", "neither a scenario"),
        ("scheduling/fragmented-pool[model=tiny-glm]", "no such point"),
        ("fuzz:gpu", "neither a scenario"),
    ],
)
def test_what_cannot_be_run_is_named(laboratory: Laboratory, spelling: str, message: str) -> None:
    with pytest.raises(FaultError, match=message):
        laboratory.judge(fault(harmless, spelling))


def test_a_point_is_chosen_by_its_values(laboratory: Laboratory) -> None:
    case = laboratory.case("fork/copy-on-write[block_size=16]")
    assert case.point["block_size"] == 16
