"""What the commands print on: a terminal obeys control characters, and an engine's words may hold some."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console
from rich.text import Text

__all__ = ["Terminal", "abridged", "complain", "escape_controls"]

#: C0 but for tab and newline, DEL, and C1.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")

#: What is shown of one message; an engine's error may hold megabytes.
_CHARACTERS, _LINES = 2000, 20


def escape_controls(text: str) -> str:
    """The text with each control character as its escape, `\\x1b`; newlines and tabs stay."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def abridged(text: str, indent: str = "") -> str:
    """What a terminal shows of a message: its beginning, and of how much if that is not all.

    Args:
        indent: before each line after the first, so that none passes for one of the command's own.
    """
    shown = "\n".join(text[:_CHARACTERS].split("\n")[:_LINES])
    if len(shown) < len(text):
        shown += f"… (of {len(text):,} characters)"
    return shown.replace("\n", "\n" + indent)


class Terminal(Console):
    """A console that prints the control characters of a text as their escapes."""

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """What every string goes through on its way to the terminal, that of a table's cell too."""
        return super().render_str(escape_controls(text), **options)


def complain(trouble: object) -> None:
    """Say on stderr what is wrong."""
    Terminal(stderr=True).print(str(trouble), style="red", markup=False, soft_wrap=True)
