"""Workers that are processes of this machine.

Each has one case at a time, one thread, and a pipe to the process that hands out the cases, so that
one which dies takes no other's case with it: `concurrent.futures` gives up the whole pool then.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

from conformance.distribute.calls import Call, Lost
from conformance.outside import Terminated

__all__ = ["Processes", "choose", "ending"]

#: How often a call is tried whose worker dies.
TRIES = 2

#: Seconds a worker has to leave, when it is told to.
PATIENCE = 5.0

#: The environment of a worker: one thread each, and none that spins while it waits.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@dataclass(frozen=True, slots=True)
class Dead(Lost):
    """Its worker died of it."""


class Processes:
    """`number` processes; see `Workers`. Use it as a context manager: its end is theirs."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._workers: list[_Worker] = []
        self._until_the_end = ExitStack()

    def __enter__(self) -> Processes:
        self._until_the_end.enter_context(_leaving_when_told())
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._until_the_end:
            self._end(at_once=kind is not None)

    def _end(self, *, at_once: bool) -> None:
        for worker in self._workers:
            worker.dismiss(at_once=at_once)
        for worker in self._workers:
            worker.join()
        self._workers.clear()

    def map(self, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        todo, tries = list(range(len(calls))), Counter[int]()
        while todo or any(worker.index is not None for worker in self._workers):
            while todo and (worker := self._idle()) is not None:
                index = choose(todo, calls, worker.loaded, [other.loaded for other in self._workers])
                todo.remove(index)
                tries[index] += 1
                worker.give(index, calls[index])
            self._wait()
            for worker in [w for w in self._workers if w.index is not None]:
                if worker.is_done():
                    index, answer = worker.take()
                elif worker.is_late():
                    index, answer = worker.give_up()
                else:
                    continue
                if isinstance(answer, Dead) and tries[index] < TRIES:
                    todo.insert(0, index)
                else:
                    yield index, answer

    def _idle(self) -> _Worker | None:
        self._workers = [worker for worker in self._workers if worker.index is not None or worker.is_alive()]
        for worker in self._workers:
            if worker.index is None:
                return worker
        if len(self._workers) == self._number:
            return None
        self._workers.append(_Worker())
        return self._workers[-1]

    def _wait(self) -> None:
        busy = [worker.pipe for worker in self._workers if worker.index is not None]
        # A process that an engine has forked may hold the pipe open: so a look at the worker now and then.
        wait(busy, timeout=1.0)


def choose(
    todo: Sequence[int],
    calls: Sequence[Call],
    own: tuple[str, str] | None,
    loaded: Collection[tuple[str, str] | None],
) -> int:
    """Which call a worker gets: the first about what it has loaded, else about what nobody has, else any.

    Args:
        todo: places in `calls`, in the order in which they are to start; at least one.
        own: (engine, model) of the worker's last call.
        loaded: the same of all workers.
    """

    def about(index: int) -> tuple[str, str]:
        return calls[index].engine, calls[index].model

    same = [index for index in todo if about(index) == own]
    free = [index for index in todo if about(index) not in loaded]
    return [*same, *free, *todo][0]


class _Worker:
    """One process.

    Attributes:
        index: place of the call it is busy with, None if it is idle.
        loaded: (engine, model) of its last call.
    """

    def __init__(self) -> None:
        context = get_context("spawn")  # not forked: a fork would copy the locks of torch's threads
        self.pipe, theirs = context.Pipe()
        # Not a daemon: engines have processes of their own.
        self._process = context.Process(target=_serve, args=(theirs,), daemon=False)
        with _interrupts_off(), _environment():
            self._process.start()
        theirs.close()
        self.index: int | None = None
        self.loaded: tuple[str, str] | None = None
        self._began = 0.0
        self._limit: float | None = None

    def give(self, index: int, call: Call) -> None:
        self.index, self.loaded = index, (call.engine, call.model)
        self._began, self._limit = time.perf_counter(), call.limit
        with suppress(BrokenPipeError):  # it is dead: `take` tells
            self.pipe.send(call)

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def is_done(self) -> bool:
        return self.pipe.poll() or not self.is_alive()

    def take(self) -> tuple[int, Any]:
        """Its call, and the answer, which is `Dead` if it died of it."""
        index, self.index = self.index, None
        assert index is not None
        if self.pipe.poll():
            with suppress(EOFError, ConnectionError):
                return index, self.pipe.recv()
        self._process.join(PATIENCE)
        reason = f"the worker process died, twice: {ending(self._process.exitcode)}"
        return index, Dead(reason, self._seconds)

    def is_late(self) -> bool:
        return self._limit is not None and self._seconds > self._limit

    def give_up(self) -> tuple[int, Lost]:
        """End it; its call, and how long that has taken."""
        index, self.index = self.index, None
        assert index is not None
        seconds = self._seconds
        self.dismiss(at_once=True)
        self.join()
        reason = f"no answer after {seconds:.0f} s: --case-timeout {self._limit:g} has ended its worker"
        return index, Lost(reason, seconds)

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._began

    def dismiss(self, *, at_once: bool) -> None:
        self.pipe.close()  # it waits for nothing else
        if at_once:
            self._process.terminate()

    def join(self) -> None:
        for stop in (self._process.terminate, self._process.kill):
            self._process.join(PATIENCE)
            if self._process.is_alive():
                stop()
        self._process.join()


def ending(status: int | None) -> str:
    """How a process ended, by its `exitcode`."""
    if status is None:
        return "it closed its pipe and stays"
    if status >= 0:
        return f"it left with exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _serve(pipe: Connection) -> None:
    """A worker's life."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that hands out the cases sees to it
    signal.signal(signal.SIGTERM, _terminate)
    while True:
        try:
            call: Call = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer = call.function(*call.arguments)
        except Exception as trouble:  # of the harness: an engine's own is in the answer
            answer = Lost(f"the worker failed: {type(trouble).__name__}: {trouble}")
        try:
            pipe.send(answer)
        except Exception as trouble:  # whatever cannot be pickled: nothing of it has been sent
            pipe.send(Lost(f"the answer cannot be sent: {type(trouble).__name__}: {trouble}"))


def _terminate(_number: int, _frame: FrameType | None) -> None:
    """Leave as by an error, so that engines are closed."""
    raise Terminated


@contextmanager
def _leaving_when_told() -> Iterator[None]:
    """SIGTERM, as a cancelled CI job sends it to the command alone, ends its workers with it."""
    try:
        before: Any = signal.signal(signal.SIGTERM, _terminate)
    except ValueError:  # not in the main thread, which alone is told
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _interrupts_off() -> Iterator[None]:
    """A process that is started here ignores Ctrl-C from its first moment on."""
    try:
        before: Any = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not in the main thread, which alone is interrupted
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _environment() -> Iterator[None]:
    """A process that is started here finds these variables, where nobody has set them otherwise."""
    added = [name for name in ENVIRONMENT if name not in os.environ]
    os.environ.update({name: ENVIRONMENT[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]
