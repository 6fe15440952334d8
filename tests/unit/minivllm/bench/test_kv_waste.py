"""Allocated and used slots, counted by hand and on the workloads in the box."""

from __future__ import annotations

import pytest

from minivllm.bench.kv_waste import measure
from minivllm.bench.workload import WORKLOADS, Length, Workload


def one_request(prompt: int, output: int) -> Workload:
    return Workload("one", Length(prompt, prompt), Length(output, output), num_requests=1)


def test_slots_of_one_request_are_those_counted_by_hand() -> None:
    waste = measure(one_request(5, 4), block_size=4, num_blocks=9, max_model_len=32)
    # Passes end with 5, 6, 7 and 8 tokens in the cache, each time in 2 blocks of 4.
    assert (waste.steps, waste.used, waste.paged) == (4, 5 + 6 + 7 + 8, 4 * 8)
    assert (waste.contiguous, waste.running, waste.preemptions) == (4 * 32, 4, 0)
    assert waste.paged_waste == pytest.approx(1 - 26 / 32)
    assert waste.contiguous_waste == pytest.approx(1 - 26 / 128)


def test_blocks_of_one_token_waste_nothing() -> None:
    assert measure(one_request(5, 4), block_size=1, num_blocks=33, max_model_len=32).paged_waste == 0


def test_running_requests_that_the_budget_passes_over_count_too() -> None:
    workload = Workload("two", Length(4, 4), Length(1, 1), num_requests=2)
    waste = measure(
        workload, block_size=4, num_blocks=9, max_model_len=16, max_num_batched_tokens=6, max_num_seqs=2
    )
    # Step 1 computes 4 + 2 tokens, step 2 the other 2 of the second request.
    assert (waste.steps, waste.used, waste.running) == (2, (4 + 2) + 4, 3)


def test_the_default_workload_wastes_less_than_four_percent_of_its_paged_slots() -> None:
    waste = measure(WORKLOADS["chat"], block_size=16)
    assert waste.paged_waste < 0.04
    assert waste.contiguous_waste > 0.5
    assert waste.preemptions > 0, "the pool is small enough to be full"


def test_the_short_workload_does_waste_more_than_four_percent() -> None:
    assert measure(WORKLOADS["short"], block_size=16).paged_waste > 0.04
