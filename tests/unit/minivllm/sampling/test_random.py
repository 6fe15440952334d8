from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.sampling.random import uniform


def philox4x64(counter: list[int], key: list[int]) -> list[int]:
    """Ten rounds of Philox4x64, written from the paper."""
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
        counter = [
            (right >> 64) ^ counter[1] ^ key[0],
            right % 2**64,
            (left >> 64) ^ counter[3] ^ key[1],
            left % 2**64,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) % 2**64, (key[1] + 0xBB67AE8584CAA73B) % 2**64]
    return counter


def test_numbers_are_philox_of_seed_sequence_and_position() -> None:
    # The zero vector of the authors' known-answer tests (Random123, kat_vectors).
    assert philox4x64([0, 0, 0, 0], [0, 0])[0] == 0x16554D9ECA36314C
    for seed, position, sequence in [(0, 0, 0), (7, 123456, 0), (-5, 3, 2), (2**64 - 1, 2**31, 9)]:
        word = philox4x64([1, position, 0, 0], [seed % 2**64, sequence])[0]
        assert uniform(seed, position, sequence) == (word >> 11) / 2**53


def test_numbers_never_change_between_versions() -> None:
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0), uniform(7, 123456)] == [
        0.011546754286331562,
        0.21185954403345741,
        0.3035680343067586,
        0.6983837542973748,
    ]


@settings(deadline=None, max_examples=100)
@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 2**31), st.integers(0, 100))
def test_every_key_gives_one_number_below_one(seed: int, position: int, sequence: int) -> None:
    number = uniform(seed, position, sequence)
    assert 0 <= number < 1
    assert number == uniform(seed, position, sequence)


def test_seeds_are_taken_modulo_two_to_the_64() -> None:
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)


def test_seeds_positions_and_sequences_give_unrelated_numbers() -> None:
    by_key = np.array([[uniform(s, p, q) for p in range(40)] for s in (0, 1, 2**32) for q in range(4)])
    assert len(np.unique(by_key)) == by_key.size
    correlation = np.corrcoef(by_key) - np.eye(len(by_key))
    assert np.abs(correlation).max() < 0.55  # 66 pairs of 40 numbers: 3.4 standard deviations


def test_numbers_are_spread_evenly() -> None:
    numbers = [uniform(11, position) for position in range(4000)]
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    chi_square = float(((counts - 200) ** 2 / 200).sum())
    assert chi_square < 43.8  # 99.9 % point with 19 degrees of freedom
