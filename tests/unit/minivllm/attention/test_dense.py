"""The dense backend has the bits of Transformers' eager attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import eager_attention_forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (3, 3, 16), (9, 3, 64)])
@pytest.mark.parametrize("chunk", [1, 7, 100, 250])
@pytest.mark.parametrize("window", [None, 6])
def test_one_sequence_alone_has_the_bits_of_eager_attention_with_a_cache(
    world: Any, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, chunk: int, window: int | None
) -> None:
    length = 12 if chunk == 1 else 250
    w = world([length], heads=heads, kv_heads=kv_heads, dim=dim, dtype=dtype, block_size=5)
    bounds = [(s, min(s + chunk, length)) for s in range(0, length, chunk)]
    got = w.run("dense", [[(0, s, e)] for s, e in bounds], scale=0.3, window=window)

    module = SimpleNamespace(num_key_value_groups=heads // kv_heads, training=False)
    cache, rows = DynamicCache(), []
    for start, end in bounds:
        q, k, v = (part[None, start:end].transpose(1, 2) for part in w.sequences[0])
        k, v = cache.update(k, v, 0)
        keys, queries = torch.arange(end)[None, :], torch.arange(start, end)[:, None]
        hidden = (keys > queries) | (keys <= queries - (window or end))
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)
        out, _ = eager_attention_forward(module, q, k, v, mask[None, None], scaling=0.3)
        rows.append(out[0].flatten(1))
    assert torch.equal(got[0], torch.cat(rows))
