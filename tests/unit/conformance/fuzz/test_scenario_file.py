"""A failing engine log as a scenario of the real engine: it fails there as well, and only there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from conformance.adapters.minivllm import MiniVLLMAdapter
from conformance.checks import judge
from conformance.contracts import find_target
from conformance.fuzz.allocator_world import AllocatorSetup
from conformance.fuzz.driver import Failure, Fuzzer
from conformance.fuzz.engine_jobs import EngineSetup
from conformance.fuzz.operations import Abort, Add, BreakOff, Commit, Operation, PlanStep, Preempt, Reset
from conformance.fuzz.scenario_file import NotAScenario, as_scenario
from conformance.fuzz.shrink import shrink
from conformance.models import resolve_model
from conformance.paths import data_root
from conformance.runner import run_scenario
from conformance.scenario import Scenario, load_scenario
from conformance.store import RecordStore
from conformance.verdicts import Verdict
from minivllm.cache import PrefixIndex

SETUP = EngineSetup(8, 2, 3, 4, 6, 16)
STEP = (PlanStep(), Commit())


def failure(*operations: Operation, setup: Any = SETUP) -> Failure:
    target = "conformance.contracts.minivllm:MiniVLLMEngine"
    return Failure(target, "context @ engine_world.py:read", "LawBroken", setup, operations, 3, 9)


def written(one: Failure, directory: Path) -> Scenario:
    path = directory / "fuzz" / "found.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(as_scenario(one, "fuzz/found"))
    return load_scenario(path, directory)


def verdict(scenario: Scenario) -> Verdict:
    store = RecordStore(data_root())
    [point] = scenario.points()
    history = run_scenario(scenario, point, MiniVLLMAdapter, resolve_model("tiny-llama"), store)
    return judge(history, scenario.checks, store.get, scenario.level).verdict


def test_steps_sizes_and_requests_are_the_logs(tmp_path: Path) -> None:
    one = failure(
        Add("r0", (1, 2, 1), 4, salt="s"),
        *STEP,
        Add("r1", (2,), 3, priority=1, ignore_eos=True),
        Preempt("r0"),
        Reset(),
        *STEP,
        Abort("r1"),
    )
    scenario = written(one, tmp_path)
    kinds = [(step.kind, step.argument) for step in scenario.steps]
    assert [kind for kind, _ in kinds] == [
        *("submit", "advance", "submit", "preempt", "reset_cache", "advance", "abort", "run")
    ]
    assert kinds[3] == ("preempt", ["r0"])
    assert scenario.engine["num_kv_blocks"] == SETUP.num_blocks + 1, "the null block comes on top"
    assert scenario.requests["r0"].prompt == {"token_ids": [1, 2, 1]}
    assert scenario.requests["r0"].cache_salt == "s"
    assert scenario.requests["r1"].priority == 1
    assert scenario.source == (f"conformance fuzz --seed 3, example 9 of {one.target}",)


def test_the_model_is_made_to_say_what_the_logs_model_said(tmp_path: Path) -> None:
    scenario = written(failure(Add("r0", (1, 2, 1), 6, ignore_eos=True), *STEP), tmp_path)
    assert len(scenario.requests["r0"].sampling["forced_token_ids"]) == 6
    assert scenario.check("finish_reason")[0].args == {"r0": "length"}


def test_a_request_that_is_too_long_must_be_refused(tmp_path: Path) -> None:
    scenario = written(failure(Add("r0", (1,) * 16, 9), Add("r1", (1,), 2), *STEP), tmp_path)
    assert scenario.steps[0].kind == "expect_error"


@pytest.mark.parametrize(
    ("operations", "words"),
    [
        ((Add("r0", (1,), 3, n=2), *STEP), "several sequences"),
        ((Add("r0", (1, 2), 3, spans=((0, 1, "a"),)), *STEP), "images"),
        ((Add("r0", (1,), 3), PlanStep(), Abort("r0"), Commit()), "abort happens inside a step"),
        ((Add("r0", (1,), 3), PlanStep(), PlanStep(), Commit()), "plans a step twice"),
        ((Add("r0", (1,), 3), PlanStep(), Commit(fail="r0")), "a computation fails"),
        ((Add("r0", (1,), 3), PlanStep(), BreakOff(0)), "a step breaks off"),
    ],
)
def test_what_no_step_can_say_is_not_written(operations: tuple[Operation, ...], words: str) -> None:
    with pytest.raises(NotAScenario, match=words):
        as_scenario(failure(*operations), "fuzz/found")


def test_a_block_manager_alone_is_no_engine() -> None:
    setup = AllocatorSetup(num_blocks=4, block_size=2, vocabulary=2, max_len=8)
    with pytest.raises(NotAScenario, match="without an engine"):
        as_scenario(failure(setup=setup), "fuzz/found")


def test_swap_space_is_the_logs_host_blocks() -> None:
    setup = SETUP._replace(preemption="swap", num_host_blocks=3)
    text = as_scenario(failure(Add("r0", (1,), 3), *STEP, setup=setup), "fuzz/found")
    config = yaml.safe_load((data_root() / "golden/checkpoints/tiny-llama/config.json").read_text())
    heads, size, layers = (config[k] for k in ("num_key_value_heads", "head_dim", "num_hidden_layers"))
    assert yaml.safe_load(text)["engine"]["swap_space_bytes"] == 3 * 2 * (2 * heads * size * layers) * 4


def test_a_fault_found_by_the_fuzzer_fails_as_a_scenario_and_passes_once_mended(tmp_path: Path) -> None:
    target = find_target("conformance.contracts.minivllm:MiniVLLMEngine")
    with pytest.MonkeyPatch.context() as patch:
        # A cached block that is handed out as writable can still be hit.
        patch.setattr(PrefixIndex, "remove", lambda *_: False)
        scenario = None
        for seed in range(20):
            found = Fuzzer(target, seed).run(200)
            assert found is not None
            try:
                scenario = written(shrink(target, found), tmp_path / str(seed))
            except NotAScenario:
                continue
            break
        assert scenario is not None
        assert verdict(scenario) in (Verdict.FAIL, Verdict.ERROR)
    assert verdict(scenario) is Verdict.PASS
