"""Typed events that tell what the engine did, so that nobody needs its private state.

A sink is any callable that takes an event. The default, `no_trace`, drops them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

__all__ = [
    "Aborted",
    "Allocated",
    "Copied",
    "Encoded",
    "Event",
    "Evicted",
    "Failed",
    "Finished",
    "Forked",
    "MediaEvicted",
    "Planned",
    "Preempted",
    "PrefixHit",
    "Published",
    "Sampled",
    "Submitted",
    "SwappedIn",
    "SwappedOut",
    "TraceSink",
    "no_trace",
]


@dataclass(frozen=True, slots=True)
class Submitted:
    """A request was accepted. Lengths in tokens."""

    request_id: str
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Planned:
    """One step was planned: (request id, first position, number of tokens) per request."""

    step: int
    scheduled: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class Allocated:
    """Blocks were added to the end of a request's block table."""

    request_id: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """At admission, the first `num_tokens` tokens were found in the prefix cache.

    `resumed` is true when the request had been preempted before: such a hit is not a cache hit
    of the user's request and does not count in statistics.
    """

    request_id: str
    num_tokens: int
    block_ids: tuple[int, ...]
    resumed: bool


@dataclass(frozen=True, slots=True)
class Published:
    """A full, computed block entered the prefix index."""

    request_id: str
    block_id: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """A block left the prefix index: it is needed, or a request that held it failed."""

    block_id: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """One image or video went through the vision encoder, in the step just committed.

    The request is the first that needed it. Length in embeddings.
    """

    request_id: str
    content_hash: str
    num_embeddings: int


@dataclass(frozen=True, slots=True)
class MediaEvicted:
    """The embeddings of an image or video were dropped, at the beginning of the step just committed."""

    content_hash: str
    num_embeddings: int


@dataclass(frozen=True, slots=True)
class Copied:
    """A request is about to write a block that others hold too, so it got a copy of its own.

    In its block table `target` takes the place of `source`.
    """

    request_id: str
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Forked:
    """A sequence of its own began with all blocks of `parent_id`, in logical order."""

    request_id: str
    parent_id: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SwappedOut:
    """A request's computed blocks move to host memory in the next plan; `Preempted` follows."""

    request_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class SwappedIn:
    """A request's blocks come back from host memory, to the blocks of the `Allocated` before."""

    request_id: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """A running request lost its blocks and waits again.

    Attributes:
        mode: whether its KV is computed anew later or was moved to host memory.
        num_computed_tokens: tokens whose KV it held.
        fallback: it was to be swapped out, but the host pool had no room.
    """

    request_id: str
    mode: Literal["recompute", "swap"]
    num_computed_tokens: int
    fallback: bool = False


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token was appended to a request. `position` counts generated tokens from 0."""

    request_id: str
    position: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A request ended by itself."""

    request_id: str
    reason: str
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Aborted:
    """A request was cancelled by its owner."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A request ended with an error of its own; the engine goes on."""

    request_id: str
    message: str


Event: TypeAlias = (
    Submitted
    | Planned
    | Allocated
    | PrefixHit
    | Published
    | Evicted
    | Encoded
    | MediaEvicted
    | Copied
    | Forked
    | SwappedOut
    | SwappedIn
    | Preempted
    | Sampled
    | Finished
    | Aborted
    | Failed
)
TraceSink: TypeAlias = Callable[[Event], None]


def no_trace(event: Event) -> None:
    """Drop the event."""
