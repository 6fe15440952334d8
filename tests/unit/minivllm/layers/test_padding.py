"""Shapes of padded products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name every PyTorch reader knows

from minivllm.layers.padding import (
    MIN_COLUMNS_PER_THREAD,
    TILES,
    padded_linear,
    padded_rows,
    stable_gelu,
    stable_gelu_tanh,
    stable_quick_gelu,
    stable_silu,
)
from minivllm.layers.probe import threads


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Size, torch.Size]]:
    """Shapes of (x, weight) of every product that reaches the BLAS."""
    seen: list[tuple[torch.Size, torch.Size]] = []
    real = F.linear

    def spy(x: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        assert x.is_contiguous()
        seen.append((x.shape, weight.shape))
        return real(x, weight, *rest)

    monkeypatch.setattr(F, "linear", spy)
    return seen


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("rows", [1, 3, 4, 5, 32, 33])
def test_the_blas_only_sees_multiples_of_the_tile(
    products: list[tuple[torch.Size, torch.Size]], tile: int, rows: int
) -> None:
    x, w = torch.randn(rows, 20), torch.randn(30, 20)
    out = padded_linear(x, w, None, tile)
    ((seen, _),) = products
    assert seen[0] % tile == 0
    assert rows <= seen[0] < rows + tile
    assert out.shape == (rows, 30)
    torch.testing.assert_close(out, x @ w.T)


def test_few_columns_are_padded_to_the_least_number_per_thread(
    products: list[tuple[torch.Size, torch.Size]],
) -> None:
    x, w, b = torch.randn(2, 20), torch.randn(30, 20), torch.randn(30)
    with threads(3):
        out = padded_linear(x, w, b, 4)
    assert products[0][1] == (3 * MIN_COLUMNS_PER_THREAD, 20)
    torch.testing.assert_close(out, x @ w.T + b)


@pytest.mark.parametrize(
    ("rows", "size", "expected"), [(1, 64 * 64, 4), (1, 8 * 8, 68), (70, 8 * 8, 72), (1, 1, 4100)]
)
def test_small_reduced_precision_products_are_made_too_large_for_the_plain_loop(
    rows: int, size: int, expected: int
) -> None:
    assert padded_rows(rows, size, torch.bfloat16, 4) == expected
    assert expected * size > 4096
    assert padded_rows(rows, size, torch.float32, 4) == -(-rows // 4) * 4


@pytest.mark.parametrize("function", [stable_silu, stable_gelu, stable_gelu_tanh, stable_quick_gelu])
def test_stable_activations_round_the_same_in_vectors_and_one_by_one(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.randn(1003, generator=torch.Generator().manual_seed(0)) * 4
    assert torch.equal(function(x), torch.stack([function(v) for v in x]))


def test_stable_silu_in_reduced_precision_rounds_once() -> None:
    x = (torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 8).to(torch.bfloat16)
    truth = (x.double() * torch.sigmoid(x.double())).to(torch.bfloat16)
    assert torch.equal(stable_silu(x), truth)
