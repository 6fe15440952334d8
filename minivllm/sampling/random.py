"""Random numbers that depend on nothing but their key."""

from __future__ import annotations

import numpy as np

__all__ = ["uniform"]


def uniform(seed: int, position: int, sequence_index: int = 0) -> float:
    """A number in [0, 1) with 53 random bits, a pure function of its arguments.

    Philox4x64-10 (Salmon et al., SC 2011): the key is (seed, sequence_index), the counter holds
    the position. Asking again, in another order or in another batch gives the same number.

    Args:
        seed: the request's seed; taken modulo 2**64.
        position: generated position, from 0.
        sequence_index: which of the sequences of one prompt.
    """
    generator = np.random.Philox(
        key=np.array([seed % 2**64, sequence_index], dtype=np.uint64),
        counter=np.array([0, position, 0, 0], dtype=np.uint64),
    )
    return float(int(generator.random_raw()) >> 11) * 2.0**-53
