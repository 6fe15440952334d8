"""Pairwise choice of matrix points."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["pairwise"]


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """A small set of points in which every pair of values of two axes occurs; deterministic."""
    names = list(axes)
    open_pairs = {
        (a, i, b, j)
        for a, b in itertools.combinations(names, 2)
        for i in range(len(axes[a]))
        for j in range(len(axes[b]))
    }
    candidates = list(itertools.product(*(range(len(axes[name])) for name in names)))

    def pairs_of(point: tuple[int, ...]) -> set[tuple[str, int, str, int]]:
        chosen = dict(zip(names, point, strict=True))
        return {(a, chosen[a], b, chosen[b]) for a, b in itertools.combinations(names, 2)}

    points = []
    while open_pairs:
        best = max(candidates, key=lambda point: len(pairs_of(point) & open_pairs))
        open_pairs -= pairs_of(best)
        points.append({name: axes[name][i] for name, i in zip(names, best, strict=True)})
    return points
