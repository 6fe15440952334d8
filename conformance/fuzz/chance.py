"""Cheap random choices: what an example is made of, so that thousands fit into a second."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

__all__ = ["Chance"]

_T = TypeVar("_T")


class Chance:
    """Choices from one seed; the same seed chooses the same on every platform."""

    __slots__ = ("_random",)

    def __init__(self, seed: int) -> None:
        self._random = Random(seed).random

    def below(self, limit: int) -> int:
        """0 … limit - 1."""
        return int(self._random() * limit)

    def between(self, low: int, high: int) -> int:
        """low … high, both included."""
        return low + int(self._random() * (high - low + 1))

    def one_in(self, number: int) -> bool:
        return self._random() * number < 1.0

    def pick(self, items: Sequence[_T]) -> _T:
        return items[int(self._random() * len(items))]

    def tokens(self, vocabulary: int, low: int, high: int) -> tuple[int, ...]:
        """Between low and high token ids."""
        draw = self._random
        return tuple([int(draw() * vocabulary) for _ in range(low + int(draw() * (high - low + 1)))])
