"""A terminal shows an engine's control characters, and does not obey them."""

from __future__ import annotations

import io

import pytest
from rich.markup import escape
from rich.table import Table

from conformance.terminal import Terminal, abridged, complain, escape_controls

NAUGHTY = "\x1b[31mred\x07 \x9b2J\x7f\r\x08gone\x00 [bold]"
SHOWN = r"\x1b[31mred\x07 \x9b2J\x7f\r\x08gone\x00 [bold]"


def printed(thing: object, *, markup: bool) -> str:
    out = io.StringIO()
    Terminal(file=out, width=200).print(thing, markup=markup, soft_wrap=True)
    return out.getvalue()


def test_every_control_character_is_escaped_but_tab_and_newline() -> None:
    controls = [chr(code) for code in (*range(32), *range(127, 160))]
    for one in controls:
        assert (escape_controls(one) == one) is (one in "\t\n"), repr(one)
    assert escape_controls("plain é ∅ \U0001f600\ud83d") == "plain é ∅ \U0001f600\ud83d"


def test_words_and_markup_are_printed_without_them() -> None:
    assert printed(NAUGHTY, markup=False) == f"{SHOWN}\n"
    assert printed(f"[dim]{escape(NAUGHTY)}[/dim]\nnext", markup=True) == f"{SHOWN}\nnext\n"
    assert printed(escape("\x1b[red]"), markup=True) == "\\x1b[red]\n"


def test_so_are_cells_of_a_table() -> None:
    table = Table("name", "beside", box=None, pad_edge=False)
    table.add_row(escape(NAUGHTY), "here")
    head, row = printed(table, markup=True).splitlines()
    assert row.rstrip() == f"{SHOWN}  here"
    assert head.index("beside") == row.index("here")


def test_complaints_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    complain(ValueError(f"no {NAUGHTY}"))
    assert capsys.readouterr() == ("", f"no {SHOWN}\n")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("one\ntwo", "one\n  two"),
        ("x" * 2000, "x" * 2000),
        ("x" * 2001, "x" * 2000 + "… (of 2,001 characters)"),
        ("a\n" * 30, "a\n  " * 19 + "a… (of 60 characters)"),
    ],
)
def test_a_long_message_is_shown_in_part(text: str, shown: str) -> None:
    assert abridged(text, "  ") == shown
