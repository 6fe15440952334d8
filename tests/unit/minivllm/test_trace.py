"""Every event is a frozen value and part of the Event union."""

from __future__ import annotations

import dataclasses
import typing

from minivllm import trace


def test_every_event_class_is_in_the_union_and_frozen() -> None:
    classes = {v for v in vars(trace).values() if dataclasses.is_dataclass(v) and isinstance(v, type)}
    assert classes == set(typing.get_args(trace.Event))
    assert all(c.__dataclass_params__.frozen for c in classes)  # type: ignore[attr-defined]  # set by dataclass
    assert {c.__name__ for c in classes} < set(trace.__all__)
