"""The model of an encoder cache: judges what a step encodes and evicts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from conformance.contracts.base import Span
from conformance.fuzz.laws import broken

__all__ = ["MediaLedger"]


class MediaLedger:
    """Which images have embeddings now, by the plans that were carried out.

    An image has as many rows as each of its spans has positions.

    Args:
        budget: most rows at any time.
        seen: counts what the example reached.
    """

    def __init__(self, budget: int, seen: Counter[str]) -> None:
        self.budget = budget
        self._seen = seen
        self._rows: dict[str, int] = {}
        self._held: set[str] = set()
        self._planned: set[str] = set()
        self._ever: set[str] = set()

    def know(self, spans: Iterable[Span]) -> None:
        """Images of a request that was accepted."""
        self._rows.update((span.content, span.length) for span in spans)

    def judge(
        self,
        encode: Sequence[str],
        evict: Sequence[str],
        chunks: Iterable[tuple[Sequence[Span], int, int]],
    ) -> None:
        """A plan: what it encodes and evicts, and (spans, start, end) of each row.

        Raises:
            LawBroken: law "encoder".
        """
        if gone := set(evict) - self._held:
            broken("encoder", f"{sorted(gone)} are evicted, but not held")
        held = self._held - set(evict)
        if len(set(encode)) != len(encode) or not held.isdisjoint(encode):
            broken("encoder", f"{list(encode)} are encoded, {sorted(held)} are held already")
        held |= set(encode)
        total = sum(self._rows[content] for content in held)
        if total > self.budget:
            broken("encoder", f"{total} rows of {sorted(held)}, at most {self.budget} are allowed")
        needed: Counter[str] = Counter()
        for spans, start, end in chunks:
            touched = [s for s in spans if s.start < end and s.start + s.length > start]
            needed.update({span.content for span in touched})
            self._seen["chunk inside an image"] += any(s.start + s.length > end for s in touched)
        if lost := needed.keys() - held:
            broken("encoder", f"{sorted(lost)} are needed, but neither held nor encoded")
        if idle := set(encode) - needed.keys():
            broken("encoder", f"{sorted(idle)} are encoded, but no row needs them")
        self._seen["image encoded"] += len(encode)
        self._seen["image encoded again"] += len(self._ever & set(encode))
        self._seen["image evicted"] += len(evict)
        self._seen["image shared in a step"] += any(count > 1 for count in needed.values())
        self._planned = held

    def carried_out(self) -> None:
        """The judged plan was carried out."""
        self._ever |= self._planned
        self._held = self._planned

    def forget(self) -> None:
        """A step broke off: nothing is held any more."""
        self._held = set()
