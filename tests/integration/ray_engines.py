"""Engines that suffer what a cluster's workers suffer; each keeps marks in the directory RAY_TEST_MARKS."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from conformance.adapters.fake import FakeEngine
from conformance.adapters.minivllm import MiniVLLMAdapter

__all__ = ["AlsoOnDoomedNode", "KilledOnce", "OnDoomedNode"]


def _marks() -> list[Path]:
    return list(Path(os.environ["RAY_TEST_MARKS"]).iterdir())


def _mark(text: str) -> int:
    """Leave a mark; returns how many there were."""
    number = len(_marks())
    Path(os.environ["RAY_TEST_MARKS"], f"{number:03} {text} {os.getpid()}").touch()
    return number


class KilledOnce(MiniVLLMAdapter):
    """minivllm, whose process is killed when it is loaded for the third time in the run."""

    def __enter__(self) -> MiniVLLMAdapter:
        if _mark("loaded") == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__enter__()


class OnDoomedNode(FakeEngine):
    """The toy, which waits for the end on a node with the variable RAY_TEST_DOOMED.

    On any other it begins when two of its kind wait there.
    """

    def __enter__(self) -> FakeEngine:
        if "RAY_TEST_DOOMED" in os.environ:
            _mark("waits")
            time.sleep(600)
        while len(_marks()) < 2:
            time.sleep(0.1)
        return super().__enter__()


class AlsoOnDoomedNode(OnDoomedNode):
    """The same under another name."""
