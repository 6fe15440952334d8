"""Which vision embeddings are kept, within a budget of rows: bookkeeping, no tensors.

An item is encoded when a step first needs a row of it, is pinned for that step, and stays until
its room is needed. So one picture in several requests is encoded once, a prompt may be cut inside
a picture, and a preempted request finds its pictures again unless they had to go.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from minivllm.errors import CapacityError, InvariantError, RequestError
from minivllm.request import MediaItem, MediaSpan, Request
from minivllm.trace import Encoded, MediaEvicted, TraceSink, no_trace

__all__ = ["EncoderCache"]


@dataclass(frozen=True, slots=True)
class _Encoding:
    """An item that the step being planned encodes, and for whom first."""

    item: MediaItem
    request_id: str


class EncoderCache:
    """The scheduler asks `most_tokens`, then `claim`s; `committed` makes a plan's changes real.

    What is supplied as embeddings already (`MediaItem.is_supplied`) takes no room here.

    Args:
        budget: most rows kept at any time, those of the step included.
        trace: receives Encoded and MediaEvicted, when a step is committed.

    Attributes:
        num_encoded: items encoded so far, repetitions counted.
    """

    def __init__(self, budget: int, trace: TraceSink = no_trace) -> None:
        self.budget = budget
        self.num_encoded = 0
        self._trace = trace
        self._held: dict[str, int] = {}  # content hash → rows; the least recently used first
        self._users: dict[str, dict[str, Request]] = {}  # content hash → live requests
        self._stale: dict[str, None] = {}  # held, but of no use: encoded with other weights
        # Of the step being planned:
        self._pinned: dict[str, int] = {}
        self._to_encode: dict[str, _Encoding] = {}
        self._to_evict: dict[str, None] = {}

    @property
    def num_rows(self) -> int:
        """Rows held now."""
        return sum(self._held.values())

    @property
    def held(self) -> tuple[str, ...]:
        """Content hashes of what is held, the least recently used first."""
        return tuple(self._held)

    # --- requests come and go ---------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Refuse a request whose media cannot be served, before it is queued.

        Raises:
            CapacityError: an item has more rows than the whole budget.
            RequestError: spans that overlap, leave the prompt, or have no such rows.
        """
        end = 0
        for span in request.media:
            item = request.media_items.get(span.content_hash)
            if item is None:
                raise RequestError(f"request {request.request_id!r}: no media item belongs to {span}")
            last_row = span.first_row + span.length
            if span.length < 1 or span.first_row < 0 or last_row > item.num_embeddings:
                raise RequestError(
                    f"request {request.request_id!r}: {span} needs rows {span.first_row} to {last_row - 1} of"
                    f" an item with {item.num_embeddings}"
                )
            if span.start < end or span.end > request.num_prompt_tokens:
                raise RequestError(
                    f"request {request.request_id!r}: spans must be in order, apart, and within the"
                    f" {request.num_prompt_tokens} prompt tokens, got {span}"
                )
            end = span.end
            if not item.is_supplied and item.num_embeddings > self.budget:
                raise CapacityError(
                    f"request {request.request_id!r}: an {item.modality} of {item.num_embeddings} embeddings"
                    f" exceeds the encoder cache of {self.budget}; make it smaller or raise"
                    f" encoder_cache_embeddings to at least {item.num_embeddings}"
                )

    def check_whole(self, request: Request) -> None:
        """Refuse a prompt whose items do not fit together, if it must be computed in one step.

        Raises:
            CapacityError: with the numbers.
        """
        total = sum(item.num_embeddings for item in request.media_items.values() if not item.is_supplied)
        if total > self.budget:
            raise CapacityError(
                f"request {request.request_id!r}: its {len(request.media_items)} media items have {total}"
                f" embeddings, more than the encoder cache of {self.budget}, and enable_chunked_prefill is"
                f" off; turn it on or raise encoder_cache_embeddings to at least {total}"
            )

    def join(self, request: Request) -> None:
        """A request became live."""
        for content_hash, item in request.media_items.items():
            if not item.is_supplied:
                self._users.setdefault(content_hash, {})[request.request_id] = request

    def leave(self, request: Request) -> None:
        """It ended. What it used stays until its room is needed."""
        for content_hash in request.media_items:
            users = self._users.get(content_hash)
            if users is not None:
                users.pop(request.request_id, None)
                if not users:
                    del self._users[content_hash]

    def clear(self) -> None:
        """What is held came from other weights: the next plan evicts it, and encodes anew."""
        self._stale = dict.fromkeys(self._held)

    def forget(self) -> None:
        """What was held is gone already: everything is encoded anew."""
        self._held.clear()
        self._stale.clear()
        self.begin()

    # --- one step ---------------------------------------------------------------------------

    def begin(self) -> None:
        """A new plan begins; one that was not committed is given up."""
        self._pinned.clear()
        self._to_encode.clear()
        self._to_evict = dict(self._stale)

    def most_tokens(self, request: Request, start: int, num_tokens: int) -> int:
        """How many of the tokens from `start` on this step has room for. Changes nothing.

        The chunk ends before the first span whose item does not fit beside what is pinned.
        """
        extra: dict[str, int] = {}
        for span, item in _needed(request, start, start + num_tokens):
            if span.content_hash in self._pinned or span.content_hash in extra:
                continue
            extra[span.content_hash] = item.num_embeddings
            if sum(self._pinned.values()) + sum(extra.values()) > self.budget:
                return max(0, span.start - start)
        return num_tokens

    def claim(self, request: Request, start: int, num_tokens: int) -> None:
        """Pin what these tokens need; encode what is missing, and evict for it.

        Raises:
            InvariantError: there is no room; `most_tokens` was not asked.
        """
        missing = False
        for span, item in _needed(request, start, start + num_tokens):
            content_hash = span.content_hash
            if content_hash in self._pinned:
                continue
            self._pinned[content_hash] = item.num_embeddings
            if content_hash not in self._held or content_hash in self._to_evict:
                self._to_encode[content_hash] = _Encoding(item, request.request_id)
                missing = True
        while missing and self._planned_rows() > self.budget:
            victim = self._victim()
            if victim is None:
                raise InvariantError(f"law 'the encoder budget of {self.budget} is kept' is broken")
            self._to_evict[victim] = None

    def changes(self) -> tuple[tuple[MediaItem, ...], tuple[str, ...]]:
        """What the planned step encodes, and the content hashes it evicts before."""
        return tuple(e.item for e in self._to_encode.values()), tuple(self._to_evict)

    def committed(self) -> None:
        """The planned step was run."""
        for content_hash in self._to_evict:
            self._trace(MediaEvicted(content_hash, self._held.pop(content_hash)))
        for content_hash, encoding in self._to_encode.items():
            self._held[content_hash] = encoding.item.num_embeddings
            self.num_encoded += 1
            self._trace(Encoded(encoding.request_id, content_hash, encoding.item.num_embeddings))
        for content_hash in self._pinned:  # used just now
            self._held[content_hash] = self._held.pop(content_hash)
        self._stale = {h: None for h in self._stale if h not in self._to_evict}
        self._to_encode.clear()
        self._to_evict.clear()
        self._pinned.clear()

    def check_integrity(self, live: Container[str]) -> None:
        """Check that budget, step and the live requests (by id) agree.

        Raises:
            InvariantError: naming the broken law.
        """
        if self.num_rows > self.budget or self._planned_rows() > self.budget:
            raise InvariantError(
                f"law 'the encoder budget is kept' is broken: {self.num_rows} rows held,"
                f" {self._planned_rows()} planned, budget {self.budget}"
            )
        kept = (self._held.keys() - self._to_evict.keys()) | self._to_encode.keys()
        if not self._pinned.keys() <= kept:
            lost = sorted(self._pinned.keys() - kept)
            raise InvariantError(f"law 'what a step needs is cached or encoded' is broken: {lost}")
        if ended := [name for users in self._users.values() for name in users if name not in live]:
            raise InvariantError(f"law 'only live requests wait for media' is broken: {ended}")
        if not self._to_evict.keys() <= self._held.keys():
            raise InvariantError("law 'only what is held is evicted' is broken")

    def _planned_rows(self) -> int:
        """Rows held once the planned step is done."""
        kept = sum(rows for content_hash, rows in self._held.items() if content_hash not in self._to_evict)
        return kept + sum(e.item.num_embeddings for e in self._to_encode.values())

    def _victim(self) -> str | None:
        """What to evict: the least recently used of what no live request still has to compute, then
        the least recently used of the rest."""
        free = [h for h in self._held if h not in self._pinned and h not in self._to_evict]
        return next((h for h in free if not self._is_awaited(h)), free[0] if free else None)

    def _is_awaited(self, content_hash: str) -> bool:
        return any(
            span.content_hash == content_hash and request.num_computed_tokens < span.end
            for request in self._users.get(content_hash, {}).values()
            for span in request.media
        )


def _needed(request: Request, start: int, end: int) -> Iterator[tuple[MediaSpan, MediaItem]]:
    """Spans with a token in start … end - 1 whose rows come from the encoder, in order."""
    if not request.media or request.media[-1].end <= start:
        return  # nearly every step of every request
    for span in request.media:
        if span.start < end and span.end > start:
            item = request.media_items[span.content_hash]
            if not item.is_supplied:
                yield span, item
