"""End-to-end workloads, on the toy engine: right it keeps every law, broken it breaks the one it should."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.adapters.base import EngineOutput, ModelSource
from conformance.adapters.fake import FakeEngine
from conformance.fuzz.laws import LawBroken
from conformance.fuzz.workload import EndToEnd, Job, Workload

SOURCE = ModelSource("toy", Path("toy"), "0")
AMPLE = {"num_kv_blocks": 200, "block_size": 16, "max_num_batched_tokens": 64}
OPTIONS = {"num_kv_blocks": 40, "block_size": 2, "max_num_batched_tokens": 4}


def job(*prompt: int, follows: int | None = None, **sampling: Any) -> Job:
    given = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True, "logprobs": 2, **sampling}
    return Job(prompt or (3, 4, 5, 6, 7), given, follows=follows)


def workload(*script: tuple[str, int], jobs: tuple[Job, ...] = ()) -> Workload:
    return Workload(OPTIONS, jobs or (job(), job(3, 4, 9), job(8)), script)


def world(fault: str | None = None, without: frozenset[str] = frozenset()) -> EndToEnd:
    """The toy, broken unless it runs with the ample options."""

    def factory(source: ModelSource, options: Mapping[str, Any]) -> FakeEngine:
        broken = None if options["num_kv_blocks"] == AMPLE["num_kv_blocks"] else fault
        return FakeEngine(source, options, fault=broken, without=without)

    return EndToEnd(factory, SOURCE, AMPLE)


BUSY = (
    *(("submit", 0), ("step", 0), ("submit", 0), ("step", 0), ("preempt", 0), ("poison", 0), ("step", 0)),
    *(("submit", 0), ("step", 0), ("preempt", 1), ("step", 0), ("reset", 0), ("step", 0)),
)


def test_the_right_engine_keeps_every_law_and_its_events_are_counted() -> None:
    end_to_end = world()
    end_to_end.check(workload(*BUSY))
    assert end_to_end.seen["submitted"] == end_to_end.seen["finished"] == 3
    assert end_to_end.seen["preempted"] >= 1


@pytest.mark.parametrize(
    ("fault", "law"),
    [
        ("wrong_token", "solo"),
        ("early_stop", "solo"),
        ("lost_on_preempt", "solo"),
        ("batch_leak", "solo"),
        ("poison_leak", "solo"),
        ("leaked_block", "leak"),
        ("hang", "progress"),
    ],
)
def test_a_broken_engine_breaks_the_law_it_should(fault: str, law: str) -> None:
    with pytest.raises(LawBroken) as caught:
        world(fault).check(workload(*BUSY))
    assert caught.value.law == law


def test_numbers_count_only_where_bits_are_promised() -> None:
    with pytest.raises(LawBroken, match="logprobs of"):
        world("noisy_logits").check(workload(*BUSY))
    world("noisy_logits", frozenset({"bitwise"})).check(workload(*BUSY))


ABORTED = (("submit", 0), ("step", 0), ("step", 0), ("step", 0), ("abort", 0))


class FirstTokenWrong(FakeEngine):
    """Tells another first token, unless it has the ample options."""

    def outputs(self) -> list[EngineOutput]:
        outputs = super().outputs()
        if self._options["num_kv_blocks"] == AMPLE["num_kv_blocks"]:
            return outputs
        return [replace(o, token_ids=(0, *(o.token_ids or ())[1:])) for o in outputs]


def test_an_aborted_request_answered_a_prefix_of_its_solo_answer() -> None:
    end_to_end = world()
    end_to_end.check(workload(*ABORTED))
    assert end_to_end.seen["aborted"] == 1
    with pytest.raises(LawBroken, match="was aborted as abort after"):
        EndToEnd(FirstTokenWrong, SOURCE, AMPLE).check(workload(*ABORTED, jobs=(job(),)))


def test_a_job_that_follows_continues_the_solo_answer() -> None:
    end_to_end = world()
    first, second = end_to_end._requests((job(3, 4), job(9, follows=0)))
    answer = end_to_end.solo(first)[0].token_ids
    assert second.prompt_token_ids == (3, 4, *(answer or ()), 9)


def test_a_refused_request_is_not_compared() -> None:
    end_to_end = world()
    tiny = {**OPTIONS, "num_kv_blocks": 3}
    end_to_end.check(Workload(tiny, (job(), job(3, max_tokens=2)), (("submit", 0),)))
    assert end_to_end.seen["refused"] == 1
    assert end_to_end.seen["finished"] == 1


def test_actions_the_engine_does_not_offer_are_left_out() -> None:
    end_to_end = world(without=frozenset({"preempt", "poison", "prefix_cache"}))
    end_to_end.check(workload(*BUSY, ("swap", 0)))
    assert end_to_end.seen["preempted"] == 0
