from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import yaml

import conformance.golden_cli
from conformance.canonical import canonical_request
from conformance.cli import main as conformance_main
from conformance.golden_cli import case_name, main, scenario_requests
from conformance.hf_models import NoTruth
from conformance.manifest import Manifest, sign
from conformance.models import ModelUnavailable
from conformance.records import ArmError, Yardstick
from conformance.reference import Reference
from conformance.store import RecordStore

SaveTiny = Callable[..., Path]


@pytest.fixture(autouse=True)
def keep_threads() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def root(save_tiny: SaveTiny, tmp_path: Path) -> Path:
    """A data directory with one signed checkpoint and no record."""
    save_tiny(tmp_path / "golden" / "checkpoints" / "tiny")
    sign(tmp_path / "golden", "made for this test")
    return tmp_path


def request(**changes: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": {"token_ids": [5, 9, 11]}, "max_tokens": 3, **changes}


@pytest.fixture
def requests(root: Path) -> Path:
    """Two requests; the second is traced."""
    path = root / "requests.yaml"
    items = [
        {"label": "area/one:a", "request": request()},
        {"label": "area/two:b", "request": request(prompt={"text": "w0 w1"}), "traced": True},
    ]
    path.write_text(yaml.safe_dump(items))
    return path


def golden(root: Path, *args: str) -> int:
    return main([args[0], "--root", str(root), *args[1:]])


@pytest.fixture
def recorded(root: Path, requests: Path) -> Path:
    assert golden(root, "record", "--requests", str(requests)) == 0
    return root


def cases(root: Path) -> list[str]:
    return [r.case for r in RecordStore(root).all()]


def test_record_writes_signed_records_named_after_their_labels(
    root: Path, requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert golden(root, "record", "--requests", str(requests)) == 0
    first, second = RecordStore(root).all()
    assert first.case == case_name("area/one:a", first.key) == f"area-one-a-{first.key[:8]}"
    assert not first.stages
    assert second.stages
    assert Manifest.load(root / "golden").faults(root / "golden") == []
    assert "2 recorded, 0 already there, 0 failed" in capsys.readouterr().out


def test_record_skips_what_is_there(
    recorded: Path, requests: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Reference, "record", None)  # any call would fail
    assert golden(recorded, "record", "--requests", str(requests)) == 0
    assert "0 recorded, 2 already there, 0 failed" in capsys.readouterr().out


def test_record_takes_the_requests_of_all_scenarios(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Scenario:
        requests: ClassVar[dict[str, Any]] = {n: SimpleNamespace(traced=False) for n in ("a", "b")}

        def golden_requests(self) -> list[tuple[str, dict[str, Any]]]:
            # The same request twice: recorded once.
            return [("s:a", canonical_request(**request())), ("s:b", canonical_request(**request()))]

    seen = []

    def load(directory: Path) -> list[Scenario]:
        seen.append(directory)
        return [Scenario()]

    monkeypatch.setattr(conformance.golden_cli, "load_scenarios", load)
    assert golden(root, "record", "--traced", "s:*", "--reason", "why not") == 0
    (record,) = RecordStore(root).all()
    assert record.case.startswith("s-a-")
    assert record.stages
    assert seen == [root / "scenarios"]
    entry = Manifest.load(root / "golden").entries[f"records/tiny/{record.case}.json"]
    assert entry.reason == "why not"
    assert [r.label for r in scenario_requests(root)] == ["s:a", "s:b"]
    assert "1 recorded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "count"),
    [(["--only", "*two*"], 1), (["--only", "x"], 0), (["--model", "tiny"], 2), (["--model", "other"], 0)],
)
def test_filters_choose_what_is_recorded(root: Path, requests: Path, options: list[str], count: int) -> None:
    assert golden(root, "record", "--requests", str(requests), *options) == 0
    assert len(cases(root)) == count


def test_one_failing_request_does_not_stop_the_others(
    root: Path, requests: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compute = Reference.record

    def sometimes(self: Reference, wanted: Any, case: str, **options: Any) -> Any:
        if "one" in case:
            raise NoTruth("there is no truth here")
        return compute(self, wanted, case, **options)

    monkeypatch.setattr(Reference, "record", sometimes)
    assert golden(root, "record", "--requests", str(requests)) == 1
    output = capsys.readouterr().out
    assert "FAILED: there is no truth here" in output
    assert "1 recorded, 0 already there, 1 failed" in output


def test_a_model_that_is_not_here_fails_with_the_way_to_get_it(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = root / "requests.json"
    path.write_text(json.dumps([{"label": "x", "request": request(model="absent")}]))
    assert golden(root, "record", "--requests", str(path)) == 1
    assert "FAILED x: unknown model 'absent'; known: tiny" in capsys.readouterr().out


def test_a_model_given_by_path_is_recorded_and_verified_under_its_own_name(
    root: Path, save_tiny: SaveTiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save_tiny(tmp_path / "elsewhere" / "Mine")
    file = root / "requests.json"
    file.write_text(json.dumps([{"label": "x", "request": request(model=str(path))}]))
    assert golden(root, "record", "--requests", str(file)) == 0
    (record,) = RecordStore(root).all()
    assert (record.model, record.request["model"]) == ("Mine", "Mine")
    assert golden(root, "verify", "--model", str(path)) == 0
    assert "same        Mine/x-" in capsys.readouterr().out


def test_record_refuses_to_leave_a_record_of_other_weights(
    recorded: Path, requests: Path, save_tiny: SaveTiny, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(recorded / "golden" / "checkpoints" / "tiny", initializer_range=0.3)
    assert golden(recorded, "record", "--requests", str(requests)) == 1
    output = capsys.readouterr().out
    assert output.count("recorded for other weights") == 2
    assert "golden update --model tiny --reason" in output


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read as YAML"),
        ("a: 1", "must hold a list"),
        ("[{label: x}]", "request 1 must hold label, request"),
        ("[{label: x, request: {}, colour: red}]", "request 1 must hold label, request"),
        ("[{label: x, request: {model: tiny}}]", "request 1: missing field"),
    ],
)
def test_a_wrong_request_file_is_refused(
    root: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = root / "requests.yaml"
    path.write_text(content)
    assert golden(root, "record", "--requests", str(path)) == 1
    assert message in capsys.readouterr().out


def test_verify_passes_on_what_was_just_recorded(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert golden(recorded, "verify") == 0
    assert "2 same, 0 inside band, 0 changed, 0 skipped, 0 errors" in capsys.readouterr().out


def test_verify_fails_on_a_flipped_byte_and_still_checks_the_rest(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recorded / "golden" / "records" / "tiny" / f"{cases(recorded)[0]}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert golden(recorded, "verify") == 1
    output = capsys.readouterr().out
    assert "MANIFEST corrupted: " in output
    assert "ERROR corrupted: " in output
    assert "1 same, 0 inside band, 0 changed, 0 skipped, 1 errors, 1 manifest faults" in output


def test_verify_fails_on_an_unknown_file(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (recorded / "golden" / "stray.txt").write_text("?")
    assert golden(recorded, "verify") == 1
    assert "MANIFEST unknown file golden/stray.txt" in capsys.readouterr().out


def test_verify_fails_on_changed_numbers_and_tells_the_stage(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = Reference._load_truth

    def other_arithmetic(self: Reference, dtype: str) -> Any:
        model = load(self, dtype)
        model.module.model.layers[1].self_attn.scaling *= 1.01
        return model

    monkeypatch.setattr(Reference, "_load_truth", other_arithmetic)
    assert golden(recorded, "verify", "--only", "*two*") == 1
    (line,) = [n for n in capsys.readouterr().out.splitlines() if n.startswith("changed")]
    stages = [part.strip().split()[0] for part in line.partition(": ")[2].split("), ")]
    assert "hidden.0" not in stages
    assert {"hidden.1", "final", "logits", "output_logits"} <= set(stages)


def test_verify_of_nothing_is_no_pass(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert golden(root, "verify") == 1
    assert "nothing was verified" in capsys.readouterr().out


def test_verify_skips_models_that_are_not_here_and_says_so(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(name: str, _root: Path) -> Any:
        raise ModelUnavailable(f"{name} is not installed")

    monkeypatch.setattr(conformance.golden_cli, "resolve_model", absent)
    assert golden(recorded, "verify") == 1
    output = capsys.readouterr().out
    assert output.count("tiny is not installed") == 2
    assert "nothing was verified" in output


def test_verify_fails_when_the_weights_are_others(
    recorded: Path, save_tiny: SaveTiny, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(recorded / "golden" / "checkpoints" / "tiny", initializer_range=0.3)
    sign(recorded / "golden", "another range")
    assert golden(recorded, "verify") == 1
    assert capsys.readouterr().out.count("recorded for other weights") == 2


def test_update_records_again_and_keeps_case_names_and_stages(
    recorded: Path, save_tiny: SaveTiny, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(recorded / "golden" / "checkpoints" / "tiny", initializer_range=0.3)
    sign(recorded / "golden", "another range", under="checkpoints/")
    before = {r.case: r for r in RecordStore(recorded).all()}
    assert golden(recorded, "update", "--reason", "new weights") == 0
    after = {r.case: r for r in RecordStore(recorded).all()}
    assert before.keys() == after.keys()
    for case, record in after.items():
        assert record.provenance["weights_sha256"] != before[case].provenance["weights_sha256"]
        assert record.stages.keys() == before[case].stages.keys()
        entry = Manifest.load(recorded / "golden").entries[f"records/tiny/{case}.json"]
        assert entry.reason == "new weights"
    capsys.readouterr()
    assert golden(recorded, "verify") == 0


def test_update_touches_only_what_the_filters_choose(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert golden(recorded, "update", "--reason", "because", "--only", "*two*") == 0
    assert "1 recorded, 0 skipped, 0 errors" in capsys.readouterr().out


def test_update_demands_a_reason(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        golden(recorded, "update")
    assert "--reason" in capsys.readouterr().err


def test_update_of_nothing_fails(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert golden(root, "update", "--reason", "because") == 1
    assert "nothing was recorded" in capsys.readouterr().out


def test_a_case_that_decides_too_little_is_told(
    root: Path, requests: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compute = Reference.record

    def blurred(self: Reference, wanted: Any, case: str, **options: Any) -> Any:
        record = compute(self, wanted, case, **options)
        return replace(record, yardstick=Yardstick({"sdpa": ArmError(1.0, 10.0)}))

    monkeypatch.setattr(Reference, "record", blurred)
    assert golden(root, "record", "--requests", str(requests), "--only", "*one*") == 0
    output = capsys.readouterr().out
    assert "decided 0%" in output
    assert "fewer than 90 % of positions are decided" in output


def test_the_command_is_a_part_of_conformance(root: Path, requests: Path) -> None:
    arguments = ["golden", "record", "--root", str(root), "--requests", str(requests)]
    assert conformance_main(arguments) == 0
    assert len(cases(root)) == 2


def test_an_unreadable_store_is_an_error_not_a_crash(
    recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (recorded / "golden" / "MANIFEST.json").write_text("{}")
    assert golden(recorded, "verify") == 1
    assert "error: " in capsys.readouterr().out
