"""Planted faults: triage names the stage each of them is in, over the command line as a user sees it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.adapters.minivllm import MiniVLLMAdapter
from conformance.cli import main
from minivllm.layers.rope import RopeTable
from minivllm.sampling import Sampler

TEXT = "parity/tiny-families"
PICTURE = "vision/one-image"


class NoProjectorBias(MiniVLLMAdapter):
    """minivllm whose projector from vision to text forgets its last bias."""

    def __enter__(self) -> NoProjectorBias:
        super().__enter__()
        parameters = dict(self._loaded.model.named_parameters())
        [name] = [name for name in parameters if name.endswith("multi_modal_projector.linear_2.bias")]
        self._weights_changed = True  # so that nobody else gets this model
        self._loaded.update_weights({name: torch.zeros_like(parameters[name])})
        return self


def look(tmp_path: Path, scenario: str, model: str, *options: str) -> tuple[int, dict[str, Any]]:
    """Exit status of `conformance triage`, and what it found."""
    file = tmp_path / "found.json"
    status = main(["triage", scenario, "--model", model, "--json", str(file), *options])
    [found] = json.loads(file.read_text(encoding="utf-8"))
    return status, found


def words(line: str) -> list[str]:
    """A line without its measured sizes."""
    return [word for word in line.split() if not re.fullmatch(r"\(?\d+(\.\d+)?e[+-]\d+\)?|1", word)]


def turned(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Rope whose positions jump by one after the twelfth."""

    def cos_sin(self: RopeTable, positions: torch.Tensor) -> Any:
        return plain(self, torch.where(positions > 12, positions + 1, positions))

    return cos_sin


def test_wrong_rope_is_found_in_the_keys_of_the_first_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RopeTable, "cos_sin", turned(RopeTable.cos_sin))
    status, found = look(tmp_path, TEXT, "tiny-llama", "--request", "long")
    assert status == 1
    suspect = found["requests"]["long"]
    assert (suspect["stage"], suspect["position"]) == ("k.0", 13)
    assert suspect["size"] > 100
    assert suspect["truth"] == "computed from the reference"
    assert any("rope" in cause for cause in suspect["causes"])
    table = {line["stage"]: line["inside"] for line in suspect["stages"]}
    assert table["embeddings"]
    assert table["positions"]
    assert table["v.0"], "values are not rotated"
    assert not table["hidden.0"]
    shown = capsys.readouterr().out
    assert "k.0: row 13 (prompt token 13, id" in shown
    page = (Path(__file__).parents[2] / "docs" / "triage.md").read_text(encoding="utf-8")
    example = page.partition("```text\n")[2].partition("```")[0]
    # Sizes are multiples of rounding, which is the machine's own.
    assert [words(line) for line in example.splitlines()] == [
        words(line) for line in shown[shown.index("  long: k.0") :].splitlines()[: example.count("\n")]
    ]
    assert f"again: conformance run {TEXT} --engine minivllm" in shown


def test_a_missing_projector_bias_is_found_in_the_embeddings_of_the_picture(tmp_path: Path) -> None:
    engine = f"{__name__}:{NoProjectorBias.__name__}"
    status, found = look(tmp_path, PICTURE, "tiny-llava", "--engine", engine)
    assert status == 1
    suspect = found["requests"]["one"]
    assert (suspect["stage"], suspect["position"]) == ("vision.0", 0)
    assert suspect["truth"] == "the golden record"
    assert any("projector" in cause for cause in suspect["causes"])
    table = {line["stage"]: line["inside"] for line in suspect["stages"]}
    assert table["pixels"]
    assert table["spans"]
    assert not table["embeddings"]


def test_a_wrong_sampler_is_found_after_logits_that_are_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Sampler.sample

    def sample(self: Sampler, logits: torch.Tensor, rows: Any, *rest: Any) -> Any:
        sampled = plain(self, logits, rows, *rest)
        wrong = [len(row.tokens) - row.num_prompt_tokens == 5 for row in rows]
        second = logits.topk(2, dim=-1).indices[:, 1].tolist()
        pairs = zip(sampled, wrong, second, strict=True)
        return [replace(one, token_id=token) if bad else one for one, bad, token in pairs]

    monkeypatch.setattr(Sampler, "sample", sample)
    status, found = look(tmp_path, TEXT, "tiny-qwen3", "--request", "text")
    assert status == 1
    suspect = found["requests"]["text"]
    assert (suspect["stage"], suspect["position"]) == ("sampling", 5)
    assert suspect["exact"]
    assert all(line["inside"] for line in suspect["stages"])


def test_a_right_engine_has_every_stage_inside_its_band(tmp_path: Path) -> None:
    status, found = look(tmp_path, PICTURE, "tiny-qwen3-vl")
    assert status == 0
    looked = found["requests"]["one"]
    assert "stage" not in looked
    assert looked["again"] is None
    kinds = {line["stage"].partition(".")[0] for line in looked["stages"]}
    assert kinds == {"spans", "pixels", "vision", "deepstack", "embeddings", "positions", "k", "v", "hidden"}
    assert all(line["inside"] for line in looked["stages"])


def test_a_run_looks_into_its_failures_by_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(RopeTable, "cos_sin", turned(RopeTable.cos_sin))
    assert main(["run", TEXT, "--model", "tiny-llama"]) == 1
    shown = capsys.readouterr().out
    assert "triage: k.0: row 13" in shown
    assert "usual causes: rope" in shown
