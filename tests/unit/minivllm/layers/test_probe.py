"""The start-up probe: sees what natural data hide, picks the smallest tile, names what fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name every PyTorch reader knows
from torch import Tensor, nn

from minivllm.errors import ConfigError
from minivllm.layers import probe as module
from minivllm.layers.probe import LinearShape, cancelling, linear_shapes, probe, probe_linear, threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_remembered_answers() -> Iterator[None]:
    module._probe_shapes.cache_clear()
    yield
    module._probe_shapes.cache_clear()


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(
        nn.Embedding(50, 24, dtype=dtype), nn.Linear(24, 40, dtype=dtype), nn.Linear(40, 24, False)
    )


def good_from(tile: int) -> object:
    """A product that depends on the row count unless rows come in multiples of `tile`."""

    def linear(x: Tensor, weight: Tensor, _bias: Tensor | None, asked: int) -> Tensor:
        rows = -(-x.shape[0] // asked) * asked
        out = F.linear(F.pad(x, (0, 0, 0, rows - x.shape[0])).double(), weight.double()).to(x.dtype)
        return out[: x.shape[0]] + (0.0 if rows % tile == 0 else rows % tile)

    return linear


@pytest.mark.parametrize("depth", [24, 25, 576])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cancelling_inputs_have_the_exact_product_zero(depth: int, dtype: torch.dtype) -> None:
    row, weight, _ = cancelling(LinearShape(depth, 40), dtype, CPU)
    products = row.double() * weight.double()
    exact = torch.stack([sum(sorted(p.tolist(), key=abs), start=0.0) * torch.ones(()) for p in products])
    assert row.shape == (1, depth)
    assert weight.shape == (40, depth)
    assert float(row.abs().sum()) > 0
    assert torch.equal(exact, torch.zeros(40))


def test_the_bias_of_a_cancelling_product_does_not_hide_its_rounding() -> None:
    _, _, bias = cancelling(LinearShape(24, 40, bias=True), torch.float32, CPU)
    assert bias is not None
    assert 0 < float(bias.abs().max()) < 1e-5


def test_shapes_are_taken_from_the_weights_once_each() -> None:
    shapes = linear_shapes(
        nn.Sequential(*[nn.Linear(24, 40) for _ in range(3)], nn.Linear(40, 24, bias=False))
    )
    assert shapes == (LinearShape(24, 40, bias=True), LinearShape(40, 24, bias=False))
    assert LinearShape(24, 50) in linear_shapes(model()), "an embedding may be a tied head"


def test_a_convolution_that_cuts_pictures_into_patches_is_a_product_too() -> None:
    patches = nn.Sequential(nn.Conv2d(3, 24, 4, 4, bias=False), nn.Conv3d(3, 40, (2, 4, 4)))
    assert linear_shapes(patches) == (LinearShape(48, 24, bias=False), LinearShape(96, 40, bias=True))


@pytest.mark.parametrize(("tile", "expected"), [(1, 4), (4, 4), (8, 8), (16, 16), (32, 32)])
def test_the_smallest_tile_that_works_is_picked(
    monkeypatch: pytest.MonkeyPatch, tile: int, expected: int
) -> None:
    monkeypatch.setattr(module, "padded_linear", good_from(tile))
    assert probe(model(), max_rows=200).tile == expected


def test_an_engine_of_small_steps_picks_the_tile_of_one_of_large_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "padded_linear", good_from(8))
    assert probe(model(), max_rows=1).tile == 8


def test_without_a_tile_the_mode_is_refused_with_the_shape_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "padded_linear", good_from(64))
    with pytest.raises(
        ConfigError, match=r"not possible here.*tile 4 fails for \[rows, 24\] × \[24, 40\] \+ bias"
    ):
        probe(model(), max_rows=200)


def test_a_dependence_on_the_number_of_threads_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(x: Tensor, weight: Tensor, _bias: Tensor | None, _tile: int) -> Tensor:
        return F.linear(x.double(), weight.double()).to(x.dtype) + torch.get_num_threads()

    monkeypatch.setattr(module, "padded_linear", linear)
    assert probe_linear(LinearShape(24, 40), torch.float32, CPU, 4, 64, most_threads=1)
    assert not probe_linear(LinearShape(24, 40), torch.float32, CPU, 4, 64, most_threads=2)


def test_the_most_rows_of_a_step_are_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def linear(x: Tensor, weight: Tensor, _bias: Tensor | None, _tile: int) -> Tensor:
        seen.append(x.shape[0])
        return torch.zeros(x.shape[0], weight.shape[0])

    monkeypatch.setattr(module, "padded_linear", linear)
    assert probe_linear(LinearShape(24, 40), torch.float32, CPU, 4, 777, most_threads=1)
    assert {1, 4, 8, 32, 777} <= set(seen)
    assert max(seen) == 777


def test_an_activation_that_depends_on_its_batch_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "stable_silu", lambda x: x + x.shape[0])
    with pytest.raises(
        ConfigError, match=r"silu of a row of 24 torch\.float32 elements depends on its batch"
    ):
        probe(model(), max_rows=64)


def test_the_report_says_whether_plain_products_change_bits() -> None:
    row, weight, _ = cancelling(LinearShape(576, 100), torch.float32, CPU)
    changes = any(
        not torch.equal(F.linear(row.expand(m, -1), weight)[0], F.linear(row, weight)[0]) for m in (2, 8)
    )
    assert probe(nn.Linear(576, 100, bias=False), max_rows=64).plain_changes_bits == changes


def test_the_number_of_threads_is_put_back_after_an_error() -> None:
    before = torch.get_num_threads()

    def fail() -> None:
        with threads(before + 1):
            assert torch.get_num_threads() == before + 1
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert torch.get_num_threads() == before


def test_a_process_asks_once_per_question(monkeypatch: pytest.MonkeyPatch) -> None:
    first = probe(model(), max_rows=64)
    monkeypatch.setattr(module, "padded_linear", good_from(64))
    assert probe(model(), max_rows=64) is first
    with pytest.raises(ConfigError):
        probe(model(), max_rows=module.LEAST_ROWS + 1)
