"""Ops "torch" give the bits of Transformers' own modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from minivllm.layers.ops_torch import TorchOps

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rows(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (7, 100), (5, 4, 32)])
@pytest.mark.parametrize("module", [LlamaRMSNorm, Qwen3RMSNorm])
def test_rms_norm_has_the_bits_of_transformers(
    dtype: torch.dtype, shape: tuple[int, ...], module: type[nn.Module]
) -> None:
    norm = module(shape[-1], eps=1e-5).to(dtype)
    with torch.inference_mode():
        norm.weight.copy_(rows(dtype, shape[-1]))
        x = rows(dtype, *shape)
        assert torch.equal(TorchOps().rms_norm(x, norm.weight, 1e-5), norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_with_one_added_has_the_bits_of_transformers(dtype: torch.dtype) -> None:
    norm = Gemma3RMSNorm(100, eps=1e-5).to(dtype)
    with torch.inference_mode():
        norm.weight.copy_(rows(dtype, 100))
        x = rows(dtype, 5, 4, 100)
        assert torch.equal(TorchOps().rms_norm_plus_one(x, norm.weight, 1e-5), norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("silu", "silu"),
        ("gelu", "gelu"),
        ("gelu_tanh", "gelu_pytorch_tanh"),
        ("quick_gelu", "quick_gelu"),
        ("relu", "relu"),
    ],
)
def test_activations_have_the_bits_of_transformers(dtype: torch.dtype, ours: str, theirs: str) -> None:
    x = rows(dtype, 7, 100)
    assert torch.equal(getattr(TorchOps(), ours)(x), ACT2FN[theirs](x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_has_the_bits_of_a_torch_module(dtype: torch.dtype) -> None:
    norm = nn.LayerNorm(100, eps=1e-6).to(dtype)
    x = rows(dtype, 3, 7, 100)
    with torch.inference_mode():
        norm.weight.copy_(rows(dtype, 100))
        norm.bias.copy_(rows(dtype, 2, 100)[1])
        assert torch.equal(TorchOps().layer_norm(x, norm.weight, norm.bias, 1e-6), norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_linear_has_the_bits_of_a_torch_module_on_one_sequence(
    dtype: torch.dtype, bias: bool, count: int
) -> None:
    module = nn.Linear(48, 100, bias=bias, dtype=dtype)
    x = rows(dtype, count, 48)
    with torch.inference_mode():
        assert torch.equal(TorchOps().linear(x, module.weight, module.bias), module(x[None])[0])


def test_log_softmax_is_float32_whatever_the_input() -> None:
    x = rows(torch.bfloat16, 3, 50)
    assert torch.equal(TorchOps().log_softmax(x), torch.log_softmax(x.float(), -1))
