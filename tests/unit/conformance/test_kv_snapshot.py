"""Snapshots are read from plain data, and refused with the place where they are none."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from conformance.kv_snapshot import Patch, PictureRows, SnapshotError, parse_snapshot

PATCH = {"left": 0.25, "top": 0.5, "width": 0.25, "height": 0.5}

DATA: dict[str, Any] = {
    "block_size": 4,
    "blocks": [
        {"block_id": 0, "state": "null"},
        {
            "block_id": 1,
            "state": "in_use",
            "owners": [{"request_id": "b", "index": 1}, {"request_id": "a", "index": 0}],
            "num_computed": 4,
        },
        {"block_id": 2, "state": "in_use", "owners": [{"request_id": "b", "index": 0}]},
    ],
    "host_blocks": [{"block_id": 0, "state": "in_use", "owners": [{"request_id": "c", "index": 0}]}],
}


def changed(**fields: Any) -> dict[str, Any]:
    """The data with fields of block 2 replaced."""
    data = copy.deepcopy(DATA)
    data["blocks"][2].update(fields)
    return data


def test_block_tables_are_in_logical_order_over_both_pools() -> None:
    tables = parse_snapshot(DATA).tables()
    assert {r: [(pool, b.block_id) for pool, b in rows] for r, rows in tables.items()} == {
        "a": [("device", 1)],
        "b": [("device", 2), ("device", 1)],
        "c": [("host", 0)],
    }


def test_rows_of_pictures_tell_their_patches_by_slot() -> None:
    media = {
        "first_slot": 1,
        "num_rows": 2,
        "content_hash": "aa",
        "first_row": 5,
        "modality": "video",
        "size": [20, 10],
        "patches": [PATCH, {**PATCH, "frame": 3}],
    }
    (rows,) = parse_snapshot(changed(media=[media])).blocks[2].media
    first, second = Patch(0, 0.25, 0.5, 0.25, 0.5), Patch(3, 0.25, 0.5, 0.25, 0.5)
    assert rows == PictureRows(1, 2, "aa", 5, "video", (20, 10), (first, second))
    assert [rows.patch(slot) for slot in range(4)] == [None, first, second, None]


def test_only_the_essentials_of_a_media_entry_are_needed() -> None:
    media = {"first_slot": 1, "num_rows": 2, "content_hash": "aa"}
    (rows,) = parse_snapshot(changed(media=[media])).blocks[2].media
    assert rows == PictureRows(1, 2, "aa")
    assert rows.patch(1) is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "a mapping with block_size"),
        ({"blocks": []}, "block_size"),
        ({"block_size": 0, "blocks": []}, "got 0"),
        ({"block_size": 4}, "blocks must be a list"),
        ({"block_size": 4, "blocks": [], "host_blocks": 3}, "host_blocks must be a list"),
        ({"block_size": 4, "blocks": [{"state": "free"}]}, r"blocks\[0\] is no block.*block_id"),
        ({"block_size": 4, "blocks": [7]}, r"blocks\[0\] is no block"),
        (changed(state="lost"), r"blocks\[2\]: state must be one of null, free, cached, in_use, got 'lost'"),
        (changed(num_computed=5), r"blocks\[2\]: num_computed 5 is outside 0 … 4"),
        (changed(media=[{"first_slot": 0}]), r"blocks\[2\] is no block.*num_rows"),
        (
            changed(media=[{"first_slot": 0, "num_rows": 2, "content_hash": "a", "patches": [PATCH]}]),
            r"blocks\[2\]: 2 rows with 1 patches",
        ),
        (changed(owners=[{"request_id": "red"}]), r"blocks\[2\].*index"),
    ],
)
def test_what_is_no_snapshot_is_refused_with_the_place(data: Any, message: str) -> None:
    with pytest.raises(SnapshotError, match=message):
        parse_snapshot(data)
