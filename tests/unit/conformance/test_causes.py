"""Usual causes: every stage that triage can name has some, and their sources are public threads."""

from __future__ import annotations

from conformance.adapters.base import STAGES
from conformance.causes import CAUSES, Cause, kind_of, usual_causes


def test_every_stage_an_engine_can_show_has_usual_causes() -> None:
    compared = set(STAGES) - {"prompt_logits"}
    assert compared | {"prompt ids", "sampling", "text"} == set(CAUSES)
    assert all(CAUSES.values())


def test_a_layers_arrays_belong_to_one_kind() -> None:
    assert kind_of("hidden.12") == "hidden"
    assert kind_of("k.0") == kind_of("v.3") == "kv"
    assert kind_of("prompt ids") == "prompt ids"
    assert usual_causes("k.7") is CAUSES["kv"]
    assert usual_causes("nobody knows") == ()


def test_sources_are_links() -> None:
    sources = [cause.source for causes in CAUSES.values() for cause in causes if cause.source]
    assert len(sources) > 15
    assert all(source.startswith("https://github.com/") for source in sources)


def test_a_cause_is_told_with_its_source() -> None:
    assert str(Cause("a bias", "https://example.org")) == "a bias (https://example.org)"
    assert str(Cause("a bias")) == "a bias"
