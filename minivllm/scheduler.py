"""Decides what each step computes, and takes in what it produced.

A plan is "request → how many tokens". There is no prefill or decode phase: chunked prompts, prefix
hits and resumed requests differ only in how far `num_computed_tokens` is behind `num_tokens`.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from minivllm.admission import check_capacity, check_prompt, most_tokens
from minivllm.cache import BlockManager
from minivllm.config import PreemptionMode
from minivllm.errors import ConfigError, DuplicateRequest, InvariantError, UnknownRequest
from minivllm.request import (
    FinishReason,
    Request,
    RequestStatus,
    SampledToken,
    ScheduledRequest,
    StepPlan,
    StepResult,
    TokenView,
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
    last one in that order loses all of its blocks and waits again with its outputs; it is computed
    anew later, from whatever the prefix cache still holds. In such a step nobody is admitted.

    Progress: every plan computes at least one token of the first running request, and that request
    is never a victim, because each request fits the pool alone (`add` refuses others). So, with
    T = prompt + most tokens to generate, and n live requests, if no more are added:

    - fcfs: all have ended after at most sum(T) steps;
    - priority: after at most sum(T) + (n - 1) * max(T) steps, since a better request that was
      waiting may displace the first one once, whose computing is then lost.

    Each call of `preempt` can cost up to max(T) steps more.

    Args:
        block_manager: the KV cache's bookkeeping; the scheduler is its only user.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: most tokens in one step.
        max_model_len: most tokens of one request, prompt and output.
        enable_chunked_prefill: off, a prompt is computed in one step. Only a preempted request
            whose prompt and outputs exceed max_num_batched_tokens is still recomputed in chunks,
            as it could not go on otherwise.
        policy: "fcfs" or "priority".
        preemption_mode: what a preempted request loses, see `EngineConfig`.
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
        enable_chunked_prefill: bool = True,
        policy: Literal["fcfs", "priority"] = "fcfs",
        preemption_mode: PreemptionMode = "recompute",
        trace: TraceSink = no_trace,
    ) -> None:
        limits = {
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_model_len": max_model_len,
        }
        problems = [f"{name} must be at least 1, got {value}" for name, value in limits.items() if value < 1]
        if policy not in ("fcfs", "priority"):
            problems.append(f"policy must be fcfs or priority, got {policy!r}")
        if preemption_mode not in ("recompute", "swap", "auto"):
            problems.append(f"preemption_mode must be recompute, swap or auto, got {preemption_mode!r}")
        if problems:
            raise ConfigError("; ".join(problems))
        self.block_manager = block_manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.enable_chunked_prefill = enable_chunked_prefill
        self.policy = policy
        self.preemption_mode = preemption_mode
        self._trace = trace
        self._requests: dict[str, Request] = {}
        self._tickets: dict[str, Ticket] = {}
        self._running: list[Request] = []  # in order of service; victims are taken from the end
        self._waiting = WaitingQueue()
        self._num_added = 0
        self._num_steps = 0
        self._plan: StepPlan | None = None  # the latest one, until it is committed

    @property
    def requests(self) -> Mapping[str, Request]:
        """Live requests by id, in order of arrival."""
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

    # --- requests come and go ---------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a new request, or refuse it for good with the numbers in the message.

        Raises:
            DuplicateRequest: a live request has this id.
            PromptTooLong: no room for one generated token, or (chunked prefill off) the prompt
                exceeds max_num_batched_tokens.
            CapacityError: it could outgrow the whole pool, so it might never finish.
            RequestError: the prompt is empty, or the object has been served already.
        """
        if request.request_id in self._requests:
            raise DuplicateRequest(
                f"request id {request.request_id!r} is in use by a live request; choose another"
            )
        max_chunk = None if self.enable_chunked_prefill else self.max_num_batched_tokens
        check_prompt(request, self.max_model_len, max_chunk)
        check_capacity(request, self.max_model_len, self.block_manager)
        self._requests[request.request_id] = request
        if self.policy == "priority":
            ticket: Ticket = (request.priority, request.arrival, self._num_added)
        else:
            ticket = (self._num_added,)
        self._num_added += 1
        self._tickets[request.request_id] = ticket
        self._waiting.push(ticket, request.request_id)
        self._trace(Submitted(request.request_id, request.num_prompt_tokens))

    def abort(self, request_id: str) -> Request:
        """Cancel a live request in any state, and return it.

        A step it is part of may still be committed; its result is then ignored.

        Raises:
            UnknownRequest: no live request has this id.
        """
        request = self._live(request_id)
        self._end(request, RequestStatus.FINISHED, FinishReason.ABORT)
        self._trace(Aborted(request_id))
        return request

    def finish(self, request_id: str, reason: FinishReason, stop_reason: int | str | None) -> None:
        """End a live request for a reason found outside, such as a stop string in its text.

        Raises:
            UnknownRequest: no live request has this id (it may have ended in `commit`).
        """
        self._finish(self._live(request_id), reason, stop_reason)

    def preempt(self, request_id: str) -> bool:
        """Take a request's blocks away before the next plan (for tests). False if it has none."""
        request = self._requests.get(request_id)
        if request is None or request.status is not RequestStatus.RUNNING:
            return False
        self._running.remove(request)
        self._put_back(request)
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks, as after a weight update. False while blocks are in use."""
        return self.block_manager.reset_prefix_cache()

    # --- one step ---------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Decide the next step; None when no request is live.

        Planning again without a commit gives up the earlier plan: nothing of it was counted.

        Raises:
            InvariantError: requests are live but none can be computed.
        """
        self._plan = None
        if not self._requests:
            return None
        scheduled: list[ScheduledRequest] = []
        budget, preempted = self._plan_running(scheduled)
        if not preempted:
            self._plan_waiting(scheduled, budget)
        if not scheduled:
            raise InvariantError(
                f"law 'every step makes progress' is broken: {len(self._running)} running and"
                f" {len(self._waiting)} waiting requests, pool {self.block_manager.counts()}"
            )
        self._plan = StepPlan(self._num_steps, tuple(scheduled))
        self._num_steps += 1
        self._trace(Planned(self._plan.step, tuple((s.request_id, s.start, s.num_tokens) for s in scheduled)))
        return self._plan

    def commit(self, plan: StepPlan, result: StepResult) -> list[Request]:
        """Take in the result of the latest plan.

        Per scheduled request that is still running: its KV counts as computed, full blocks are
        published, its token is appended, and it ends if it must. A failed one ends with the
        message, and its blocks are never hit again. Requests aborted or preempted since the plan
        are skipped.

        Returns:
            The requests that got a token, finished or failed, in the order of the plan.

        Raises:
            InvariantError: not the latest plan, or a result that does not fit it. Nothing has
                changed then.
        """
        if plan is not self._plan:
            raise InvariantError(f"step {plan.step} is committed, but it is not the latest plan")
        current = [s for s in plan.requests if self._is_current(s)]
        self._check_result(plan, current, result)
        self._plan = None
        changed = []
        for scheduled in current:
            request = scheduled.request
            if scheduled.request_id in result.failures:
                self._fail(request, result.failures[scheduled.request_id])
                changed.append(request)
                continue
            request.num_computed_tokens = scheduled.end
            self.block_manager.publish(request)
            if scheduled.sample:
                self._append(request, result.samples[scheduled.request_id])
                changed.append(request)
        return changed

    def check_integrity(self) -> None:
        """Check every law of the scheduler and its block manager; slow, for tests.

        Raises:
            InvariantError: naming the broken law.
        """
        self.block_manager.check_integrity()
        running = [request.request_id for request in self._running]
        waiting = [request_id for request_id in self._requests if request_id in self._waiting]
        if sorted(running + waiting) != sorted(self._requests) or len(waiting) != len(self._waiting):
            raise InvariantError("law 'a live request either runs or waits' is broken")
        if self._tickets.keys() != self._requests.keys():
            raise InvariantError("law 'each live request has one ticket' is broken")
        if len(running) > self.max_num_seqs:
            raise InvariantError(f"law 'at most {self.max_num_seqs} run' is broken: {len(running)} run")
        if self.policy == "priority" and running != sorted(running, key=self._tickets.__getitem__):
            raise InvariantError(f"law 'running requests are in order' is broken: {running}")
        for request in self._requests.values():
            self._check_request(request)

    # --- planning ---------------------------------------------------------------------------

    def _plan_running(self, scheduled: list[ScheduledRequest]) -> tuple[int, bool]:
        """Schedule running requests; returns the tokens left, and whether one was preempted."""
        budget = self.max_num_batched_tokens
        preempted = False
        position = 0
        while position < len(self._running) and budget > 0:
            request = self._running[position]
            num_tokens = min(request.num_tokens - request.num_computed_tokens, budget)
            if self.block_manager.append(request, request.num_computed_tokens + num_tokens):
                scheduled.append(self._schedule(request, num_tokens))
                budget -= num_tokens
                position += 1
            else:
                # Those before `position` are scheduled; the last one never is.
                self._put_back(self._running.pop())
                preempted = True
        return budget, preempted

    def _plan_waiting(self, scheduled: list[ScheduledRequest], budget: int) -> None:
        """Admit waiting requests in order, up to the first that does not fit."""
        manager = self.block_manager
        while budget > 0 and len(self._running) < self.max_num_seqs:
            first = self._waiting.first()
            if first is None:
                return
            request = self._requests[first]
            prefix = manager.find_prefix(request)
            remaining = request.num_tokens - prefix.num_tokens
            num_tokens = min(remaining, budget)
            in_one_step = not self.enable_chunked_prefill and remaining <= self.max_num_batched_tokens
            if in_one_step and num_tokens < remaining:
                return
            # All known tokens must fit, not only this chunk: a prompt let in without room for its
            # end would be thrown out again half computed.
            if not manager.can_fit(request, request.num_tokens, prefix):
                return
            if not manager.allocate(request, prefix.num_tokens + num_tokens, prefix):
                raise InvariantError(f"request {first!r} fits the pool but was not allocated")
            self._waiting.pop()
            self._start(request, prefix.num_tokens)
            scheduled.append(self._schedule(request, num_tokens))
            budget -= num_tokens

    def _schedule(self, request: Request, num_tokens: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        return ScheduledRequest(
            request_id=request.request_id,
            start=start,
            num_tokens=num_tokens,
            tokens=TokenView(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            block_table=self.block_manager.block_table(request.request_id),
            sample=start + num_tokens == request.num_tokens,
            request=request,
        )

    # --- changes of state -------------------------------------------------------------------

    def _start(self, request: Request, num_cached_tokens: int) -> None:
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_cached_tokens
        if request.num_cached_tokens < 0:
            request.num_cached_tokens = num_cached_tokens
        if self.policy == "priority":
            bisect.insort(self._running, request, key=lambda r: self._tickets[r.request_id])
        else:
            self._running.append(request)

    def _put_back(self, request: Request) -> None:
        """Turn a request just taken out of the running ones into a waiting one without blocks."""
        self._trace(Preempted(request.request_id, "recompute", request.num_computed_tokens))
        self.block_manager.free(request.request_id)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self._waiting.push(self._tickets[request.request_id], request.request_id)

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
        self.block_manager.free(request.request_id)
        request.status = status
        request.finish_reason = reason

    # --- checks -----------------------------------------------------------------------------

    def _live(self, request_id: str) -> Request:
        request = self._requests.get(request_id)
        if request is None:
            raise UnknownRequest(f"no live request has the id {request_id!r}")
        return request

    def _is_current(self, scheduled: ScheduledRequest) -> bool:
        request = scheduled.request
        return (
            self._requests.get(scheduled.request_id) is request
            and request.status is RequestStatus.RUNNING
            and request.num_computed_tokens == scheduled.start
            and self.block_manager.block_table(scheduled.request_id) == scheduled.block_table
        )

    def _check_result(self, plan: StepPlan, current: list[ScheduledRequest], result: StepResult) -> None:
        problems = []
        expected = {s.request_id for s in plan.requests if s.sample}
        if extra := sorted(result.samples.keys() - expected):
            problems.append(f"tokens for requests that were not to sample: {extra}")
        if extra := sorted(result.failures.keys() - {s.request_id for s in plan.requests}):
            problems.append(f"failures of requests that were not scheduled: {extra}")
        answered = result.samples.keys() | result.failures.keys()
        if missing := sorted(s.request_id for s in current if s.sample and s.request_id not in answered):
            problems.append(f"no token for {missing}")
        if problems:
            raise InvariantError(
                f"the result of step {plan.step} does not fit its plan: {'; '.join(problems)}"
            )

    def _check_request(self, request: Request) -> None:
        name = request.request_id
        holds = self.block_manager.has_table(name)
        if (request.status is RequestStatus.RUNNING) != holds or (name in self._waiting) == holds:
            raise InvariantError(f"law 'exactly running requests hold blocks' is broken: {name!r}")
        if not 0 <= request.num_computed_tokens < request.num_tokens:
            raise InvariantError(
                f"law 'a live request has a token to compute' is broken: {name!r} computed"
                f" {request.num_computed_tokens} of {request.num_tokens}"
            )
        if not holds and request.num_computed_tokens:
            raise InvariantError(f"law 'computed tokens have blocks' is broken: {name!r}")
