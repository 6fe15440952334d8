"""Faults are put in, counted and taken out again."""

from __future__ import annotations

import pytest

from conformance.faults import Fault, Seam, planted


class Engine:
    unit = 1

    def step(self) -> int:
        return self.unit

    @staticmethod
    def twice(x: int) -> int:
        return 2 * x


def fault(plant: object) -> Fault:
    return Fault("area/words", "a", "https://example.org", "Engine.step: x", "history", ("s",), plant)  # type: ignore[arg-type]


def test_a_fault_lasts_as_long_as_its_block_and_counts_what_it_did() -> None:
    def plant(seam: Seam) -> None:
        def step(self: Engine) -> int:
            seam.fire()
            seam.fire(False)
            return int(genuine(self)) + 1

        genuine = seam.set(Engine, "step", step)

    before = vars(Engine)["step"]
    with planted(fault(plant)) as seam:
        assert Engine().step() == 2
        assert Engine().step() == 2
    assert seam.fired == 2
    assert vars(Engine)["step"] is before


def test_it_is_taken_out_when_the_block_or_the_planting_fails() -> None:
    def plant(seam: Seam) -> None:
        seam.set(Engine, "unit", 5)
        seam.set(Engine, "unit", 6)
        if Engine.unit == broken:
            raise ValueError("while planting")

    for broken in (6, 0):  # noqa: B007 - `plant` reads it
        with pytest.raises(ValueError, match="while"), planted(fault(plant)):
            raise ValueError("while running")
        assert Engine.unit == 1


def test_a_seam_that_is_not_there_is_an_error() -> None:
    with pytest.raises(AttributeError):
        Seam().set(Engine, "stepp", None)


def test_a_static_method_stays_one() -> None:
    seam = Seam()
    genuine = seam.set(Engine, "twice", staticmethod(lambda x: 3 * x))
    assert (genuine(2), Engine.twice(2), Engine().twice(2)) == (4, 6, 6)
    seam.restore()
    assert Engine().twice(2) == 4


def test_the_area_is_the_first_part_of_the_id() -> None:
    assert fault(None).area == "area"
