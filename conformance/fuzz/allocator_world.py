"""The model of an allocator: applies operations to a target and judges every answer.

The model owns tokens, tags, KV memory and the laws. The target only ever says which blocks are
whose; what those blocks then hold is looked up in the fake memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from conformance.contracts.base import AllocatorShape, Moves, Span, Tags
from conformance.fuzz.content import Content
from conformance.fuzz.kv import KVMemory, ListMemory, Story, move
from conformance.fuzz.laws import broken
from conformance.fuzz.operations import (
    Fork,
    Grant,
    More,
    Operation,
    Preempt,
    Probe,
    Release,
    Reset,
    Resume,
    Run,
    SwapIn,
    SwapOut,
)

__all__ = ["AllocatorSetup", "AllocatorWorld", "Holder"]


class AllocatorSetup(NamedTuple):
    """One example's sizes. `max_len`: sequences stop growing there."""

    num_blocks: int
    block_size: int
    vocabulary: int
    max_len: int
    prefix_caching: bool = True
    num_host_blocks: int = 0


class Holder:
    """One sequence of the model.

    `state` is "waiting" (no blocks), "running" or "swapped"; `granted` is how many tokens it may
    compute in the step to come, 0 for none; `private` how many tokens came back from the host, whose
    blocks the target need not publish.
    """

    __slots__ = ("computed", "granted", "name", "preempted", "private", "state", "story", "table")

    def __init__(self, name: str, story: Story) -> None:
        self.name = name
        self.story = story
        self.state = "waiting"
        self.computed = 0
        self.granted = 0
        self.private = 0
        self.preempted = False
        self.table: tuple[int, ...] = ()


class AllocatorWorld:
    """A target allocator, the memory its blocks stand for, and what has been seen.

    Args:
        target: adapter class (anything that makes an adapter from an `AllocatorShape`).
        seen: counts what the example reached, see `conformance.fuzz.coverage`.
        strict: run the target's own check after every operation, not only after every eighth run
            and at the end.
    """

    def __init__(
        self,
        target: Callable[[AllocatorShape], Any],
        setup: AllocatorSetup,
        seen: Counter[str],
        *,
        strict: bool = False,
    ) -> None:
        self.setup = setup
        self.seen = seen
        self.strict = strict
        self.target = target(
            AllocatorShape(
                num_blocks=setup.num_blocks,
                block_size=setup.block_size,
                prefix_caching=setup.prefix_caching,
                num_host_blocks=setup.num_host_blocks,
            )
        )
        self.can = self.target.capabilities
        self.memory: KVMemory = self.target.memory() if self.can.memory else ListMemory(setup.block_size)
        self.content = Content(setup.block_size, tail_first=self.can.evicts == "tail-first")
        self.holders: dict[str, Holder] = {}
        self.transcript: list[object] = []
        self._held: Counter[int] = Counter()  # block → tables that name it
        self._fresh: list[int] = []  # blocks handed out since the last run
        self._cancelled = False
        self._runs = 0
        self._has_moves = self.can.fork or self.can.swap
        self._shares = self.can.prefix_sharing and setup.prefix_caching
        self._retains = self._shares and self.can.retains
        self._exact = self._retains and self.can.publish == "commit"
        self.capacity = self.target.num_free()
        if self.capacity != setup.num_blocks:
            broken("conservation", f"a new pool of {setup.num_blocks} blocks has {self.capacity} free")
        self.host_capacity = self.target.num_host_free() if self.can.swap else 0

    # --- applying -------------------------------------------------------------------------------

    def apply(self, operation: Operation) -> None:
        """Do one operation and check every law it could break.

        Raises:
            LawBroken: naming the law; and whatever the target raises.
        """
        _APPLY[type(operation)](self, operation)
        self._check_pool()
        if self.strict and self.can.white_box:
            self.target.check()

    def finish(self) -> None:
        """Release everything; the pool must be whole again."""
        for name in list(self.holders):
            self.apply(Release(name))
        if self.can.swap:
            self.apply(Run())
        if self.can.white_box:
            self.target.check()
        if self.target.num_free() != self.capacity:
            broken("leak", f"{self.target.num_free()} of {self.capacity} blocks are free, nobody holds any")
        if self.can.swap and self.target.num_host_free() != self.host_capacity:
            broken("leak", f"{self.target.num_host_free()} of {self.host_capacity} host blocks are free")

    # --- one method per operation ---------------------------------------------------------------

    def _grant(self, op: Grant) -> None:
        if op.request in self.holders or len(op.tokens) < 1 or op.n < 1:
            return
        spans = tuple(Span(*span) for span in op.spans)
        holder = Holder(op.request, Story(op.tokens, Tags(op.salt, spans)))
        self.holders[op.request] = holder
        self._admit(holder, op.n)

    def _resume(self, op: Resume) -> None:
        holder = self.holders.get(op.request)
        if holder is not None and holder.state == "waiting" and op.n >= 1:
            self._admit(holder, op.n)

    def _admit(self, holder: Holder, n: int) -> None:
        story = holder.story
        length = len(story)
        tags = {"tags": story.tags} if self.can.tags else {}
        free = self.target.num_free()
        doubtful = self._blocks_for(length) > free
        before = self._observe() if doubtful else None
        start = self.target.grant_new(holder.name, tuple(story.tokens), n, **tags)
        self.transcript.append((holder.name, start))
        if start is None:
            self._refused(doubtful, before, f"{holder.name} of {length} tokens with {free} blocks free")
            return
        if not 0 <= start < length:
            broken("a row computes", f"{holder.name}: {start} of {length} tokens are said to be computed")
        if start and not self._shares:
            broken("context", f"{holder.name} starts at {start} although nothing is shared")
        if self._retains:
            expected = self.content.expected(story.values)
            if start < expected:
                broken("retention", f"{holder.name} hits {start} tokens where {expected} are cached")
            if start > expected and self._exact:
                broken("publish point", f"{holder.name} hits {start} tokens where {expected} are published")
        holder.state = "running"
        holder.computed = start
        holder.granted = min(n, length - start)
        self._note_hit(holder, start)
        self._new_table(holder, start)

    def _note_hit(self, holder: Holder, start: int) -> None:
        seen = self.seen
        if start:
            seen["resumed with a hit" if holder.preempted else "hit"] += 1
            if holder.story.tags.salt is not None or holder.story.tags.spans:
                seen["hit with salt or image"] += 1
        seen["resumed"] += holder.preempted
        others = (h for h in self.holders.values() if h.granted and h is not holder)
        if any(h.story.values[:1] == holder.story.values[:1] and len(h.table) for h in others):
            seen["shared beginning in one step"] += 1

    def _more(self, op: More) -> None:
        holder = self.holders.get(op.request)
        if holder is None or holder.state != "running" or holder.granted:
            return
        n = min(op.n, len(holder.story) - holder.computed)
        if n < 1:
            return
        end = holder.computed + n
        needed = self._blocks_for(end) - len(holder.table)
        shared = self._writes_shared(holder, end)
        free = self.target.num_free()
        doubtful = needed + shared > free
        before = self._observe() if doubtful else None
        granted = self.target.grant_more(holder.name, n)
        self.transcript.append((holder.name, granted))
        if not granted:
            self._refused(doubtful, before, f"{holder.name}: {n} tokens more with {free} blocks free")
            return
        self.seen["copy on write"] += shared > 0
        holder.granted = n
        self._new_table(holder)

    def _writes_shared(self, holder: Holder, end: int) -> int:
        """How many shared blocks the positions from `computed` on fall into."""
        first = holder.computed // self.setup.block_size
        return sum(self._held[block] > 1 for block in holder.table[first : self._blocks_for(end)])

    def _run(self, _: Run) -> None:
        memory, size = self.memory, self.setup.block_size
        rows = [h for h in self.holders.values() if h.granted]
        moves: Moves = self.target.moves() if self._has_moves else Moves()
        if self._has_moves:
            self.transcript.append(moves)
            move(memory, moves)
            self.target.moved()
        filled = {c.target for c in moves.swap_in} | {c.target for c in moves.copies}
        memory.poison([block for block in self._fresh if block not in filled])
        self._fresh.clear()
        written: dict[int, int] = {}
        for h in rows:
            for position in range(h.computed, h.computed + h.granted):
                slot, value = _slot(h.table, position, size), h.story.values[position]
                if written.setdefault(slot, value) != value:
                    broken("one write per slot", f"{h.name} at position {position}, slot {slot}")
        memory.write(list(written), list(written.values()))
        for h in self.holders.values():
            if h.state == "running":
                self._read(h)
        self.seen["requests in one step"] += len(rows) > 1
        self.seen["cancelled inside a step"] += self._cancelled
        self._cancelled = False
        for h in rows:
            self._commit(h)
        self._runs += 1
        if self.can.white_box and self._runs % 8 == 0:
            self.target.check()

    def _read(self, h: Holder) -> None:
        size, end = self.setup.block_size, h.computed + h.granted
        got = self.memory.read([_slot(h.table, position, size) for position in range(end)])
        if got != h.story.values[:end]:
            wrong = [i for i, (a, b) in enumerate(zip(got, h.story.values, strict=False)) if a != b]
            what = "nothing" if got[wrong[0]] is None else "something else"
            broken("context", f"{h.name} of {end} tokens reads {what} at positions {wrong}, table {h.table}")

    def _commit(self, h: Holder) -> None:
        n, story = h.granted, h.story
        self.target.commit(h.name, n)
        self.seen["chunk over several blocks"] += n > self.setup.block_size
        h.computed += n
        h.granted = 0
        table = tuple(self.target.table(h.name))
        if table != h.table:  # duplicates may be remapped when they are committed
            self._set_table(h, table)
            self._check_table(h)
        if self.can.publish != "release" and self._shares:
            self.content.publish(h.table, story.values, h.computed, h.private)
        if h.computed == len(story) < self.setup.max_len:
            token = story.next_token(self.setup.vocabulary)
            self.target.append(h.name, token)
            story.append(token)

    def _release(self, op: Release) -> None:
        holder = self.holders.get(op.request)
        if holder is None or (holder.granted and not self.can.cancel_granted):
            return
        self._let_go(holder)
        del self.holders[op.request]
        if op.again and self.can.repeat_release:
            before = self._observe()
            self.target.release(op.request)
            if self._observe() != before:
                broken("release", f"the second release of {op.request}")
            self.seen["released twice"] += 1

    def _preempt(self, op: Preempt) -> None:
        holder = self.holders.get(op.request)
        if holder is None or holder.state != "running" or (holder.granted and not self.can.cancel_granted):
            return
        self._let_go(holder)
        holder.preempted = True
        self.seen["preempted"] += 1

    def _let_go(self, h: Holder) -> None:
        self._cancelled |= h.granted > 0
        if self.can.publish == "release" and self._shares and h.state == "running":
            self.content.publish(h.table, h.story.values, h.computed, h.private)
        self.seen[f"released while {h.state}"] += 1
        self.target.release(h.name)
        self._set_table(h, ())
        h.state, h.computed, h.granted, h.private = "waiting", 0, 0, 0
        if self.target.table(h.name):
            broken("release", f"{h.name} still has the table {self.target.table(h.name)}")

    def _fork(self, op: Fork) -> None:
        parent = self.holders.get(op.request)
        if not self.can.fork or parent is None or op.child in self.holders:
            return
        if parent.state != "running" or parent.granted or not parent.computed:
            return
        before = self._observe()
        if not self.target.fork(parent.name, op.child):
            if self._observe() != before:
                broken("refusal", f"fork of {parent.name}")
            return
        child = Holder(op.child, parent.story.branch(parent.computed, len(self.holders)))
        self.target.append(child.name, op.token)
        child.story.append(op.token)
        child.state, child.computed, child.private = "running", parent.computed, parent.private
        self.holders[op.child] = child
        self._set_table(child, tuple(self.target.table(child.name)))
        if child.table != parent.table[: len(child.table)]:
            broken("table", f"{child.name} has {child.table} of its parent's {parent.table}")
        self.seen["forked"] += 1
        self.seen["forked inside a block"] += parent.computed % self.setup.block_size > 0

    def _swap_out(self, op: SwapOut) -> None:
        h = self.holders.get(op.request)
        if not self.can.swap or h is None or h.state != "running" or not h.computed:
            return
        if h.granted and not self.can.cancel_granted:
            return
        before = self._observe()
        done = self.target.swap_out(h.name)
        self.transcript.append((h.name, "out", done))
        if not done:
            if self._observe() != before:
                broken("refusal", f"swap-out of {h.name}")
            self.seen["swap-out refused"] += 1
            return
        self._set_table(h, tuple(self.target.table(h.name)))
        self.seen["swapped out inside a step"] += h.granted > 0
        h.state, h.granted = "swapped", 0
        self.seen["swapped out"] += 1

    def _swap_in(self, op: SwapIn) -> None:
        h = self.holders.get(op.request)
        if not self.can.swap or h is None or h.state != "swapped":
            return
        n = min(op.n, len(h.story) - h.computed)
        if n < 1:
            return
        before = self._observe()
        done = self.target.swap_in(h.name, n)
        self.transcript.append((h.name, "in", done))
        if not done:
            if self._observe() != before:
                broken("refusal", f"swap-in of {h.name}")
            self.seen["swap-in refused"] += 1
            return
        h.state, h.granted = "running", n
        if not self.can.publishes_swapped:
            h.private, self._exact = h.computed, False
        self._new_table(h)
        self.seen["swapped in"] += 1

    def _reset(self, _: Reset) -> None:
        if not self.can.reset:
            return
        done = self.target.reset()
        self.transcript.append(("reset", done))
        if done:
            self.content.clear()
            # At the next run, since copies of this step may still read from them.
            self._fresh += [b for b in range(self.setup.num_blocks + 2) if b not in self._held]
            self.seen["reset"] += 1

    def _probe(self, op: Probe) -> None:
        if not self.can.probe or op.request in self.holders or len(op.tokens) < 1:
            return
        before = self._observe()
        first = self.target.can_grant(op.request, op.tokens, op.n)
        if self.target.can_grant(op.request, op.tokens, op.n) != first or self._observe() != before:
            broken("purity", f"asked twice whether {len(op.tokens)} tokens fit")
        self.seen["asked twice"] += 1

    # --- laws -----------------------------------------------------------------------------------

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.setup.block_size)

    def _observe(self) -> object:
        """All that a refused or repeated call may not change."""
        target = self.target
        return (
            target.num_free(),
            target.num_host_free() if self.can.swap else 0,
            [tuple(target.table(name)) for name in self.holders],
            target.snapshot() if self.can.snapshot else None,
        )

    def _refused(self, doubtful: bool, before: object, what: str) -> None:
        self.seen["refused"] += 1
        if not doubtful:
            if self.can.admits_when_it_fits:
                broken("admission", what)
        elif self._observe() != before:
            broken("refusal", what)

    def _new_table(self, h: Holder, num_hit: int = 0) -> None:
        """Take in the table after a grant: what is new in it, and who owns what will be written."""
        size, old = self.setup.block_size, h.table
        table = tuple(self.target.table(h.name))
        fresh = [block for block in table[self._blocks_for(num_hit) :] if block not in old]
        self._set_table(h, table)
        self._check_table(h)
        self._fresh += fresh
        self.content.take(fresh)
        self.transcript.append(table)
        if self.can.single_writer:
            written = table[h.computed // size : self._blocks_for(h.computed + h.granted)]
            if shared := [block for block in written if self._held[block] > 1]:
                broken("single writer", f"{h.name} may write blocks {shared}, which others hold too")

    def _check_table(self, h: Holder) -> None:
        table, end = h.table, h.computed + h.granted
        if len(set(table)) != len(table):
            broken("table", f"{h.name} holds a block twice: {table}")
        if len(table) * self.setup.block_size < end:
            broken("table", f"{h.name} has {len(table)} blocks for {end} tokens")

    def _set_table(self, h: Holder, table: tuple[int, ...]) -> None:
        held = self._held
        for block in h.table:
            held[block] -= 1
            if not held[block]:
                del held[block]
        h.table = table
        for block in table:
            held[block] += 1

    def _check_pool(self) -> None:
        free, held = self.target.num_free(), len(self._held)
        if free + held == self.capacity:
            return
        # A copy that is still to be made may keep its source although no table names it any more.
        sources = {c.source for c in self.target.moves().copies} if self._has_moves else set()
        if not free + held < self.capacity <= free + len(sources | self._held.keys()):
            broken("conservation", f"{free} blocks free and {held} held make not {self.capacity}")


def _slot(table: Sequence[int], position: int, size: int) -> int:
    block, offset = divmod(position, size)
    return table[block] * size + offset


_APPLY: Mapping[type[Any], Callable[[AllocatorWorld, Any], None]] = {
    Grant: AllocatorWorld._grant,
    Resume: AllocatorWorld._resume,
    More: AllocatorWorld._more,
    Run: AllocatorWorld._run,
    Release: AllocatorWorld._release,
    Preempt: AllocatorWorld._preempt,
    Fork: AllocatorWorld._fork,
    SwapOut: AllocatorWorld._swap_out,
    SwapIn: AllocatorWorld._swap_in,
    Probe: AllocatorWorld._probe,
    Reset: AllocatorWorld._reset,
}
