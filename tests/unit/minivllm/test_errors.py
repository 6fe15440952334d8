"""The tree of errors is the one its module draws."""

from __future__ import annotations

import re

from minivllm import errors


def test_the_drawn_tree_is_the_real_one() -> None:
    assert errors.__doc__ is not None
    stack: list[tuple[int, str]] = []
    drawn = set()
    for line in errors.__doc__.splitlines():
        match = re.match(r"^(\s*[│├└─ ]*)([A-Z]\w+)", line)
        if match and (match.group(2) in errors.__all__):
            depth, name = len(match.group(1)), match.group(2)
            while stack and stack[-1][0] >= depth:
                stack.pop()
            if stack:
                drawn.add((stack[-1][1], name))
            stack.append((depth, name))
    real = {
        (base.__name__, name)
        for name in errors.__all__
        for base in getattr(errors, name).__bases__
        if base.__name__ in errors.__all__
    }
    assert drawn == real


def test_every_public_error_is_listed() -> None:
    defined = {n for n, v in vars(errors).items() if isinstance(v, type) and issubclass(v, Exception)}
    assert defined == set(errors.__all__)
