"""A small soak: aborts and preemptions in any state leave nothing behind."""

from __future__ import annotations

import pytest

from minivllm.bench import soak as module
from minivllm.bench.soak import soak
from minivllm.cache import BlockManager
from minivllm.errors import InvariantError

PATHS = (
    "Aborted",
    "Allocated",
    "Copied",
    "Evicted",
    "Finished",
    "Forked",
    "Preempted",
    "PrefixHit",
    "Published",
    "SwappedIn",
    "SwappedOut",
)


def test_a_soak_takes_every_path_and_ends_empty() -> None:
    report = soak(600, trace_memory=False)
    assert {path: report.events.get(path, 0) for path in PATHS if not report.events.get(path)} == {}
    assert report.events["Submitted"] == sum(wave.requests for wave in report.waves) == 600
    assert len(report.waves) == 10


def test_a_soak_is_the_same_for_the_same_seed() -> None:
    one, same, other = (soak(60, seed=seed, trace_memory=False) for seed in (1, 1, 2))
    assert (one.events, one.waves) == (same.events, same.waves)
    assert one.events != other.events


def test_memory_is_flat_once_the_bounded_parts_are_full() -> None:
    report = soak(1200)
    assert all(wave.memory > 0 for wave in report.waves)
    # The prefix index of 256 blocks, which is bounded, takes several times as much.
    assert report.growth < 48 * 1024


def test_a_block_that_is_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    free = BlockManager.free

    def forgetful(self: BlockManager, request_id: str) -> None:
        if request_id != "r7":
            free(self, request_id)

    monkeypatch.setattr(BlockManager, "free", forgetful)
    with pytest.raises(InvariantError):
        module.soak(60, trace_memory=False)
