"""What is wrong with a check's arguments: found when a scenario is loaded, before anything runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "AXES",
    "arm_name",
    "arm_names",
    "compare",
    "lint_cached",
    "lint_comparison",
    "lint_error",
    "lint_finish_reason",
    "lint_group",
    "lint_nothing",
    "lint_requests",
    "lint_same_under",
    "lint_text_equals",
    "lint_yardstick",
]

#: Axes a same_under check may vary.
AXES = (
    "chunk",
    "block_size",
    "batch",
    "prefix_cache",
    "preempt",
    "preemption",
    "backend",
    "threads",
    "poison",
    "order",
)

#: Values of the axis "preemption".
MODES = ("recompute", "swap")

_COMPARISON = re.compile(r"\s*(>=|<=|==|!=|>|<)?\s*(-?\d+(?:\.\d+)?)\s*")
_REASONS = ("stop", "length", "abort", "error")


def arm_name(axis: str, value: Any) -> str:
    """Name of the pass that runs one arm of same_under: "chunk=7", "prefix_cache=off"."""
    if isinstance(value, bool):  # YAML reads a bare on or off as a boolean
        value = "on" if value else "off"
    return f"{axis}={value}"


def arm_names(args: Mapping[str, Any]) -> list[str]:
    """Names of the passes a same_under check needs, in the order given.

    `preempt: every` and `preemption` name none: how many arms they make, one per step, is known
    only after the free pass. Those of `preemption` are called "preemption=swap@3".
    """
    return [
        arm_name(axis, value)
        for axis, values in args.items()
        if axis in AXES and values != "every" and axis != "preemption"
        for value in values
        if value != "every"
    ]


def compare(value: float, wanted: Any) -> bool:
    """Whether a number meets a comparison such as ">=1", "==0" or plain 3."""
    match = _COMPARISON.fullmatch(str(wanted))
    assert match is not None  # linted
    sign, bound = match.group(1) or "==", float(match.group(2))
    return {
        ">=": value >= bound,
        "<=": value <= bound,
        "==": value == bound,
        "!=": value != bound,
        ">": value > bound,
        "<": value < bound,
    }[sign]


def lint_comparison(where: str, wanted: Any) -> list[str]:
    """Problems of a comparison string."""
    if isinstance(wanted, bool) or not isinstance(wanted, int | str):
        return [f'{where}: expected a comparison such as ">=1", got {wanted!r}']
    if not _COMPARISON.fullmatch(str(wanted)):
        return [f'{where}: {wanted!r} is no comparison; write for example ">=1", "==0" or 3']
    return []


def lint_nothing(args: Any) -> list[str]:
    """For checks that take no arguments."""
    return [] if args in (None, True) else [f"takes no arguments, got {args!r}"]


def lint_requests(args: Any) -> list[str]:
    """None, a request name, a list of them, or {requests: […]}."""
    if isinstance(args, Mapping):
        unknown = sorted(set(args) - {"requests"})
        return [f"unknown argument {u!r}; known: requests" for u in unknown] or lint_requests(
            args.get("requests")
        )
    if args is None or args is True or isinstance(args, str):
        return []
    if isinstance(args, Sequence) and args and all(isinstance(a, str) for a in args):
        return []
    return [f"expected request names, got {args!r}"]


def lint_group(args: Any) -> list[str]:
    """A list of at least two different names."""
    if not isinstance(args, list) or len(args) < 2 or not all(isinstance(a, str) for a in args):
        return [f"expected a list of at least two request names, got {args!r}"]
    return [f"{name!r} is given twice" for name in sorted({a for a in args if args.count(a) > 1})]


def lint_yardstick(args: Any) -> list[str]:
    """As lint_requests, and `strict: true`."""
    if isinstance(args, Mapping) and "strict" in args:
        if not isinstance(args["strict"], bool):
            return [f"strict must be true or false, got {args['strict']!r}"]
        rest = {k: v for k, v in args.items() if k != "strict"}
        return lint_requests(rest) if rest else []
    return lint_requests(args)


def _per_request(args: Any, what: str) -> list[str]:
    if isinstance(args, Mapping) and args and all(isinstance(k, str) for k in args):
        return []
    return [f"expected {{request: {what}}}, got {args!r}"]


def lint_cached(args: Any) -> list[str]:
    """{request: number | {min, max, equals}}."""
    problems = _per_request(args, "number or {min, max, equals}")
    for name, wanted in () if problems else args.items():
        if isinstance(wanted, int) and not isinstance(wanted, bool):
            continue
        if not isinstance(wanted, Mapping) or not wanted or set(wanted) - {"min", "max", "equals"}:
            problems.append(f"{name}: expected a number or {{min, max, equals}}, got {wanted!r}")
        elif any(isinstance(v, bool) or not isinstance(v, int) for v in wanted.values()):
            problems.append(f"{name}: bounds must be integers, got {wanted!r}")
    return problems


def lint_finish_reason(args: Any) -> list[str]:
    """{request: reason | {reason, stop_reason}}."""
    problems = _per_request(args, "reason")
    for name, wanted in () if problems else args.items():
        reason = wanted.get("reason") if isinstance(wanted, Mapping) else wanted
        extra = set(wanted) - {"reason", "stop_reason"} if isinstance(wanted, Mapping) else set()
        if reason not in _REASONS or extra:
            problems.append(f"{name}: expected one of {_REASONS}, or {{reason, stop_reason}}, got {wanted!r}")
    return problems


def lint_text_equals(args: Any) -> list[str]:
    """{request: text | {equals: text, golden: true, streaming: consistent}}."""
    problems = _per_request(args, "text")
    for name, wanted in () if problems else args.items():
        if isinstance(wanted, str):
            continue
        ok = isinstance(wanted, Mapping) and wanted and not set(wanted) - {"equals", "golden", "streaming"}
        ok = ok and isinstance(wanted.get("equals", ""), str) and wanted.get("golden", True) is True
        ok = ok and wanted.get("streaming", "consistent") == "consistent"
        if not ok:
            problems.append(
                f"{name}: expected a text or some of {{equals: text, golden: true, "
                f"streaming: consistent}}, got {wanted!r}"
            )
    return problems


def lint_error(args: Any) -> list[str]:
    """{request, or "engine": type | any | {type, contains}}."""
    problems = _per_request(args, "error type")
    for name, wanted in () if problems else args.items():
        if isinstance(wanted, str) and wanted:
            continue
        ok = isinstance(wanted, Mapping) and wanted and not set(wanted) - {"type", "contains"}
        if not ok or not all(_strings(v) for v in wanted.values()):
            problems.append(f"{name}: expected an error type, any, or {{type, contains}}, got {wanted!r}")
    return problems


def _strings(value: Any) -> bool:
    values = [value] if isinstance(value, str) else value
    return isinstance(values, Sequence) and bool(values) and all(isinstance(v, str) and v for v in values)


def lint_same_under(args: Any) -> list[str]:
    """{axis: [values], …} and optionally {requests: […]}."""
    if not isinstance(args, Mapping):
        return [f"expected {{axis: [values]}}, got {args!r}"]
    problems = [f"unknown axis {a!r}; known: {', '.join(AXES)}" for a in args if a not in (*AXES, "requests")]
    if not any(axis in AXES for axis in args):
        problems.append(f"no axis given; known: {', '.join(AXES)}")
    for axis, values in args.items():
        if axis == "requests":
            problems += lint_requests(values)
        elif axis == "preempt" and values == "every":
            continue
        elif axis == "preemption" and (not isinstance(values, list) or not values or set(values) - {*MODES}):
            problems.append(f"preemption: expected a list of {', '.join(MODES)}, got {values!r}")
        elif axis in AXES and (not isinstance(values, Sequence) or isinstance(values, str) or not values):
            problems.append(f"{axis}: expected a list of values, got {values!r}")
    names = arm_names(args) if not problems else []
    problems += [f"arm {n!r} is given twice" for n in sorted({n for n in names if names.count(n) > 1})]
    return problems
