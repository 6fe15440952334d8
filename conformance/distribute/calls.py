"""What is asked of a worker, and what a worker does with it.

A case travels as the id of its scenario and its point, and an engine as its name: the worker reads the
rest from its own copy of the suite. So what is sent is small, and the answer is all that comes back.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from conformance import EDITION
from conformance.adapters.base import Capabilities
from conformance.engines import EngineNotFound, find_engine, with_options
from conformance.paths import data_root
from conformance.retrace import explain
from conformance.runner import EngineFactory
from conformance.scenario import Scenario, load_scenario
from conformance.store import RecordStore
from conformance.suite import Case, Outcome, capabilities_of, run_case, unjudged
from conformance.verdicts import Verdict

__all__ = [
    "Call",
    "Identity",
    "Introduction",
    "Judged",
    "Lost",
    "Settings",
    "Task",
    "Workers",
    "declare",
    "identity_of",
    "introduce",
    "judge_task",
    "look_into",
    "perform",
]


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for every case of a run.

    Attributes:
        options: for the adapters, under those of the scenarios.
        strict: minivllm's own bar.
        root: directory with golden/ and scenarios/ where the worker is; None is the suite's own.
        keep_histories: whether a judged case comes back with its history.
        limit: seconds after which a worker's process is ended, and the case with it; None: never.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    root: Path | None = None
    keep_histories: bool = False
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """A case in a few words."""

    scenario: str
    point: Mapping[str, Any]
    engine: str

    @classmethod
    def of(cls, case: Case) -> Task:
        return cls(case.scenario.id, dict(case.point), case.engine)


@dataclass(frozen=True, slots=True)
class Judged:
    """An outcome, and the files of its history: name → text."""

    outcome: Outcome
    histories: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Call:
    """One call for some worker.

    Attributes:
        function: of this module, so that it can be named to another process.
        engine, device, model: what it is about, for placing it.
        label: for people.
        limit: seconds it may take, see `Settings`.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    engine: str
    device: str
    model: str
    label: str
    limit: float | None = None


@dataclass(frozen=True, slots=True)
class Lost:
    """A call that no worker answered."""

    reason: str
    seconds: float = 0.0


class Workers(Protocol):
    """Who answers calls."""

    def map(self, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        """(place in `calls`, what the function returned or `Lost`), as they come. The first start first."""
        ...


def judge_task(settings: Settings, task: Task) -> Judged:
    """Run and judge a case here, in a worker."""
    case = Case(_scenario(settings.root, task.scenario), task.point, task.engine)
    try:
        factory = _factory(task.engine, settings)
    except EngineNotFound as missing:
        return Judged(Outcome(case, unjudged(case, Verdict.ERROR, str(missing)), 0.0))
    store = _store(settings.root)
    if not settings.keep_histories:
        return Judged(run_case(case, factory, store, strict=settings.strict, root=settings.root))
    with TemporaryDirectory() as name:
        directory = Path(name)
        outcome = run_case(
            case, factory, store, strict=settings.strict, root=settings.root, histories=directory
        )
        return Judged(outcome, {p.name: p.read_text(encoding="utf-8") for p in directory.iterdir()})


def look_into(settings: Settings, task: Task, outcome: Outcome) -> Judged:
    """The triage of a failed case, in a worker."""
    case = Case(_scenario(settings.root, task.scenario), task.point, task.engine)
    factory, store = _factory(task.engine, settings), _store(settings.root)
    return Judged(explain(replace(outcome, case=case), factory, store, root=settings.root))


def declare(settings: Settings, engine: str, tasks: Sequence[Task]) -> Capabilities | None:
    """What an engine says of itself where the first model that is here is loaded."""
    cases = (Case(_scenario(settings.root, task.scenario), task.point, task.engine) for task in tasks)
    return capabilities_of(_factory(engine, settings), cases, settings.root)


# ---- from another machine ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Identity:
    """Which suite somebody has.

    Attributes:
        edition: the suite's version.
        data: digest of its scenarios and of the manifest of its golden files.
    """

    edition: str
    data: str

    def as_tuple(self) -> tuple[str, str]:
        return self.edition, self.data

    def __str__(self) -> str:
        return f"suite {self.edition} with data {self.data[:12]}"


@dataclass(frozen=True, slots=True)
class Introduction:
    """Who a worker is, and which engines it cannot import: name → why."""

    identity: Identity
    engines: Mapping[str, str]


@cache
def identity_of(root: Path | None) -> Identity:
    """This machine's suite.

    Raises:
        OSError: there is none at `root`.
    """
    root = root or data_root()
    digest = hashlib.sha256((root / "golden" / "MANIFEST.json").read_bytes())
    for path in sorted((root / "scenarios").rglob("*.y*ml")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()} {len(text)}\n".encode() + text)
    return Identity(EDITION, digest.hexdigest())


def introduce(engines: Sequence[str], root: Path | None) -> Introduction:
    """This machine's answer to who it is.

    Raises:
        OSError: it has no data at `root`.
    """
    troubles = {}
    for engine in engines:
        try:
            find_engine(engine)
        except EngineNotFound as error:
            troubles[engine] = str(error)
    return Introduction(identity_of(root), troubles)


def perform(asked_by: Identity, root: Path | None, payload: bytes) -> Any:
    """Do what another machine asks, if it has the same suite.

    Args:
        payload: pickled (function of this module, arguments), read only then.
    """
    own = identity_of(root)
    if own != asked_by:
        return Lost(f"the worker has {own}, and was asked by one with {asked_by}")
    function, arguments = pickle.loads(payload)
    return function(*arguments)


# ---- what a process keeps ---------------------------------------------------------------------------


def _factory(engine: str, settings: Settings) -> EngineFactory:
    return with_options(find_engine(engine), settings.options)


@cache
def _store(root: Path | None) -> RecordStore:
    return RecordStore(root)


@cache
def _scenario(root: Path | None, name: str) -> Scenario:
    directory = (root or data_root()) / "scenarios"
    path = directory / f"{name}.yaml"
    return load_scenario(path if path.is_file() else path.with_suffix(".yml"), directory)
