"""The ops seam: names, refusals, and the promise every implementation keeps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name every PyTorch reader knows
from torch import nn

from minivllm.errors import ConfigError
from minivllm.layers import OPS, Ops, make_ops

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


def prepared(name: str, dtype: torch.dtype) -> Ops:
    ops = make_ops(name, CPU)
    ops.prepare(nn.Linear(24, 40, dtype=dtype), max_rows=64)
    return ops


def test_the_registered_names_are_the_published_ones() -> None:
    assert list(OPS) == ["torch", "torch-pad"]
    assert [make_ops(name, CPU).name for name in OPS] == ["torch", "torch-pad"]
    assert [make_ops(name, CPU).bitwise for name in OPS] == [False, True]


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown ops backend 'fast'; known: torch, torch-pad"):
        make_ops("fast", CPU)


def test_bitwise_ops_are_refused_where_they_are_not_proven() -> None:
    with pytest.raises(
        ConfigError, match=r"'torch-pad' cannot run here: .*cpu libraries only, got device cuda"
    ):
        make_ops("torch-pad", torch.device("cuda"))


def test_making_ops_pins_the_precision_of_products() -> None:
    torch.set_float32_matmul_precision("medium")
    make_ops("torch", CPU)
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(OPS))
@pytest.mark.parametrize("rows", [1, 2, 5, 33])
def test_every_implementation_agrees_with_float64(name: str, dtype: torch.dtype, rows: int) -> None:
    ops, gen = prepared(name, dtype), torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 24, generator=gen).to(dtype)
    w, b = torch.randn(40, 24, generator=gen).to(dtype), torch.randn(40, generator=gen).to(dtype)
    g, h = torch.rand(24, generator=gen).to(dtype), torch.rand(24, generator=gen).to(dtype)
    wide = x.double()
    expected = {
        "linear": (ops.linear(x, w), wide @ w.double().T),
        "linear + bias": (ops.linear(x, w, b), wide @ w.double().T + b.double()),
        "silu": (ops.silu(x), wide * torch.sigmoid(wide)),
        "gelu": (ops.gelu(x), F.gelu(wide)),
        "gelu_tanh": (ops.gelu_tanh(x), F.gelu(wide, approximate="tanh")),
        "quick_gelu": (ops.quick_gelu(x), wide * torch.sigmoid(1.702 * wide)),
        "tanh": (ops.tanh(x), torch.tanh(wide)),
        "norm + 1": (
            ops.rms_norm_plus_one(x, g, 1e-5),
            (1 + g.double()) * wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt(),
        ),
        "relu": (ops.relu(x), wide.clamp(min=0)),
        "layer_norm": (
            ops.layer_norm(x, g, h, 1e-5),
            F.layer_norm(wide, (24,), g.double(), h.double(), 1e-5),
        ),
        "norm": (
            ops.rms_norm(x, g, 1e-5),
            g.double() * wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt(),
        ),
        "log_softmax": (ops.log_softmax(x), torch.log_softmax(wide, -1)),
    }
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    for what, (got, truth) in expected.items():
        assert got.dtype == (torch.float32 if what == "log_softmax" else dtype), what
        torch.testing.assert_close(got.double(), truth, rtol=tolerance, atol=tolerance, msg=what)


@pytest.mark.parametrize("name", list(OPS))
def test_a_row_that_is_not_finite_spoils_no_other_row(name: str) -> None:
    ops, gen = prepared(name, torch.float32), torch.Generator().manual_seed(1)
    x, w = torch.randn(6, 24, generator=gen), torch.randn(40, 24, generator=gen)
    spoiled = x.clone()
    spoiled[2] = float("nan")
    for run in (lambda t: ops.linear(t, w), ops.silu, ops.log_softmax):
        clean, got = run(x), run(spoiled)
        keep = torch.tensor([0, 1, 3, 4, 5])
        assert torch.equal(got[keep], clean[keep])
        assert bool(torch.isnan(got[2]).all())


@pytest.mark.parametrize("name", list(OPS))
def test_no_rows_give_no_rows(name: str) -> None:
    ops = prepared(name, torch.float32)
    assert ops.linear(torch.empty(0, 24), torch.randn(40, 24)).shape == (0, 40)


@pytest.mark.parametrize("activation", ["silu", "gelu", "quick_gelu", "relu"])
@pytest.mark.parametrize("name", list(OPS))
def test_activations_keep_their_limits_far_from_zero(name: str, activation: str) -> None:
    x = torch.tensor([[-1e30, -200.0, -0.0, 0.0, 200.0, 1e30]])
    got = getattr(prepared(name, torch.float32), activation)(x)
    assert got.tolist()[0] == [0, 0, 0, 0, 200.0, torch.tensor(1e30).item()]


@pytest.mark.parametrize("name", list(OPS))
def test_gelu_tanh_keeps_its_limits_far_from_zero(name: str) -> None:
    x = torch.tensor([[-1e9, -200.0, -0.0, 0.0, 200.0, 1e9]])
    assert prepared(name, torch.float32).gelu_tanh(x).tolist()[0] == [0, 0, 0, 0, 200.0, 1e9]
