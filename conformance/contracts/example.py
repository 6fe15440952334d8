"""A small block manager of the kind found in other projects, its adapter, and three known bugs.

`PagePool` knows nothing of this package. It has its own words (pages, keys) and its own way: the
caller says how far a sequence should reach, a directory maps whole prefixes to pages, and freed
pages lie on a stack. `ExampleAllocator` translates; that is all an adapter does. The three
variants re-create public bugs; `conformance fuzz` finds each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from conformance.contracts.base import AllocatorCapabilities, AllocatorShape

__all__ = ["ExampleAllocator", "PagePool", "SharedPageFreed", "StaleDirectory", "WholePromptHit"]


class PagePool:
    """Pages of a fixed number of tokens, shared by sequences that begin alike."""

    def __init__(self, num_pages: int, page_len: int) -> None:
        self.page_len = page_len
        self.spare = list(range(num_pages))
        self.users = [0] * num_pages
        self.pages_of: dict[str, list[int]] = {}
        self.directory: dict[tuple[int, ...], int] = {}  # whole prefix → the page that holds its end
        self.prefix_at: dict[int, tuple[int, ...]] = {}  # and back

    def open(self, key: str, prompt: Sequence[int], reach: int) -> int:
        """Begin a sequence and reserve `reach` tokens past what is stored already; -1 if too full."""
        shared = self.find(prompt)
        stored = len(shared) * self.page_len
        for page in shared:
            self.hold(page)
        self.pages_of[key] = shared
        if self.reserve(key, min(stored + reach, len(prompt))):
            return stored
        self.close(key)
        return -1

    def find(self, prompt: Sequence[int]) -> list[int]:
        """Pages that hold the beginning of a prompt; its last token is always left to compute."""
        found: list[int] = []
        for end in range(self.page_len, len(prompt), self.page_len):
            page = self.directory.get(tuple(prompt[:end]))
            if page is None:
                break
            found.append(page)
        return found

    def reserve(self, key: str, upto: int) -> bool:
        """Pages for the first `upto` tokens; all of them or none."""
        pages = self.pages_of[key]
        missing = -(-upto // self.page_len) - len(pages)
        if missing > len(self.spare):
            return False
        for _ in range(missing):
            page = self.spare.pop()
            self.forget(page)
            self.users[page] = 1
            pages.append(page)
        return True

    def hold(self, page: int) -> None:
        if self.users[page] == 0:
            self.spare.remove(page)
        self.users[page] += 1

    def forget(self, page: int) -> None:
        """The page will hold something else: nobody may find it any more."""
        prefix = self.prefix_at.pop(page, None)
        if prefix is not None:
            del self.directory[prefix]

    def filled(self, key: str, tokens: Sequence[int]) -> None:
        """These tokens of the sequence are stored; whole pages can be found from now on."""
        for index, page in enumerate(self.pages_of[key][: len(tokens) // self.page_len]):
            prefix = tuple(tokens[: (index + 1) * self.page_len])
            if prefix not in self.directory and page not in self.prefix_at:
                self.directory[prefix] = page
                self.prefix_at[page] = prefix

    def close(self, key: str) -> None:
        """The sequence is over; its pages may be reused, and found until they are."""
        for page in self.pages_of.pop(key, []):
            self.users[page] -= 1
            if self.users[page] == 0:
                self.spare.append(page)


class ExampleAllocator:
    """The adapter: tokens are the caller's in this project, so it keeps them, and only those."""

    capabilities: ClassVar[AllocatorCapabilities] = AllocatorCapabilities(
        prefix_sharing=True, publish="commit", admits_when_it_fits=True
    )
    pool: ClassVar[type[PagePool]] = PagePool

    def __init__(self, shape: AllocatorShape) -> None:
        self.pages = self.pool(shape.num_blocks, shape.block_size)
        self.tokens: dict[str, list[int]] = {}
        self.stored: dict[str, int] = {}

    def grant_new(self, rid: str, tokens: Sequence[int], n: int) -> int | None:
        start = self.pages.open(rid, tokens, n)
        if start < 0:
            return None
        self.tokens[rid], self.stored[rid] = list(tokens), start
        return start

    def grant_more(self, rid: str, n: int) -> bool:
        return self.pages.reserve(rid, self.stored[rid] + n)

    def append(self, rid: str, token: int) -> None:
        self.tokens[rid].append(token)

    def commit(self, rid: str, n: int) -> None:
        self.stored[rid] += n
        self.pages.filled(rid, self.tokens[rid][: self.stored[rid]])

    def release(self, rid: str) -> None:
        self.pages.close(rid)

    def table(self, rid: str) -> Sequence[int]:
        return self.pages.pages_of.get(rid, [])

    def num_free(self) -> int:
        return len(self.pages.spare)


# --- three bugs ----------------------------------------------------------------------------------


class _StaleDirectory(PagePool):
    def forget(self, page: int) -> None:
        self.prefix_at.pop(page, None)


class StaleDirectory(ExampleAllocator):
    """A reused page can still be found by what it held before (nano-vllm issue 163)."""

    pool = _StaleDirectory


class _WholePromptHit(PagePool):
    def find(self, prompt: Sequence[int]) -> list[int]:
        return super().find((*prompt, 0))


class WholePromptHit(ExampleAllocator):
    """A prompt that is stored to its end leaves no token to compute (vLLM pull request 3239)."""

    pool = _WholePromptHit


class _SharedPageFreed(PagePool):
    def hold(self, page: int) -> None:
        if self.users[page] == 0:
            super().hold(page)


class SharedPageFreed(ExampleAllocator):
    """Sharing a page in use is not counted, so it is freed under its second user.

    Pages of a live table in the free pool: the symptom of mini-sglang pull request 142.
    """

    pool = _SharedPageFreed
