"""Requests for several sequences: which ids belong together, and which of them are live."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field, replace

from minivllm.errors import DuplicateRequest
from minivllm.request import Request, sequence_ids

__all__ = ["SequenceGroups", "forks_when_it_samples", "make_child"]


def forks_when_it_samples(request: Request) -> bool:
    """Whether the request still stands for all of its n sequences: none has a token yet."""
    return request.sampling.n > 1 and request.parent_id is None and request.num_output_tokens == 0


def make_child(parent: Request, sequence_index: int) -> Request:
    """Sequence `sequence_index` of a request, with the history the parent has now.

    It counts as admitted when its parent was: what it finds in the prefix cache later is no hit
    of the user's request.
    """
    return replace(
        parent,
        request_id=sequence_ids(parent.request_id, parent.sampling.n)[sequence_index],
        token_ids=list(parent.token_ids),
        num_preemptions=0,
        parent_id=parent.request_id,
        sequence_index=sequence_index,
    )


@dataclass(slots=True)
class _Group:
    parent: Request
    live: dict[str, Request] = field(default_factory=dict)


class SequenceGroups:
    """The live groups. Requests with n = 1 are in none.

    All n ids of a group are taken as long as any of its sequences is live.
    """

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}  # by any of a group's ids

    def refuse_taken(self, request: Request, live: Container[str]) -> None:
        """Refuse a new request if one of its ids is in use, by a request or by a sequence.

        Raises:
            DuplicateRequest: naming the id.
        """
        for request_id in sequence_ids(request.request_id, request.sampling.n):
            if request_id in live or request_id in self._groups:
                raise DuplicateRequest(
                    f"request id {request_id!r} is in use by a live request; choose another"
                )

    def open(self, request: Request) -> None:
        """Follow a new request, if it is one for several sequences."""
        if request.sampling.n > 1:
            group = _Group(request, {request.request_id: request})
            for request_id in sequence_ids(request.request_id, request.sampling.n):
                self._groups[request_id] = group

    def join(self, child: Request) -> None:
        """A sequence other than the first became live."""
        self._groups[child.request_id].live[child.request_id] = child

    def leave(self, request_id: str) -> None:
        """A request ended; with the last sequence its group's ids are free again."""
        group = self._groups.get(request_id)
        if group is None:
            return
        del group.live[request_id]
        if not group.live:
            parent = group.parent
            for taken in sequence_ids(parent.request_id, parent.sampling.n):
                del self._groups[taken]

    def all_of(self, request_id: str) -> tuple[Request, list[Request]] | None:
        """Sequence 0 and the live sequences of the live group with this (first) id, or None."""
        group = self._groups.get(request_id)
        if group is None or group.parent.request_id != request_id:
            return None
        return group.parent, list(group.live.values())
