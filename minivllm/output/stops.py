"""Stop strings in growing text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopStrings"]


class StopStrings:
    """Text that ends where a stop string is completed.

    Attributes:
        text: everything so far, cut at the stop string once one was found (after it, if it is
            to be kept in the output).

    A stop string may be spread over any number of tokens. The one completed first wins; of those
    completed by the same character, the first in the list.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool) -> None:
        self.text = ""
        self._stops = tuple(stops)
        self._include = include_in_output

    def push(self, piece: str, *, armed: bool = True) -> str | None:
        """Append text; returns the stop string it completes, if any.

        With `armed` false, stop strings completed by this piece are let through (min_tokens).
        """
        old_length = len(self.text)
        self.text += piece
        if not armed or not piece:
            return None
        ends: dict[str, int] = {}  # where each was first completed, in list order
        for stop in self._stops:
            at = self.text.find(stop, max(0, old_length - len(stop) + 1))
            if at >= 0:
                ends[stop] = at + len(stop)
        if not ends:
            return None
        found, end = min(ends.items(), key=lambda item: item[1])
        self.text = self.text[: end if self._include else end - len(found)]
        return found

    def visible(self) -> str:
        """The text that no stop string can still take back."""
        return self.text[: len(self.text) - self._held_back()]

    def _held_back(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        if self._include:
            return 0
        return max((_overlap(self.text, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
