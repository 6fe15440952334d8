"""What an engine's events tell of a pass: what ran in each step, and who held which block.

Blocks are those held at the moment a step was planned. Events are the engine's own
(`conformance.adapters.base.Traced`); an engine that tells none has no timeline.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from conformance.adapters.base import PoolState
from conformance.history import Pass

__all__ = ["MOST_BLOCKS", "MOST_STEPS", "BlockSpan", "Chunk", "Timeline", "timeline_of"]

#: What is kept of a long pass: the first steps, and the first blocks that were used.
MOST_STEPS = 120
MOST_BLOCKS = 96

#: Events that the engine tells after a step was computed; the others come while it plans the next one.
_AFTER = frozenset({"encoded", "media_evicted", "forked", "finished", "failed"})


class Chunk(NamedTuple):
    """Tokens of one request in one step: `request` is its place in `Timeline.requests`."""

    request: int
    start: int
    tokens: int


class BlockSpan(NamedTuple):
    """Who held a block, from step `first` to step `last`; nobody: it lay in the prefix cache."""

    block: int
    first: int
    last: int
    holders: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """One pass.

    Attributes:
        of: the pass: "free", or the arm of a same_under check.
        requests: in the order in which they appear.
        steps: chunks of each step; at most `MOST_STEPS`.
        notes: (step, what happened), for what is no mere scheduling.
        spans: by block, then by step; blocks that were never used have none.
        num_steps, num_blocks: of the whole pass.
    """

    of: str
    requests: tuple[str, ...]
    steps: tuple[tuple[Chunk, ...], ...]
    notes: tuple[tuple[int, str], ...]
    spans: tuple[BlockSpan, ...]
    num_steps: int
    num_blocks: int
    pool_before: PoolState | None
    pool_after: PoolState | None


def timeline_of(one: Pass) -> Timeline | None:
    """The timeline of a pass; None if it holds no step.

    Raises KeyError, TypeError or ValueError for events that lack what their kind has.
    """
    replay = _Replay()
    for event in one.events:
        replay.see(event)
    if not replay.steps:
        return None
    spans = list(_spans(replay.owners))
    blocks = sorted({span.block for span in spans})
    shown = frozenset(blocks[:MOST_BLOCKS])
    return Timeline(
        of=one.name,
        requests=tuple(replay.requests),
        steps=tuple(replay.steps[:MOST_STEPS]),
        notes=tuple(note for note in replay.notes if note[0] < MOST_STEPS),
        spans=tuple(span for span in spans if span.block in shown),
        num_steps=len(replay.steps),
        num_blocks=len(blocks),
        pool_before=one.pool_before,
        pool_after=one.pool_after,
    )


class _Replay:
    """The events once more, with a block table per request."""

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        self.steps: list[tuple[Chunk, ...]] = []
        self.notes: list[tuple[int, str]] = []
        #: Per step shown: block → who held it.
        self.owners: list[dict[int, tuple[int, ...]]] = []
        self._tables: dict[int, list[int]] = {}
        self._cached: set[int] = set()

    def see(self, event: Mapping[str, Any]) -> None:
        kind = str(event.get("event"))
        if kind == "planned":
            self._plan(event)
            return
        note = self._apply(kind, event)
        if note is not None:
            step = len(self.steps) - (1 if kind in _AFTER and self.steps else 0)
            self.notes.append((step, note))

    def _plan(self, event: Mapping[str, Any]) -> None:
        chunks = [
            Chunk(self._number(name), int(start), int(size)) for name, start, size in event["scheduled"]
        ]
        self.steps.append(tuple(chunks))
        if len(self.owners) == MOST_STEPS:
            return
        held: dict[int, list[int]] = {}
        for request, table in self._tables.items():
            for block in table:
                held.setdefault(block, []).append(request)
        cached = {block: () for block in self._cached if block not in held}
        self.owners.append({**cached, **{block: tuple(sorted(set(who))) for block, who in held.items()}})

    def _apply(self, kind: str, event: Mapping[str, Any]) -> str | None:
        """Change the tables as the event says; returns what it says in words, if that is worth a note."""
        if kind == "evicted":
            self._cached.discard(int(event["block_id"]))
            return f"block {event['block_id']} leaves the prefix cache"
        if kind == "published":
            self._cached.add(int(event["block_id"]))
            return None
        if kind == "media_evicted":
            return f"the encoder cache drops {event['num_embeddings']} embeddings"
        if "request_id" not in event:
            return None
        name = str(event["request_id"])
        request = self._number(name)
        table = self._tables.setdefault(request, [])
        if kind == "allocated":
            table += [int(block) for block in event["block_ids"]]
            return None
        if kind == "prefix_hit":
            table[:] = [int(block) for block in event["block_ids"]]
            return f"{name} reuses {event['num_tokens']} tokens" if event["num_tokens"] else None
        if kind == "copied":
            source, target = int(event["source"]), int(event["target"])
            table[:] = [target if block == source else block for block in table]
            return f"{name} writes, so block {source} is copied to {target}"
        if kind == "forked":
            table[:] = [int(block) for block in event["block_ids"]]
            return f"{name} begins as a copy of {event['parent_id']}"
        if kind in ("preempted", "finished", "aborted", "failed"):
            self._tables.pop(request)
        return _WORDS[kind](name, event) if kind in _WORDS else None

    def _number(self, name: Any) -> int:
        return self.requests.setdefault(str(name), len(self.requests))


_WORDS: Mapping[str, Callable[[str, Mapping[str, Any]], str]] = {
    "preempted": lambda name, e: (
        f"{name} is preempted ({e.get('mode', 'mode unknown')}"
        + (", no room to swap)" if e.get("fallback") else ")")
    ),
    "swapped_out": lambda name, e: f"{name} moves {e['num_blocks']} blocks to the host",
    "swapped_in": lambda name, e: f"{name} brings {e['num_blocks']} blocks back",
    "encoded": lambda name, e: f"{name}: a picture becomes {e['num_embeddings']} embeddings",
    "finished": lambda name, e: f"{name} ends ({e.get('reason', 'reason unknown')})",
    "aborted": lambda name, _: f"{name} is aborted",
    "failed": lambda name, e: f"{name} fails: {e.get('message', '')}",
}


def _spans(owners: Iterable[Mapping[int, tuple[int, ...]]]) -> Iterator[BlockSpan]:
    """Owners step by step as spans of equal owners."""
    steps = list(owners)
    for block in sorted({block for step in steps for block in step}):
        first = 0
        for at in range(len(steps) + 1):
            was = steps[first].get(block) if first < len(steps) else None
            if at < len(steps) and steps[at].get(block) == was:
                continue
            if was is not None:
                yield BlockSpan(block, first, at - 1, was)
            first = at
