"""Makes a failing operation log small: delta debugging, then simpler operations.

Only what fails with the same signature counts as smaller, so that shrinking does not slip from one
fault to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from conformance.contracts.targets import Target
from conformance.fuzz.driver import Failure, replay
from conformance.fuzz.operations import Operation

__all__ = ["shrink"]


def shrink(target: Target, failure: Failure, limit: int = 4000) -> Failure:
    """The same failure with fewer and simpler operations.

    Args:
        limit: most replays to try.
    """
    left = limit
    message = failure.message

    def fails(operations: Sequence[Operation]) -> bool:
        nonlocal left, message
        if left <= 0:
            return False
        left -= 1
        found = replay(target, failure.setup, operations)
        if found is None or found[0] != failure.signature:
            return False
        message = found[1]
        return True

    operations = list(failure.operations)
    if not fails(operations):
        return failure  # only the driver's own repetition shows it
    before: list[Operation] = []
    while before != operations:
        before = operations
        operations = _fewer(operations, fails)
        operations = _simpler(operations, fails)
    fails(operations)  # so that the message is that of the result
    return replace(failure, operations=tuple(operations), message=message)


def _fewer(operations: list[Operation], fails: Callable[[Sequence[Operation]], bool]) -> list[Operation]:
    """Leave out as much as possible, in ever smaller pieces, from the end."""
    size = max(1, len(operations) // 2)
    while True:
        end = len(operations)
        while end > 0:
            begin = max(0, end - size)
            candidate = operations[:begin] + operations[end:]
            if fails(candidate):
                operations = candidate
            end = begin
        if size == 1:
            return operations
        size //= 2


def _simpler(operations: list[Operation], fails: Callable[[Sequence[Operation]], bool]) -> list[Operation]:
    for index in range(len(operations)):
        improved = True
        while improved:
            improved = False
            for candidate in _candidates(operations[index]):
                changed = [*operations[:index], candidate, *operations[index + 1 :]]
                if fails(changed):
                    operations, improved = changed, True
                    break
    return operations


def _candidates(operation: Operation) -> Iterator[Operation]:
    """Operations that are simpler in one field."""
    fields: dict[str, Any] = operation._asdict()

    def but(name: str, value: object) -> Operation:
        changed: Any = type(operation)
        made: Operation = changed(**(fields | {name: value}))
        return made

    for name, default in operation._field_defaults.items():
        if fields[name] != default:
            yield but(name, default)
    for name, value in fields.items():
        if name == "tokens":
            yield from (but(name, value[:i] + value[i + 1 :]) for i in range(len(value)))
            yield from (but(name, (*value[:i], 0, *value[i + 1 :])) for i, t in enumerate(value) if t)
        elif isinstance(value, int) and not isinstance(value, bool) and name not in operation._field_defaults:
            lowest = 0 if name == "token" else 1
            for smaller in dict.fromkeys((lowest, value - 1)):
                if lowest <= smaller < value:
                    yield but(name, smaller)
