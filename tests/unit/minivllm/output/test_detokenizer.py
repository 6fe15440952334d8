from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm.output import Detokenizer

SETTINGS = settings(
    deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
FFFD = "\ufffd"
TEXTS = [
    "Hello, world! It's a test .",
    "你好,世界。",
    "one 😀 two 👨‍👩‍👧 three 🏳️‍🌈",
    "combining: é ñ ạ̈ and naïve",
    "  spaces   and\n\ttabs  ",
    "한국어 русский Ελληνικά",
]
# Everyday text, with the characters that are spread over several tokens made common.
WRITING = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from(" ab.好😀e\u0301\u200d\n")), max_size=25
)


class Text(Protocol):
    num_tokens: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


def pieces(tokenizer: Text, prompt: Sequence[int], output: Sequence[int], *, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt, skip_special_tokens=skip)
    return [*(detokenizer.push(t) for t in output), detokenizer.flush()]


def appended(tokenizer: Text, prompt: Sequence[int], output: Sequence[int], *, skip: bool = True) -> str:
    """What the output appends to the prompt's text, from decoding everything at once."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    whole = tokenizer.decode([*prompt, *output], skip_special_tokens=skip)
    shared = 0
    while shared < min(len(before), len(whole)) and before[shared] == whole[shared]:
        shared += 1
    return whole[shared:]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_decoded_whole_at_every_split(tokenizer: Text, text: str) -> None:
    ids = tokenizer.encode(text)
    for split in range(len(ids) + 1):
        joined = "".join(pieces(tokenizer, ids[:split], ids[split:]))
        assert joined == appended(tokenizer, ids[:split], ids[split:])


@SETTINGS
@given(WRITING, WRITING)
def test_pieces_join_to_the_decoded_whole_for_any_text(tokenizer: Text, prompt: str, output: str) -> None:
    before, after = tokenizer.encode(prompt), tokenizer.encode(output)
    assert "".join(pieces(tokenizer, before, after)) == appended(tokenizer, before, after)


@SETTINGS
@given(st.data(), st.booleans())
def test_pieces_join_to_the_decoded_whole_for_any_byte_level_ids(
    byte_level: Text, data: st.DataObject, skip: bool
) -> None:
    any_ids = st.lists(st.integers(0, byte_level.num_tokens - 1), max_size=30)
    prompt, output = data.draw(any_ids), data.draw(any_ids)
    joined = "".join(pieces(byte_level, prompt, output, skip=skip))
    assert joined == appended(byte_level, prompt, output, skip=skip)


@SETTINGS
@given(WRITING, WRITING)
def test_without_a_prompt_the_text_is_the_decoded_output(byte_level: Text, first: str, second: str) -> None:
    ids = byte_level.encode(first) + byte_level.encode(second)
    assert "".join(pieces(byte_level, [], ids)) == first + second


def test_a_partial_character_is_held_back_until_it_is_whole(byte_level: Text) -> None:
    ids = byte_level.encode("a嵐b")
    assert pieces(byte_level, [], ids) == ["a", "", "", "嵐", "b", ""]


def test_text_before_a_partial_character_is_not_held_back() -> None:
    class Joined:
        """Token 1 is "ab" and the first half of "é"; token 2 the second half."""

        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:  # noqa: ARG002  (protocol)
            parts = {0: b"x", 1: b"ab\xc3", 2: b"\xa9"}
            return b"".join(parts[t] for t in token_ids).decode("utf-8", errors="replace")

    assert pieces(Joined(), [0], [1, 2, 0]) == ["ab", "é", "x", ""]


def test_a_character_that_never_completes_shows_at_the_end_only(byte_level: Text) -> None:
    ids = byte_level.encode("a嵐")
    assert pieces(byte_level, [], ids[:-1]) == ["a", "", "", FFFD]


def test_bytes_that_cannot_become_a_character_show_once_text_follows(byte_level: Text) -> None:
    first = byte_level.encode("🦜")[0]
    assert pieces(byte_level, [], [first, *byte_level.encode("a")]) == ["", f"{FFFD}a", ""]


@pytest.mark.parametrize("missing", [1, 2])
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_a_prompt_that_ends_inside_a_character_does_not_leak(
    kind: str, missing: int, request: pytest.FixtureRequest
) -> None:
    tokenizer: Text = request.getfixturevalue(kind)
    prompt = tokenizer.encode("the secret prompt嵐")
    found = pieces(tokenizer, prompt[:-missing], [*prompt[-missing:], *tokenizer.encode("ok")])
    assert found[:missing] == ["嵐"] if missing == 1 else ["", "嵐"]
    assert "".join(found).strip("嵐 ") == "ok"


def test_a_prompt_character_that_stays_broken_is_not_the_outputs(byte_level: Text) -> None:
    prompt = byte_level.encode("secret 🦜")[:-1]
    assert "".join(pieces(byte_level, prompt, byte_level.encode("ab"))) == "ab"


def test_a_long_prompt_of_bytes_is_read_back_to_a_whole_character(byte_fallback: Text) -> None:
    prompt = byte_fallback.encode("🦜" * 10)
    assert len(prompt) > 40
    for cut in range(1, 8):
        joined = "".join(pieces(byte_fallback, prompt[:-cut], prompt[-cut:]))
        assert joined == "🦜" * -(-cut // 4), cut


def test_the_space_before_a_word_is_kept(metaspace: Text, byte_fallback: Text) -> None:
    for tokenizer in (metaspace, byte_fallback):
        prompt, output = tokenizer.encode("Hello,"), tokenizer.encode("world")
        assert "".join(pieces(tokenizer, prompt, output)) == " world"


def test_special_tokens_are_left_out_or_shown(byte_level: Text) -> None:
    ids = [0, *byte_level.encode("a"), 0, *byte_level.encode("b"), 1]
    assert pieces(byte_level, [0], ids) == ["", "a", "", "b", "", ""]
    assert pieces(byte_level, [0], ids, skip=False) == ["<s>", "a", "<s>", "b", "</s>", ""]


def test_a_special_token_inside_a_word_changes_no_spacing(metaspace: Text) -> None:
    words = metaspace.encode("The cat")
    output = [words[0], 1, *words[1:]]
    assert "".join(pieces(metaspace, [0], output)) == metaspace.decode(output, skip_special_tokens=True)


def test_flushing_twice_gives_nothing_more(byte_level: Text) -> None:
    detokenizer = Detokenizer(byte_level, [], skip_special_tokens=True)
    detokenizer.push(byte_level.encode("🦜")[0])
    assert [detokenizer.flush(), detokenizer.flush()] == [FFFD, ""]


def test_the_work_per_token_does_not_grow_with_the_text(byte_level: Text) -> None:
    lengths: list[int] = []

    class Counting:
        def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
            lengths.append(len(token_ids))
            return byte_level.decode(token_ids, skip_special_tokens=skip_special_tokens)

    prompt = byte_level.encode("Hello, world! " * 50)
    detokenizer = Detokenizer(Counting(), prompt, skip_special_tokens=True)
    for token_id in prompt:
        detokenizer.push(token_id)
    assert max(lengths) <= 9
