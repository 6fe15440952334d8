"""The operations of both levels: small tuples, so that a list of them is a log to replay.

An operation that makes no sense in the state it meets (a release of an unknown request) does
nothing. So any part of a log is a log again, which is what shrinking needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

__all__ = [
    "ALLOCATOR_OPERATIONS",
    "ENGINE_OPERATIONS",
    "Abort",
    "Add",
    "BreakOff",
    "Commit",
    "Fork",
    "Grant",
    "More",
    "Operation",
    "PlanStep",
    "Preempt",
    "Probe",
    "Release",
    "Reset",
    "Resume",
    "Run",
    "SwapIn",
    "SwapOut",
    "from_plain",
    "to_plain",
]

SpanFields: TypeAlias = tuple[tuple[int, int, str], ...]


class Grant(NamedTuple):
    """A new request asks for room for n tokens."""

    request: str
    tokens: tuple[int, ...]
    n: int
    salt: str | None = None
    spans: SpanFields = ()


class Resume(NamedTuple):
    """A preempted or refused request asks again."""

    request: str
    n: int


class More(NamedTuple):
    """A running request asks for room for n more tokens."""

    request: str
    n: int


class Run(NamedTuple):
    """Carry out what was granted: copies, store all, read all, commit."""


class Release(NamedTuple):
    """A request ends, in whatever state; `again` releases it twice."""

    request: str
    again: bool = False


class Preempt(NamedTuple):
    """A request loses its blocks and keeps its tokens."""

    request: str


class Fork(NamedTuple):
    """A second sequence shares what is computed and goes on with `token`."""

    request: str
    child: str
    token: int


class SwapOut(NamedTuple):
    """A request's blocks go to the host."""

    request: str


class SwapIn(NamedTuple):
    """They come back, with room for n tokens."""

    request: str
    n: int


class Probe(NamedTuple):
    """Ask twice whether a request would get room, without asking for it."""

    request: str
    tokens: tuple[int, ...]
    n: int


class Reset(NamedTuple):
    """Forget every cached prefix."""


class Add(NamedTuple):
    """A request arrives."""

    request: str
    tokens: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = False
    salt: str | None = None
    spans: SpanFields = ()
    priority: int = 0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    n: int = 1
    prompt_logprobs: bool = False


class PlanStep(NamedTuple):
    """Plan a step and carry it out; `ship` sends the plan to a worker and back first."""

    ship: bool = False


class Commit(NamedTuple):
    """Commit the planned step; the computation of `fail` was unusable."""

    fail: str | None = None


class BreakOff(NamedTuple):
    """The planned step ends early (an interrupt, memory that ran out) and is not committed: after its
    first `copies` block copies; if those were all, after the KV of its first `rows` rows too."""

    copies: int
    rows: int = 0


class Abort(NamedTuple):
    """The owner of a request cancels it."""

    request: str


Operation: TypeAlias = (
    Grant
    | Resume
    | More
    | Run
    | Release
    | Preempt
    | Fork
    | SwapOut
    | SwapIn
    | Probe
    | Reset
    | Add
    | PlanStep
    | Commit
    | BreakOff
    | Abort
)

_ALLOCATOR = (Grant, Resume, More, Run, Release, Preempt, Fork, SwapOut, SwapIn, Probe, Reset)
_ENGINE = (Add, PlanStep, Commit, BreakOff, Abort, Preempt, Reset)


def _name(kind: type[Any]) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in kind.__name__).removeprefix("_")


ALLOCATOR_OPERATIONS: Mapping[str, type[Any]] = {_name(kind): kind for kind in _ALLOCATOR}
ENGINE_OPERATIONS: Mapping[str, type[Any]] = {_name(kind): kind for kind in _ENGINE}


def to_plain(operation: Operation) -> dict[str, Any]:
    """As JSON data: {"op": name, field: value …}; fields that have their default are left out."""
    defaults = operation._field_defaults
    fields = {k: v for k, v in operation._asdict().items() if k not in defaults or defaults[k] != v}
    return {"op": _name(type(operation)), **fields}


def from_plain(data: Mapping[str, Any]) -> Operation:
    """Back from JSON data.

    Raises:
        ValueError: an unknown operation, or fields that are not its own.
    """
    kinds = {**ALLOCATOR_OPERATIONS, **ENGINE_OPERATIONS}
    kind = kinds.get(str(data.get("op")))
    if kind is None:
        raise ValueError(f"unknown operation {data.get('op')!r}; known: {', '.join(sorted(kinds))}")
    fields = {k: _tuples(v) for k, v in data.items() if k != "op"}
    try:
        operation: Operation = kind(**fields)
    except TypeError as error:
        raise ValueError(f"operation {data['op']!r}: {error}") from error
    return operation


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
