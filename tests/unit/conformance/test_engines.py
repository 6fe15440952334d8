"""Engines are found by name, and a wrong name says what there is."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from conformance.engines import ENGINES, EngineNotFound, engine_names, find_engine


def outside(monkeypatch: pytest.MonkeyPatch, **names: str) -> None:
    points = [EntryPoint(name, value, "conformance.engines") for name, value in names.items()]
    monkeypatch.setattr("conformance.engines.entry_points", lambda group: points if group else [])


def test_every_engine_in_the_box_can_be_imported() -> None:
    for name in ENGINES:
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
