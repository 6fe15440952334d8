"""The model of an engine: applies operations to a target and judges every row it plans.

A planned step is carried out when it is committed, on the fake KV memory: copies, then all writes,
then all reads. What happens between plan and commit (an abort, a preemption) happens inside the
step. Or the step breaks off: part of the copies and writes happened, and it is planned anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from conformance.contracts.base import EngineShape, Moves, Plan, Rejected, Row, Span, Tags
from conformance.fuzz.content import Content
from conformance.fuzz.engine_jobs import EngineSetup, Job, why_rejected
from conformance.fuzz.kv import KVMemory, ListMemory, Story, move, move_some
from conformance.fuzz.laws import broken
from conformance.fuzz.media import MediaLedger
from conformance.fuzz.operations import (
    Abort,
    Add,
    BreakOff,
    Commit,
    Operation,
    PlanStep,
    Preempt,
    Reset,
)

__all__ = ["EngineWorld"]


class EngineWorld:
    """A target engine, the memory its slots stand for, and what has been seen.

    Args:
        target: adapter class (anything that makes an adapter from an `EngineShape`).
        seen: counts what the example reached, see `conformance.fuzz.coverage`.
        strict: run the target's own check after every operation, not only now and then.
    """

    def __init__(
        self,
        target: Callable[[EngineShape], Any],
        setup: EngineSetup,
        seen: Counter[str],
        *,
        strict: bool = False,
    ) -> None:
        self.setup = setup
        self.seen = seen
        self.strict = strict
        self.target = target(setup.shape())
        self.can = self.target.capabilities
        self.memory: KVMemory = self.target.memory() if self.can.memory else ListMemory(setup.block_size)
        self.content = Content(setup.block_size, tail_first=self.can.evicts == "tail-first")
        self.jobs: dict[str, Job] = {}
        self.media = MediaLedger(setup.encoder_budget, seen)
        self.planned: Plan | None = None
        self.transcript: list[object] = []
        self._by_rid: dict[str, Job] = {}
        self._void: set[str] = set()  # names whose row of the planned step counts for nothing
        self._fresh: list[int] = []
        self._steps = 0
        self._shares = self.can.prefix_sharing and setup.prefix_caching
        self._retains = self._shares and self.can.retains
        self._exact = self._retains and self.can.publish == "commit"
        self.capacity = self.target.num_free() if self.can.pool else 0
        self.host_capacity = self.target.num_host_free() if self.can.swap else 0

    # --- applying -------------------------------------------------------------------------------

    def apply(self, operation: Operation) -> None:
        """Do one operation and check every law it could break.

        Raises:
            LawBroken: naming the law; and whatever the target raises.
        """
        _APPLY[type(operation)](self, operation)
        if self.strict and self.can.white_box:
            self.target.check()

    def live(self) -> list[Job]:
        """Sequences that have not ended, in order of arrival."""
        return [job for job in self.jobs.values() if job.reason is None]

    def rows(self) -> list[Job]:
        """Sequences in the step that is planned and not committed."""
        return [self._by_rid[row.rid] for row in self.planned.rows] if self.planned else []

    def finish(self) -> None:
        """Let everything end by itself; then the engine must be as empty as it was."""
        if self.planned is not None:
            self.apply(Commit())
        limits = [job.limit for job in self.live() for _ in range(1 + self._unborn(job))]
        bound = self.target.bound(limits) if self.can.bound else 20 * sum(limits) + 20
        for _ in range(bound):
            if not self.live():
                break
            self.apply(PlanStep())
            if self.planned is not None:
                self.apply(Commit())
        if left := [job.name for job in self.live()]:
            broken("progress", f"{left} unfinished after {bound} steps")
        if not self.target.idle():
            broken("progress", "every request has ended, but the engine is not idle")
        if self.target.plan() is not None:
            broken("progress", "an idle engine plans a step")
        if self.can.white_box:
            self.target.check()
        if self.can.pool and self.target.num_free() != self.capacity:
            broken("leak", f"{self.target.num_free()} of {self.capacity} blocks are free, nobody is live")
        if self.can.swap and self.target.num_host_free() != self.host_capacity:
            broken("leak", f"{self.target.num_host_free()} of {self.host_capacity} host blocks are free")

    # --- one method per operation ---------------------------------------------------------------

    def _add(self, op: Add) -> None:
        if op.request in self.jobs or not op.tokens or op.max_tokens < 1:
            return
        spans = tuple(Span(*span) for span in op.spans)
        values = op._asdict() | {"spans": spans}
        options = {name: values[name] for name in self.can.options}
        tags = Tags(op.salt if "salt" in options else None, spans if "spans" in options else ())
        limit = min(self.setup.max_model_len, len(op.tokens) + op.max_tokens)
        answer = self.target.add(op.tokens, op.max_tokens, op.ignore_eos, **options)
        whole = self._whole_prompts()
        why = why_rejected(op if "n" in options else op._replace(n=1), self.setup, whole_prompts=whole)
        if isinstance(answer, Rejected):
            if why is None:
                broken("never fits", f"{op.request} was rejected: {answer.message}")
            self.seen[f"refused: {why}"] += 1
            return
        if why == "too long" or (why == "never fits" and self.can.never_fit == "refused"):
            broken("never fits", f"{op.request} ({len(op.tokens)} tokens, at most {limit}) was accepted")
        if answer in self._by_rid:
            broken("history", f"two requests are called {answer!r}")
        job = Job(op.request, answer, op, Story(op.tokens, tags), limit, len(self.jobs))
        self.jobs[op.request] = self._by_rid[answer] = job
        self.media.know(tags.spans)

    def _whole_prompts(self) -> bool:
        return self.can.chunked_prefill and not self.setup.chunked_prefill

    def _plan(self, op: PlanStep) -> None:
        if self.planned is not None:
            if not self.can.replan:
                return
            self.seen["planned again"] += 1
        if self.can.unused and self.planned is None:
            self.memory.write(slots := [*self.target.unused_slots()], [None] * len(slots))
        plan: Plan | None = self.target.plan()
        if op.ship and self.can.ship and plan is not None:
            shipped = self.target.ship()
            if shipped != plan:
                broken("same twice", f"a plan changed on its way to the worker: {plan} became {shipped}")
            self.seen["plan shipped"] += 1
        self.planned = plan
        self.transcript.append(plan)
        if plan is None:
            if self.live() and not self.can.empty_plans:
                broken("progress", f"no step although {[job.name for job in self.live()]} are live")
            return
        self._steps += 1
        self._void.clear()
        self._judge(plan)
        if self.can.white_box and self._steps % 4 == 0:
            self.target.check()

    def _commit(self, op: Commit) -> None:
        plan = self.planned
        if plan is None:
            return
        failing = self.jobs.get(op.fail) if op.fail is not None and self.can.fail else None
        if failing is not None and (failing.name in self._void or failing not in self.rows()):
            failing = None
        self._carry_out(plan, failing)
        sampled: dict[str, int] = {}
        born: dict[str, list[Job]] = {}
        vocabulary = self.setup.vocabulary
        for row in plan.rows:
            job = self._by_rid[row.rid]
            if job is failing or row.kv_len != len(job.story):
                continue
            sampled[row.rid] = job.story.next_token(vocabulary)
            for index, rid in enumerate(row.forks, 1):
                child = Job(
                    f"{job.name}/{index}",
                    rid,
                    job.add,
                    job.story.branch(row.kv_len, index),
                    job.limit,
                    job.arrival,
                )
                sampled[rid] = child.story.next_token(vocabulary)
                born.setdefault(row.rid, []).append(child)
        if failing is not None:
            self.target.commit(sampled, failed={failing.rid: "unusable"})
        else:
            self.target.commit(sampled)
        self.planned = None
        self.media.carried_out()
        for row in plan.rows:
            job = self._by_rid[row.rid]
            if job.name not in self._void:
                self._advance(job, row, sampled, born.get(row.rid, []), failing)
        for job in self.live():
            if self.target.finished(job.rid) is not None:
                broken("end", f"{job.name} has ended, although it was not in the step")

    def _break_off(self, op: BreakOff) -> None:
        plan = self.planned
        if plan is None or not self.can.break_off:
            return
        moves = plan.moves
        done = move_some(self.memory, moves, op.copies)
        arrived = {c.target for copies in (moves.swap_in, moves.copies)[: max(0, done - 1)] for c in copies}
        self._fresh = [block for block in self._fresh if block not in arrived]
        if done == 3:
            self.memory.poison(self._fresh)
            self._fresh.clear()
            for row in plan.rows[: op.rows]:
                values = self._by_rid[row.rid].story.values
                self.memory.write(row.slots, [values[position] for position in row.positions])
        self.target.break_off(done)
        self.planned = None
        self.media.forget()
        self.seen["broken steps"] += 1
        self.seen["broken between copies"] += op.copies > 0 and done < 3
        self.seen["broken after copies"] += done == 3 and moves != Moves()
        if self.can.white_box:
            self.target.check()
        for job in self.live():
            if self.target.finished(job.rid) is not None:
                broken("end", f"{job.name} has ended in a step that broke off")

    def _abort(self, op: Abort) -> None:
        job = self.jobs.get(op.request)
        inside = self.planned is not None
        if job is None or not (self.can.abort_inside_step if inside else self.can.abort):
            return
        # The first sequence stands for the whole request, even if it has ended itself.
        members = job.family if job is job.family[0] else [job]
        members = [member for member in members if member.reason is None]
        if not members:
            return
        self.target.abort(job.rid)
        when = "preempted" if job.preempted else "running" if job.started else "waiting"
        self.seen[f"aborted while {when}"] += 1
        self.seen["aborted inside a step"] += inside and job in self.rows()
        self.seen["several sequences aborted"] += len(members) > 1
        for member in members:
            member.reason = "abort"
            self._void.add(member.name)
            self._check_output(member)

    def _preempt(self, op: Preempt) -> None:
        job = self.jobs.get(op.request)
        if job is None or job.reason is not None or not self.can.preempt:
            return
        done = self.target.preempt(job.rid)
        self.transcript.append(done)
        if done:
            inside = self.planned is not None and job in self.rows()
            self.seen["preempted on demand"] += 1
            self.seen["preempted inside a step"] += inside
            job.preempted = True
            self._void.add(job.name)

    def _reset(self, _: Reset) -> None:
        if self.can.reset and self.planned is None:
            done = self.target.reset()
            self.transcript.append(done)
            if done:
                self.content.clear()
                self.seen["reset"] += 1

    # --- the step -------------------------------------------------------------------------------

    def _judge(self, plan: Plan) -> None:
        """Laws of a plan as such, and what its tables tell about the pool."""
        setup, seen = self.setup, self.seen
        rids = [row.rid for row in plan.rows]
        if not rids:
            broken("a row computes", "a plan has no rows")
        if len(set(rids)) != len(rids) or len(rids) > setup.max_num_seqs:
            broken("budget", f"rows for {rids}, at most {setup.max_num_seqs} different ones are allowed")
        total = sum(len(row.ids) for row in plan.rows)
        if total > setup.max_num_batched_tokens:
            broken("budget", f"{total} tokens, at most {setup.max_num_batched_tokens} are allowed")
        filled = {c.target for c in plan.moves.swap_in}
        copied = {c.target for c in plan.moves.copies}
        for row in plan.rows:
            job = self._by_rid.get(row.rid)
            if job is None or job.reason is not None:
                broken("history", f"a row for {row.rid!r}, which is not live")
            self._judge_row(job, row)
            self._take_in(job, row, filled, copied)
        if setup.encoder_budget:
            chunks = ((self._by_rid[r.rid].story.tags.spans, r.positions[0], r.kv_len) for r in plan.rows)
            self.media.judge(plan.encode, plan.evict, chunks)
        beginnings = [row.ids for row in plan.rows if row.positions[0] == 0]
        seen["equal prompts in one step"] += len(set(beginnings)) < len(beginnings)
        partial = [row for row in plan.rows if row.kv_len < len(self._by_rid[row.rid].story)]
        seen["chunk over several blocks"] += any(len(row.ids) > setup.block_size for row in partial)
        seen["chunk beside a decode"] += bool(partial) and any(
            row.kv_len > self._by_rid[row.rid].num_prompt for row in plan.rows
        )
        seen["swapped out"] += bool(plan.moves.swap_out)
        seen["swapped in"] += bool(plan.moves.swap_in)
        seen["copy on write"] += bool(copied)

    def _judge_row(self, job: Job, row: Row) -> None:
        size, start, tokens = self.setup.block_size, row.kv_len - len(row.ids), job.story.tokens
        if not row.ids:
            broken("a row computes", f"{job.name} has an empty row")
        if row.positions != tuple(range(start, row.kv_len)):
            broken("positions", f"{job.name}: positions {row.positions} with a context of {row.kv_len}")
        if list(row.ids) != tokens[start : row.kv_len] or row.kv_len > len(tokens):
            broken("history", f"{job.name} computes {row.ids} at {start}, its tokens are {tokens}")
        if len(row.table) * size < row.kv_len or len(set(row.table)) != len(row.table):
            broken("table", f"{job.name} computes up to {row.kv_len} with the table {row.table}")
        wanted = tuple([row.table[i // size] * size + i % size for i in range(row.kv_len)])
        if row.context != wanted or row.slots != wanted[start:]:
            broken("table", f"{job.name}: slots {row.slots}, context {row.context}, table {row.table}")
        first = row.kv_len == len(tokens) == job.num_prompt
        if len(row.forks) != (self._unborn(job) if first else 0):
            broken("one token", f"{job.name} forks {row.forks} with {len(tokens)} tokens")
        if not job.started:
            if self._whole_prompts() and row.kv_len < job.num_prompt:
                broken("chunking", f"{job.name} computes {row.kv_len} of its prompt of {job.num_prompt}")
            if self.can.order == "fcfs" and self.setup.policy == "fcfs":
                early = [j.name for j in self.live() if not j.started and j.arrival < job.arrival]
                if early:
                    broken("order", f"{job.name} starts before {early}")

    def _take_in(self, job: Job, row: Row, filled: set[int], copied: set[int]) -> None:
        """What the row's table tells: hits, blocks handed out anew, blocks that came back."""
        size, start = self.setup.block_size, row.kv_len - len(row.ids)
        back = not filled.isdisjoint(row.table)
        again = start < job.computed or back or job.preempted
        if not job.started or again:
            if self._retains and not back:
                expected = 0 if job.add.prompt_logprobs else self.content.expected(job.story.values)
                if start < expected:
                    broken("retention", f"{job.name} hits {start} tokens where {expected} are cached")
                if start > expected and self._exact:
                    broken("publish point", f"{job.name} hits {start} tokens, {expected} are published")
            self.seen["resumed"] += job.started
            if start and not back:
                self.seen["resumed with a hit" if job.started else "hit"] += 1
                tagged = job.story.tags.salt is not None or job.story.tags.spans
                self.seen["hit with salt or image"] += bool(tagged)
            job.private = 0
            if back and not self.can.publishes_swapped:
                job.private, self._exact = start, False
        known = () if again else job.table
        hits = 0 if back else -(-start // size)
        # A request that was preempted in silence may be given one of its former blocks again. It was
        # handed out anew if it was published meanwhile; else it has no content to lose.
        fresh = [
            block
            for i, block in enumerate(row.table)
            if block in copied or (i >= hits and (known[i : i + 1] != (block,) or block in self.content))
        ]
        self._fresh += fresh
        self.content.take(fresh)
        job.table, job.computed, job.started, job.preempted = row.table, start, True, False

    def _carry_out(self, plan: Plan, failing: Job | None) -> None:
        """The forward pass: copies, all writes, all reads."""
        move(self.memory, plan.moves)
        filled = {c.target for c in (*plan.moves.swap_in, *plan.moves.copies)}
        self.memory.poison([block for block in self._fresh if block not in filled])
        self._fresh.clear()
        written: dict[int, int | None] = {}
        for row in plan.rows:
            job = self._by_rid[row.rid]
            for position, slot in zip(row.positions, row.slots, strict=True):
                value = None if job is failing else job.story.values[position]
                if written.setdefault(slot, value) != value:
                    broken("one write per slot", f"{job.name} at position {position}, slot {slot}")
        self.memory.write(list(written), list(written.values()))
        for row in plan.rows:
            job = self._by_rid[row.rid]
            if job is failing:
                continue
            got, wanted = self.memory.read(row.context), job.story.values[: row.kv_len]
            if got != wanted:
                wrong = [i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b]
                what = "nothing" if got[wrong[0]] is None else "something else"
                broken(
                    "context", f"{job.name} reads {what} at positions {wrong} of {row.kv_len}, {row.table}"
                )

    def _advance(
        self, job: Job, row: Row, sampled: Mapping[str, int], born: list[Job], failing: Job | None
    ) -> None:
        if job is failing:
            job.reason = "error"
            # Its blocks can no longer be hit, so blocks of others may have lost their parents.
            self.content.forget(job.table)
            self.content.tail_first = False
            self.seen["failed"] += 1
            self._check_output(job)
            return
        job.computed = row.kv_len
        if self._shares and self.can.publish != "release":
            self.content.publish(job.table, job.story.values, job.computed, job.private)
        if row.rid not in sampled:
            self._check_output(job)
            return
        for child in born:
            child.family = job.family
            job.family.append(child)
            child.table, child.computed, child.started = job.table, job.computed, True
            child.private = job.private
            self.jobs[child.name] = self._by_rid[child.rid] = child
            self.seen["forked"] += 1
        for sequence in (job, *born):
            sequence.append(sampled[sequence.rid])
            if sequence.reason is not None and len(sequence.story) == sequence.num_prompt + 1:
                self.seen["finished on the first token"] += 1
            self._check_output(sequence)

    def _unborn(self, job: Job) -> int:
        """How many more sequences will be sampled from the request's prompt."""
        n = job.add.n if "n" in self.can.options else 1
        return n - 1 if job is job.family[0] and len(job.story) == job.num_prompt else 0

    def _check_output(self, job: Job) -> None:
        output, reason = list(self.target.output(job.rid)), self.target.finished(job.rid)
        if output != job.generated:
            broken("solo", f"{job.name} generated {output}, alone it generates {job.generated}")
        if reason != job.reason:
            broken("end", f"{job.name} ended with {reason!r}, it must be {job.reason!r}, outputs {output}")


_APPLY: Mapping[type[Any], Callable[[EngineWorld, Any], None]] = {
    Add: EngineWorld._add,
    PlanStep: EngineWorld._plan,
    Commit: EngineWorld._commit,
    BreakOff: EngineWorld._break_off,
    Abort: EngineWorld._abort,
    Preempt: EngineWorld._preempt,
    Reset: EngineWorld._reset,
}
