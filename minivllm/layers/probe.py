"""Start-up probe of ops "torch-pad": measures which padding makes rows independent here.

Natural data hide a change of summation order (in bfloat16 nearly always). So the inputs cancel:
a row [a, a] times a column [w, -w], both permuted alike, is exactly 0, and what comes out is
nothing but rounding in its order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F  # noqa: N812 - the name every PyTorch reader knows
from torch import Tensor, nn

from minivllm.errors import ConfigError
from minivllm.layers.padding import (
    TILES,
    padded_linear,
    stable_gelu,
    stable_gelu_tanh,
    stable_quick_gelu,
    stable_silu,
)

__all__ = ["LinearShape", "ProbeReport", "cancelling", "linear_shapes", "probe", "probe_linear", "threads"]

MAX_COLUMNS = 1024
"""Wider matrices (the vocabulary) are probed on this many columns: the order of one column's sum was
measured not to depend on how many there are, from 12 on."""

MANY_ROWS = 64
"""Products of more rows than this are probed on `FEW_COLUMNS` columns, to keep start-up short."""

FEW_COLUMNS = 256

LEAST_ROWS = 2048
"""Row counts up to this are probed even if a step holds fewer, or engines that differ in that limit alone
could pick different tiles, and so compute different bits (seen with oneMKL on Intel: one row alone asks
for tile 4, many for 8)."""


@dataclass(frozen=True, order=True, slots=True)
class LinearShape:
    """A matrix product of the model: [rows, depth] × [depth, columns]."""

    depth: int
    columns: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the probe found.

    Attributes:
        tile: the smallest tile for which every row kept its bits.
        shapes: the shapes that were probed.
        plain_changes_bits: whether unpadded products change bits with the number of rows for at
            least one of the shapes. If not, a test that plain ops must fail has no power here.
    """

    tile: int
    shapes: tuple[LinearShape, ...]
    plain_changes_bits: bool


def probe(model: nn.Module, *, max_rows: int) -> ProbeReport:
    """Pick the smallest tile that works for every weight matrix of a model.

    Tried with 1 thread and with as many as torch uses now, for row counts up to max_rows and at least
    up to `LEAST_ROWS`.

    Raises:
        ConfigError: no tile works, or a row-wise operation depends on its batch; names the shape.
    """
    shapes = linear_shapes(model)
    dtype, device = next((p.dtype, p.device) for p in model.parameters())
    widths = sorted({p.shape[0] for p in model.parameters() if p.dim() == 1} | {s.columns for s in shapes})
    rows = max(max_rows, LEAST_ROWS)
    return _probe_shapes(shapes, tuple(widths), dtype, device, rows, torch.get_num_threads())


@cache
def _probe_shapes(
    shapes: tuple[LinearShape, ...],
    widths: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    max_rows: int,
    most_threads: int,
) -> ProbeReport:
    """`probe` on what it depends on; a process asks once."""
    _probe_row_wise(widths, dtype, device)
    failures = []
    for tile in TILES:
        failed = next(
            (s for s in shapes if not probe_linear(s, dtype, device, tile, max_rows, most_threads)), None
        )
        if failed is None:
            changes = any(_plain_changes(s, dtype, device) for s in shapes)
            return ProbeReport(tile=tile, shapes=shapes, plain_changes_bits=changes)
        failures.append(f"tile {tile} fails for {_describe(failed)}")
    raise ConfigError(
        f"batch_invariant is not possible here: with {dtype} and up to {max_rows} rows, a row of a matrix "
        f"product depends on its batch whatever the padding ({'; '.join(failures)}); use another dtype or "
        f"machine, or batch_invariant=False"
    )


def linear_shapes(model: nn.Module) -> tuple[LinearShape, ...]:
    """The distinct shapes of a model's weight matrices.

    Embeddings (a tied head) are among them, and convolutions [out, channels, …] that cut pictures
    into patches, which are computed as products.
    """
    parameters = dict(model.named_parameters())
    return tuple(
        sorted(
            {
                LinearShape(p[0].numel(), p.shape[0], name.removesuffix("weight") + "bias" in parameters)
                for name, p in parameters.items()
                if p.dim() == 2 or p.dim() >= 4
            }
        )
    )


def probe_linear(
    shape: LinearShape,
    dtype: torch.dtype,
    device: torch.device,
    tile: int,
    max_rows: int,
    most_threads: int,
) -> bool:
    """Whether a padded product gives one row the same bits at every place in every batch."""
    row, weight, bias = cancelling(shape, dtype, device)
    expected: Tensor | None = None
    for count in sorted({1, most_threads}):
        with threads(count):
            for rows in _row_counts(tile, max_rows):
                columns = FEW_COLUMNS if rows > MANY_ROWS else MAX_COLUMNS
                part = None if bias is None else bias[:columns]
                out = padded_linear(row.expand(rows, -1), weight[:columns], part, tile)
                expected = out[0].clone() if expected is None else expected
                if not bool((out == expected[:columns]).all()):
                    return False
    return True


def cancelling(
    shape: LinearShape, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A row [1, depth], a weight [columns, depth] whose product is exactly 0, and a bias or None."""
    generator = torch.Generator().manual_seed(0)
    half, columns = shape.depth // 2, min(shape.columns, MAX_COLUMNS)
    a = torch.randn(1, half, generator=generator)
    w = torch.randn(columns, half, generator=generator)
    odd = shape.depth - 2 * half
    order = torch.randperm(shape.depth, generator=generator)
    row = torch.cat([a, a, torch.zeros(1, odd)], dim=1)[:, order]
    weight = torch.cat([w, -w, torch.zeros(columns, odd)], dim=1)[:, order]
    # As small as the rounding of the product, or adding it would round the differences away.
    bias = torch.randn(columns, generator=generator) * torch.finfo(dtype).eps if shape.bias else None
    return (
        row.to(device, dtype),
        weight.to(device, dtype),
        None if bias is None else bias.to(device, dtype),
    )


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run a block with this many threads inside operators."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _row_counts(tile: int, max_rows: int) -> list[int]:
    """1, every multiple of the tile up to eight, then sparser, then the most there can be."""
    counts = {1, *range(tile, 8 * tile + 1, tile)}
    size = MANY_ROWS
    while size < max_rows:
        counts.add(size + tile)
        size *= 4
    return sorted({c for c in counts if c < max_rows} | {max_rows})


def _plain_changes(shape: LinearShape, dtype: torch.dtype, device: torch.device) -> bool:
    row, weight, bias = cancelling(shape, dtype, device)
    alone = F.linear(row, weight, bias)
    return any(not torch.equal(F.linear(row.expand(m, -1), weight, bias)[:1], alone) for m in (2, 8))


def _probe_row_wise(widths: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    for width in widths:
        x = (torch.randn(37, width, generator=generator) * 4).to(device, dtype)
        wide = x.to(torch.float32)
        for name, rows, function in (
            ("silu", x, stable_silu),
            ("gelu", x, stable_gelu),
            ("gelu_tanh", x, stable_gelu_tanh),
            ("quick_gelu", x, stable_quick_gelu),
            ("tanh", x, torch.tanh),
            ("layer_norm", x, lambda t: F.layer_norm(t, t.shape[-1:])),
            ("mean of squares", wide, lambda t: t.pow(2).mean(-1, keepdim=True)),
            ("log_softmax", wide, lambda t: torch.log_softmax(t, dim=-1)),
        ):
            alone = torch.cat([function(row[None]) for row in rows])
            if not torch.equal(alone, function(rows)):
                raise ConfigError(
                    f"batch_invariant is not possible here: {name} of a row of {width} {dtype} elements "
                    f"depends on its batch; use another machine, or batch_invariant=False"
                )


def _describe(shape: LinearShape) -> str:
    return f"[rows, {shape.depth}] × [{shape.depth}, {shape.columns}]" + (" + bias" if shape.bias else "")
