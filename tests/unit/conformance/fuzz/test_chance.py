"""Cheap choices that are the same on every machine."""

from __future__ import annotations

from conformance.fuzz.chance import Chance


def test_the_same_seed_chooses_the_same() -> None:
    def choices(seed: int) -> list[object]:
        chance = Chance(seed)
        return [
            chance.below(9),
            chance.between(2, 5),
            chance.one_in(2),
            chance.pick("abc"),
            chance.tokens(3, 1, 4),
        ]

    assert choices(1) == choices(1)
    assert len({repr(choices(seed)) for seed in range(20)}) > 10


def test_choices_stay_within_their_bounds_and_reach_them() -> None:
    chance = Chance(0)
    assert {chance.below(3) for _ in range(200)} == {0, 1, 2}
    assert {chance.between(2, 4) for _ in range(200)} == {2, 3, 4}
    assert {chance.pick("ab") for _ in range(200)} == {"a", "b"}
    drawn = [chance.tokens(2, 1, 3) for _ in range(200)]
    assert {len(tokens) for tokens in drawn} == {1, 2, 3}
    assert {token for tokens in drawn for token in tokens} == {0, 1}
    assert 20 < sum(chance.one_in(4) for _ in range(200)) < 90
