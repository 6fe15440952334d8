"""What a block manager, alone or with its scheduler, offers to be fuzzed.

An adapter translates and nothing else: it owns no tokens, no KV, no oracle and repairs nothing. A
repair in an adapter (a clamp, a retry) hides the very fault it works around. There are two levels:

- `Allocator`: who owns which block. Whole-prompt allocation, granted tokens only, or output
  reserved ahead all fit, since only a minimum of room is asked for.
- `Engine`: what the kernel is told. A scheduler over an allocator of its own.

Laws that hold for any paged engine are always checked. What engines differ in is declared in
`capabilities`; only what is declared is used and judged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

__all__ = [
    "Allocator",
    "AllocatorCapabilities",
    "AllocatorShape",
    "Copy",
    "Engine",
    "EngineCapabilities",
    "EngineShape",
    "Moves",
    "Plan",
    "Rejected",
    "Row",
    "Span",
    "Tags",
]


@dataclass(frozen=True, slots=True)
class Span:
    """Positions start … start + length - 1 stand for an image: the KV depends on its content.

    For an engine, the image has `length` rows of embeddings, and equal `content` means an equal
    length too.
    """

    start: int
    length: int
    content: str


@dataclass(frozen=True, slots=True)
class Tags:
    """What the KV of a sequence depends on beside its tokens."""

    salt: str | None = None
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a whole block."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Moves:
    """Block copies of one step, in this order: swap_out (device → host), swap_in, copies.

    Within one list all sources count as read before any target is written.
    """

    swap_out: tuple[Copy, ...] = ()
    swap_in: tuple[Copy, ...] = ()
    copies: tuple[Copy, ...] = ()


# --- allocator level -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class AllocatorShape:
    """Sizes of one allocator.

    Attributes:
        num_blocks: blocks that can be handed out; null or padding blocks come on top.
        block_size: tokens per block.
        prefix_caching: whether to share prefixes, where the allocator can.
        num_host_blocks: blocks of the host pool; 0 unless `swap` is declared.
    """

    num_blocks: int
    block_size: int
    prefix_caching: bool = True
    num_host_blocks: int = 0


@dataclass(frozen=True, kw_only=True)
class AllocatorCapabilities:
    """What an allocator can do, and which of the laws that differ between engines it keeps.

    Attributes:
        prefix_sharing: `grant_new` may answer a start above 0.
        prefix_switch: honours `AllocatorShape.prefix_caching=False`.
        publish: when a full block can be hit by others: on "grant" (in the same step already),
            on "commit", or at "release".
        retains: a published block stays hittable until it is handed out again. Then the length of
            every hit is known in advance, and a cache that forgets is found.
        evicts: "tail-first": no cached block outlives its parent, which would make it unreachable.
        admits_when_it_fits: a grant whose blocks are free is never refused.
        single_writer: a block that is written has exactly one owner.
        cancel_granted: a request may be released between grant and commit.
        repeat_release: a second `release` changes nothing (False: it may raise, and is not tried).
        tags: `grant_new` takes `tags=Tags(…)`.
        fork: has `fork`, `moves` and `moved`.
        publishes_swapped: blocks that come back from the host are published at their next commit.
        swap: has `swap_out`, `swap_in`, `num_host_free`, `moves` and `moved`.
        reset: has `reset`.
        probe: has `can_grant`.
        snapshot: has `snapshot`.
        memory: has `memory`.
        white_box: has `check`.
    """

    prefix_sharing: bool = False
    prefix_switch: bool = False
    publish: Literal["grant", "commit", "release"] = "commit"
    retains: bool = False
    evicts: Literal["any", "tail-first"] = "any"
    admits_when_it_fits: bool = False
    single_writer: bool = True
    cancel_granted: bool = True
    repeat_release: bool = True
    tags: bool = False
    fork: bool = False
    swap: bool = False
    publishes_swapped: bool = False
    reset: bool = False
    probe: bool = False
    snapshot: bool = False
    memory: bool = False
    white_box: bool = False


class Allocator(Protocol):
    """Adapter of a block manager. `rid` names a request; every size is in tokens.

    One step is: grants to any number of requests, all KV stored, all KV read, `commit` for each.
    `None` or `False` means refused, and then nothing may have changed.

    Optional, each by its capability::

        grant_new(rid, tokens, n, tags=Tags(…))
        can_grant(rid, tokens, n) -> bool      # a pure question: what grant_new would answer
        reset() -> bool                        # forget every cached prefix
        snapshot() -> object                   # compares equal if and only if nothing changed
        check() -> None                        # raises if its own invariants are broken
        fork(rid, child) -> bool               # child shares the computed tokens of rid
        swap_out(rid) -> bool                  # rid holds host blocks instead
        swap_in(rid, n) -> bool                # device blocks again, with room for n more tokens
        num_host_free() -> int
        moves() -> Moves                       # what the step to come copies first; a pure question
        moved() -> None                        # it was copied; called before the commits of the step
        memory() -> KVMemory                   # keeps the KV, so that its copies are judged as well
    """

    capabilities: ClassVar[AllocatorCapabilities]

    def __init__(self, shape: AllocatorShape) -> None: ...

    def grant_new(self, rid: str, tokens: Sequence[int], n: int) -> int | None:
        """Admit a request without blocks: room to compute n tokens (at most all) from `start` on.

        Returns:
            start: how many tokens are found computed already, below len(tokens); None: refused.
        """
        ...

    def grant_more(self, rid: str, n: int) -> bool:
        """Room for n known tokens after the computed ones."""
        ...

    def append(self, rid: str, token: int) -> None:
        """The sampled token: the last of the request's tokens, not computed yet."""
        ...

    def commit(self, rid: str, n: int) -> None:
        """The KV of n more tokens has been stored."""
        ...

    def release(self, rid: str) -> None:
        """The request's blocks are no longer needed: finished, preempted or cancelled."""
        ...

    def table(self, rid: str) -> Sequence[int]:
        """Ids of the request's device blocks in logical order; empty if it holds none."""
        ...

    def num_free(self) -> int:
        """Blocks that could be handed out now, those with cached content included."""
        ...


# --- engine level --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """Sizes and switches of one engine; `num_blocks` as in `AllocatorShape`.

    Attributes:
        eos: token id that ends a request unless it ignores EOS.
        policy: order of service.
        preemption: what to do with the victim's KV; "recompute" unless `swap` is declared.
        num_host_blocks: blocks of the host pool; 0 unless `swap` is declared.
        encoder_budget: most rows of image embeddings at any time; 0 unless `encoder` is declared.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    eos: int
    prefix_caching: bool = True
    chunked_prefill: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    preemption: Literal["recompute", "swap", "auto"] = "recompute"
    num_host_blocks: int = 0
    encoder_budget: int = 0


@dataclass(frozen=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do, and which of the laws that differ between engines it keeps.

    Attributes:
        options: keyword arguments `add` takes beside the three: salt, spans, priority, min_tokens,
            stop_ids, n, prompt_logprobs.
        prefix_sharing, publish, retains, evicts, publishes_swapped: as for an allocator, judged by
            the rows.
        prefix_switch: honours `EngineShape.prefix_caching=False`.
        never_fit: "refused": `add` rejects a request that could outgrow the whole pool.
        order: "fcfs": under that policy nobody starts before an earlier arrival.
        chunked_prefill: honours `EngineShape.chunked_prefill=False`.
        priority_policy: honours `EngineShape.policy="priority"`.
        empty_plans: `plan` may answer None although requests are live.
        replan: `plan` may be called again instead of `commit`; the first plan is void.
        abort: has `abort(rid)`, outside of steps.
        abort_inside_step: also between `plan` and `commit`.
        preempt: has `preempt(rid) -> bool`, outside of and inside steps.
        fail: `commit` takes `failed={rid: message}`; such a request ends with "error".
        break_off: has `break_off(done)`, called instead of `commit`: the step ended early. Of its
            moves, the first `done` of the three lists were carried out, perhaps also a part of the
            next one; no row counts, and the embeddings of all images are gone.
        ship: has `ship()`: the plan goes to a worker and back (pickle), rows come from the copy.
        swap: understands `EngineShape.num_host_blocks` and has `num_host_free`.
        encoder: takes spans, honours `EngineShape.encoder_budget`, and its plans say which images
            are encoded and evicted.
        reset: has `reset() -> bool`.
        pool: has `num_free`.
        unused: has `unused_slots() -> iterable of slots` that hold no computed KV.
        memory: has `memory() -> KVMemory` (`conformance.fuzz.kv`).
        white_box: has `check()`.
        bound: has `bound(lengths) -> int`: steps to empty for live requests of these greatest
            lengths; 20 times their sum is allowed without.
    """

    options: frozenset[str] = frozenset()
    prefix_sharing: bool = False
    prefix_switch: bool = False
    publish: Literal["grant", "commit", "release"] = "commit"
    retains: bool = False
    evicts: Literal["any", "tail-first"] = "any"
    never_fit: Literal["any", "refused"] = "any"
    order: Literal["any", "fcfs"] = "any"
    chunked_prefill: bool = False
    priority_policy: bool = False
    empty_plans: bool = False
    replan: bool = False
    abort: bool = False
    abort_inside_step: bool = False
    preempt: bool = False
    fail: bool = False
    break_off: bool = False
    ship: bool = False
    swap: bool = False
    publishes_swapped: bool = False
    encoder: bool = False
    reset: bool = False
    pool: bool = False
    unused: bool = False
    memory: bool = False
    white_box: bool = False
    bound: bool = False


@dataclass(frozen=True, slots=True)
class Rejected:
    """The answer to a request that will never be served."""

    message: str


@dataclass(frozen=True, slots=True)
class Row:
    """What the kernel is told about one request in one step.

    Attributes:
        rid: whose row.
        ids: tokens to compute.
        positions: their positions in the sequence.
        slots: where to store their KV: block * block_size + offset.
        kv_len: length of the context, the new tokens included.
        context: slots of positions 0 … kv_len - 1, to read.
        table: the block table they were taken from.
        forks: names of further sequences that are to be sampled from this row (n > 1).
    """

    rid: str
    ids: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    kv_len: int
    context: tuple[int, ...]
    table: tuple[int, ...]
    forks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """One step.

    Attributes:
        evict: contents of images whose embeddings are dropped, before anything is encoded.
        encode: contents of images that are encoded, and held until a plan evicts them.
    """

    rows: tuple[Row, ...]
    moves: Moves = Moves()
    evict: tuple[str, ...] = ()
    encode: tuple[str, ...] = ()


class Engine(Protocol):
    """Adapter of a scheduler with its block manager.

    Optional methods are named at their capability.
    """

    capabilities: ClassVar[EngineCapabilities]

    def __init__(self, shape: EngineShape) -> None: ...

    def add(self, tokens: Sequence[int], max_tokens: int, ignore_eos: bool, **options: Any) -> str | Rejected:
        """Queue a request; returns the name that rows will carry."""
        ...

    def plan(self) -> Plan | None:
        """The next step; None if there is nothing to do."""
        ...

    def commit(self, sampled: Mapping[str, int]) -> None:
        """The step was carried out. `sampled` has a token for every row (and fork of a row) that
        computed the last known token of its request, aborted ones included."""
        ...

    def output(self, rid: str) -> Sequence[int]:
        """Tokens generated so far; also after the end."""
        ...

    def finished(self, rid: str) -> str | None:
        """Why it ended: "stop", "length", "abort" or "error"; None while it lives."""
        ...

    def idle(self) -> bool:
        """Whether no request is live."""
        ...
