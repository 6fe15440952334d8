"""A snapshot of a KV cache as plain data, read into values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Block", "Patch", "PictureRows", "Snapshot", "SnapshotError", "parse_snapshot"]

_STATES = ("null", "free", "cached", "in_use")


class SnapshotError(ValueError):
    """The data is no snapshot of a KV cache; the message says where it is not."""


@dataclass(frozen=True, slots=True)
class Patch:
    """Part of a picture, in fractions of its width and height; `frame` of a video."""

    frame: int
    left: float
    top: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class PictureRows:
    """Rows of one image or video, in the slots of a block from `first_slot` on.

    Attributes:
        content_hash: which picture.
        first_row: which row of the picture is the first.
        modality: "image" or "video"; "" if unknown.
        size: width and height of the picture in pixels; None if unknown.
        patches: which part of the picture each row stands for; () if unknown.
    """

    first_slot: int
    num_rows: int
    content_hash: str
    first_row: int = 0
    modality: str = ""
    size: tuple[int, int] | None = None
    patches: tuple[Patch, ...] = ()

    def patch(self, slot: int) -> Patch | None:
        """What the slot stands for, if it is among these and that is known."""
        index = slot - self.first_slot
        return self.patches[index] if 0 <= index < len(self.patches) else None


@dataclass(frozen=True, slots=True)
class Block:
    """One block.

    Attributes:
        holders: (request, index of the block in its block table).
        token_ids: tokens whose KV it holds, in order of its slots.
        first_position: position of its first slot in the sequence; None if it is nobody's.
        num_computed: slots that hold KV, from the first on.
        digits: start of its prefix key, if the prefix cache can find it.
        media: rows of images and videos among its slots.
    """

    block_id: int
    state: str
    holders: tuple[tuple[str, int], ...]
    token_ids: tuple[int, ...]
    first_position: int | None
    num_computed: int
    digits: str | None
    media: tuple[PictureRows, ...]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All blocks of both pools, by block id."""

    block_size: int
    blocks: tuple[Block, ...]
    host_blocks: tuple[Block, ...]

    def pools(self) -> Iterator[tuple[str, tuple[Block, ...]]]:
        """(name, blocks) of each pool that there is."""
        yield "device", self.blocks
        if self.host_blocks:
            yield "host", self.host_blocks

    def tables(self) -> dict[str, list[tuple[str, Block]]]:
        """Request → (pool, block) in logical order; requests in alphabetical order."""
        found: dict[str, list[tuple[int, str, Block]]] = {}
        for pool, blocks in self.pools():
            for block in blocks:
                for request, index in block.holders:
                    found.setdefault(request, []).append((index, pool, block))
        return {
            request: [(pool, block) for _, pool, block in sorted(rows, key=lambda row: row[0])]
            for request, rows in sorted(found.items())
        }


def parse_snapshot(data: Any) -> Snapshot:
    """Read what `minivllm.cache.KVSnapshot.as_dict` writes, or another engine in the same form.

    {"block_size": int, "blocks": [block…], "host_blocks": [block…]}, a block being {"block_id",
    "state": null | free | cached | in_use, "owners": [{"request_id", "index"}…], "token_ids",
    "first_position", "num_computed", "hash", "media": [{"first_slot", "num_rows", "content_hash",
    "first_row", "modality", "size": [width, height], "patches": [{"frame", "left", "top", "width",
    "height"}…]}…]}. All but the first two of a block, the first three of a media entry and the
    last four of a patch may be left out.

    Raises:
        SnapshotError: the data has another form.
    """
    if not isinstance(data, Mapping) or not isinstance(data.get("block_size"), int):
        raise SnapshotError("a snapshot is a mapping with block_size, blocks and perhaps host_blocks")
    if data["block_size"] < 1:
        raise SnapshotError(f"block_size must be a positive number of tokens, got {data['block_size']}")
    pools = []
    for name in ("blocks", "host_blocks"):
        blocks = data.get(name, [] if name == "host_blocks" else None)
        if not isinstance(blocks, Sequence):
            raise SnapshotError(f"{name} must be a list of blocks, got {type(blocks).__name__}")
        pools.append(
            tuple(_block(block, f"{name}[{i}]", data["block_size"]) for i, block in enumerate(blocks))
        )
    return Snapshot(data["block_size"], pools[0], pools[1])


def _block(data: Any, where: str, block_size: int) -> Block:
    try:
        block = Block(
            block_id=int(data["block_id"]),
            state=str(data["state"]),
            holders=tuple((str(o["request_id"]), int(o["index"])) for o in data.get("owners", ())),
            token_ids=tuple(int(t) for t in data.get("token_ids", ())),
            first_position=data.get("first_position"),
            num_computed=int(data.get("num_computed", 0)),
            digits=data.get("hash"),
            media=tuple(map(_rows, data.get("media", ()))),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SnapshotError(f"{where} is no block: {type(error).__name__}: {error}") from error
    if block.state not in _STATES:
        raise SnapshotError(f"{where}: state must be one of {', '.join(_STATES)}, got {block.state!r}")
    if not 0 <= block.num_computed <= block_size:
        raise SnapshotError(f"{where}: num_computed {block.num_computed} is outside 0 … {block_size}")
    for rows in block.media:
        if rows.patches and len(rows.patches) != rows.num_rows:
            raise SnapshotError(f"{where}: {rows.num_rows} rows with {len(rows.patches)} patches")
    return block


def _rows(data: Any) -> PictureRows:
    size = data.get("size")
    return PictureRows(
        first_slot=int(data["first_slot"]),
        num_rows=int(data["num_rows"]),
        content_hash=str(data["content_hash"]),
        first_row=int(data.get("first_row", 0)),
        modality=str(data.get("modality", "")),
        size=None if size is None else (int(size[0]), int(size[1])),
        patches=tuple(
            Patch(int(p.get("frame", 0)), *(float(p[side]) for side in ("left", "top", "width", "height")))
            for p in data.get("patches", ())
        ),
    )
