"""A picture of the cache in plain values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pytest

from minivllm.cache import BlockManager, BlockOwner, BlockSnapshot, KVSnapshot, MediaRows
from minivllm.request import MediaItem, MediaSpan, PatchRect, Request, SamplingParams


def request(name: str, tokens: Sequence[int], media: tuple[MediaSpan, ...] = ()) -> Request:
    return Request(name, list(tokens), len(tokens), SamplingParams(), media=media)


def manager(num_blocks: int = 7, block_size: int = 2, host: int = 2) -> BlockManager:
    return BlockManager(
        num_blocks, block_size, enable_prefix_caching=True, prefix_seed=0, num_host_blocks=host
    )


def compute(blocks: BlockManager, req: Request, num_tokens: int) -> None:
    if not blocks.has_table(req.request_id):
        blocks.allocate(req, num_tokens)
    blocks.copies_done(blocks.pending_copies())
    req.num_computed_tokens = num_tokens
    blocks.publish(req)


def by_state(snapshot: KVSnapshot) -> Mapping[str, list[int]]:
    states: dict[str, list[int]] = {}
    for block in snapshot.blocks:
        states.setdefault(block.state, []).append(block.block_id)
    return states


def test_an_empty_cache_has_a_null_block_and_free_ones() -> None:
    assert manager(3).snapshot({}) == KVSnapshot(
        2,
        (BlockSnapshot(0, "null"), BlockSnapshot(1, "free"), BlockSnapshot(2, "free")),
        (BlockSnapshot(0, "free"), BlockSnapshot(1, "free")),
    )


def test_a_block_in_use_tells_whose_it_is_and_what_is_computed_in_it() -> None:
    blocks = manager()
    req = request("a", [7, 8, 9, 10, 11])
    blocks.allocate(req, 5)
    compute(blocks, req, 3)
    full, part, fresh = blocks.snapshot({"a": req}).blocks[1:4]
    key = blocks.index.content(1).key.hex()
    assert full == BlockSnapshot(
        1, "in_use", 1, (BlockOwner("a", 0),), (7, 8), first_position=0, num_computed=2, hash=key[:12]
    )
    assert part == BlockSnapshot(
        2, "in_use", 1, (BlockOwner("a", 1),), (9,), first_position=2, num_computed=1
    )
    assert fresh == BlockSnapshot(3, "in_use", 1, (BlockOwner("a", 2),), (), first_position=4, num_computed=0)


def test_a_cached_block_still_tells_its_tokens_and_where_they_stood() -> None:
    blocks = manager()
    compute(blocks, req := request("a", [7, 8, 9, 10, 11]), 5)
    blocks.free("a")
    snapshot = blocks.snapshot({})
    assert by_state(snapshot) == {"null": [0], "cached": [1, 2], "free": [3, 4, 5, 6]}
    one, two = snapshot.blocks[1:3]
    assert (one.token_ids, one.first_position, one.num_computed, one.ref_count) == ((7, 8), 0, 2, 0)
    assert (two.token_ids, two.first_position) == ((9, 10), 2)
    assert one.hash != two.hash
    assert one.owners == ()
    assert req.num_tokens == 5


def test_a_shared_block_names_all_of_its_owners() -> None:
    blocks = manager()
    compute(blocks, a := request("a", [7, 8, 9]), 3)
    blocks.fork("a", b := request("b", [7, 8, 9]))
    b.num_computed_tokens = 3
    shared = blocks.snapshot({"a": a, "b": b}).blocks[2]
    assert (shared.ref_count, shared.owners) == (2, (BlockOwner("a", 1), BlockOwner("b", 1)))


def test_a_block_that_a_pending_copy_reads_counts_the_reader() -> None:
    blocks = manager()
    compute(blocks, a := request("a", [7, 8, 9]), 3)
    blocks.fork("a", b := request("b", [7, 8, 9]))
    blocks.append(a, 4)
    blocks.free("b")
    source, target = blocks.snapshot({"a": a, "b": b}).blocks[2:4]
    assert (source.state, source.ref_count, source.owners) == ("in_use", 1, ())
    assert (target.owners, target.token_ids) == ((BlockOwner("a", 1),), (9,))


@pytest.mark.parametrize("coming_back", [False, True])
def test_host_blocks_are_told_until_they_are_given_back(coming_back: bool) -> None:
    blocks = manager()
    compute(blocks, req := request("a", [7, 8, 9]), 3)
    blocks.swap_out("a")
    if coming_back:
        req.token_ids.append(1)
        blocks.swap_in(req, 4)
    snapshot = blocks.snapshot({"a": req})
    assert snapshot.host_blocks == (
        BlockSnapshot(0, "in_use", 1, (BlockOwner("a", 0),), (7, 8), first_position=0, num_computed=2),
        BlockSnapshot(1, "in_use", 1, (BlockOwner("a", 1),), (9,), first_position=2, num_computed=1),
    )
    on_device = [block for block in snapshot.blocks if block.owners]
    assert [block.token_ids for block in on_device] == ([(7, 8), (9,)] if coming_back else [])


@pytest.mark.parametrize("cached", [False, True])
def test_rows_of_images_are_told_per_block(cached: bool) -> None:
    blocks = manager(block_size=4)
    media = (MediaSpan(1, 2, "image", "red"), MediaSpan(3, 4, "image", "blue"))
    compute(blocks, req := request("a", range(8), media), 8)
    if cached:
        blocks.free("a")
    first, second = blocks.snapshot({"a": req}).blocks[1:3]
    assert first.media == (
        MediaRows("red", first_row=0, num_rows=2, first_slot=1, modality="image"),
        MediaRows("blue", first_row=0, num_rows=1, first_slot=3, modality="image"),
    )
    assert second.media == (MediaRows("blue", first_row=1, num_rows=3, first_slot=0, modality="image"),)


@pytest.mark.parametrize("cached", [False, True])
def test_rows_know_their_part_of_the_picture(cached: bool) -> None:
    blocks = manager(block_size=4)
    patches = tuple(PatchRect(0, 0.25 * i, 0.0, 0.25, 1.0) for i in range(4))
    facts = {"size": (112, 28)}
    media = (MediaSpan(1, 1, "image", "red", 0), MediaSpan(3, 3, "image", "red", 1))
    req = request("a", range(8), media)
    req.media_items = {"red": MediaItem("red", "image", 4, {}, patches, facts)}
    compute(blocks, req, 8)
    if cached:
        blocks.free("a")
    first, second = blocks.snapshot({"a": req}).blocks[1:3]
    assert first.media == (
        MediaRows("red", 0, 1, 1, "image", (112, 28), patches[:1]),
        MediaRows("red", 1, 1, 3, "image", (112, 28), patches[1:2]),
    )
    assert second.media == (MediaRows("red", 2, 2, 0, "image", (112, 28), patches[2:]),)


def test_a_snapshot_is_plain_data_for_json() -> None:
    blocks = manager()
    compute(blocks, req := request("a", [7, 8, 9], (MediaSpan(0, 1, "image", "red"),)), 3)
    data = json.loads(json.dumps(blocks.snapshot({"a": req}).as_dict()))
    assert data["block_size"] == 2
    assert data["blocks"][1] == {
        "block_id": 1,
        "state": "in_use",
        "ref_count": 1,
        "owners": [{"request_id": "a", "index": 0}],
        "token_ids": [7, 8],
        "first_position": 0,
        "num_computed": 2,
        "hash": blocks.index.content(1).key.hex()[:12],
        "media": [
            {
                "content_hash": "red",
                "first_row": 0,
                "num_rows": 1,
                "first_slot": 0,
                "modality": "image",
                "size": None,
                "patches": [],
            }
        ],
    }
    assert [block["state"] for block in data["host_blocks"]] == ["free", "free"]


def test_looking_changes_nothing() -> None:
    blocks = manager()
    compute(blocks, req := request("a", [7, 8, 9]), 3)
    assert blocks.snapshot({"a": req}) == blocks.snapshot({"a": req})
    blocks.check_integrity()
