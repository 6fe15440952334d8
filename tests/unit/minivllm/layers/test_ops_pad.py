"""Ops "torch-pad": prepared once, then a row keeps its bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from minivllm.errors import ConfigError, InvariantError
from minivllm.layers.ops_pad import PadOps
from minivllm.layers.probe import LinearShape, cancelling, threads

CPU = torch.device("cpu")


def test_products_are_refused_before_the_tile_is_known() -> None:
    with pytest.raises(InvariantError, match="no tile yet"):
        PadOps().linear(torch.ones(1, 4), torch.ones(4, 4))


def test_prepare_records_what_the_probe_found() -> None:
    ops = PadOps()
    ops.prepare(nn.Linear(24, 40), max_rows=16)
    assert ops.report is not None
    assert ops.report.shapes == (LinearShape(24, 40, bias=True),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("depth", "columns"), [(64, 64), (160, 64), (64, 160), (576, 451), (1536, 50), (8, 8)]
)
def test_a_row_has_the_same_bits_among_any_rows_at_any_place_with_any_threads(
    dtype: torch.dtype, depth: int, columns: int
) -> None:
    ops = PadOps()
    try:
        with threads(2):
            ops.prepare(nn.Linear(depth, columns, bias=False, dtype=dtype), max_rows=64)
    except ConfigError as refusal:
        pytest.skip(f"refused on this machine: {refusal}")
    row, weight, _ = cancelling(LinearShape(depth, columns), dtype, CPU)
    alone = ops.linear(row, weight)
    generator = torch.Generator().manual_seed(1)
    for count in (1, 2):
        with threads(count):
            for rows in (1, 2, 3, 4, 5, 7, 9, 16, 31, 64):
                batch = torch.randn(rows, depth, generator=generator).to(dtype)
                places = [0, rows // 2, rows - 1]
                batch[places] = row
                assert all(torch.equal(ops.linear(batch, weight)[p], alone[0]) for p in places), (count, rows)
                # Strided rows take another path into the BLAS; the bits must not know.
                strided = torch.randn(rows, 2 * depth, generator=generator).to(dtype)[:, ::2]
                strided[places] = row
                assert all(torch.equal(ops.linear(strided, weight)[p], alone[0]) for p in places)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 31, 49, 64, 100, 576, 1536])
def test_row_wise_operations_do_not_depend_on_the_other_rows(dtype: torch.dtype, width: int) -> None:
    ops = PadOps()
    x = (torch.randn(33, width, generator=torch.Generator().manual_seed(0)) * 6).to(dtype)
    gain = torch.rand(width, generator=torch.Generator().manual_seed(1)).to(dtype)
    for count in (1, 2):
        with threads(count):
            for run in (
                ops.silu,
                ops.gelu,
                ops.gelu_tanh,
                ops.quick_gelu,
                ops.relu,
                ops.tanh,
                lambda t: ops.rms_norm_plus_one(t, gain, 1e-5),
                ops.log_softmax,
                lambda t: ops.rms_norm(t, gain, 1e-5),
                lambda t: ops.layer_norm(t, gain, gain, 1e-5),
            ):
                batch = run(x)
                for start, end in ((0, 1), (4, 7), (16, 33), (32, 33)):
                    assert torch.equal(run(x[start:end]), batch[start:end])
