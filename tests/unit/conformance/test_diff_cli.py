"""`conformance diff`: what it asks, what it prints, how it exits. What is compared: test_direct."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from conformance.adapters.base import ModelSource
from conformance.diff_cli import main, parser, print_comparison
from conformance.direct import Agreement, Comparison, Question, Side
from conformance.runner import Skipped
from conformance.verdicts import Verdict

A = Side("hf", "5", (1, 2), (7, 8, 9), "abc", verdict=Verdict.PASS)
B = Side("mine", "1", (1, 2), (7, 8, 9), "abc", verdict=Verdict.PASS)
SAME = Comparison(Verdict.PASS, A, B, None, (), "computed here")
OTHER = replace(
    SAME,
    verdict=Verdict.FAIL,
    b=replace(B, token_ids=(7, 5, 9), text="a[x]", verdict=Verdict.FAIL, findings=("position 1 is off", "x")),
    divergence=1,
    margin=3.25,
    band=0.001,
    agreement=Agreement(2, 3, "forced decode"),
)
UNJUDGED = {"a": replace(A, verdict=None), "b": replace(B, verdict=None)}


def shown(found: Comparison) -> list[str]:
    text = io.StringIO()
    print_comparison(Console(file=text, width=200), found)
    return text.getvalue().splitlines()


def test_agreement_is_three_lines_and_the_last_word() -> None:
    assert shown(SAME) == [
        "hf 5 [PASS]: 'abc'",
        "mine 1 [PASS]: 'abc'",
        "truth: computed here",
        "PASS: both answer as the reference does",
    ]


def test_a_divergence_is_told_with_its_margin_and_the_band_and_who_is_wrong() -> None:
    assert shown(OTHER) == [
        "hf 5 [PASS]: 'abc'",
        "mine 1 [FAIL]: 'a[x]'",
        "  position 1 is off",
        (
            "first divergence at generated position 1: 8 and 5; "
            "3.25 logits below the truth's best, outside the band of 0.001"
        ),
        "led along the answer of hf, mine chooses the same token at 2 of 3 positions (by forced decode)",
        "truth: computed here",
        "FAIL: mine disagrees with the reference",
    ]


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (replace(OTHER, margin=0.0005), "0.0005 logits below the truth's best, inside the band of 0.001"),
        (replace(OTHER, margin=None), "nothing tells how close the two are"),
        (
            replace(OTHER, b=replace(OTHER.b, token_ids=None)),
            "first divergence at generated position 1: 8 and nothing",
        ),
        (
            replace(OTHER, a=replace(A, verdict=Verdict.FAIL)),
            "FAIL: hf and mine disagree with the reference",
        ),
        (
            replace(OTHER, b=replace(OTHER.b, verdict=Verdict.PASS)),
            "FAIL: they differ by rounding only",
        ),
        (replace(SAME, **UNJUDGED), "PASS: the same tokens, and no yardstick for more"),
        (replace(SAME, divergence=0, **UNJUDGED), "PASS: other tokens, and no yardstick for why"),
        (replace(SAME, b=replace(B, stage="k.0: row 3 is off")), "  triage: k.0: row 3 is off"),
        (replace(SAME, b=replace(B, error="Refused: too long")), "mine 1 [PASS]: Refused: too long"),
    ],
)
def test_each_case_has_its_words(found: Comparison, line: str) -> None:
    assert any(line in one for one in shown(found)), shown(found)


def test_what_came_before_the_answer_comes_first_and_hides_the_divergence() -> None:
    lines = shown(replace(OTHER, lines=("the prompts differ at 0: BOS",)))
    assert lines[3] == "the prompts differ at 0: BOS"
    assert not any("first divergence" in line for line in lines)
    assert lines[-1] == "FAIL: they were not given the same prompt, or one of them failed"


# ---- the command ---------------------------------------------------------------------------------


class Asked:
    """The calls of `compare`, and what it finds or raises."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.answer: Comparison | Exception = OTHER


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """`compare` finds OTHER unless told otherwise."""
    asked = Asked()
    monkeypatch.setattr("conformance.diff_cli.find_engine", lambda name: f"engine {name}")
    source = ModelSource("m", Path("m"), "w")
    monkeypatch.setattr("conformance.diff_cli.resolve_model", lambda name, root: (name, root, source))

    def compare(*given: Any) -> Comparison:
        asked.calls.append(given)
        if isinstance(asked.answer, Exception):
            raise asked.answer
        return asked.answer

    monkeypatch.setattr("conformance.diff_cli.compare", compare)
    return asked


def test_everything_on_the_command_line_reaches_the_comparison(asked: Asked, tmp_path: Path) -> None:
    given = ["--a", "x", "--b", "y", "--model", "m", "--prompt", "Hi", "--chat", "--image", "a.png"]
    given += ["--image", "b.png", "--max-tokens", "5", "--dtype", "bfloat16", "--device", "cuda"]
    assert main([*given, "--data", str(tmp_path)]) == 1
    [(question, a, b, (model, root, _source), data)] = asked.calls
    assert question == Question("Hi", True, (Path("a.png"), Path("b.png")), 5, "bfloat16", "cuda")
    assert (a, b, model, root, data) == ("engine x", "engine y", "m", tmp_path, tmp_path)


def test_left_alone_it_compares_transformers_with_minivllm(asked: Asked) -> None:
    main(["--model", "m", "--prompt", "Hi"])
    [(question, a, b, *_)] = asked.calls
    assert question == Question("Hi")
    assert (a, b) == ("engine hf", "engine minivllm")


@pytest.mark.parametrize(
    ("verdict", "status"), [(Verdict.PASS, 0), (Verdict.NOISE, 0), (Verdict.WEAK, 0), (Verdict.FAIL, 1)]
)
def test_the_exit_status_is_the_verdicts(asked: Asked, verdict: Verdict, status: int) -> None:
    asked.answer = replace(SAME, verdict=verdict)
    assert main(["--model", "m", "--prompt", "Hi"]) == status


def test_what_cannot_be_asked_is_told_and_exits_with_2(
    asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    asked.answer = Skipped("mine does not offer bfloat16")
    assert main(["--model", "m", "--prompt", "Hi"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "mine does not offer bfloat16\n")


def test_the_same_is_written_for_programs(asked: Asked, tmp_path: Path) -> None:
    file = tmp_path / "diff.json"
    assert main(["--model", "m", "--prompt", "Hi", "--json", str(file)]) == 1
    assert len(asked.calls) == 1
    told = json.loads(file.read_text(encoding="utf-8"))
    assert told == json.loads(json.dumps(OTHER.as_dict()))
    assert (told["verdict"], told["b"]["verdict"], told["divergence"]) == ("FAIL", "FAIL", 1)
    assert main(["--model", "m", "--prompt", "Hi", "--json", str(tmp_path / "no" / "where.json")]) == 2


def test_a_prompt_and_a_model_must_be_given() -> None:
    for given in (["--model", "m"], ["--prompt", "Hi"]):
        with pytest.raises(SystemExit) as caught:
            parser().parse_args(given)
        assert caught.value.code == 2
