"""Engines that end the process they run in, for tests of what outlives them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conformance.adapters.base import ModelSource
from conformance.adapters.fake import FakeEngine, fake_engine

__all__ = ["DiesOnce", "Hangs", "Killed", "Wrong"]

Wrong = fake_engine(fault="wrong_token")


class _Ends(FakeEngine):
    """The right engine, which at block size 4 ends before it has answered anything."""

    def __init__(self, model: ModelSource, options: Mapping[str, Any]) -> None:
        self._marks = Path(options.get("marks", "."))
        super().__init__(model, {name: value for name, value in options.items() if name != "marks"})

    def __enter__(self) -> FakeEngine:
        if self._options["block_size"] == 4:
            self._end()
        return super().__enter__()

    def _end(self) -> None:
        raise NotImplementedError


class Killed(_Ends):
    """Killed, as for want of memory."""

    def _end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(_Ends):
    """It never comes back."""

    def _end(self) -> None:
        time.sleep(600)


class DiesOnce(_Ends):
    """Killed the first time; the option "marks" is a directory that remembers each life."""

    def _end(self) -> None:
        number = len(list(self._marks.iterdir()))
        (self._marks / f"{number}-{os.getpid()}").touch()
        if number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
