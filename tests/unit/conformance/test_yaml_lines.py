"""YAML is read as plain data, strictly, with the line of everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.yaml_lines import Document, YamlError, read_yaml


def read(tmp_path: Path, text: str) -> Document:
    path = tmp_path / "file.yaml"
    path.write_text(text, encoding="utf-8")
    return read_yaml(path)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("on", "on"),
        ("off", "off"),
        ("yes", "yes"),
        ("No", "No"),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("010", 10),
        ("-3", -3),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2026-01-31", "2026-01-31"),
        ("1e-3", 0.001),
        (".5", 0.5),
        ("0.25", 0.25),
        ("==2", "==2"),
        ("'7'", "7"),
    ],
)
def test_plain_scalars_follow_the_core_schema_of_yaml_1_2(tmp_path: Path, text: str, value: object) -> None:
    got = read(tmp_path, f"key: {text}\n").data["key"]
    assert got == value
    assert type(got) is type(value)


def test_an_empty_file_is_none(tmp_path: Path) -> None:
    assert read(tmp_path, "").data is None


def test_every_key_and_item_has_its_line(tmp_path: Path) -> None:
    document = read(tmp_path, "a: 1\nb:\n  - x\n  - {c: 2,\n     d: 3}\n")
    assert document.data == {"a": 1, "b": ["x", {"c": 2, "d": 3}]}
    assert document.line(("a",)) == 1
    assert document.line(("b",)) == 2
    assert document.line(("b", 0)) == 3
    assert document.line(("b", 1, "c")) == 4
    assert document.line(("b", 1, "d")) == 5


def test_a_location_with_unknown_parts_has_the_line_of_its_deepest_known_part(tmp_path: Path) -> None:
    document = read(tmp_path, "a: 1\nb:\n  c: 2\n")
    assert document.line(("b", "function-before", "c", "str")) == 3
    assert document.line(("nowhere",)) == 1


def test_a_duplicate_key_names_both_lines(tmp_path: Path) -> None:
    with pytest.raises(YamlError, match=r"file\.yaml:3: duplicate key 'a', first given on line 1"):
        read(tmp_path, "a: 1\nb: 2\na: 3\n")


def test_a_duplicate_key_deep_inside_is_found_too(tmp_path: Path) -> None:
    with pytest.raises(YamlError, match=r":2: duplicate key 'c'"):
        read(tmp_path, "a:\n  - {c: 1, c: 1}\n")


@pytest.mark.parametrize("key", ["true", "null", "1.5", "[1, 2]"])
def test_a_key_must_be_a_word_or_a_whole_number(tmp_path: Path, key: str) -> None:
    with pytest.raises(YamlError, match=r":1: a key must be"):
        read(tmp_path, f"? {key}\n: 1\n")


def test_a_syntax_error_has_file_and_line(tmp_path: Path) -> None:
    with pytest.raises(YamlError, match=r"file\.yaml:2: "):
        read(tmp_path, "a: [1,\nb: }\n")


def test_a_tag_that_would_build_an_object_is_refused(tmp_path: Path) -> None:
    with pytest.raises(YamlError, match=r"file\.yaml:1: "):
        read(tmp_path, "a: !!python/object/apply:os.getcwd []\n")


def test_an_alias_repeats_its_anchor_but_may_not_contain_itself(tmp_path: Path) -> None:
    assert read(tmp_path, "a: &x [1, 2]\nb: *x\n").data == {"a": [1, 2], "b": [1, 2]}
    with pytest.raises(YamlError, match=r"nested more than 32 deep"):
        read(tmp_path, "a: &x [1, *x]\n")


def test_aliases_of_aliases_are_not_multiplied_without_end(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 20)]
    with pytest.raises(YamlError, match=r":\d+: more than 200000 values"):
        read(tmp_path, "\n".join(levels) + "\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a: 1\nb: \xe9\n", r":2: not UTF-8: .* 0xe9"),
        (b"\xff\xfe\x00", r":1: not UTF-8"),
        (b"a: 1\nb: \x00\n", r":2: the character 0x00 is not allowed"),
        (b"a: " + b"9" * 5000, r":1: '9{40}' is no int: "),
        (b"? " + b"9" * 5000 + b"\n: 1\n", r":1: '9{40}' is no int: "),
        (b"[" * 5000, r":1: nested more than 32 deep"),
        (b"{a: " * 3000, r":1: nested more than 32 deep"),
    ],
    ids=["latin-1", "utf-16", "NUL", "long number", "long key", "deep list", "deep map"],
)
def test_what_no_person_writes_is_refused_with_file_and_line(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "file.yaml").write_bytes(content)
    with pytest.raises(YamlError, match=r"file\.yaml" + message):
        read_yaml(tmp_path / "file.yaml")


def test_a_second_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(YamlError):
        read(tmp_path, "a: 1\n---\nb: 2\n")


_words = st.text(alphabet="abcdefghij", min_size=2, max_size=6).filter(
    lambda w: w not in ("true", "null", "false")
)
_plain: st.SearchStrategy[Any] = st.recursive(
    st.integers(-(10**6), 10**6) | st.booleans() | st.none() | _words,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_words, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=40)
@given(data=_plain)
def test_what_yaml_writes_is_read_back(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    path.write_text(yaml.safe_dump(data), encoding="utf-8")
    assert read_yaml(path).data == data
