"""Decides what each step computes, and takes in what it produced.

A plan is "request → how many tokens". There is no prefill or decode phase: chunked prompts, prefix
hits, forked and resumed requests differ only in how far `num_computed_tokens` is behind
`num_tokens`.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from minivllm.admission import (
    Room,
    check_capacity,
    check_prompt,
    check_spans,
    most_tokens,
    seats,
    uncut,
)
from minivllm.cache import BlockManager, EncoderCache, KVSnapshot, PendingCopies, PrefixMatch
from minivllm.config import PreemptionMode
from minivllm.errors import ConfigError, InvariantError, UnknownRequest
from minivllm.groups import SequenceGroups, forks_when_it_samples, make_child
from minivllm.integrity import check_result, check_schedule
from minivllm.request import (
    FinishReason,
    Request,
    RequestStatus,
    SampledToken,
    ScheduledRequest,
    StepPlan,
    StepResult,
    TokenView,
    sequence_ids,
)
from minivllm.trace import (
    Aborted,
    Failed,
    Finished,
    Planned,
    Preempted,
    Sampled,
    Submitted,
    TraceSink,
    no_trace,
)
from minivllm.waiting import Ticket, WaitingQueue

__all__ = ["Scheduler"]


class Scheduler:
    """Continuous batching over a paged KV cache: `add`, then `plan` and `commit` in turn.

    Running requests are served first, then waiting ones are admitted, in order of arrival ("fcfs")
    or of (priority, arrival), lower first ("priority"). When a running request finds no block, the
    last one in that order loses all of its blocks and waits again with its outputs. Later it is
    computed anew, from whatever the prefix cache still holds, or swapped back in. In such a step
    nobody is admitted.

    A request for n sequences is computed once; with its first tokens it becomes n requests that
    share its blocks, and from then on are served, preempted and ended one by one.

    Admission: a request is let in if the pool has room for all of its known tokens and for what it
    needs in the step after, beside what those already running need then. Nobody is thrown out for
    want of room more than `max_preemptions` times: after that many, a request is let in only if
    all that run could reach their ends together with it, and while it runs so is everybody else.

    Progress: every plan computes at least one token of the first running request, and that request
    is never a victim, because each request fits the pool alone (`add` refuses others). So, with
    T = prompt + most tokens to generate, and n live sequences (those to be forked included), if no
    more are added:

    - fcfs: all have ended after at most sum(T) steps;
    - priority: after at most sum(T) + (n - 1) * max(T) steps, since a better request that was
      waiting may displace the first one once, whose computing is then lost.

    Each call of `preempt` can cost up to max(T) steps more.

    Args:
        block_manager: the KV cache's bookkeeping; the scheduler is its only user.
        max_num_seqs: most requests in one step. A request still to be forked counts n times.
        max_num_batched_tokens: most tokens in one step.
        max_model_len: most tokens of one request, prompt and output.
        max_encoder_embeddings: most rows of vision embeddings kept at once. A step computes no
            token whose picture does not fit beside those the step already needs: the chunk ends
            before it.
        enable_chunked_prefill: off, a prompt is computed in one step. Only a preempted request
            whose prompt and outputs exceed max_num_batched_tokens is still recomputed in chunks,
            as it could not go on otherwise.
        policy: "fcfs" or "priority".
        preemption_mode: what a preempted request loses. "recompute": its KV. "swap": nothing; its
            KV moves to host blocks, if there is room, and is lost otherwise. "auto": swapped if
            more than one block of it is computed and there is room.
        max_preemptions: how often want of room may preempt one request; calls of `preempt` count
            too, but are not bounded by it.
        trace: receives Submitted, Planned, Preempted, Sampled, Finished, Aborted and Failed.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        *,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_encoder_embeddings: int = 2048,
        enable_chunked_prefill: bool = True,
        policy: Literal["fcfs", "priority"] = "fcfs",
        preemption_mode: PreemptionMode = "recompute",
        max_preemptions: int = 3,
        trace: TraceSink = no_trace,
    ) -> None:
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
            "max_encoder_embeddings": max_encoder_embeddings,
        }
        problems = [f"{name} must be at least 1, got {value}" for name, value in limits.items() if value < 1]
        if max_preemptions < 0:
            problems.append(f"max_preemptions must not be negative, got {max_preemptions}")
        if policy not in ("fcfs", "priority"):
            problems.append(f"policy must be fcfs or priority, got {policy!r}")
        if preemption_mode not in ("recompute", "swap", "auto"):
            problems.append(f"preemption_mode must be recompute, swap or auto, got {preemption_mode!r}")
        if problems:
            raise ConfigError("; ".join(problems))
        self.block_manager = block_manager
        self.encoder_cache = EncoderCache(max_encoder_embeddings, trace)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.enable_chunked_prefill = enable_chunked_prefill
        self.policy = policy
        self.preemption_mode: PreemptionMode = preemption_mode
        self.max_preemptions = max_preemptions
        self._trace = trace
        self._requests: dict[str, Request] = {}
        self._groups = SequenceGroups()
        self._tickets: dict[str, Ticket] = {}
        self._running: list[Request] = []  # in order of tickets; victims are taken from the end
        self._waiting = WaitingQueue()
        self._arrivals = itertools.count()  # numbers the requests
        self._num_steps = 0
        self._plan: StepPlan | None = None  # the latest one, until it is committed

    @property
    def requests(self) -> Mapping[str, Request]:
        """Live requests by id; sequences other than the first are requests of their own."""
        return MappingProxyType(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_unfinished(self) -> bool:
        """Whether any request is live."""
        return bool(self._requests)

    def kv_snapshot(self) -> KVSnapshot:
        """Every KV block with its holders and content. Slow: takes time in proportion to the pool."""
        return self.block_manager.snapshot(self._requests)

    # --- requests come and go ---------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request, or refuse it for good with the numbers in the message.

        Raises:
            DuplicateRequest: a live request has this id, or one of those its sequences would have.
            PromptTooLong: no room for one generated token, or (chunked prefill off) the prompt
                exceeds max_num_batched_tokens.
            CapacityError: it could outgrow the whole pool, or an image the encoder cache or the
                step, so it might never finish.
            RequestError: the prompt is empty, the object has been served already, or its media
                spans do not fit its prompt.
        """
        self._groups.refuse_taken(request, self._requests)
        max_chunk = None if self.enable_chunked_prefill else self.max_num_batched_tokens
        check_prompt(request, self.max_model_len, max_chunk)
        check_capacity(request, self.max_model_len, self.block_manager)
        self.encoder_cache.check(request)
        check_spans(request, self.max_num_batched_tokens)
        if not self.enable_chunked_prefill:
            self.encoder_cache.check_whole(request)
        order = (request.priority, request.arrival) if self.policy == "priority" else ()
        self._groups.open(request)
        self._enter(request, (*order, next(self._arrivals)))
        self._waiting.push(self._tickets[request.request_id], request.request_id)
        self._trace(Submitted(request.request_id, request.num_prompt_tokens))

    def abort(self, request_id: str) -> Request:
        """Cancel a live request in any state with all of its sequences, and return it.

        The id of a sequence other than the first cancels that one alone. A step that a request is
        part of may still be committed; its result is then ignored.

        Raises:
            UnknownRequest: no live request has this id, nor has a sequence of it.
        """
        group = self._groups.all_of(request_id)
        if group is None:
            request = self._live(request_id)
            group = request, [request]
        for member in group[1]:
            self._end(member, RequestStatus.FINISHED, FinishReason.ABORT)
            self._trace(Aborted(member.request_id))
        return group[0]

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End a live request for a reason found outside, such as a stop string in its text.

        Its other sequences go on.

        Raises:
            UnknownRequest: no live request has this id (it may have ended in `commit`).
        """
        self._finish(self._live(request_id), reason, stop_reason)

    def preempt(self, request_id: str, mode: PreemptionMode | None = None) -> bool:
        """Take a request's blocks away before the next plan (for tests). False if it has none.

        Args:
            mode: instead of the scheduler's preemption_mode.
        """
        request = self._requests.get(request_id)
        if request is None or request.status is not RequestStatus.RUNNING:
            return False
        self._running.remove(request)
        self._put_back(request, mode or self.preemption_mode)
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks, as after a weight update. False while blocks are in use."""
        return self.block_manager.reset_prefix_cache()

    def reset_encoder_cache(self) -> None:
        """Forget all vision embeddings, as after a weight update; they are dropped in the next step."""
        self.encoder_cache.clear()

    # --- one step ---------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Decide the next step; None when no request is live.

        Planning again without a commit gives up the earlier plan, which must not have been run:
        nothing of it was counted, and its copies are planned again.

        Raises:
            InvariantError: requests are live but none can be computed.
        """
        self._plan = None
        if not self._requests:
            return None
        self.encoder_cache.begin()
        scheduled: list[ScheduledRequest] = []
        num_running = len(self._running)
        budget = self._plan_running(scheduled)
        preempted = len(self._running) < num_running
        if self._waiting and not preempted:
            self._plan_waiting(scheduled, budget)
        if not scheduled:
            raise InvariantError(
                f"law 'every step makes progress' is broken: {len(self._running)} running and"
                f" {len(self._waiting)} waiting requests, pool {self.block_manager.counts()}"
            )
        pending = self.block_manager.pending_copies()
        encode, evict = self.encoder_cache.changes()
        self._plan = StepPlan(
            self._num_steps,
            tuple(scheduled),
            pending.copies,
            pending.swap_out,
            pending.swap_in,
            encode,
            evict,
        )
        self._num_steps += 1
        self._trace(Planned(self._plan.step, tuple((s.request_id, s.start, s.num_tokens) for s in scheduled)))
        return self._plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Take in the result of the latest plan.

        Its copies count as done. Per scheduled request that is still running: its KV counts as
        computed, full blocks are published, its token is appended, and it ends if it must. With
        its first token a request for n sequences is forked. A failed one ends with the message,
        and its blocks are never hit again. Requests aborted or preempted since the plan are
        skipped.

        Returns:
            The requests that got a token, finished or failed, in the order of the plan, each
            followed by the sequences forked from it.

        Raises:
            InvariantError: not the latest plan, or a result that does not fit it. Nothing has
                changed then.
        """
        if plan is not self._plan:
            raise InvariantError(f"step {plan.step} is committed, but it is not the latest plan")
        # One that was aborted or preempted can only run again in a later plan.
        current = [s for s in plan.requests if s.request.status is RequestStatus.RUNNING]
        check_result(plan, current, result)
        self._plan = None
        self.block_manager.copies_done(PendingCopies(plan.swap_out, plan.swap_in, plan.copies))
        self.encoder_cache.committed()
        changed: list[Request] = []
        for scheduled in current:
            request = scheduled.request
            if scheduled.request_id in result.failures:
                self._fail(request, result.failures[scheduled.request_id])
                changed.append(request)
                continue
            request.num_computed_tokens = scheduled.end
            self.block_manager.publish(request)
            if scheduled.sample:
                # Forked first: the parent's own token may end it, and its blocks would be gone.
                sequences = [request, *self._fork(request, scheduled.fork_ids)]
                for sequence in sequences:
                    if sequence.request_id in result.failures:
                        self._fail(sequence, result.failures[sequence.request_id])
                    else:
                        self._append(sequence, result.samples[sequence.request_id])
                changed += sequences
        return changed

    def break_off(self, carried_out: PendingCopies) -> None:
        """The latest plan's run ended early: nothing of it counts but the copies it had finished.

        The runner has forgotten all media, so they are encoded again.
        """
        self._plan = None
        self.block_manager.copies_done(carried_out)
        self.encoder_cache.forget()

    def check_integrity(self) -> None:
        """Check every law of the scheduler and its block manager; slow, for tests.

        Raises:
            InvariantError: naming the broken law.
        """
        self.block_manager.check_integrity()
        self.encoder_cache.check_integrity(self._requests)
        check_schedule(
            self._requests, self._tickets, self._running, self._waiting, self.max_num_seqs, self.block_manager
        )

    # --- planning ---------------------------------------------------------------------------

    def _plan_running(self, scheduled: list[ScheduledRequest]) -> int:
        """Schedule running requests, preempting others if need be; returns the tokens left."""
        budget = self.max_num_batched_tokens
        position = 0
        while position < len(self._running) and budget > 0:
            request = self._running[position]
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            num_tokens = uncut(request, request.num_computed_tokens, num_tokens)
            num_tokens = self.encoder_cache.most_tokens(request, request.num_computed_tokens, num_tokens)
            if num_tokens == 0:  # its picture waits for room, here or in the encoder cache
                position += 1
            elif self.block_manager.append(request, request.num_computed_tokens + num_tokens):
                scheduled.append(self._schedule(request, num_tokens))
                budget -= num_tokens
                position += 1
            else:
                # Those before `position` are scheduled; the last one never is.
                self._put_back(self._running.pop(), self.preemption_mode)
        return budget

    def _plan_waiting(self, scheduled: list[ScheduledRequest], budget: int) -> None:
        """Admit waiting requests in order, up to the first that does not fit."""
        room = Room(self._running, self.max_model_len, self.block_manager, self.max_preemptions)
        taken = sum(seats(request, self.max_num_seqs) for request in self._running)
        while budget > 0 and (first := self._waiting.first()) is not None:
            request = self._requests[first]
            taken += seats(request, self.max_num_seqs)
            if taken > self.max_num_seqs:
                return
            prefix = self.block_manager.find_prefix(request)
            start = request.num_computed_tokens or prefix.num_tokens
            remaining = request.num_tokens - start
            num_tokens = uncut(request, start, min(remaining, budget))
            num_tokens = self.encoder_cache.most_tokens(request, start, num_tokens)
            in_one_step = not self.enable_chunked_prefill and remaining <= self.max_num_batched_tokens
            if num_tokens == 0 or (in_one_step and num_tokens < remaining):
                return
            # All its known tokens must fit, not only this chunk: a prompt let in without room for
            # its end would be thrown out again half computed.
            if not room.has(request, prefix):
                return
            self._admit(request, start, num_tokens, prefix)
            room.admitted(request)
            scheduled.append(self._schedule(request, num_tokens))
            budget -= num_tokens

    def _admit(self, request: Request, start: int, num_tokens: int, prefix: PrefixMatch) -> None:
        """Take the first waiting request in, to compute `num_tokens` tokens from `start` on."""
        self._waiting.pop()
        if self.block_manager.host_table(request.request_id):
            done = self.block_manager.swap_in(request, start + num_tokens)
        else:
            done = self.block_manager.allocate(request, start + num_tokens, prefix)
        if not done:
            raise InvariantError(f"request {request.request_id!r} fits the pool but was not allocated")
        request.num_computed_tokens = start
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = start
        self._run(request)

    def _schedule(self, request: Request, num_tokens: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        self.encoder_cache.claim(request, start, num_tokens)
        sample = start + num_tokens == request.num_tokens
        forks = sample and forks_when_it_samples(request)
        return ScheduledRequest(
            request_id=request.request_id,
            start=start,
            num_tokens=num_tokens,
            tokens=TokenView(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            block_table=self.block_manager.block_table(request.request_id),
            sample=sample,
            request=request,
            fork_ids=sequence_ids(request.request_id, request.sampling.n)[1:] if forks else (),
        )

    # --- changes of state -------------------------------------------------------------------

    def _enter(self, request: Request, ticket: Ticket) -> None:
        self._requests[request.request_id] = request
        self.encoder_cache.join(request)
        self._tickets[request.request_id] = ticket

    def _run(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        bisect.insort(self._running, request, key=lambda r: self._tickets[r.request_id])

    def _put_back(self, request: Request, mode: PreemptionMode) -> None:
        """Turn a request just taken out of the running ones into a waiting one without blocks."""
        computed = request.num_computed_tokens
        least = self.block_manager.block_size if mode == "auto" else 0
        to_swap = mode != "recompute" and computed > least
        swapped = to_swap and self.block_manager.swap_out(request.request_id)
        if not swapped:
            self.block_manager.free(request.request_id)
            request.num_computed_tokens = 0
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self._waiting.push(self._tickets[request.request_id], request.request_id)
        done: Literal["recompute", "swap"] = "swap" if swapped else "recompute"
        self._trace(Preempted(request.request_id, done, computed, fallback=to_swap and not swapped))

    def _fork(self, parent: Request, child_ids: tuple[str, ...]) -> list[Request]:
        """Make the other sequences of a request that is about to get its first token.

        They are served right after the parent. Those for whom there is no seat wait, to be
        computed from the prefix cache; this happens only if n exceeds max_num_seqs.
        """
        children = [make_child(parent, index) for index in range(1, len(child_ids) + 1)]
        for child in children:
            ticket = (*self._tickets[parent.request_id], child.sequence_index)
            self._enter(child, ticket)
            self._groups.join(child)
            if child.sequence_index < self.max_num_seqs:
                self.block_manager.fork(parent.request_id, child)
                self._run(child)
            else:
                child.status = RequestStatus.WAITING
                child.num_computed_tokens = 0
                self._waiting.push(ticket, child.request_id)
        return children

    def _append(self, request: Request, sampled: SampledToken) -> None:
        token_id = sampled.token_id
        request.token_ids.append(token_id)
        generated = request.num_output_tokens
        self._trace(Sampled(request.request_id, generated - 1, token_id))
        sampling = request.sampling
        if generated >= sampling.min_tokens:
            if token_id in request.eos_token_ids and not sampling.ignore_eos:
                self._finish(request, FinishReason.STOP, None)
                return
            if token_id in sampling.stop_token_ids:
                self._finish(request, FinishReason.STOP, token_id)
                return
        if request.num_tokens >= most_tokens(request, self.max_model_len):
            self._finish(request, FinishReason.LENGTH, None)

    def _finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        request.stop_reason = stop_reason
        self._end(request, RequestStatus.FINISHED, reason)
        self._trace(Finished(request.request_id, reason.value, request.num_output_tokens))

    def _fail(self, request: Request, message: str) -> None:
        request.error = message
        self.block_manager.discard(request.request_id)
        self._end(request, RequestStatus.FAILED, FinishReason.ERROR)
        self._trace(Failed(request.request_id, message))

    def _end(self, request: Request, status: RequestStatus, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request.request_id)
        del self._requests[request.request_id]
        del self._tickets[request.request_id]
        self._groups.leave(request.request_id)
        self.encoder_cache.leave(request)
        self.block_manager.free(request.request_id)
        request.status = status
        request.finish_reason = reason

    # --- questions --------------------------------------------------------------------------

    def _live(self, request_id: str) -> Request:
        request = self._requests.get(request_id)
        if request is None:
            raise UnknownRequest(f"no live request has the id {request_id!r}")
        return request
