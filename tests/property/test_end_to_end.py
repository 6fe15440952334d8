"""Whole engine, tiny model, random workloads: every answer is what the request gets alone, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.errors import NoSuchExample

from conformance.adapters.minivllm import MiniVLLMAdapter
from conformance.fuzz.laws import LawBroken
from conformance.fuzz.strategies import workloads
from conformance.fuzz.workload import EndToEnd, Workload
from conformance.models import resolve_model
from minivllm.attention import KVCache
from minivllm.cache import BlockManager
from minivllm.errors import InvariantError

FIXED: dict[str, Any] = {"batch_invariant": True, "max_model_len": 64}
AMPLE: Mapping[str, Any] = {**FIXED, "num_kv_blocks": 64, "block_size": 16}

#: A law was never put to the test if its event never came.
REACHED = (
    "preempted",
    "swapped_out",
    "swapped_in",
    "forked",
    "copied",
    "prefix_hit",
    "evicted",
    "aborted",
    "refused",
)

Patch = Callable[[pytest.MonkeyPatch], None]


def end_to_end() -> EndToEnd:
    return EndToEnd(MiniVLLMAdapter, resolve_model("tiny-llama"), AMPLE)


def test_every_answer_is_what_the_request_gets_alone() -> None:
    world = end_to_end()

    # Without shrinking, which takes minutes here: the workload that fails is printed as it is.
    @settings(
        max_examples=50,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(workloads(FIXED))
    def check(workload: Workload) -> None:
        world.check(workload)

    check()
    assert [name for name in REACHED if not world.seen[name]] == []


def copies_keys_only(patch: pytest.MonkeyPatch) -> None:
    copy = KVCache.copy

    def keys_only(self: KVCache, copies: Any) -> None:
        values, self.values = self.values, []
        copy(self, copies)
        self.values = values

    patch.setattr(KVCache, "copy", keys_only)


def writes_into_a_shared_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "_must_copy", lambda *_: False)


def swaps_in_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "swap_in", lambda *_: None)


@pytest.mark.parametrize("fault", [copies_keys_only, writes_into_a_shared_block, swaps_in_nothing])
def test_a_fault_that_only_tensors_show_is_found(fault: Patch) -> None:
    world = end_to_end()

    def breaks(workload: Workload) -> bool:
        try:
            world.check(workload)
        except (LawBroken, InvariantError):
            return True
        return False

    quick = settings(
        max_examples=80,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        try:
            find(workloads(FIXED), breaks, settings=quick)
        except NoSuchExample:
            pytest.fail("the fault went unnoticed")
