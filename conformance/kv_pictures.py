"""The pictures in a KV cache: which block holds which part of which picture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from conformance.kv_snapshot import Block, Patch, Snapshot

__all__ = ["Grid", "Held", "Picture", "pictures_of"]


@dataclass(frozen=True, slots=True)
class Held:
    """Where one row of a picture is: a pool and a block of it."""

    pool: str
    block: Block

    @property
    def name(self) -> str:
        """The block's number, with an h for a host block."""
        return f"{'h' if self.pool == 'host' else ''}{self.block.block_id}"


@dataclass(frozen=True, slots=True)
class Grid:
    """Patches of one size in one frame.

    Attributes:
        width, height: of each patch, in fractions of the picture.
        cells: row by row from the top, each from the left; None where no block holds the patch.
    """

    frame: int
    width: float
    height: float
    cells: tuple[tuple[Patch | None, ...], ...]


@dataclass(slots=True)
class Picture:
    """One image or video of which a block holds a part.

    Attributes:
        held: row of the picture → (its patch if known, the blocks that hold it).
    """

    content_hash: str
    modality: str
    size: tuple[int, int] | None
    held: dict[int, tuple[Patch | None, list[Held]]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        size = "" if self.size is None else f" ({self.size[0]} × {self.size[1]})"
        return f"{self.modality or 'media'} {self.content_hash[:8]}{size}: {len(self.held)} rows"

    def holders(self, patch: Patch) -> list[Held]:
        """The blocks that hold this patch."""
        return [held for known, blocks in self.held.values() if known == patch for held in blocks]

    def grids(self) -> Iterator[Grid]:
        """The known patches by frame and size: an overview and its details are apart."""
        groups: dict[tuple[int, float, float], list[Patch]] = {}
        for patch, _ in self.held.values():
            if patch is not None:
                key = (patch.frame, round(patch.width, 6), round(patch.height, 6))
                groups.setdefault(key, []).append(patch)
        for (frame, width, height), patches in sorted(groups.items()):
            tops = sorted({round(p.top, 6) for p in patches})
            lefts = sorted({round(p.left, 6) for p in patches})
            found = {(round(p.top, 6), round(p.left, 6)): p for p in patches}
            cells = tuple(tuple(found.get((top, left)) for left in lefts) for top in tops)
            yield Grid(frame, width, height, cells)


def pictures_of(snapshot: Snapshot) -> list[Picture]:
    """Every picture that is somewhere in the cache, in the order of the blocks."""
    found: dict[str, Picture] = {}
    for pool, blocks in snapshot.pools():
        for block in blocks:
            for rows in block.media:
                picture = found.setdefault(
                    rows.content_hash, Picture(rows.content_hash, rows.modality, rows.size)
                )
                for index in range(rows.num_rows):
                    patch = rows.patch(rows.first_slot + index)
                    _, holders = picture.held.setdefault(rows.first_row + index, (patch, []))
                    holders.append(Held(pool, block))
    return list(found.values())
