from __future__ import annotations

from collections.abc import Sequence

import pytest

from minivllm.cache import prefix_index
from minivllm.cache.prefix_index import Tag


@pytest.fixture
def keys_made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The tokens of each block whose key has been computed since, in order."""
    made: list[tuple[int, ...]] = []
    block_key = prefix_index.block_key

    def recorded(parent_key: bytes, token_ids: Sequence[int], tags: Sequence[Tag]) -> bytes:
        made.append(tuple(token_ids))
        return block_key(parent_key, token_ids, tags)

    monkeypatch.setattr(prefix_index, "block_key", recorded)
    return made
