"""What the documentation shows is run: every command, every example, every link."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest
import yaml

from conformance import cli as conformance_cli
from conformance import compare_cli, diff_cli, golden_cli, kv_map, report_cli
from conformance.doctor import cli as doctor_cli
from conformance.faults import cli as faults_cli
from conformance.fuzz import cli as fuzz_cli
from conformance.scenario import load_scenario
from minivllm import cli as minivllm_cli

OWN_PARSERS = {
    "compare": compare_cli.parser(),
    "doctor": doctor_cli.parser(),
    "diff": diff_cli.parser(),
    "faults": faults_cli.parser(),
    "fuzz": fuzz_cli.parser(),
    "golden": golden_cli.parser(),
    "kv-map": kv_map.parser(),
    "report": report_cli.parser(),
}
ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


def fenced(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def commands() -> list[tuple[str, str]]:
    return [
        (page.name, line.strip())
        for page in PAGES
        for block in fenced(page, "console")
        for line in block.splitlines()
        if line.strip()
    ]


def nox_sessions() -> set[str]:
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("nox.session" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


@pytest.mark.parametrize(("page", "line"), commands(), ids=lambda value: str(value)[:60])
def test_every_command_shown_is_one_that_exists(page: str, line: str) -> None:
    """nox sessions exist; the command lines of both packages accept what is shown."""
    for part in line.split("&&"):
        words = shlex.split(part.replace("$(", "").replace(")", ""))
        if "nox" in words and "-s" in words:
            session, *rest = words[words.index("-s") + 1 :]
            assert session in nox_sessions(), f"{page}: no nox session {session}"
            if session == "conformance":
                conformance_cli.parser().parse_args(["run", *rest[1:]])
            continue
        name = Path(words[0]).name
        if name == "conformance" and words[1] in OWN_PARSERS:
            OWN_PARSERS[words[1]].parse_args(words[2:])
        elif name == "conformance":
            conformance_cli.parser().parse_args(words[1:])
        elif words[:2] == ["minivllm", "bench"]:
            minivllm_cli.parser().parse_args(words[1:])
        elif name == "minivllm":
            # The model's path comes from a command in the line; here any path will do.
            at = words.index("--model")
            end = next(i for i in range(at + 1, len(words)) if words[i].startswith("--"))
            minivllm_cli.parser().parse_args([*words[1:at], "--model", "path", *words[end:]])
        elif name == "pytest":
            assert words[1:3] == ["--pyargs", "conformance"], f"{page}: {part!r}"
            options = {word for word in words[3:] if word.startswith("--")}
            assert options <= {"--conformance-engine", "--conformance-device"}, f"{page}: {part!r}"
        else:
            assert words[:3] == ["python", "-m", "pip"], f"{page}: unknown command {part!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        path = page.parent / target
        assert path.exists() or path.with_suffix(".md").exists(), f"{page.name}: {target}"


def test_readme_commands_that_read_only_do_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance_cli.main(["list"]) == 0
    assert "prefix-cache/hit-equals-cold" in capsys.readouterr().out
    assert conformance_cli.main(["explain", "prefix-cache/hit-equals-cold"]) == 0
    shown = capsys.readouterr().out
    assert "conformance run prefix-cache/hit-equals-cold" in shown
    assert "https://github.com/vllm-project/vllm/issues/46592" in shown


def test_the_adapter_of_the_plug_in_page_is_judged_and_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = fenced(ROOT / "docs" / "plug-in-your-engine.md", "python")
    files = {re.match(r'"""(\w+\.py): ', source)[1]: source for source in sources}  # type: ignore[index]
    assert list(files) == ["my_engine.py", "llama.py"], "the adapter comes first, then what it adapts"
    for name, source in files.items():
        assert source == (ROOT / "tests" / "harness" / "toy_engines" / name).read_text(), f"{name} is another"
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ["run", "--engine", "my_engine:MyEngine", "--profile", "smoke", "--model", "tiny-llama"]
    assert conformance_cli.main(arguments) == 0, capsys.readouterr().out
    shown = capsys.readouterr().out
    assert "WEAK   parity/tiny-families[model=tiny-llama]" in shown, "it is not traced"
    assert "my-engine 1.0, suite" in shown
    assert shown.rstrip().endswith("passed")

    broken = files["my_engine.py"].replace("int(rows[-1].argmax())", "int(rows[-1].argmax()) ^ 1")
    assert broken != files["my_engine.py"]
    (tmp_path / "my_broken_engine.py").write_text(broken)
    arguments[2] = "my_broken_engine:MyEngine"
    assert conformance_cli.main(arguments) == 1


def test_the_scenario_of_the_scenarios_page_is_a_scenario(tmp_path: Path) -> None:
    [text] = [t for t in fenced(ROOT / "docs" / "scenarios.md", "yaml") if t.startswith("schema:")]
    path = tmp_path / (yaml.safe_load(text)["id"] + ".yaml")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert load_scenario(path, tmp_path).id == "prefix-cache/salt-isolation"


def test_the_wasted_slots_of_the_cache_page_are_those_the_benchmark_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    [printed] = [block for block in fenced(ROOT / "docs" / "kv-cache.md", "text") if "workload" in block]
    assert minivllm_cli.main(["bench", "kv-waste", "--workload", "short"]) == 0
    assert capsys.readouterr().out.strip() in printed


def test_the_map_of_the_cache_page_is_the_one_that_is_drawn(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    [printed] = [block for block in fenced(ROOT / "docs" / "kv-cache.md", "text") if "KV cache of" in block]
    assert conformance_cli.main(["kv-map", "fork/swap-space-just-enough", "--step", "8"]) == 0
    shown = {line.rstrip() for line in capsys.readouterr().out.splitlines()}
    assert [line for line in printed.splitlines() if line != "…" and line not in shown] == []


@pytest.mark.parametrize("variant", ["StaleDirectory", "SharedPageFreed", "WholePromptHit"])
def test_the_fuzzer_finds_the_bugs_that_its_page_names(
    variant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = f"conformance.contracts.example:{variant}"
    assert fuzz_cli.main(["--allocator", adapter, "--out", str(tmp_path)]) == 1, capsys.readouterr().out
    assert list(tmp_path.iterdir())
