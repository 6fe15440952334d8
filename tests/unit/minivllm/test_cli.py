"""The command line answers, and says in one line what is wrong."""

from __future__ import annotations

import json

import pytest

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
