"""Hypothesis rule-based state machines over both levels of the contract.

`allocator_machine(target)` and `engine_machine(target)` make the classes; a test instantiates them:

    TestMyManager = allocator_machine(find_target("my.module:Adapter")).TestCase

The rules apply the operations of `conformance.fuzz.operations` to the models, which check every
law after every rule; the target's own check runs after every rule as well.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from conformance.contracts.targets import Target
from conformance.fuzz.allocator_world import AllocatorWorld, Holder
from conformance.fuzz.engine_jobs import Job, why_rejected
from conformance.fuzz.engine_world import EngineWorld
from conformance.fuzz.operations import (
    Abort,
    Add,
    BreakOff,
    Commit,
    Fork,
    Grant,
    More,
    Operation,
    PlanStep,
    Preempt,
    Probe,
    Release,
    Reset,
    Resume,
    Run,
    SwapIn,
    SwapOut,
)
from conformance.fuzz.strategies import allocator_setups, engine_setups, prompts, salts, spans

__all__ = ["AllocatorMachine", "EngineMachine", "allocator_machine", "engine_machine"]

_INDEX = st.integers(0, 5)
_AMOUNT = st.integers(1, 9)


class _Machine(RuleBasedStateMachine):
    """What both machines share: the world, the counters, and the end."""

    target: ClassVar[Target]
    seen: ClassVar[Counter[str]]
    world: Any = None
    _broken = False
    _number = 0

    def do(self, operation: Operation) -> None:
        """Apply an operation; after a failure nothing more is expected of the target."""
        try:
            self.world.apply(operation)
        except BaseException:
            self._broken = True
            raise

    def name(self) -> str:
        self._number += 1
        return f"r{self._number}"

    def teardown(self) -> None:
        if self.world is not None and not self._broken:
            self.world.finish()


class AllocatorMachine(_Machine):
    """Over an allocator. The model stores the content of each logical position of each sequence."""

    world: AllocatorWorld

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        setup = data.draw(allocator_setups(self.target.can))
        self.world = AllocatorWorld(self.target.factory, setup, self.seen, strict=True)

    def _holders(self, *states: str) -> list[Holder]:
        return [h for h in self.world.holders.values() if not states or h.state in states]

    @rule(tokens=prompts(), n=_AMOUNT, salt=salts(), ask=st.booleans(), data=st.data())
    def grant(
        self, tokens: tuple[int, ...], n: int, salt: str | None, ask: bool, data: st.DataObject
    ) -> None:
        tags = self.world.can.tags
        if ask:
            self.do(Probe("probe", tokens, n))
        found = data.draw(spans(len(tokens))) if tags else ()
        self.do(Grant(self.name(), tokens, n, salt if tags else None, found))

    @precondition(lambda self: self._holders())
    @rule(index=_INDEX, more=prompts(2), turn=st.booleans(), n=_AMOUNT)
    def grant_alike(self, index: int, more: tuple[int, ...], turn: bool, n: int) -> None:
        """The same prompt again, or the next turn of a conversation."""
        holder = _pick(self._holders(), index)
        tags = holder.story.tags
        tokens = (*holder.story.tokens, *(more if turn else ()))
        found = tuple((s.start, s.length, s.content) for s in tags.spans)
        self.do(Grant(self.name(), tokens, n, tags.salt, found))

    @precondition(lambda self: any(not h.granted for h in self._holders("running")))
    @rule(index=_INDEX, n=_AMOUNT)
    def more(self, index: int, n: int) -> None:
        idle = [h for h in self._holders("running") if not h.granted]
        self.do(More(_pick(idle, index).name, n))

    @precondition(lambda self: self._holders("running"))
    @rule(steps=st.integers(1, 3), n=_AMOUNT)
    def steps(self, steps: int, n: int) -> None:
        """Whole steps in which everybody who runs goes on."""
        for _ in range(steps):
            for holder in self._holders("running"):
                self.do(More(holder.name, n))
            self.do(Run())

    @precondition(lambda self: self._holders("waiting"))
    @rule(index=_INDEX, n=_AMOUNT)
    def resume(self, index: int, n: int) -> None:
        self.do(Resume(_pick(self._holders("waiting"), index).name, n))

    @precondition(lambda self: any(h.granted for h in self._holders()))
    @rule()
    def run(self) -> None:
        self.do(Run())

    @precondition(lambda self: self._holders())
    @rule(index=_INDEX, again=st.booleans())
    def release(self, index: int, again: bool) -> None:
        self.do(Release(_pick(self._holders(), index).name, again))

    @precondition(lambda self: self._holders("running"))
    @rule(index=_INDEX, back=st.none() | _AMOUNT)
    def preempt(self, index: int, back: int | None) -> None:
        """Preempt, and perhaps let it come back at once."""
        name = _pick(self._holders("running"), index).name
        self.do(Preempt(name))
        if back:
            self.do(Resume(name, back))

    @precondition(lambda self: self.target.can.fork and self._holders("running"))
    @rule(index=_INDEX, token=st.integers(0, 2), both=st.booleans())
    def fork(self, index: int, token: int, both: bool) -> None:
        """Fork, and perhaps let both sequences write at once."""
        parent, child = _pick(self._holders("running"), index).name, self.name()
        self.do(Fork(parent, child, token))
        for name in (parent, child) if both else ():
            self.do(More(name, 1))

    @precondition(lambda self: self.target.can.swap and self._holders("running"))
    @rule(index=_INDEX)
    def swap_out(self, index: int) -> None:
        self.do(SwapOut(_pick(self._holders("running"), index).name))

    @precondition(lambda self: self.target.can.swap and self._holders("swapped"))
    @rule(index=_INDEX, n=_AMOUNT)
    def swap_in(self, index: int, n: int) -> None:
        self.do(SwapIn(_pick(self._holders("swapped"), index).name, n))

    @precondition(lambda self: self.target.can.reset and self.world.content and not self._holders())
    @rule()
    def reset(self) -> None:
        self.do(Reset())


class EngineMachine(_Machine):
    """Over a scheduler with its block manager: plan and commit with a runner that writes fake KV."""

    world: EngineWorld

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        setup = data.draw(engine_setups(self.target.can))
        self.world = EngineWorld(self.target.factory, setup, self.seen, strict=True)

    def _outside(self) -> bool:
        return self.world.planned is None

    @rule(tokens=prompts(), data=st.data())
    def add(self, tokens: tuple[int, ...], data: st.DataObject) -> None:
        self.do(self._request(tokens, data))

    @precondition(lambda self: self.world.jobs)
    @rule(index=st.integers(0, 8), more=prompts(2), turn=st.booleans(), data=st.data())
    def add_alike(self, index: int, more: tuple[int, ...], turn: bool, data: st.DataObject) -> None:
        """The same prompt again, or the next turn of a conversation, ended or not."""
        job = _pick(list(self.world.jobs.values()), index)
        self.do(self._request((*job.story.tokens, *more) if turn else job.add.tokens, data))

    def _request(self, tokens: tuple[int, ...], data: st.DataObject) -> Add:
        can, draw = self.target.can.options, data.draw
        max_tokens = draw(st.integers(1, 8))
        n = draw(st.sampled_from([1, 1, 1, 2, 3])) if "n" in can else 1
        rarely = st.integers(0, 7).map(lambda value: value == 7)
        add = Add(
            self.name(),
            tokens,
            max_tokens,
            ignore_eos=draw(st.booleans()),
            salt=draw(salts()) if "salt" in can else None,
            spans=draw(spans(len(tokens))) if "spans" in can else (),
            priority=draw(st.integers(0, 1)) if "priority" in can else 0,
            min_tokens=draw(st.integers(0, max_tokens)) if "min_tokens" in can else 0,
            stop_ids=(1,) if "stop_ids" in can and draw(rarely) else (),
            n=n,
            prompt_logprobs="prompt_logprobs" in can and n == 1 and draw(rarely),
        )
        setup = self.world.setup
        while not setup.oversized and add.max_tokens > 1 and why_rejected(add, setup, whole_prompts=False):
            add = add._replace(max_tokens=add.max_tokens - 1, min_tokens=0)
        return add

    @precondition(lambda self: self._outside() and self.world.live())
    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        """Whole steps, undisturbed."""
        for _ in range(steps):
            self.do(PlanStep())
            self.do(Commit())

    @precondition(lambda self: self._outside() and self.world.live())
    @rule(ship=st.booleans(), twice=st.booleans())
    def plan(self, ship: bool, twice: bool) -> None:
        """The beginning of a step; what comes before the commit is inside it."""
        self.do(PlanStep(ship))
        if twice and self.target.can.replan:
            self.do(PlanStep(ship))

    @precondition(lambda self: not self._outside())
    @rule(failing=st.none() | _INDEX, broken=st.sampled_from([*[None] * 10, 0, 1, 2, 4]))
    def commit(self, failing: int | None, broken: int | None) -> None:
        """The end of a step, which now and then is not committed but breaks off."""
        if self.target.can.break_off and broken is not None:
            self.do(BreakOff(broken, rows=failing or 0))
            return
        can = self.target.can.fail and failing is not None
        self.do(Commit(_pick(self.world.rows(), failing or 0).name if can else None))

    @precondition(lambda self: self.target.can.abort and self.world.live())
    @rule(index=_INDEX, whole=st.booleans())
    def abort(self, index: int, whole: bool) -> None:
        job: Job = _pick(self.world.live(), index)
        self.do(Abort((job.family[0] if whole else job).name))

    @precondition(lambda self: self.target.can.preempt and self.world.live())
    @rule(index=_INDEX)
    def preempt(self, index: int) -> None:
        self.do(Preempt(_pick(self.world.live(), index).name))

    @precondition(lambda self: self.target.can.reset and self.world.jobs and not self.world.live())
    @rule()
    def reset(self) -> None:
        self.do(Reset())


def _pick(items: list[Any], index: int) -> Any:
    return items[index % len(items)]


def allocator_machine(target: Target) -> type[AllocatorMachine]:
    """A machine over this allocator, with counters of its own."""
    return type("Machine", (AllocatorMachine,), {"target": target, "seen": Counter()})


def engine_machine(target: Target) -> type[EngineMachine]:
    """A machine over this engine, with counters of its own."""
    return type("Machine", (EngineMachine,), {"target": target, "seen": Counter()})
