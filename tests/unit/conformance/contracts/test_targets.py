"""What is fuzzed is found by name, and must offer what it declares."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from conformance.contracts.base import AllocatorCapabilities, EngineCapabilities
from conformance.contracts.example import ExampleAllocator
from conformance.contracts.targets import OWN_TARGETS, TargetNotFound, find_target


def named(monkeypatch: pytest.MonkeyPatch, **fields: object) -> str:
    """The name of a class with these attributes on top of the example's."""
    module = ModuleType("a_made_up_module")
    module.__dict__["Made"] = type("Made", (ExampleAllocator,), fields)
    monkeypatch.setitem(sys.modules, "a_made_up_module", module)
    return "a_made_up_module:Made"


@pytest.mark.parametrize("name", [*OWN_TARGETS, "conformance.contracts.example:ExampleAllocator"])
def test_targets_in_the_box_are_found(name: str) -> None:
    target = find_target(name)
    assert (target.name, target.can) == (name, target.factory.capabilities)


@pytest.mark.parametrize(
    ("code", "words"),
    [("1 / 0", "ZeroDivisionError"), ("def", "SyntaxError"), ("raise SystemExit(3)", "SystemExit")],
)
def test_a_module_may_raise_anything_on_import(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_allocator.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "broken_allocator", raising=False)
    with pytest.raises(TargetNotFound, match=f"cannot be imported: {words}"):
        find_target("broken_allocator:Allocator")


def test_levels_are_told_by_the_capabilities() -> None:
    assert [find_target(name).level for name in OWN_TARGETS] == ["allocator", "engine", "engine"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ExampleAllocator", "give package.module:Class"),
        ("no_such_package.module:Thing", "cannot be imported"),
        ("conformance.contracts.example:Nothing", "cannot be imported"),
        ("conformance.contracts.example:PagePool", "must have a class attribute `capabilities`"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name: str, words: str) -> None:
    with pytest.raises(TargetNotFound, match=words):
        find_target(name)


@pytest.mark.parametrize(
    ("capabilities", "words"),
    [
        (AllocatorCapabilities(fork=True), "fork needs fork, moves, moved"),
        (AllocatorCapabilities(swap=True), "swap needs swap_out, swap_in, num_host_free, moves, moved"),
        (AllocatorCapabilities(probe=True), "probe needs can_grant"),
        (EngineCapabilities(), "the contract needs add, plan, output, finished, idle"),
        (EngineCapabilities(options=frozenset({"beams"})), "options .'beams'. do not exist"),
    ],
)
def test_who_declares_more_than_it_has_is_refused(
    capabilities: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TargetNotFound, match=words):
        find_target(named(monkeypatch, capabilities=capabilities))
