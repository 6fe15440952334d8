"""The parts that vision towers share."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - the name every PyTorch reader knows
from transformers import CLIPVisionConfig

from minivllm.errors import BadMedia, ConfigError, UnsupportedError
from minivllm.layers.ops_torch import TorchOps
from minivllm.models.vision.vit import PatchEmbedding, ViTConfig, attend, hidden_states, layer_index

CPU = torch.device("cpu")


def patch_embedding(bias: bool) -> PatchEmbedding:
    made = PatchEmbedding(3, 5, 4, bias=bias, ops=TorchOps(), dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [(8, 12), (12, 8), (11, 9)])
def test_patches_are_a_convolution_row_by_row(bias: bool, size: tuple[int, int]) -> None:
    made = patch_embedding(bias)
    pixels = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    truth = F.conv2d(pixels.double(), made.weight.double(), None, stride=4)
    if made.bias is not None:
        truth += made.bias.double()[:, None, None]
    torch.testing.assert_close(made(pixels).double(), truth.flatten(2).transpose(1, 2), rtol=0, atol=1e-5)


def test_a_picture_of_other_channels_is_refused() -> None:
    with pytest.raises(BadMedia, match="4 channels, the model 3"):
        patch_embedding(bias=False)(torch.zeros(1, 4, 8, 8))


def test_every_token_sees_every_token_of_its_own_picture_only() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(2, 3, 5, 4, generator=generator) for _ in range(3))
    together = attend(q, k, v, 0.5)
    assert together.shape == (2, 5, 12)
    alone = torch.cat([attend(q[i : i + 1], k[i : i + 1], v[i : i + 1], 0.5) for i in range(2)])
    torch.testing.assert_close(together, alone)
    truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=0.5)
    torch.testing.assert_close(together.double(), truth.transpose(1, 2).flatten(2), rtol=1e-5, atol=1e-6)


def test_the_softmax_is_float32_unless_a_family_keeps_its_dtype() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, 2, 40, 8, generator=generator).bfloat16() for _ in range(3))
    assert attend(q, k, v, 1.0).dtype == attend(q, k, v, 1.0, wide_softmax=False).dtype == torch.bfloat16
    assert attend(q.double(), k.double(), v.double(), 1.0, wide_softmax=False).dtype == torch.float64


@pytest.mark.parametrize(("index", "meant"), [(0, 0), (3, 3), (-1, 3), (-2, 2), (-4, 0)])
def test_layers_count_from_the_embeddings_or_from_the_end(index: int, meant: int) -> None:
    assert layer_index(index, 3) == meant


@pytest.mark.parametrize("index", [4, -5])
def test_a_layer_that_does_not_exist_is_refused(index: int) -> None:
    with pytest.raises(ConfigError, match=f"vision_feature_layer {index} does not exist in a tower of 3"):
        layer_index(index, 3)


def test_layers_behind_the_last_wanted_one_do_not_run() -> None:
    class Add(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    class Never(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError(x)

    layers = torch.nn.ModuleList([Add(), Add(), Never()])
    assert [s.item() for s in hidden_states(torch.tensor(0), layers, [2, 0])] == [2, 0]


def test_the_configuration_takes_a_side_or_an_equal_pair() -> None:
    values = CLIPVisionConfig(image_size=[56, 56], patch_size=14).to_dict()
    config = ViTConfig.read(values)
    assert (config.image_size, config.patch_size, config.grid) == (56, 14, 4)
    with pytest.raises(UnsupportedError, match=r"image_size \[56, 28\] is not square"):
        ViTConfig.read({**values, "image_size": [56, 28]})


def test_heads_must_divide_the_width() -> None:
    values = CLIPVisionConfig().to_dict()
    with pytest.raises(ConfigError, match=r"hidden_size \(768\) must be a multiple of .* \(7\)"):
        ViTConfig.read({**values, "num_attention_heads": 7})
