"""A seeded fault: one public kind of bug, put back into minivllm by patching one seam of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from conformance.adapters import minivllm as adapter

__all__ = ["Fault", "GREEDY", "HF", "LOGITS", "NANO", "Seam", "Table", "VLLM", "planted"]

GREEDY = "tokens_match_golden"
HF = "https://github.com/huggingface/transformers"
LOGITS = "logits_within_yardstick"
NANO = "https://github.com/GeeeekExplorer/nano-vllm"
VLLM = "https://github.com/vllm-project/vllm"


class Seam:
    """What a fault patches with. Everything is put back when the fault ends.

    Attributes:
        fired: how often the fault did something that a right engine does not.
    """

    def __init__(self) -> None:
        self.fired = 0
        self._undo: list[tuple[Any, str, Any]] = []

    def fire(self, happened: object = True) -> None:
        """Count one firing, if `happened`."""
        self.fired += bool(happened)

    def set(self, owner: Any, name: str, value: Any) -> Any:
        """Put `value` in the place of an attribute of a class, module or object; returns the old one.

        Raises:
            AttributeError: there is no such attribute, so the fault would patch nothing.
        """
        old = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
        self._undo.append((owner, name, old))
        setattr(owner, name, value)
        return getattr(old, "__func__", old) if isinstance(old, staticmethod) else old

    def fresh_models(self) -> None:
        """Load models anew while the fault lasts: for faults of loading, and of what a model keeps."""
        self.set(adapter, "_models", OrderedDict())

    def restore(self) -> None:
        """Put everything back, the latest first."""
        while self._undo:
            owner, name, old = self._undo.pop()
            setattr(owner, name, old)


@dataclass(frozen=True)
class Fault:
    """One kind of bug.

    Attributes:
        id: area/words.
        about: what is wrong, in one sentence.
        origin: the public report that it re-creates, or "first principles" with the reason.
        at: what is patched, to the branch; no two faults have the same `at` and `detector`.
        detector: the check that is expected to find it, or "fuzz".
        shown_by: what is run to find it, the cheapest first: "scenario-id[axis=value, …]" (the
            first point that has these values), or "fuzz:allocator", "fuzz:engine", "fuzz:tensors".
        plant: patches the seam.
        equivalent: why no output can show it; then outputs must be equal bit for bit.
    """

    id: str
    about: str
    origin: str
    at: str
    detector: str
    shown_by: tuple[str, ...]
    plant: Callable[[Seam], None]
    equivalent: str | None = None

    @property
    def area(self) -> str:
        """First part of the id."""
        return self.id.partition("/")[0]


class Table:
    """Collects the faults of a module: `@faults.add("words", …)` over the function that plants one.

    The function's docstring says what is wrong.
    """

    def __init__(self, area: str) -> None:
        self.area = area
        self.faults: list[Fault] = []

    def add(
        self,
        words: str,
        *shown_by: str,
        origin: str,
        at: str,
        detector: str,
        equivalent: str | None = None,
    ) -> Callable[[Callable[[Seam], None]], Callable[[Seam], None]]:
        """Arguments as the attributes of `Fault`."""

        def register(plant: Callable[[Seam], None]) -> Callable[[Seam], None]:
            about = " ".join((plant.__doc__ or "").split())
            fault_id = f"{self.area}/{words}"
            self.faults.append(Fault(fault_id, about, origin, at, detector, shown_by, plant, equivalent))
            return plant

        return register


@contextmanager
def planted(fault: Fault) -> Iterator[Seam]:
    """The fault is in minivllm inside the block, and out of it after."""
    seam = Seam()
    try:
        fault.plant(seam)
        yield seam
    finally:
        seam.restore()
