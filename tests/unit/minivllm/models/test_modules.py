"""Parameter holders compute through the ops they were given."""

from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from minivllm.errors import UnsupportedError
from minivllm.layers.ops_torch import TorchOps
from minivllm.models.modules import (
    ACTIVATIONS,
    Activation,
    Embedding,
    LayerNorm,
    Linear,
    RMSNorm,
    new_parameter,
)

CPU = torch.device("cpu")


def test_linear_is_x_times_w_transposed_plus_b() -> None:
    layer = Linear(3, 2, bias=True, ops=TorchOps(), dtype=torch.float64, device=CPU)
    layer.weight.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
    assert layer.bias is not None
    layer.bias.copy_(torch.tensor([10.0, 20.0]))
    assert layer(torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64)).tolist() == [[8.0, 18.0]]


def test_linear_without_bias_has_one_parameter() -> None:
    layer = Linear(3, 2, bias=False, ops=TorchOps(), dtype=torch.float32, device=CPU)
    assert [name for name, _ in layer.named_parameters()] == ["weight"]


def test_linear_keeps_every_dimension_but_the_last() -> None:
    layer = Linear(3, 2, bias=True, ops=TorchOps(), dtype=torch.float32, device=CPU)
    for parameter in layer.parameters():
        parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
    x = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(0))
    assert layer(x).shape == (4, 5, 2)
    torch.testing.assert_close(layer(x)[3, 4], layer(x[3:, 4])[0])
    assert layer(x[:, :0]).shape == (4, 0, 2)


def test_layer_norm_takes_mean_and_variance_of_the_last_dimension() -> None:
    norm = LayerNorm(2, 0.0, ops=TorchOps(), dtype=torch.float32, device=CPU)
    norm.weight.copy_(torch.tensor([1.0, 2.0]))
    norm.bias.copy_(torch.tensor([10.0, 20.0]))
    torch.testing.assert_close(norm(torch.tensor([[[3.0, 5.0]]])), torch.tensor([[[9.0, 22.0]]]))


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_an_activation_is_known_by_the_name_a_config_gives_it(name: str) -> None:
    x = torch.linspace(-4, 4, 33)
    assert torch.equal(Activation(name, ops=TorchOps())(x), ACT2FN[name](x))


def test_an_unknown_activation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedError, match="'mish' is not implemented; known: gelu, gelu_pytorch_tanh"):
        Activation("mish", ops=TorchOps())


def test_rms_norm_divides_by_the_root_mean_square_of_the_last_dimension() -> None:
    norm = RMSNorm(2, 0.0, ops=TorchOps(), dtype=torch.float32, device=CPU)
    norm.weight.copy_(torch.tensor([1.0, 2.0]))
    out = norm(torch.tensor([[[3.0, 4.0]], [[0.6, 0.8]]]))
    expected = torch.tensor([3.0, 8.0]) / 12.5**0.5
    torch.testing.assert_close(out, expected.expand(2, 1, 2))


def test_embedding_picks_rows() -> None:
    table = Embedding(4, 2, dtype=torch.float32, device=CPU)
    table.weight.copy_(torch.arange(8.0).reshape(4, 2))
    assert table(torch.tensor([3, 0, 3])).tolist() == [[6, 7], [0, 1], [6, 7]]


def test_a_new_parameter_takes_no_gradient_and_no_memory_on_meta() -> None:
    parameter = new_parameter(10**6, 10**6, dtype=torch.bfloat16, device=torch.device("meta"))
    assert parameter.shape == (10**6, 10**6)
    assert not parameter.requires_grad
