from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm.output import StopStrings

# Two letters make overlaps and near misses common.
PIECES = st.lists(st.text("ab", max_size=4), max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def feed(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str | None, str, list[str]]:
    """The stop string found, the final text, and what was visible after each piece."""
    checker = StopStrings(stops, include_in_output=include)
    visible = []
    for piece in pieces:
        found = checker.push(piece)
        if found is not None:
            return found, checker.text, visible
        visible.append(checker.visible())
    return None, checker.text, visible


def test_a_stop_string_is_found_across_pieces_and_cut_off() -> None:
    assert feed(["END"], ["text E", "N", "D more"]) == ("END", "text ", ["text ", "text "])


def test_a_stop_string_can_be_kept() -> None:
    assert feed(["END"], ["text E", "ND more"], include=True) == ("END", "text END", ["text E"])


def test_text_held_back_is_shown_when_the_stop_string_does_not_complete() -> None:
    assert feed(["END"], ["an EN", "TRY"]) == (None, "an ENTRY", ["an ", "an ENTRY"])


def test_the_stop_string_completed_first_wins_whatever_the_order() -> None:
    for stops in (["cd", "abcdef"], ["abcdef", "cd"]):
        assert feed(stops, ["abcdef"])[:2] == ("cd", "ab")


def test_of_those_completed_together_the_first_in_the_list_wins() -> None:
    assert feed(["d", "cd"], ["abcd"])[:2] == ("d", "abc")
    assert feed(["cd", "d"], ["abcd"])[:2] == ("cd", "ab")


def test_a_later_start_can_complete_earlier() -> None:
    assert feed(["abcde", "cd"], ["ab", "cd", "e"])[:2] == ("cd", "ab")


def test_unarmed_pieces_complete_nothing_and_are_shown() -> None:
    checker = StopStrings(["\n"], include_in_output=False)
    assert checker.push("a\nb", armed=False) is None
    assert checker.visible() == "a\nb"
    assert checker.push("c") is None
    assert checker.push("\n") == "\n"
    assert checker.text == "a\nbc"


def test_a_whole_stop_string_that_was_let_through_is_not_held_back() -> None:
    checker = StopStrings(["ab"], include_in_output=False)
    checker.push("xab", armed=False)
    assert checker.visible() == "xab"


def test_a_stop_string_begun_while_unarmed_and_completed_armed_counts() -> None:
    checker = StopStrings(["END"], include_in_output=False)
    checker.push("xE", armed=False)
    assert checker.visible() == "x"
    assert checker.push("ND") == "END"
    assert checker.text == "x"


def test_an_empty_piece_completes_nothing() -> None:
    checker = StopStrings(["a"], include_in_output=False)
    checker.push("a", armed=False)
    assert checker.push("") is None


@pytest.mark.parametrize("include", [False, True])
@settings(deadline=None, max_examples=100)
@given(stops=STOPS, pieces=PIECES)
def test_any_cutting_into_pieces_stops_where_single_characters_do(
    include: bool, stops: list[str], pieces: list[str]
) -> None:
    characters = list("".join(pieces))
    found, text, visible = feed(stops, pieces, include=include)
    assert (found, text) == feed(stops, characters, include=include)[:2]
    for earlier in visible:
        assert text.startswith(earlier)


@settings(deadline=None, max_examples=100)
@given(STOPS, PIECES)
def test_a_stop_string_ends_the_text_at_its_first_completion(stops: list[str], pieces: list[str]) -> None:
    whole = "".join(pieces)
    ends = [(whole.find(s) + len(s), i, s) for i, s in enumerate(stops) if s in whole]
    found, text, visible = feed(stops, pieces)
    if not ends:
        assert (found, text) == (None, whole)
    else:
        end, _, stop = min(ends)
        assert (found, text) == (stop, whole[: end - len(stop)])
    for shown, length in zip(visible, range(len(visible)), strict=True):
        rest = "".join(pieces[: length + 1])[len(shown) :]
        assert rest == "" or any(s.startswith(rest) and s != rest for s in stops)  # held for a reason
