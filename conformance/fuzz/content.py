"""Which blocks could be hit, as told by nothing but block tables and commits."""

from __future__ import annotations

from collections.abc import Sequence

from conformance.fuzz.laws import broken

__all__ = ["Content"]


class Content:
    """Published blocks by content; the last value of a full block stands for its whole prefix.

    Args:
        block_size: tokens per block.
        tail_first: judge the order of eviction.
    """

    def __init__(self, block_size: int, *, tail_first: bool) -> None:
        self.block_size = block_size
        self.tail_first = tail_first
        self._of: dict[int, tuple[int, int | None]] = {}  # block → (value, value of its parent)
        self._blocks: dict[int, set[int]] = {}  # value → blocks
        self._children: dict[int, set[int]] = {}  # value → published blocks that follow it
        self._barred: set[int] = set()  # not to be published again before they are handed out anew

    def __len__(self) -> int:
        """Blocks that could be hit."""
        return len(self._of)

    def __contains__(self, block: object) -> bool:
        """Whether anything is known of what the block holds."""
        return block in self._of or block in self._barred

    def clear(self) -> None:
        self._of.clear()
        self._blocks.clear()
        self._children.clear()

    def publish(self, table: Sequence[int], values: Sequence[int], computed: int, private: int = 0) -> None:
        """Note the full computed blocks of a table; not the first `private` tokens' blocks."""
        size = self.block_size
        for index in range(-(-private // size), computed // size):
            block = table[index]
            if block in self._of or block in self._barred:
                continue
            value = values[(index + 1) * size - 1]
            # A parent that was never published itself cannot be outlived.
            known = index and table[index - 1] in self._of
            parent = values[index * size - 1] if known else None
            self._of[block] = (value, parent)
            self._blocks.setdefault(value, set()).add(block)
            if parent is not None:
                self._children.setdefault(parent, set()).add(block)

    def expected(self, values: Sequence[int]) -> int:
        """Tokens of a request that must be hit, leaving at least one to compute."""
        size, found = self.block_size, 0
        while found + size < len(values) and values[found + size - 1] in self._blocks:
            found += size
        return found

    def forget(self, blocks: Sequence[int]) -> None:
        """These blocks cannot be hit any more, whoever holds them; no order is judged."""
        for block in blocks:
            self._drop(block)
        self._barred.update(blocks)

    def take(self, blocks: Sequence[int]) -> None:
        """These blocks were handed out, in this order: what they held is gone.

        Raises:
            LawBroken: a block went before one that can only be reached through it.
        """
        self._barred.difference_update(blocks)
        for block in blocks:
            value = self._drop(block)
            if value is None or not self.tail_first or value in self._blocks:
                continue
            if left := self._children.get(value):
                broken("eviction order", f"block {block} was handed out before its successors {sorted(left)}")

    def _drop(self, block: int) -> int | None:
        known = self._of.pop(block, None)
        if known is None:
            return None
        value, parent = known
        blocks = self._blocks[value]
        blocks.discard(block)
        if not blocks:
            del self._blocks[value]
        if parent is not None:
            self._children[parent].discard(block)
        return value
