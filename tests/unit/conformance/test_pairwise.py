"""A pairwise matrix holds every pair of values, in far fewer points than the product."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.pairwise import pairwise

_axes = st.dictionaries(
    st.sampled_from("abcd"),
    st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True),
    min_size=2,
    max_size=4,
)


@settings(max_examples=40)
@given(axes=_axes)
def test_every_pair_of_values_of_two_axes_occurs(axes: dict[str, list[int]]) -> None:
    points = pairwise(axes)
    for a, b in itertools.combinations(axes, 2):
        for pair in itertools.product(axes[a], axes[b]):
            assert any((point[a], point[b]) == pair for point in points)


@settings(max_examples=40)
@given(axes=_axes)
def test_every_point_has_one_value_of_each_axis_and_none_twice(axes: dict[str, list[int]]) -> None:
    points = pairwise(axes)
    for point in points:
        assert list(point) == list(axes)
        assert all(point[name] in axes[name] for name in axes)
    assert len({tuple(point.items()) for point in points}) == len(points)


def test_it_is_much_smaller_than_the_product() -> None:
    axes: dict[str, list[Any]] = {name: [1, 2, 3] for name in "abcd"}
    assert 9 <= len(pairwise(axes)) <= 15


def test_it_is_the_same_every_time() -> None:
    axes = {"a": [1, 2], "b": ["x", "y", "z"], "c": [True, False]}
    assert pairwise(axes) == pairwise(axes)
