"""`conformance report`: pages and summaries of saved runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conformance.adapters.fake import FakeEngine
from conformance.adapters.fake_model import write_toy_suite
from conformance.cli import main

SCENARIO = """requirement: It answers.
level: must
source: [https://example.org]
model: toy
profile: smoke
requests:
  one: {token_ids: [3, 4, 5], max_tokens: 9}
steps: [{submit: one}, run]
checks: [tokens_match_golden, logits_within_yardstick]
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., int]:
    data = write_toy_suite(tmp_path_factory.mktemp("data"), {"toy/one": SCENARIO})
    return lambda *arguments: main(
        ["run", "--engine", "conformance.adapters.fake:FakeEngine", "--data", str(data), *map(str, arguments)]
    )


def test_the_page_of_a_run_is_the_page_of_its_report(run: Callable[..., int], tmp_path: Path) -> None:
    saved, page, again = tmp_path / "r.json", tmp_path / "r.html", tmp_path / "again.html"
    assert run("--json", saved, "--html", page) == 0
    assert main(["report", str(saved), "--html", str(again)]) == 0
    assert again.read_bytes() == page.read_bytes()
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    assert text.rstrip().endswith("</html>")
    assert "24 of 24" not in text
    assert "9 of 9 positions inside the band of 4 M" in text


def test_several_reports_are_summed_up_one_after_the_other(run: Callable[..., int], tmp_path: Path) -> None:
    saved, summary = tmp_path / "r.json", tmp_path / "s.md"
    assert run("--json", saved) == 0
    assert main(["report", str(saved), str(saved), "--markdown", str(summary)]) == 0
    assert summary.read_text(encoding="utf-8").count("# fake 1: passed") == 2


def test_a_file_that_is_no_report_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.json").write_text("[]", encoding="utf-8")
    assert main(["report", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]) == 2
    assert "not a report" in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_a_file_in_another_encoding_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.json").write_text("{}", encoding="utf-16")
    assert main(["report", str(tmp_path / "r.json"), "--html", str(tmp_path / "r.html")]) == 2
    assert "not JSON in UTF-8" in capsys.readouterr().err


def test_text_that_no_file_can_hold_is_written_as_its_escape(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("half \ud83d, \x1b[31mred\x1b[0m, whole \U0001f600")

    monkeypatch.setattr(FakeEngine, "submit", fails)
    files = {kind: tmp_path / f"r.{kind}" for kind in ("json", "html", "markdown", "junit")}
    assert run(*(item for kind, path in files.items() for item in (f"--{kind}", path))) == 1
    for kind in ("html", "markdown", "junit"):
        assert "half \\ud83d, " in files[kind].read_text(encoding="utf-8").replace("\\\\", "\\"), kind
    told = "".join(ElementTree.parse(files["junit"]).getroot().itertext())
    assert "\\x1b[31mred\\x1b[0m, whole \U0001f600" in told
    again = tmp_path / "again.html"
    assert main(["report", str(files["json"]), "--html", str(again)]) == 0
    assert again.read_bytes() == files["html"].read_bytes()


def test_one_file_for_two_forms_exits_with_2(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, one = tmp_path / "r.json", str(tmp_path / "one")
    assert run("--json", saved) == 0
    assert main(["report", str(saved), "--html", one, "--markdown", one]) == 2
    assert "--html and --markdown are both" in capsys.readouterr().err
    assert main(["report", str(saved), "--html", str(saved)]) == 2
    assert "would be written over a file that this command reads" in capsys.readouterr().err


def test_asking_for_nothing_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["report", str(tmp_path / "r.json")])
    assert stopped.value.code == 2
    assert "nothing to write: give --html FILE or --markdown FILE" in capsys.readouterr().err
