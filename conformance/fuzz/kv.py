"""Fake KV: the value stored for a token is chained over its whole prefix.

A read of any wrong slot is therefore seen at once, and it would change every token sampled later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol
from zlib import crc32

from conformance.contracts.base import Copy, Moves, Tags
from conformance.fuzz.laws import broken

__all__ = ["KVMemory", "ListMemory", "Story", "move", "move_some"]

_MASK = (1 << 61) - 1
_MULTIPLIER = 6364136223846793005
_TOKEN = 1442695040888963407


class Story:
    """What one sequence has to hold: its tokens and, for each, the value its KV must have.

    Attributes:
        tokens: prompt, then generated tokens.
        values: chained over all tokens up to the same index, and over the tags.
        index: number of the sequence among those sampled from one prompt.
    """

    __slots__ = ("_rows", "index", "tags", "tokens", "values")

    def __init__(self, tokens: Sequence[int], tags: Tags = Tags(), index: int = 0) -> None:  # noqa: B008 # frozen
        self.tokens: list[int] = []
        self.values: list[int] = []
        self.tags = tags
        self.index = index
        self._rows = {
            span.start + i: (i + 1) * 8191 + crc32(span.content.encode()) * 127
            for span in tags.spans
            for i in range(span.length)
        }
        for token in tokens:
            self.append(token)

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, token: int) -> None:
        if self.values:
            value = self.values[-1]
        else:
            value = 1 if self.tags.salt is None else 2 + sum(self.tags.salt.encode())
        row = self._rows.get(len(self.tokens), 0) if self._rows else 0
        self.tokens.append(token)
        self.values.append((value * _MULTIPLIER + token * _TOKEN + row * 97 + 11) & _MASK)

    def next_token(self, vocabulary: int) -> int:
        """The token sampled after the last one: a function of everything before it."""
        return ((self.values[-1] >> 23) + self.index * 7) % vocabulary

    def branch(self, num_tokens: int, index: int) -> Story:
        """Another sequence with the same first tokens."""
        other = Story((), self.tags, index)
        other._rows = self._rows
        other.tokens = self.tokens[:num_tokens]
        other.values = self.values[:num_tokens]
        return other


class KVMemory(Protocol):
    """Where values are kept, by slot (block * block_size + offset); None where nothing is."""

    def write(self, slots: Sequence[int], values: Sequence[int | None]) -> None: ...
    def read(self, slots: Sequence[int]) -> list[int | None]: ...
    def poison(self, blocks: Iterable[int]) -> None:
        """Nothing is in these blocks any more."""

    def swap_out(self, copies: Sequence[Copy]) -> None: ...
    def swap_in(self, copies: Sequence[Copy]) -> None: ...
    def copy(self, copies: Sequence[Copy]) -> None: ...


class ListMemory:
    """KV memory as a dictionary per pool; a step of a fuzz run costs microseconds with it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.device: dict[int, int] = {}
        self._host: dict[int, list[int | None]] = {}

    def write(self, slots: Sequence[int], values: Sequence[int | None]) -> None:
        for slot, value in zip(slots, values, strict=True):
            if value is None:
                self.device.pop(slot, None)
            else:
                self.device[slot] = value

    def read(self, slots: Sequence[int]) -> list[int | None]:
        return [self.device.get(slot) for slot in slots]

    def poison(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            for slot in self._slots(block):
                self.device.pop(slot, None)

    def swap_out(self, copies: Sequence[Copy]) -> None:
        self._host.update({c.target: self.read(self._slots(c.source)) for c in copies})

    def swap_in(self, copies: Sequence[Copy]) -> None:
        nothing: list[int | None] = [None] * self.block_size
        for c in copies:
            self.write(self._slots(c.target), self._host.get(c.source, nothing))

    def copy(self, copies: Sequence[Copy]) -> None:
        for c, values in [(c, self.read(self._slots(c.source))) for c in copies]:
            self.write(self._slots(c.target), values)

    def _slots(self, block: int) -> range:
        return range(block * self.block_size, (block + 1) * self.block_size)


def move(memory: KVMemory, moves: Moves) -> None:
    """Carry out the copies of one step in their order.

    Raises:
        LawBroken: the result would depend on the order inside one list.
    """
    move_some(memory, moves, None)


def move_some(memory: KVMemory, moves: Moves, most: int | None) -> int:
    """Carry out the first `most` copies alone (None: all). Returns how many of the three lists are done.

    Raises:
        LawBroken: as for `move`.
    """
    left = most
    lists = (("swap_out", moves.swap_out), ("swap_in", moves.swap_in), ("copies", moves.copies))
    for done, (name, whole) in enumerate(lists):
        if not whole:
            continue
        copies = whole[:left]
        targets = {c.target for c in copies}
        if len(targets) != len(copies):
            broken("copies", f"{name} writes a block twice: {copies}")
        if name == "copies" and not targets.isdisjoint(c.source for c in copies):
            broken("copies", f"a source is also a target: {copies}")
        getattr(memory, {"copies": "copy"}.get(name, name))(copies)
        if len(copies) < len(whole):
            return done
        if left is not None:
            left -= len(copies)
    return len(lists)
