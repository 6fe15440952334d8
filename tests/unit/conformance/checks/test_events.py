"""Counters over events, and the conservation of the pool."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from conformance.adapters.base import FEATURES, EngineError
from conformance.checks import judge
from conformance.checks.events import COUNTERS
from conformance.history import Operation, Pass, RequestRun
from conformance.testing import Spec, answer, make_history, make_pass, make_record, records_of
from conformance.verdicts import Verdict

RED = answer(make_record("red"))


def event(kind: str, request: str | None = "red", **fields: Any) -> Mapping[str, Any]:
    return {"event": kind, **({"request_id": request} if request is not None else {}), **fields}


def submitted(name: str, length: int) -> Mapping[str, Any]:
    return event("submitted", name, num_prompt_tokens=length)


def planned(*rows: tuple[str, int, int]) -> Mapping[str, Any]:
    # Lists, as after reading a history from disk.
    return event("planned", None, step=0, scheduled=[list(r) for r in rows])


def hit(tokens: int, *, resumed: bool = False, blocks: tuple[int, ...] = (1,)) -> Mapping[str, Any]:
    return event("prefix_hit", num_tokens=tokens, block_ids=blocks, resumed=resumed)


def one_pass(*events: Mapping[str, Any], **changes: Any) -> Pass:
    return make_pass("free", [RED], events=events, **changes)


def count(name: str, *events: Mapping[str, Any]) -> int:
    return COUNTERS[name](one_pass(*events))


@pytest.mark.parametrize(
    "kind",
    [
        "submitted",
        "allocated",
        "published",
        "evicted",
        "encoded",
        "copied",
        "swapped_out",
        "swapped_in",
        "preempted",
        "sampled",
        "finished",
        "aborted",
        "failed",
    ],
)
def test_plain_counters_count_their_event(kind: str) -> None:
    assert count(kind, event(kind), event("other"), event(kind)) == 2


def test_hits_count_only_at_first_admission_and_only_if_something_was_found() -> None:
    events = (hit(0), hit(4), hit(8, resumed=True))
    assert count("prefix_hit", *events) == 1
    assert count("hit_tokens", *events) == 4
    assert count("resumed_hit", *events) == 1


def test_a_step_with_a_prompt_chunk_and_a_decode_is_mixed() -> None:
    start = (submitted("red", 4), submitted("blue", 6))
    assert count("planned_mixed", *start, planned(("red", 0, 4), ("blue", 0, 2))) == 0
    assert count("planned_mixed", *start, planned(("red", 4, 1), ("blue", 2, 2))) == 1
    assert count("planned_mixed", *start, planned(("red", 4, 1), ("blue", 6, 1))) == 0


def test_a_prompt_is_chunked_if_some_step_ends_inside_it() -> None:
    assert count("chunked", submitted("red", 4), planned(("red", 0, 4)), planned(("red", 4, 1))) == 0
    assert count("chunked", submitted("red", 4), planned(("red", 0, 3)), planned(("red", 3, 1))) == 1
    # A cached beginning does not make the rest a chunk.
    assert count("chunked", submitted("red", 4), planned(("red", 2, 2))) == 0


def test_batch_and_tokens_in_step_are_the_largest_of_any_step() -> None:
    events = (
        submitted("red", 9),
        submitted("blue", 9),
        planned(("red", 0, 5)),
        planned(("red", 5, 1), ("blue", 0, 3)),
    )
    assert count("batch", *events) == 2
    assert count("tokens_in_step", *events) == 5
    assert count("steps", *events) == 2


def test_lengths_counts_how_many_different_ones_there_are() -> None:
    ends = [event("finished", n, num_output_tokens=c) for n, c in (("a", 3), ("b", 5), ("c", 3))]
    assert count("lengths", *ends) == 2


def test_blocks_out_of_order_are_non_monotonic() -> None:
    up = (event("allocated", block_ids=[1, 2]), event("allocated", block_ids=[5]))
    assert count("non_monotonic_blocks", *up) == 0
    assert count("non_monotonic_blocks", *up, event("allocated", block_ids=[3])) == 1
    # Blocks held before a preemption are no longer in the table.
    assert count("non_monotonic_blocks", *up, event("preempted"), event("allocated", block_ids=[3])) == 0
    assert count("non_monotonic_blocks", hit(4, blocks=(7,)), event("allocated", block_ids=[2])) == 1


def test_poisoned_slots_are_summed_over_steps() -> None:
    operations = (
        Operation("poison", None, {"poisoned": 5}),
        Operation("run", None, {"steps": 3, "poisoned": 2}),
    )
    assert COUNTERS["poisoned"](one_pass(operations=operations)) == 7
    assert COUNTERS["poisoned"](one_pass(operations=(Operation("poison", None, 4),))) == 4


def test_refused_and_unfinished_need_no_events() -> None:
    refused = RequestRun("bad", {}, None, refused=EngineError("X", "y"))
    assert RED.output is not None
    running = replace(RED, request_id="b", output=replace(RED.output, finished=False))
    one = make_pass("free", [RED, refused, running])
    assert COUNTERS["refused"](one) == 1
    assert COUNTERS["unfinished"](one) == 1


def verdict(one: Pass, args: Any, *, features: frozenset[str] = frozenset(FEATURES)) -> Verdict:
    h = make_history([one], features=features)
    return judge(h, [Spec("happened", args)], records_of()).verdict


def test_happened_passes_and_fails_by_its_bound() -> None:
    one = one_pass(event("preempted"))
    assert verdict(one, {"preempted": ">=1"}) is Verdict.PASS
    assert verdict(one, {"preempted": ">=2"}) is Verdict.FAIL
    assert verdict(one, {"preempted": "==1", "evicted": ">=1"}) is Verdict.FAIL


def test_happened_of_one_request_ignores_the_others() -> None:
    one = one_pass(event("preempted", "blue"))
    assert verdict(one, {"preempted": {"blue": ">=1"}}) is Verdict.PASS
    assert verdict(one, {"preempted": {"red": ">=1"}}) is Verdict.FAIL
    steps = one_pass(submitted("red", 3), submitted("blue", 3), planned(("red", 0, 3), ("blue", 0, 2)))
    assert verdict(steps, {"chunked": {"blue": 1, "red": 0}}) is Verdict.PASS


def test_the_harness_own_neighbours_are_nobodys_evidence() -> None:
    one = one_pass(
        event("aborted", "~filler0"),
        submitted("~filler0", 9),
        submitted("red", 3),
        planned(("~filler0", 0, 2), ("red", 0, 3)),
        event("evicted", None, block_id=4),
    )
    assert verdict(one, {"aborted": 0, "chunked": 0, "batch": 1, "evicted": 1}) is Verdict.PASS


def test_without_a_trace_happened_is_skipped_with_the_reason() -> None:
    h = make_history([one_pass(event("preempted"))], features=frozenset())
    found = judge(h, [Spec("happened", {"preempted": ">=1"})], records_of())
    assert found.verdict is Verdict.SKIP
    assert "'traced'" in found.findings[0].message


def test_poisoned_is_judged_without_a_trace() -> None:
    one = one_pass(operations=(Operation("poison", None, {"poisoned": 0}),))
    assert verdict(one, {"poisoned": ">=1"}, features=frozenset()) is Verdict.FAIL


def test_without_a_pool_conservation_is_skipped() -> None:
    h = make_history([one_pass()], features=frozenset())
    assert judge(h, [Spec("pool_conserved")], records_of()).verdict is Verdict.SKIP


def test_every_pass_must_conserve_the_pool() -> None:
    good, bad = one_pass(), make_pass("chunk=3", [RED])
    assert bad.pool_after is not None
    bad = replace(bad, pool_after=replace(bad.pool_after, in_use=1, free=59))
    found = judge(make_history([good, bad]), [Spec("pool_conserved")], records_of())
    assert [f.verdict for f in found.findings] == [Verdict.PASS, Verdict.FAIL]
    assert "chunk=3" in found.findings[1].message
