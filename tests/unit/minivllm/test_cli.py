"""The command line answers, and says in one line what is wrong."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from PIL import Image

from minivllm import LLM, SamplingParams
from minivllm.cli import main


def test_generate_streams_what_the_engine_answers(
    tiny_llama: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "--model", tiny_llama, "--num-kv-blocks", "64", "--max-tokens", "5", "Hello"]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    llm = LLM(model=tiny_llama, num_kv_blocks=64)
    [expected] = llm.chat(
        [{"role": "user", "content": "Hello"}], SamplingParams(temperature=0.0, max_tokens=5)
    )
    assert shown == expected.outputs[0].text + "\n"


def test_json_prints_one_object_per_prompt(tiny_llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["generate", "--raw", "--json", "--model", tiny_llama, "--num-kv-blocks", "64"]
    assert main([*arguments, "--max-tokens", "3", "one", "two"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [o["prompt"] for o in objects] == ["one", "two"]
    assert all(len(o["outputs"][0]["token_ids"]) <= 3 for o in objects)


def test_a_refusal_is_one_line_with_its_name(tiny_llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--model", tiny_llama, "--block-size", "0", "x"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: block_size")
    assert error.count("\n") == 1
    assert main(["generate", "--model", "/no/such/model", "x"]) == 2
    assert "/no/such/model" in capsys.readouterr().err


def test_info_prints_the_resolved_configuration(tiny_llama: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--model", tiny_llama, "--num-kv-blocks", "9"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["num_kv_blocks"] == 9
    assert plain["attention_backend"] != "auto"


@pytest.fixture
def pictures(tmp_path: Path) -> list[str]:
    paths = []
    for name, colour, size in (("red", (255, 0, 0), (84, 112)), ("blue", (0, 0, 255), (112, 56))):
        Image.new("RGB", size, colour).save(tmp_path / f"{name}.png")
        paths.append(str(tmp_path / f"{name}.png"))
    return paths


def test_pictures_come_before_the_text(
    checkpoints: Path, pictures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(checkpoints / "tiny-qwen2-vl")
    arguments = [
        "generate",
        "--model",
        model,
        "--num-kv-blocks",
        "64",
        "--max-tokens",
        "5",
        "--json",
        "What?",
    ]
    assert main([*arguments, "--image", pictures[0], "--image", pictures[1]]) == 0
    shown = json.loads(capsys.readouterr().out)
    llm = LLM(model=model, num_kv_blocks=64)
    content = [*({"type": "image", "image": path} for path in pictures), {"type": "text", "text": "What?"}]
    [expected] = llm.chat(
        [{"role": "user", "content": content}], SamplingParams(temperature=0.0, max_tokens=5)
    )
    assert shown["prompt_token_ids"] == list(expected.prompt_token_ids)
    assert shown["outputs"][0]["token_ids"] == list(expected.outputs[0].token_ids)


def test_raw_prompts_place_their_pictures_themselves(
    checkpoints: Path, pictures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "--raw", "--model", str(checkpoints / "tiny-qwen2-vl"), "--num-kv-blocks", "64"]
    arguments += ["--max-tokens", "3", "--image", pictures[0], "--encoder-cache-embeddings", "100"]
    assert main([*arguments, "<|image_pad|> this"]) == 0
    assert capsys.readouterr().out
    assert main([*arguments, "this"]) == 2
    assert capsys.readouterr().err.startswith("BadMedia: the prompt has 0 image placeholders")


def test_mappings_are_given_as_json(checkpoints: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["info", "--model", str(checkpoints / "tiny-qwen2-vl"), "--num-kv-blocks", "64"]
    limit = ["--limit-mm-per-prompt", '{"image": 2}']
    assert main([*arguments, *limit, "--mm-processor-kwargs", '{"max_pixels": 9000}']) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["engine"]["limit_mm_per_prompt"] == {"image": 2}
    assert plain["engine"]["mm_processor_kwargs"] == {"max_pixels": 9000}
    with pytest.raises(SystemExit):
        main([*arguments, "--mm-processor-kwargs", "[1]"])
    assert "invalid json_object value" in capsys.readouterr().err


def test_a_reader_that_goes_away_ends_the_command_without_a_word(
    tiny_llama: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert main(["info", "--model", tiny_llama]) == 141
        print("and what comes later is dropped", file=pipe, flush=True)
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_told_in_one_line(
    tiny_llama: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert main(["info", "--model", tiny_llama]) == 2
    error = capsys.readouterr().err
    assert error.startswith("OSError: [Errno 28]")
    assert error.count("\n") == 1


def test_what_the_terminal_cannot_show_is_escaped(
    tiny_llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open(tmp_path / "out", "w", encoding="ascii") as narrow:
        monkeypatch.setattr(sys, "stdout", narrow)
        arguments = [
            "generate",
            "--model",
            tiny_llama,
            "--num-kv-blocks",
            "64",
            "--max-tokens",
            "40",
            "Hello",
        ]
        assert main(arguments) == 0
    assert "\\u" in (tmp_path / "out").read_text()


def test_an_interrupted_command_exits_with_130(tiny_llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("minivllm.cli.resolve", interrupted)
    assert main(["info", "--model", tiny_llama]) == 130
