"""Every feature has a probe, sound engines pass it, and one that is broken in it is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.adapters.base import FEATURES, ModelSource
from conformance.adapters.fake import FakeEngine, fake_engine
from conformance.adapters.fake_model import write_toy_suite
from conformance.adapters.received import AdapterError
from conformance.doctor import engine as doctor
from conformance.doctor.cli import main
from conformance.doctor.engine import DECLARED_BUT_FAILING, NOT_TRIED, UNKNOWN, WORKS, examine_engine
from conformance.doctor.probes import PROBES, SCENARIOS
from conformance.engines import find_engine
from conformance.models import resolve_model

SOURCE = ModelSource("toy", Path("toy"), "w")
A_SCENARIO = """\
requirement: It answers.
level: must
profile: smoke
source: [https://example.org]
model: toy
requests: {r: {token_ids: [3, 4], max_tokens: 2}}
steps: [{submit: r}, run]
checks: [tokens_match_golden]
"""
OPTIONS: Mapping[str, Any] = {"dtype": "float32", "device": "cpu"}


def states(fault: str | None = None, without: tuple[str, ...] = ()) -> dict[str, tuple[str, str]]:
    findings = examine_engine(fake_engine(fault=fault, without=without), SOURCE, OPTIONS)
    return {f.feature: (f.state, f.told) for f in findings}


def failing(found: Mapping[str, tuple[str, str]]) -> set[str]:
    return {feature for feature, (state, _told) in found.items() if state == DECLARED_BUT_FAILING}


def test_every_feature_has_one_probe() -> None:
    assert set(PROBES) | set(SCENARIOS) == set(FEATURES)
    assert not set(PROBES) & set(SCENARIOS)


def test_a_sound_engine_does_what_it_declares_and_nothing_else_is_tried() -> None:
    found = states(without=("prompt_logprobs",))
    assert failing(found) == set()
    assert found["prefix_cache"] == (WORKS, "")
    assert found["bitwise"] == (WORKS, "")
    assert found["prompt_logprobs"] == (NOT_TRIED, "left out for a test")
    assert sum(state == WORKS for state, _ in found.values()) == 17


@pytest.mark.parametrize(
    ("fault", "feature", "told"),
    [
        ("lost_on_preempt", "preempt", "preempt() changes the answer"),
        ("poison_leak", "poison", "NaN in unused memory changes the answer"),
        ("stale_prefix", "prefix_cache", "a cache hit changes the answer"),
        ("chunk_seam", "chunked_prefill", "a prompt in chunks of 16 gets another answer"),
        ("batch_leak", "bitwise", "company in the batch changes the bits"),
        ("leaked_block", "pool", "blocks stay in use after the last request"),
        ("nan_logits", "stages", "a logit is not finite"),
        ("early_stop", "output_ids", "max_tokens 1 with ignore_eos gave"),
        ("crash", "stepped", "RuntimeError: the toy crashed"),
    ],
)
def test_what_is_declared_and_broken_is_named(fault: str, feature: str, told: str) -> None:
    found = states(fault)
    if fault != "early_stop":  # which still gives its one token, so that six come short
        assert found[feature][0] == DECLARED_BUT_FAILING
        assert told in found[feature][1]
    assert failing(found)


def test_a_feature_without_its_option_or_its_method_fails() -> None:
    class Mute(FakeEngine):
        def capabilities(self) -> Any:
            told = super().capabilities()
            features = frozenset({"token_ids", "block_size", "kv", "prompt_logprobs"})
            return type(told)("mute", "1", told.dtypes, features)

        def generate(self, requests: Any) -> Any:
            return [replace(output, prompt_logprobs=None) for output in super().generate(requests)]

    found = {f.feature: f.told for f in examine_engine(Mute, SOURCE, OPTIONS) if f.state != NOT_TRIED}
    assert found == {
        "token_ids": "",
        "block_size": "capabilities().options has no block_size, so it cannot be asked for",
        "kv": "it lacks the method read_kv",
        "prompt_logprobs": "the prompt has 5 tokens, prompt_logprobs 0",
    }


class Leaving(FakeEngine):
    def submit(self, _request: object) -> None:
        raise SystemExit(0)

    def generate(self, _requests: object) -> list[Any]:
        raise SystemExit(0)


def test_an_engine_that_leaves_fails_the_probe() -> None:
    found = {f.feature: (f.state, f.told) for f in examine_engine(Leaving, SOURCE, OPTIONS)}
    assert found["output_ids"] == (DECLARED_BUT_FAILING, "SystemExit: 0")


class Boastful(FakeEngine):
    """The toy, which takes any checkpoint, as if it refused some."""

    def capabilities(self) -> Any:
        told = super().capabilities()
        return replace(told, features=frozenset({"strict_loading", "strict_rope"}))


#: An engine of the box → the features that must not be missing, so that an empty list is no success.
SOUND = {
    "fake": {"token_ids", "prompt_logprobs", "stages", "bitwise", "preempt"},
    "minivllm": set(FEATURES) - {"strict_windows"},
    "hf": {"token_ids", "text", "chat", "prompt_logprobs", "forced_decode"},
}


@pytest.mark.parametrize("name", SOUND)
def test_the_engines_of_the_box_do_what_they_declare(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for what a whole scenario must show: those run in the suite."""
    monkeypatch.setattr(doctor, "_by_scenario", lambda *_: (WORKS, ""))
    source = SOURCE if name == "fake" else resolve_model("tiny-llama")
    found = list(examine_engine(find_engine(name), source, OPTIONS))
    assert [f for f in found if f.state not in (WORKS, NOT_TRIED)] == []
    assert {f.feature for f in found if f.state == WORKS} >= SOUND[name]


def test_a_scenario_is_the_probe_where_a_checkpoint_must_be_made_for_it(tmp_path: Path) -> None:
    write_toy_suite(tmp_path, {"a/b": A_SCENARIO})
    found = {f.feature: f for f in examine_engine(Boastful, SOURCE, OPTIONS, tmp_path)}
    assert found["strict_loading"].state == UNKNOWN
    assert found["strict_loading"].told == "loading/missing-tensor is not in this suite"
    [loading] = [f for f in examine_engine(Boastful, SOURCE, OPTIONS) if f.feature == "strict_loading"]
    assert loading.state == DECLARED_BUT_FAILING
    assert loading.told.startswith("loading/missing-tensor: ")


def test_an_adapter_that_cannot_say_what_it_can_do_is_told() -> None:
    def broken(_model: ModelSource, _options: Mapping[str, Any]) -> FakeEngine:
        raise RuntimeError("no licence")

    with pytest.raises(AdapterError, match="no licence"):
        list(doctor.examine_engine(broken, SOURCE, OPTIONS))


def test_the_exit_status_tells_whether_something_declared_fails(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conformance.doctor.cli.find_engine", lambda _name: FakeEngine)
    assert main(["--engine", "toy"]) == 0
    shown = capsys.readouterr().out
    assert "18 capabilities work, 0 are declared and fail" in shown
    assert "not declared swap" in shown

    monkeypatch.setattr("conformance.doctor.cli.find_engine", lambda _name: fake_engine(fault="poison_leak"))
    assert main(["--engine", "toy"]) == 1
    assert "NaN in unused memory changes the answer" in capsys.readouterr().out
