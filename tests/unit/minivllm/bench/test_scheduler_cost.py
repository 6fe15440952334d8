"""The cost benchmark measures what it says; the numbers themselves are not for a test."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from minivllm.bench.scheduler_cost import pool_cost, queue_cost


@pytest.mark.parametrize("num_blocks", [1000, 5000])
def test_a_pool_is_measured_half_cached_and_every_time_is_positive(num_blocks: int) -> None:
    cost = pool_cost(num_blocks, repetitions=12)
    assert cost.num_blocks == num_blocks
    assert 0 < num_blocks // 2 - cost.num_cached < 128
    assert all(value > 0 for value in astuple(cost))


@pytest.mark.parametrize("num_waiting", [10, 100])
def test_a_queue_is_measured_and_every_time_is_positive(num_waiting: int) -> None:
    cost = queue_cost(num_waiting, repetitions=10)
    assert cost.num_waiting == num_waiting
    assert all(value > 0 for value in astuple(cost))
