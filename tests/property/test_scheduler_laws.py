"""Scheduler and block manager under random histories, against a model that knows every KV value.

The value a fake runner stores for a token is chained over the token's whole prefix, so a read of
any wrong slot is seen at once, and the sampled tokens depend on it. Pools, blocks and
vocabularies are tiny: that is where collisions of every kind happen.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.cache import BlockManager
from minivllm.config import PreemptionMode
from minivllm.errors import CapacityError, PromptTooLong
from minivllm.groups import forks_when_it_samples
from minivllm.request import (
    FinishReason,
    MediaItem,
    MediaSpan,
    Request,
    RequestStatus,
    SampledToken,
    SamplingParams,
    ScheduledRequest,
    StepPlan,
    StepResult,
    sequence_ids,
)
from minivllm.scheduler import Scheduler
from minivllm.trace import Copied, Event, Forked, Preempted, PrefixHit, SwappedIn, SwappedOut

EOS = 0
MASK = (1 << 61) - 1


@dataclass(frozen=True)
class Spec:
    """A request to make. With `follows`, its prompt continues what that request has by then."""

    prompt: tuple[int, ...]
    max_tokens: int | None
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    salt: str | None
    image: tuple[int, int, str] | None
    priority: int
    prompt_logprobs: int | None
    n: int
    follows: int | None


@dataclass(frozen=True)
class Case:
    block_size: int
    num_blocks: int
    max_num_seqs: int
    budget: int
    max_model_len: int
    chunked: bool
    caching: bool
    policy: Literal["fcfs", "priority"]
    mode: PreemptionMode
    num_host_blocks: int
    max_preemptions: int
    vocabulary: int
    specs: tuple[Spec, ...]
    script: tuple[tuple[str, int], ...]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    vocabulary = draw(st.integers(2, 3))
    tokens = st.integers(0, vocabulary - 1)
    specs: list[Spec] = []
    stems = draw(st.lists(st.lists(tokens, min_size=1, max_size=6), min_size=1, max_size=2))

    def spec(number: int) -> Spec:
        if specs and draw(st.integers(0, 2)) == 0:
            return specs[-1]  # the same again, so that equal prompts meet in one step
        prompt = (*draw(st.sampled_from(stems)), *draw(st.lists(tokens, max_size=4)))
        max_tokens = draw(st.integers(1, 8)) if draw(st.integers(0, 11)) else None
        image = None
        if draw(st.integers(0, 5)) == 0:
            start = draw(st.integers(0, len(prompt) - 1))
            image = (start, draw(st.integers(1, len(prompt) - start)), draw(st.sampled_from("ab")))
        return Spec(
            prompt=prompt,
            max_tokens=max_tokens,
            min_tokens=draw(st.integers(0, max_tokens or 2)),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=(1,) if draw(st.integers(0, 5)) == 0 else (),
            salt=draw(st.sampled_from([None, None, None, None, "a"])),
            image=image,
            priority=draw(st.integers(0, 1)),
            prompt_logprobs=0 if draw(st.integers(0, 7)) == 0 else None,
            n=draw(st.sampled_from([1, 1, 1, 2, 3])),
            follows=draw(st.integers(0, number - 1)) if number and not draw(st.integers(0, 3)) else None,
        )

    block_size = draw(st.integers(1, 4))
    chunked = draw(st.integers(0, 3)) > 0
    for number in range(draw(st.integers(2, 6))):
        specs.append(spec(number))
    kinds = ["add", "add", "step", "step", "step", "abort", "preempt", "reset"]
    kinds += ["step+abort", "step+preempt", "step+fail", "plan"]
    return Case(
        block_size=block_size,
        num_blocks=1 - -draw(st.integers(6, 24)) // block_size,
        max_num_seqs=draw(st.integers(1, 4)),
        budget=draw(st.integers(1, 12) if chunked else st.integers(6, 14)),
        max_model_len=draw(st.integers(10, 20)),
        chunked=chunked,
        caching=draw(st.integers(0, 4)) > 0,
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        mode=draw(st.sampled_from(["recompute", "swap", "swap", "auto"])),
        num_host_blocks=draw(st.sampled_from([0, 1, 2, 4, 8, 24])),
        max_preemptions=draw(st.sampled_from([0, 1, 3, 3])),
        vocabulary=vocabulary,
        specs=tuple(specs),
        script=tuple(
            draw(st.lists(st.tuples(st.sampled_from(kinds), st.integers(0, 5)), min_size=6, max_size=30))
        ),
    )


class Model:
    """KV values and next tokens as pure functions of a request's prefix."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def values(self, request: Request, tokens: list[int]) -> list[int]:
        value = 1 if request.cache_salt is None else 2
        out = []
        for position, token in enumerate(tokens):
            row = 0
            for span in request.media:
                if span.start <= position < span.start + span.length:
                    row = (position - span.start + 1) * 31 + ord(span.content_hash)
            value = (value * 6364136223846793005 + token * 1442695040888963407 + row * 97 + 11) & MASK
            out.append(value)
        return out

    def next_token(self, value: int, sequence_index: int) -> int:
        return ((value >> 23) + sequence_index * 7919 * (value >> 11)) % self.vocabulary

    def solo(self, request: Request, most: int, index: int) -> tuple[list[int], FinishReason, int | None]:
        """What a sequence of the request must generate, by the plain reading of its parameters."""
        sampling = request.sampling
        tokens = request.token_ids[: request.num_prompt_tokens]
        generated: list[int] = []
        while True:
            token = self.next_token(self.values(request, tokens)[-1], index)
            tokens.append(token)
            generated.append(token)
            if len(generated) >= sampling.min_tokens:
                if token == EOS and not sampling.ignore_eos:
                    return generated, FinishReason.STOP, None
                if token in sampling.stop_token_ids:
                    return generated, FinishReason.STOP, token
            if len(tokens) == most:
                return generated, FinishReason.LENGTH, None


@dataclass
class World:
    """The scheduler under test, the fake KV memory, and what has been seen."""

    case: Case
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        case = self.case
        self.events: list[Event] = []
        self.manager = BlockManager(
            case.num_blocks,
            case.block_size,
            enable_prefix_caching=case.caching,
            prefix_seed=0,
            num_host_blocks=case.num_host_blocks,
            trace=self.events.append,
        )
        self.scheduler = Scheduler(
            block_manager=self.manager,
            max_num_seqs=case.max_num_seqs,
            max_num_batched_tokens=case.budget,
            max_model_len=case.max_model_len,
            enable_chunked_prefill=case.chunked,
            policy=case.policy,
            preemption_mode=case.mode,
            max_preemptions=case.max_preemptions,
            trace=self.events.append,
        )
        self.model = Model(case.vocabulary)
        self.memory: dict[int, int | None] = {}
        self.host_memory: dict[int, int | None] = {}
        self.made: list[Request] = []
        self.sequences: dict[str, Request] = {}
        self.hooked: Counter[str] = Counter()  # calls of `preempt` by request
        self.expected: dict[str, tuple[list[int], FinishReason, int | None]] = {}
        self.disturbed: set[str] = set()  # aborted or failed on purpose
        self.most: dict[str, int] = {}
        self.history: dict[str, list[int]] = {}  # tokens of each request when last planned

    # --- operations

    def add(self) -> None:
        if len(self.made) == len(self.case.specs):
            return
        number = len(self.made)
        spec = self.case.specs[number]
        prompt = list(spec.prompt)
        if spec.follows is not None:
            prompt = [*self.made[spec.follows].token_ids, *prompt]
        request = Request(
            f"r{number}",
            prompt,
            len(prompt),
            SamplingParams(
                max_tokens=spec.max_tokens,
                min_tokens=spec.min_tokens,
                ignore_eos=spec.ignore_eos,
                stop_token_ids=spec.stop_token_ids,
                prompt_logprobs=spec.prompt_logprobs,
                n=spec.n,
            ),
            eos_token_ids=(EOS,),
            arrival=number,
            priority=spec.priority,
            cache_salt=spec.salt,
            media=() if spec.image is None else (MediaSpan(*spec.image[:2], "image", spec.image[2]),),
            media_items={name: MediaItem(name, "image", 32, {}) for name in "ab"},
        )
        self.made.append(request)
        most = min(self.case.max_model_len, len(prompt) + (spec.max_tokens or self.case.max_model_len))
        too_long = len(prompt) >= self.case.max_model_len
        too_long |= not self.case.chunked and len(prompt) > self.case.budget
        size = self.case.block_size
        together = len(prompt) // size if most - 1 > len(prompt) else -(-(most - 1) // size)
        own = -(-(most - 1) // size) - together
        never_fits = together + spec.n * own > self.case.num_blocks - 1
        try:
            self.scheduler.add(request)
        except PromptTooLong:
            assert too_long
            self.seen["refused as too long"] += 1
        except CapacityError:
            assert never_fits
            self.seen["refused as never fitting"] += 1
        else:
            assert not too_long
            assert not never_fits
            for index, name in enumerate(sequence_ids(request.request_id, spec.n)):
                self.most[name] = most
                self.expected[name] = self.model.solo(request, most, index)
            self.sequences[request.request_id] = request

    def live(self, number: int) -> Request | None:
        """One of the live requests; of the preempted ones, if there are any, for an even number."""
        requests = list(self.scheduler.requests.values())
        preempted = [r for r in requests if r.status is RequestStatus.PREEMPTED]
        if number % 2 == 0 and preempted:
            requests = preempted
        return requests[number % len(requests)] if requests else None

    def abort(self, number: int) -> None:
        request = self.live(number)
        if request is not None:
            if self.manager.host_table(request.request_id):
                self.seen["aborted while swapped out"] += 1
            self.seen[f"aborted while {request.status.value}"] += 1
            name = request.request_id
            with_all = sequence_ids(name, 1 if request.parent_id else request.sampling.n)
            ended = [self.sequences[one] for one in with_all if one in self.scheduler.requests]
            assert self.scheduler.abort(name) is request
            assert all(one.finish_reason is FinishReason.ABORT for one in ended)
            self.disturbed |= {one.request_id for one in ended}
            if request.num_output_tokens == 0:
                self.disturbed |= set(with_all)

    def preempt(self, number: int) -> None:
        request = self.live(number)
        if request is not None:
            running = request.status is RequestStatus.RUNNING
            mode: PreemptionMode | None = (None, "swap", "recompute")[number % 3]
            assert self.scheduler.preempt(request.request_id, mode) is running
            self.hooked[request.request_id] += running

    def step(self, meanwhile: str = "", number: int = 0) -> None:
        for block_id in self.manager.unused_slots()[0]:
            for offset in range(self.case.block_size):
                self.memory[block_id * self.case.block_size + offset] = None
        for block_id, first in self.manager.unused_slots()[1].items():
            for offset in range(first, self.case.block_size):
                self.memory[block_id * self.case.block_size + offset] = None
        for block_id in {*range(self.case.num_host_blocks)} - {*self.manager.host_pool.used_blocks()}:
            for offset in range(self.case.block_size):
                self.host_memory[block_id * self.case.block_size + offset] = None
        plan = self.scheduler.plan()
        self.scheduler.check_integrity()
        if plan is None:
            assert not self.scheduler.has_unfinished()
            return
        self.check_plan(plan)
        failing = plan.requests[number % len(plan.requests)] if meanwhile == "fail" else None
        samples = self.run(plan, failing)
        failures = {}
        if failing is not None:
            names = (failing.request_id, *failing.fork_ids)
            if number % 2 and failing.fork_ids:
                self.seen["failed as it was forked"] += 1
                names = failing.fork_ids[:1]
            failures = dict.fromkeys(names, "unusable")
            self.disturbed |= set(names)
            if failing.request_id in names and forks_when_it_samples(failing.request):
                self.disturbed |= set(sequence_ids(failing.request_id, failing.sampling.n))
            for name in names:
                samples.pop(name, None)
        if meanwhile == "abort":
            self.abort(number)
        elif meanwhile == "preempt":
            self.preempt(number)
        changed = self.scheduler.commit(plan, StepResult(samples, failures=failures))
        self.scheduler.check_integrity()
        for request in changed:
            self.sequences.setdefault(request.request_id, request)
            if request.request_id in failures:
                assert request.status is RequestStatus.FAILED
                assert request.error == "unusable"
            elif request.status is RequestStatus.FINISHED and request.num_output_tokens == 1:
                self.seen["finished on the first token"] += 1

    def run(self, plan: StepPlan, failing: ScheduledRequest | None) -> dict[str, SampledToken]:
        """Copy blocks, store all values, then read every context, as a forward pass does."""
        size = self.case.block_size
        for copies, sources, targets in (
            (plan.swap_out, self.memory, self.host_memory),
            (plan.swap_in, self.host_memory, self.memory),
            (plan.copies, self.memory, self.memory),
        ):
            for copy in copies:
                for offset in range(size):
                    targets[copy.target * size + offset] = sources.get(copy.source * size + offset)
        values = {s.request_id: self.model.values(s.request, list(s.tokens)) for s in plan.requests}
        written: dict[int, int | None] = {}
        tables = [self.manager.block_table(name) for name in self.scheduler.requests]
        for s in plan.requests:
            for position in range(s.start, s.end):
                value = values[s.request_id][position]
                slot = self.slot(s, position)
                assert written.setdefault(slot, value) == value, "one step writes a slot twice"
                assert sum(slot // size in table for table in tables) == 1, "a shared block is written"
        if failing is not None and not failing.fork_ids:
            for position in range(failing.start, failing.end):
                written[self.slot(failing, position)] = None
        self.memory.update(written)
        for s in plan.requests:
            if s is not failing:
                read = [self.memory[self.slot(s, position)] for position in range(s.end)]
                assert read == values[s.request_id][: s.end], f"{s.request_id} reads a wrong context"
        return {
            name: SampledToken(token, token)
            for s in plan.requests
            if s.sample
            for index, name in enumerate((s.request_id, *s.fork_ids), s.request.sequence_index)
            for token in [self.model.next_token(values[s.request_id][s.end - 1], index)]
        }

    def slot(self, s: ScheduledRequest, position: int) -> int:
        block, offset = divmod(position, self.case.block_size)
        return s.block_table[block] * self.case.block_size + offset

    # --- laws

    def check_plan(self, plan: StepPlan) -> None:
        case = self.case
        assert 0 < plan.num_tokens <= case.budget
        names = [s.request_id for s in plan.requests]
        assert len(set(names)) == len(names) <= case.max_num_seqs
        for s in plan.requests:
            request = s.request
            assert self.scheduler.requests[s.request_id] is request
            assert s.start == request.num_computed_tokens
            assert s.num_tokens >= 1
            assert s.end <= len(s.tokens)
            assert list(s.tokens) == request.token_ids
            before = self.history.get(s.request_id, [])
            assert s.tokens[: len(before)] == before, "tokens were taken back"
            self.history[s.request_id] = list(s.tokens)
            assert s.sample == (s.end == len(s.tokens))
            assert 0 not in s.block_table
            assert len(s.block_table) == -(-s.end // case.block_size)
            fresh = request.num_output_tokens == 0 and request.num_preemptions == 0
            if not case.chunked and fresh:
                assert s.sample, "a prompt was split although chunked prefill is off"
            if request.sampling.prompt_logprobs is not None:
                assert request.num_cached_tokens == 0
            self.seen["chunk over several blocks"] += not s.sample and s.num_tokens > case.block_size
        self.seen["chunk beside a decode"] += any(not s.sample for s in plan.requests) and any(
            s.sample and s.start >= s.num_prompt_tokens for s in plan.requests
        )
        prompts = [tuple(s.tokens) for s in plan.requests if s.start == 0]
        self.seen["equal prompts in one step"] += len(prompts) > len(set(prompts))

    def drain(self) -> None:
        limits = [
            self.most[name]
            for name, request in self.scheduler.requests.items()
            for _ in range(request.sampling.n if forks_when_it_samples(request) else 1)
        ]
        bound = sum(limits)
        if self.case.policy == "priority":
            bound += max(len(limits) - 1, 0) * max(limits, default=0)
        for _ in range(bound):
            self.step()
        assert not self.scheduler.has_unfinished(), f"unfinished after {bound} steps"

    def check_end(self) -> None:
        counts = self.manager.counts()
        assert counts.in_use == 0
        assert counts.free + counts.cached == self.case.num_blocks - 1
        assert self.manager.host_counts().in_use == 0
        self.manager.check_integrity()
        for name, (tokens, reason, stop_reason) in self.expected.items():
            if name not in self.sequences:
                # Never forked: its parent had been aborted or had failed.
                assert name in self.disturbed
                continue
            request = self.sequences[name]
            assert request.num_preemptions <= self.case.max_preemptions + self.hooked[name]
            if name in self.disturbed:
                assert request.output_token_ids == tokens[: request.num_output_tokens]
                assert request.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
            else:
                assert request.output_token_ids == tokens
                assert (request.finish_reason, request.stop_reason) == (reason, stop_reason)
        first_hits = sum(e.num_tokens for e in self.events if isinstance(e, PrefixHit) and not e.resumed)
        assert self.manager.stats.num_hit_tokens == first_hits
        assert first_hits == sum(max(0, r.num_cached_tokens) for r in self.made)
        for event in self.events:
            if isinstance(event, PrefixHit):
                self.seen["hit on resumption" if event.resumed else "hit"] += 1
            elif isinstance(event, Preempted):
                self.seen["preempted"] += 1
                self.seen["fell back to recomputing"] += event.fallback
            elif isinstance(event, SwappedOut | SwappedIn | Forked | Copied):
                self.seen[type(event).__name__] += 1
        assert self.scheduler.reset_prefix_cache()
        assert self.manager.counts().free == self.case.num_blocks - 1


def run_case(case: Case, seen: Counter[str] | None = None) -> list[Event]:
    world = World(case, Counter() if seen is None else seen)
    world.add()
    world.add()
    for kind, number in case.script:
        if kind == "add":
            world.add()
        elif kind == "abort":
            world.abort(number)
        elif kind == "preempt":
            world.preempt(number)
        elif kind == "reset":
            held = world.manager.counts().in_use + world.manager.host_counts().in_use
            assert world.scheduler.reset_prefix_cache() is (held == 0)
        elif kind == "plan":
            world.scheduler.plan()  # given up: the next step plans again
        else:
            world.step(kind.partition("+")[2], number)
        world.scheduler.check_integrity()
    while len(world.made) < len(case.specs):
        world.add()
    world.drain()
    world.check_end()
    return world.events


REACHED = (
    "hit",
    "hit on resumption",
    "preempted",
    "chunk over several blocks",
    "chunk beside a decode",
    "equal prompts in one step",
    "finished on the first token",
    "refused as too long",
    "refused as never fitting",
    "aborted while waiting",
    "aborted while running",
    "aborted while preempted",
    "aborted while swapped out",
    "fell back to recomputing",
    "failed as it was forked",
    "SwappedOut",
    "SwappedIn",
    "Forked",
    "Copied",
)


def test_every_history_reads_right_contexts_conserves_the_pool_and_drains_in_bounded_steps() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
    @given(cases())
    def check(case: Case) -> None:
        run_case(case, seen)

    check()
    assert [name for name in REACHED if not seen[name]] == []


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_the_same_history_happens_twice_in_the_same_way(case: Case) -> None:
    assert run_case(case) == run_case(case)
