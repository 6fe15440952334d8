"""Deterministic synthetic prompts of an exact number of tokens, built from small pieces.

Token ids come from SHA-256 of a counter, so a prompt is the same on every machine and in every
version of Python and NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = ["Piece", "filler_prompt", "generate_prompt"]

_Count = Annotated[int, Field(ge=1)]
_Id = Annotated[int, Field(ge=0)]
_Ids = Annotated[list[_Id], Field(min_length=1)]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _Drawn(_Closed):
    """`length` ids from [low, high), chosen by `seed`."""

    length: _Count
    seed: int
    low: _Id
    high: _Count

    @model_validator(mode="after")
    def _range_is_not_empty(self) -> _Drawn:
        if self.high <= self.low:
            raise ValueError(f"high must exceed low, got low {self.low} and high {self.high}")
        return self


class RandomPiece(_Drawn):
    """Ids drawn from the range; repeats occur."""

    kind: Literal["random"]

    def token_ids(self) -> list[int]:
        return [self.low + _number(self.seed, i) % (self.high - self.low) for i in range(self.length)]


class DistinctPiece(_Drawn):
    """Different ids of the range, in shuffled order."""

    kind: Literal["distinct"]

    @model_validator(mode="after")
    def _range_is_long_enough(self) -> DistinctPiece:
        if self.high - self.low < self.length:
            raise ValueError(f"[{self.low}, {self.high}) has no {self.length} distinct ids")
        return self

    def token_ids(self) -> list[int]:
        order = sorted(range(self.low, self.high), key=lambda i: _number(self.seed, i))
        return order[: self.length]


class RepeatPiece(_Closed):
    """`ids` again and again, cut at `length`."""

    kind: Literal["repeat"]
    ids: _Ids
    length: _Count

    def token_ids(self) -> list[int]:
        return [self.ids[i % len(self.ids)] for i in range(self.length)]


class IdsPiece(_Closed):
    """Exactly `ids`."""

    kind: Literal["ids"]
    ids: _Ids

    def token_ids(self) -> list[int]:
        return list(self.ids)


#: One stretch of a synthetic prompt.
Piece = Annotated[RandomPiece | DistinctPiece | RepeatPiece | IdsPiece, Field(discriminator="kind")]


def generate_prompt(
    pieces: Sequence[RandomPiece | DistinctPiece | RepeatPiece | IdsPiece],
) -> tuple[int, ...]:
    """The pieces' ids, one after the other."""
    return tuple(token for piece in pieces for token in piece.token_ids())


def filler_prompt(number: int, length: int) -> tuple[int, ...]:
    """Prompt of the `number`-th neighbour request; ids 3 … 31 exist in every vocabulary."""
    return tuple(3 + _number(number, i) % 29 for i in range(length))


def _number(seed: int, counter: int) -> int:
    return int.from_bytes(sha256(f"{seed}:{counter}".encode()).digest()[:8], "big")
