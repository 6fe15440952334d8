"""Finds computed blocks by what they hold: everything the KV of a block depends on.

The key of a block is SHA-256 over length-framed, tagged parts: the parent's key, the token ids,
and tags for whatever else changes the KV: `("media", …)` per overlapping image or video,
`("salt", …)` in the first block. Parts of different origin cannot run into each other (vLLM
issue 44701, SGLang issue 24638), and a new kind of part is a new tag.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from minivllm.cache.media_rows import MediaRows, media_rows
from minivllm.errors import InvariantError
from minivllm.request import Request

__all__ = ["BlockContent", "PrefixChain", "PrefixIndex", "Tag", "block_key", "root_key", "same_content"]

#: A named part of a block's identity, such as ("salt", "tenant-7").
Tag: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class BlockContent:
    """What a full block holds. Compare with `same_content`; `key` only finds candidates.

    Attributes:
        parent: content of the block before it; None for the first.
        token_ids: the block's tokens.
        tags: what else its KV depends on.
        key: chained SHA-256.
        media: rows of images and videos among its tokens, to look at; not part of its identity
            beyond what `tags` say.
    """

    parent: BlockContent | None
    token_ids: tuple[int, ...]
    tags: tuple[Tag, ...]
    key: bytes
    media: tuple[MediaRows, ...] = ()


def _frame(*fields: bytes) -> bytes:
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


def _encode(value: str | int) -> bytes:
    if isinstance(value, str):
        return b"s" + value.encode(errors="surrogatepass")
    return b"i" + str(value).encode()


def root_key(seed: int | None) -> bytes:
    """The parent key of first blocks: random if seed is None, so that keys cannot be guessed."""
    if seed is None:
        return secrets.token_bytes()
    return hashlib.sha256(_frame(b"root", _encode(seed))).digest()


def block_key(parent_key: bytes, token_ids: Sequence[int], tags: Sequence[Tag]) -> bytes:
    """SHA-256 over the framed parts; equal only for equal arguments, short of a collision."""
    parts = [
        _frame(b"parent", parent_key),
        _frame(b"tokens", struct.pack(f"<{len(token_ids)}q", *token_ids)),
        *(_frame(b"tag", *map(_encode, tag)) for tag in tags),
    ]
    return hashlib.sha256(_frame(*parts)).digest()


def same_content(one: BlockContent | None, other: BlockContent | None) -> bool:
    """Whether both hold the same tokens and tags, and all their ancestors too.

    Ends at the first shared ancestor, which is the parent when contents come from one index.
    """
    while one is not other:
        if one is None or other is None:
            return False
        if one.token_ids != other.token_ids or one.tags != other.tags:
            return False
        one, other = one.parent, other.parent
    return True


class PrefixChain:
    """The contents of one request's full blocks, made block by block and only once.

    Valid as long as the request lives: its tokens only grow, and what else goes into a key
    does not change.
    """

    __slots__ = ("_block_size", "_contents", "_media", "_request", "_root")

    def __init__(self, request: Request, block_size: int, root: bytes) -> None:
        self._request = request
        self._block_size = block_size
        self._root = root
        self._contents: list[BlockContent] = []
        self._media = sorted(request.media, key=lambda span: span.start)

    def content(self, index: int) -> BlockContent:
        """Content of block `index`, which must be full, after all blocks before it."""
        while len(self._contents) <= index:
            self._contents.append(self._make(len(self._contents)))
        return self._contents[index]

    def adopt(self, index: int, content: BlockContent) -> None:
        """Use an equal content, so that later blocks share their ancestors with the index."""
        self._contents[index] = content

    def fork(self, request: Request, num_blocks: int) -> PrefixChain:
        """The chain of a request that has the same first `num_blocks` blocks."""
        chain = PrefixChain(request, self._block_size, self._root)
        chain._contents = self._contents[:num_blocks]
        return chain

    def _make(self, index: int) -> BlockContent:
        start = index * self._block_size
        token_ids = tuple(self._request.token_ids[start : start + self._block_size])
        if len(token_ids) != self._block_size:
            raise InvariantError(
                f"block {index} of request {self._request.request_id!r} holds {len(token_ids)} of"
                f" {self._block_size} tokens, but only full blocks have a key"
            )
        end = start + self._block_size
        media = media_rows(self._media, self._request.media_items, start, end)
        parent = self._contents[index - 1] if index else None
        tags = tuple(self._tags(start, media))
        key = block_key(parent.key if parent else self._root, token_ids, tags)
        return BlockContent(parent, token_ids, tags, key, media)

    def _tags(self, start: int, media: Sequence[MediaRows]) -> Iterator[Tag]:
        if start == 0 and self._request.cache_salt is not None:
            yield ("salt", self._request.cache_salt)
        for rows in media:
            # Which rows of the item, and where in the block: two images that share a block may
            # meet at different places although all ids are equal (vLLM pull request 36708).
            yield ("media", rows.content_hash, rows.first_row, rows.first_slot, rows.num_rows)


class PrefixIndex:
    """Published blocks by content. Several blocks may hold the same; the first one is found.

    A hit compares the content of the block and of all blocks before it, not only keys, so a key
    collision cannot give one prompt another's KV (openvino.genai issue 3722).

    Args:
        block_size: tokens per block.
        seed: fixes the root key; None: random per process.
    """

    def __init__(self, block_size: int, seed: int | None = None) -> None:
        self.block_size = block_size
        self.root = root_key(seed)
        self._content: dict[int, BlockContent] = {}
        self._blocks: dict[bytes, dict[int, None]] = {}  # insertion order: the oldest block first

    def __len__(self) -> int:
        return len(self._content)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._content

    def content(self, block_id: int) -> BlockContent:
        """What a published block holds."""
        return self._content[block_id]

    def chain(self, request: Request) -> PrefixChain:
        """A fresh chain of contents for a request."""
        return PrefixChain(request, self.block_size, self.root)

    def match(self, chain: PrefixChain, limit: int) -> tuple[int, ...]:
        """Blocks that hold the longest published prefix, at most `limit` of them."""
        found = []
        for index in range(limit):
            block_id = self._find(chain.content(index))
            if block_id is None:
                break
            chain.adopt(index, self._content[block_id])
            found.append(block_id)
        return tuple(found)

    def publish(self, block_id: int, chain: PrefixChain, index: int) -> None:
        """Enter a block that holds the computed content `index` of the chain.

        Raises:
            InvariantError: the block is published already.
        """
        if block_id in self._content:
            raise InvariantError(f"block {block_id} is published twice")
        content = chain.content(index)
        twin = self._find(content)
        if twin is not None:
            content = self._content[twin]
            chain.adopt(index, content)
        self._content[block_id] = content
        self._blocks.setdefault(content.key, {})[block_id] = None

    def remove(self, block_id: int) -> bool:
        """Take a block out; False if it was not published."""
        content = self._content.pop(block_id, None)
        if content is None:
            return False
        blocks = self._blocks[content.key]
        del blocks[block_id]
        if not blocks:
            del self._blocks[content.key]
        return True

    def clear(self) -> None:
        """Forget every block."""
        self._content.clear()
        self._blocks.clear()

    def check_integrity(self) -> None:
        """Check that contents and keys agree in both directions.

        Raises:
            InvariantError: naming the broken law.
        """
        listed = {block_id: key for key, blocks in self._blocks.items() for block_id in blocks}
        if listed.keys() != self._content.keys():
            wrong = sorted(listed.keys() ^ self._content.keys())
            raise InvariantError(f"law 'an index entry and its block name each other' is broken: {wrong}")
        for block_id, content in self._content.items():
            parent_key = content.parent.key if content.parent else self.root
            if not listed[block_id] == content.key == block_key(parent_key, content.token_ids, content.tags):
                raise InvariantError(f"law 'a published block carries its key' is broken: block {block_id}")

    def _find(self, content: BlockContent) -> int | None:
        for block_id in self._blocks.get(content.key, ()):
            if same_content(self._content[block_id], content):
                return block_id
        return None
