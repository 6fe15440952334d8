"""The queue of requests that wait for room."""

from __future__ import annotations

import heapq
from typing import TypeAlias

__all__ = ["Ticket", "WaitingQueue"]

#: A request's place in the order of service: smaller is served earlier. Unique per request.
Ticket: TypeAlias = tuple[int, ...]


class WaitingQueue:
    """Request ids, the smallest ticket first.

    `push`, `pop` and `remove` take O(log n), amortised, and `first` O(1): a long queue does not
    slow a step down. A removed entry stays in the heap until it surfaces, or until such entries
    are the majority.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[Ticket, str]] = []
        self._tickets: dict[str, Ticket] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._tickets

    def push(self, ticket: Ticket, request_id: str) -> None:
        """Queue a request that is not queued."""
        self._tickets[request_id] = ticket
        heapq.heappush(self._heap, (ticket, request_id))

    def first(self) -> str | None:
        """The request to serve next, or None."""
        return self._heap[0][1] if self._heap else None

    def pop(self) -> str:
        """Take out the request to serve next."""
        _, request_id = heapq.heappop(self._heap)
        del self._tickets[request_id]
        self._drop_stale()
        return request_id

    def remove(self, request_id: str) -> None:
        """Take out a queued request, wherever it stands."""
        del self._tickets[request_id]
        self._drop_stale()

    def _drop_stale(self) -> None:
        if len(self._heap) > 2 * len(self._tickets):
            self._heap = [(ticket, request_id) for request_id, ticket in self._tickets.items()]
            heapq.heapify(self._heap)
        while self._heap and self._tickets.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
