"""The timeline replays an engine's events: who ran in each step, and who held which block when."""

from __future__ import annotations

from typing import Any

from conformance.adapters.base import PoolState
from conformance.history import Pass
from conformance.timeline import MOST_BLOCKS, MOST_STEPS, BlockSpan, Chunk, Timeline, timeline_of


def made(*events: tuple[str, dict[str, Any]]) -> Timeline:
    plain = tuple({"event": kind, **fields} for kind, fields in events)
    pool = PoolState(8, 8, 0, 0)
    found = timeline_of(Pass("free", {}, (), {}, plain, pool_before=pool, pool_after=pool))
    assert found is not None
    return found


def allocated(name: str, *blocks: int) -> tuple[str, dict[str, Any]]:
    return "allocated", {"request_id": name, "block_ids": list(blocks)}


def planned(*chunks: tuple[str, int, int]) -> tuple[str, dict[str, Any]]:
    return "planned", {"step": 0, "scheduled": [list(chunk) for chunk in chunks]}


def finished(name: str) -> tuple[str, dict[str, Any]]:
    return "finished", {"request_id": name, "reason": "stop", "num_output_tokens": 1}


def test_a_pass_without_steps_has_no_timeline() -> None:
    assert timeline_of(Pass("free", {}, (), {})) is None


def test_steps_hold_chunks_and_blocks_are_held_until_their_request_ends() -> None:
    found = made(
        allocated("a", 1, 2), planned(("a", 0, 5)), allocated("b", 3), planned(("a", 5, 1), ("b", 0, 2)),
        finished("a"), planned(("b", 2, 1)),
    )  # fmt: skip
    assert found.requests == ("a", "b")
    assert found.steps == ((Chunk(0, 0, 5),), (Chunk(0, 5, 1), Chunk(1, 0, 2)), (Chunk(1, 2, 1),))
    assert found.spans == (BlockSpan(1, 0, 1, (0,)), BlockSpan(2, 0, 1, (0,)), BlockSpan(3, 1, 2, (1,)))
    assert found.notes == ((1, "a ends (stop)"),)
    assert (found.num_steps, found.num_blocks) == (3, 3)


def test_a_fork_shares_blocks_and_a_write_parts_them() -> None:
    found = made(
        allocated("a", 1, 2),
        planned(("a", 0, 5)),
        ("forked", {"request_id": "a/1", "parent_id": "a", "block_ids": [1, 2]}),
        ("copied", {"request_id": "a", "source": 2, "target": 3}),
        planned(("a", 5, 1), ("a/1", 5, 1)),
    )
    assert found.spans == (
        BlockSpan(1, 0, 0, (0,)),
        BlockSpan(1, 1, 1, (0, 1)),
        BlockSpan(2, 0, 0, (0,)),
        BlockSpan(2, 1, 1, (1,)),
        BlockSpan(3, 1, 1, (0,)),
    )
    assert found.notes == ((0, "a/1 begins as a copy of a"), (1, "a writes, so block 2 is copied to 3"))


def test_published_blocks_lie_in_the_cache_until_they_are_hit_or_evicted() -> None:
    found = made(
        allocated("a", 1, 2),
        planned(("a", 0, 8)),
        *(("published", {"request_id": "a", "block_id": block}) for block in (1, 2)),
        finished("a"),
        planned(("c", 0, 1)),
        ("evicted", {"block_id": 2}),
        ("prefix_hit", {"request_id": "b", "num_tokens": 4, "block_ids": [1], "resumed": False}),
        planned(("b", 4, 1)),
    )
    assert found.spans == (
        BlockSpan(1, 0, 0, (0,)),
        BlockSpan(1, 1, 1, ()),
        BlockSpan(1, 2, 2, (2,)),
        BlockSpan(2, 0, 0, (0,)),
        BlockSpan(2, 1, 1, ()),
    )
    assert found.notes[1:] == ((2, "block 2 leaves the prefix cache"), (2, "b reuses 4 tokens"))


def test_a_preempted_request_loses_its_blocks_before_the_step_and_says_how() -> None:
    found = made(
        allocated("a", 1),
        planned(("a", 0, 3)),
        ("swapped_out", {"request_id": "a", "num_blocks": 1}),
        ("preempted", {"request_id": "a", "mode": "swap", "num_computed_tokens": 3}),
        planned(),
        allocated("a", 2),
        ("swapped_in", {"request_id": "a", "num_blocks": 1}),
        planned(("a", 3, 1)),
        ("preempted", {"request_id": "a", "mode": "recompute", "num_computed_tokens": 4, "fallback": True}),
        ("aborted", {"request_id": "a"}),
        ("failed", {"request_id": "b", "message": "no <b>room</b>"}),
    )
    assert found.spans == (BlockSpan(1, 0, 0, (0,)), BlockSpan(2, 2, 2, (0,)))
    assert [note for _, note in found.notes] == [
        "a moves 1 blocks to the host",
        "a is preempted (swap)",
        "a brings 1 blocks back",
        "a is preempted (recompute, no room to swap)",
        "a is aborted",
        "b fails: no <b>room</b>",
    ]
    assert [step for step, _ in found.notes] == [1, 1, 2, 3, 3, 2]


def test_pictures_are_noted_in_the_step_that_encoded_them() -> None:
    found = made(
        planned(("a", 0, 3)),
        ("media_evicted", {"content_hash": "h", "num_embeddings": 2}),
        ("encoded", {"request_id": "a", "content_hash": "h", "num_embeddings": 4}),
        ("something_new", {"request_id": "a"}),
        ("nobody_s", {}),
    )
    assert found.notes == (
        (0, "the encoder cache drops 2 embeddings"),
        (0, "a: a picture becomes 4 embeddings"),
    )


def test_a_long_pass_keeps_its_first_steps_and_blocks_and_tells_the_whole_size() -> None:
    events = [allocated("a", *range(1, MOST_BLOCKS + 9))]
    events += [planned(("a", step, 1)) for step in range(MOST_STEPS + 5)]
    found = made(*events, finished("a"))
    assert len(found.steps) == MOST_STEPS
    assert len(found.spans) == MOST_BLOCKS
    assert {span.last for span in found.spans} == {MOST_STEPS - 1}
    assert (found.num_steps, found.num_blocks) == (MOST_STEPS + 5, MOST_BLOCKS + 8)
    assert found.notes == ()
