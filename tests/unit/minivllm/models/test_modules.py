"""Parameter holders compute through the ops they were given."""

from __future__ import annotations

import torch

from minivllm.layers.ops_torch import TorchOps
from minivllm.models.modules import Embedding, Linear, RMSNorm, new_parameter

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
