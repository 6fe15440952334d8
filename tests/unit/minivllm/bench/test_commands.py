"""The benchmarks from the command line: what they print says under which conditions it was measured."""

from __future__ import annotations

import pytest

from minivllm.cli import main


def test_kv_waste_prints_both_ways_side_by_side_with_distribution_and_seed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "kv-waste", "--workload", "short", "--seed", "7"]) == 0
    text = capsys.readouterr().out
    assert "workload short: 400 requests, seed 7" in text
    assert "uniform 1 … 16" in text
    (wasted,) = [line for line in text.splitlines() if "wasted" in line]
    paged, contiguous = (float(word.rstrip("%")) for word in wasted.split()[1:])
    assert 4 < paged < contiguous < 100


def test_scheduler_cost_prints_a_line_per_size(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--repetitions", "8", "--largest-pool", "10000", "--longest-queue", "100"]
    assert main(["bench", "scheduler-cost", *arguments]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines if line[0].isdigit()] == ["1000", "10000", "10", "100"]


def test_soak_prints_what_happened_and_the_memory_of_every_wave(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "soak", "--requests", "100", "--seed", "3"]) == 0
    text = capsys.readouterr().out
    assert "100 requests, seed 3: the engine is empty and every block is free" in text
    assert "Aborted" in text
    assert "growth from wave 2 to wave 10" in text


def test_a_benchmark_must_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench"])
    assert "BENCHMARK" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["scheduler-cost", "--repetitions", "0"],
        ["soak", "--requests", "-5"],
        ["kv-waste", "--block-size", "0"],
    ],
)
def test_nothing_can_be_measured_of_nothing(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["bench", *arguments])
    assert refused.value.code == 2
    assert "is not a positive number" in capsys.readouterr().err
