"""Two engines on one prompt: what is compared, in which order, and who is blamed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance.adapters.base import Capabilities, EngineOutput, EngineRequest, ModelSource, TokenLogprob
from conformance.diff_cli import main
from conformance.direct import Agreement, Question, compare
from conformance.engines import find_engine
from conformance.models import resolve_model
from conformance.verdicts import Verdict

#: No checkpoint: the reference cannot be loaded from it, so engines are compared with one another.
NOWHERE = ModelSource("nowhere", Path("nowhere"), "0" * 64)
PROMPT = (1, 5, 6)


class Canned:
    """An engine whose answer is written down: after n generated tokens comes answer[n]."""

    name = "canned"
    prompt: tuple[int, ...] = PROMPT
    answer: tuple[int, ...] = (7, 8, 9, 3)
    features: frozenset[str] = frozenset({"token_ids", "text", "output_ids"})

    def __init__(self, *_: Any) -> None:
        pass

    def __enter__(self) -> Canned:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def capabilities(self) -> Capabilities:
        return Capabilities(self.name, "1", ("float32",), self.features)

    def generate(self, requests: Sequence[EngineRequest]) -> list[EngineOutput]:
        return [self.serve(request) for request in requests]

    def serve(self, request: EngineRequest) -> EngineOutput:
        prompt = request.prompt_token_ids or self.prompt
        done = len(prompt) - len(self.prompt)
        rest = self.answer[done : done + request.sampling["max_tokens"]]
        rows = None
        if "prompt_logprobs" in request.sampling:
            told = (*self.prompt, *self.answer)[: len(prompt)]
            rows = (None, *((TokenLogprob(token, -0.1),) for token in told[1:]))
        return EngineOutput(
            request.request_id,
            " ".join(map(str, rest)),
            True,
            prompt_token_ids=prompt,
            token_ids=request.forced_token_ids or rest,
            choice_token_ids=self.answer[: len(request.forced_token_ids or rest)],
            prompt_logprobs=rows,
            finish_reason="length",
        )


class Parts(Canned):
    name = "parts"
    answer = (7, 8, 4, 3)


class Doubled(Canned):
    name = "doubled"
    prompt = (1, *PROMPT)


class Raising(Canned):
    name = "raising"

    def serve(self, request: EngineRequest) -> EngineOutput:
        raise RuntimeError(f"no memory for {request.request_id}")


def asked(b: type[Canned], features: frozenset[str] | None = None) -> Any:
    if features is not None:
        b = type(b.__name__, (b,), {"features": features})
    return compare(Question("hello", max_tokens=4), Canned, b, NOWHERE)


def test_without_a_reference_the_same_tokens_are_weak_evidence() -> None:
    found = asked(Canned)
    assert found.verdict is Verdict.WEAK
    assert found.divergence is None
    assert found.reference.startswith("none: the reference cannot be computed here")
    assert found.agreement == Agreement(4, 4, "one request per position")


def test_a_divergence_is_named_and_every_position_after_it_is_judged() -> None:
    found = asked(Parts)
    assert found.verdict is Verdict.FAIL
    assert found.divergence == 2
    assert found.margin is None
    assert found.agreement == Agreement(3, 4, "one request per position")


@pytest.mark.parametrize(
    ("feature", "how"),
    [
        ("forced_decode", "forced decode"),
        ("forced_prompt", "prompt logprobs (judges prefill)"),
        ("prompt_logprobs", "prompt logprobs (judges prefill)"),
    ],
)
def test_the_best_way_of_teacher_forcing_is_taken(feature: str, how: str) -> None:
    found = asked(Parts, Canned.features | {feature})
    assert found.agreement == Agreement(3, 4, how)


def test_an_engine_that_takes_no_ids_cannot_be_led() -> None:
    assert asked(Parts, frozenset({"text", "output_ids"})).agreement is None


def test_a_second_bos_is_told_and_nothing_after_it() -> None:
    found = asked(Doubled)
    assert found.verdict is Verdict.FAIL
    [line] = found.lines
    assert line.startswith(
        "the prompt ids differ at 1 (template, tokenizer or expansion): [5, 6] and [1, 5, 6]"
    )
    assert line.endswith("3 and 4 tokens; nothing later is compared")
    assert found.agreement is None


def test_an_engine_that_raises_is_named() -> None:
    found = asked(Raising)
    assert found.verdict is Verdict.FAIL
    assert found.lines == ("raising failed: RuntimeError: no memory for asked",)


class Leaving(Canned):
    name = "leaving"

    def generate(self, requests: Sequence[EngineRequest]) -> list[EngineOutput]:
        if any(request.forced_token_ids for request in requests):
            raise SystemExit(0)
        return super().generate(requests)


def test_an_engine_that_leaves_while_it_is_led_is_named() -> None:
    class Forced(Leaving):
        features = Canned.features | {"forced_decode"}

    found = compare(Question("x"), Canned, Forced, NOWHERE)
    assert found.verdict is Verdict.FAIL
    assert found.lines == ("leaving failed, led along the other's answer: SystemExit: 0",)


def test_an_adapter_that_cannot_say_what_it_can_do_exits_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mute(Canned):
        def capabilities(self) -> Capabilities:
            raise SystemExit(0)

    monkeypatch.setattr("conformance.diff_cli.find_engine", lambda _name: Mute)
    assert main(["--model", "tiny-llama", "--prompt", "x"]) == 2
    assert "the adapter cannot tell its capabilities: SystemExit: 0" in capsys.readouterr().err


def test_with_the_reference_both_are_judged_and_the_wrong_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    other = f"{__name__}:Parts"
    arguments = [
        "--model",
        "tiny-llama",
        "--prompt",
        "The red boat",
        "--max-tokens",
        "4",
        "--json",
        str(file),
    ]
    assert main(["--a", "hf", "--b", other, *arguments]) == 1
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["a"]["verdict"] == "PASS"
    assert found["b"]["verdict"] == "FAIL"
    assert "prompt ids differ" in found["lines"][0]
    shown = capsys.readouterr().out
    assert "truth: computed from the reference" in shown
    assert shown.rstrip().splitlines()[-1].startswith("FAIL: they were not given the same prompt")


def test_two_right_engines_agree() -> None:
    source = resolve_model("tiny-llama")
    found = compare(
        Question("The red boat", max_tokens=6), find_engine("hf"), find_engine("minivllm"), source
    )
    assert found.verdict is Verdict.PASS
    assert found.agreement == Agreement(6, 6, "forced decode")
    assert (found.a.stage, found.b.stage) == (None, None)
    assert found.a.prompt_token_ids == found.b.prompt_token_ids


def test_an_unknown_model_or_engine_or_picture_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "tiny-lama", "--prompt", "x"]) == 2
    assert main(["--a", "vlm", "--model", "tiny-llama", "--prompt", "x"]) == 2
    assert main(["--model", "tiny-llama", "--prompt", "x", "--image", "no.png"]) == 2
    shown = capsys.readouterr().err
    assert "unknown model 'tiny-lama'" in shown
    assert "unknown engine 'vlm'" in shown
    assert "no.png" in shown
