"""Engines are found by name, and a wrong name says what there is."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import cast

import pytest

from conformance.adapters.base import EngineAdapter, ModelSource
from conformance.engines import (
    ENGINES,
    NEEDED,
    EngineNotFound,
    EngineOptionError,
    engine_names,
    find_engine,
    parse_options,
    with_options,
)


def outside(monkeypatch: pytest.MonkeyPatch, **names: str) -> None:
    points = [EntryPoint(name, value, "conformance.engines") for name, value in names.items()]
    monkeypatch.setattr("conformance.engines.entry_points", lambda group: points if group else [])


def test_every_engine_in_the_box_can_be_imported() -> None:
    for name in set(ENGINES) - set(NEEDED):
        assert callable(find_engine(name))


@pytest.mark.parametrize("name", NEEDED)
def test_an_engine_whose_package_is_not_here_says_how_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conformance.engines.find_spec", lambda _package: None)
    with pytest.raises(EngineNotFound, match=f"needs the package {NEEDED[name][0]}.*nox -s"):
        find_engine(name)
    monkeypatch.setattr("conformance.engines.find_spec", lambda _package: object())
    assert callable(find_engine(name))


def test_an_engine_may_be_given_as_module_and_class() -> None:
    from conformance.adapters.fake import FakeEngine

    assert find_engine("conformance.adapters.fake:FakeEngine") is FakeEngine


def test_an_entry_point_is_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from conformance.adapters.fake import FakeEngine

    outside(monkeypatch, toy="conformance.adapters.fake:FakeEngine")
    assert "toy" in engine_names()
    assert find_engine("toy") is FakeEngine


def test_an_entry_point_may_not_take_a_name_of_the_box(monkeypatch: pytest.MonkeyPatch) -> None:
    outside(monkeypatch, minivllm="conformance.adapters.fake:FakeEngine")
    with pytest.raises(EngineNotFound, match=r"redefine \['minivllm'\]"):
        find_engine("minivllm")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise RuntimeError('no GPU')", "RuntimeError: no GPU"),
        ("def", "SyntaxError"),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("Engine = 3", "broken_engine:Engine is no class or function, but 3"),
        ("", "AttributeError"),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_whatever_it_raises(
    code: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_engine.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken_engine", raising=False)
    with pytest.raises(EngineNotFound, match=message):
        find_engine("broken_engine:Engine")


@pytest.mark.parametrize("name", [":Engine", "json:", ".relative:Engine", "a b:c"])
def test_a_name_that_names_nothing_is_not_found(name: str) -> None:
    with pytest.raises(EngineNotFound, match="cannot be imported"):
        find_engine(name)


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(
        EngineNotFound, match=r"unknown engine 'vlm'; known: .*minivllm.*package.module:Class"
    ):
        find_engine("vlm")


@pytest.mark.parametrize(
    "name", ["no.such.module:Engine", "conformance.adapters.fake:NoSuch", "conformance:"]
)
def test_what_cannot_be_imported_is_told_with_the_reason(name: str) -> None:
    with pytest.raises(EngineNotFound, match="cannot be imported"):
        find_engine(name)


def test_options_of_the_command_line_are_yaml_and_yield_to_the_scenarios() -> None:
    options = parse_options(["base_url=http://127.0.0.1:1/v1", "num_kv_blocks=8", "flag=true"])
    assert options == {"base_url": "http://127.0.0.1:1/v1", "num_kv_blocks": 8, "flag": True}
    seen: list[Mapping[str, object]] = []

    def factory(_model: ModelSource, given: Mapping[str, object]) -> EngineAdapter:
        seen.append(given)
        return cast("EngineAdapter", None)

    with_options(factory, options)(ModelSource("m", Path(), "w"), {"num_kv_blocks": 64})
    assert seen == [{**options, "num_kv_blocks": 64}]
    assert with_options(factory, {}) is factory


@pytest.mark.parametrize("item", ["base_url", "=x", "a=[1"])
def test_an_option_of_another_form_is_told(item: str) -> None:
    with pytest.raises(EngineOptionError, match="--engine-option"):
        parse_options([item])
