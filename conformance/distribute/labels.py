"""Which resources of a Ray cluster a case asks for: a label per device or engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["DEFAULTS", "LabelError", "Labels", "parse_labels", "shown"]

#: What a device asks for, unless told otherwise. Ray counts GPUs itself; it knows nothing of MPS.
DEFAULTS: Mapping[str, Mapping[str, float]] = {"cuda": {"GPU": 1}, "mps": {"mps": 1}}


class LabelError(ValueError):
    """A label is not of the form WHO=NAME[:AMOUNT], or is about nobody in this run."""


@dataclass(frozen=True, slots=True)
class Labels:
    """Resources by device or engine: {"cuda": {"GPU": 1}, "vllm": {"vllm": 1}}."""

    by_who: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def of(self, engine: str, device: str) -> dict[str, float]:
        """What a case on that engine and device asks for; one CPU core unless told otherwise."""
        wanted = {**DEFAULTS, **self.by_who}
        return {"CPU": 1, **wanted.get(device, {}), **wanted.get(engine, {})}


def parse_labels(items: Sequence[str], engines: Collection[str], devices: Collection[str]) -> Labels:
    """Labels of "WHO=NAME" and "WHO=NAME:AMOUNT" items; several about one WHO all hold.

    Args:
        engines, devices: those of the run. A label about any other is a mistake.

    Raises:
        LabelError: see there.
    """
    by_who: dict[str, dict[str, float]] = {}
    for item in items:
        # An engine may be package.module:Class, so the last "=" counts.
        who, _, resource = item.rpartition("=")
        name, colon, amount = resource.partition(":")
        try:
            number = float(amount) if colon else 1.0
        except ValueError:
            number = 0.0
        if not who or not name or number <= 0 or (number > 1 and number != int(number)):
            raise LabelError(
                f"--ray-resource takes WHO=NAME or WHO=NAME:AMOUNT, where AMOUNT is a whole number or a part "
                f"of one, got {item!r}"
            )
        if who not in engines and who not in devices:
            known = ", ".join([*engines, *devices])
            raise LabelError(
                f"--ray-resource {item}: this run has no engine or device {who!r}; it has {known}"
            )
        by_who.setdefault(who, {})[name] = number
    return Labels(by_who)


def shown(resources: Mapping[str, float]) -> str:
    """Resources for people: "CPU 1, GPU 0.5"."""
    return ", ".join(f"{name} {amount:g}" for name, amount in sorted(resources.items()))
