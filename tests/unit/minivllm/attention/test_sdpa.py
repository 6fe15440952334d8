"""The sdpa backend leaves the arithmetic to PyTorch's fused attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name every PyTorch reader knows

DECODE = [(0, 9), (1, 5), (2, 200), (3, 1)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Keyword arguments of every fused call."""
    seen: list[dict[str, Any]] = []
    real = F.scaled_dot_product_attention

    def spy(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        seen.append({"rows": q.shape[2], "length": k.shape[2], **options})
        return real(q, k, v, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return seen


def test_a_whole_prompt_is_causal_a_chunk_masked_and_a_decode_row_neither(
    world: Any, calls: list[dict[str, Any]]
) -> None:
    world([9]).run("sdpa", [[(0, 0, 5)], [(0, 5, 8)], [(0, 8, 9)]], scale=0.3)
    assert [(c["rows"], c["length"], c["is_causal"]) for c in calls] == [
        (5, 5, True),
        (3, 8, False),
        (1, 9, False),
    ]
    assert calls[0]["attn_mask"] is None
    assert calls[2]["attn_mask"] is None
    assert calls[1]["attn_mask"][0, 0].tolist() == [[j <= i for j in range(8)] for i in (5, 6, 7)]
    assert all(c["scale"] == 0.3 for c in calls)


def test_a_first_token_alone_sees_itself(world: Any) -> None:
    w = world([1], heads=2, kv_heads=2)
    assert torch.equal(w.run("sdpa", [[(0, 0, 1)]])[0], w.sequences[0][2].flatten(1))


@pytest.mark.parametrize(("kv_heads", "grouped"), [(4, False), (2, True), (1, True)])
def test_grouped_heads_are_left_to_the_kernel(
    world: Any, calls: list[dict[str, Any]], kv_heads: int, grouped: bool
) -> None:
    world([5], kv_heads=kv_heads).run("sdpa", [[(0, 0, 5)]])
    assert calls[0]["enable_gqa"] is grouped


def test_decode_rows_of_like_length_are_one_call_and_hide_each_others_padding(
    world: Any, calls: list[dict[str, Any]]
) -> None:
    world([9, 5, 200, 1]).run(
        "sdpa", [[(2, 0, 199), (0, 0, 8), (1, 0, 4)], [(i, n - 1, n) for i, n in DECODE]]
    )
    decode = calls[3:]
    assert [(c["rows"], c["length"]) for c in decode] == [(1, 200), (1, 9)]
    assert decode[0]["attn_mask"] is None
    assert decode[1]["attn_mask"][:, 0, 0].sum(-1).tolist() == [9, 5, 1]
