"""What the vision transformers share: cutting a picture into patches, and attention over all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from minivllm.errors import BadMedia, ConfigError, UnsupportedError
from minivllm.layers.ops import Ops
from minivllm.models.modules import Activation, LayerNorm, Linear, new_parameter

__all__ = [
    "EncoderLayer",
    "PatchEmbedding",
    "ViTConfig",
    "attend",
    "hidden_states",
    "layer_index",
    "pixel_shuffle",
    "square_side",
]


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Shape of a CLIP or SigLIP tower; field names follow the Transformers config.

    Attributes:
        image_size: side of the square picture the positions are for, in pixels.
        patch_size: side of a patch, in pixels.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_channels: int
    image_size: int
    patch_size: int
    hidden_act: str
    layer_norm_eps: float

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> ViTConfig:
        """From the `vision_config` of a config.json with defaults filled in.

        Raises:
            ConfigError: sizes that do not divide each other.
            UnsupportedError: pictures or patches that are not square.
        """
        config = cls(
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            num_hidden_layers=values["num_hidden_layers"],
            num_attention_heads=values["num_attention_heads"],
            num_channels=values["num_channels"],
            image_size=square_side(values["image_size"], "image_size"),
            patch_size=square_side(values["patch_size"], "patch_size"),
            hidden_act=values["hidden_act"],
            layer_norm_eps=values["layer_norm_eps"],
        )
        if config.hidden_size % config.num_attention_heads:
            raise ConfigError(
                f"vision_config: hidden_size ({config.hidden_size}) must be a multiple of "
                f"num_attention_heads ({config.num_attention_heads})"
            )
        return config

    @property
    def grid(self) -> int:
        """Patches along one side of the picture; a last incomplete patch is dropped."""
        return self.image_size // self.patch_size


def square_side(value: int | Sequence[int], name: str) -> int:
    """The one side of a square given as a number or as [height, width]."""
    sides = {value} if isinstance(value, int) else set(value)
    if len(sides) != 1:
        raise UnsupportedError(f"vision_config: {name} {value} is not square; only squares are implemented")
    return int(sides.pop())


def layer_index(index: int, num_layers: int) -> int:
    """`vision_feature_layer` (0 is the embeddings, -1 the last layer's output) as 0..num_layers.

    Raises:
        ConfigError: there is no such layer.
    """
    if not -num_layers - 1 <= index <= num_layers:
        raise ConfigError(f"vision_feature_layer {index} does not exist in a tower of {num_layers} layers")
    return index % (num_layers + 1)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, *, wide_softmax: bool = True) -> Tensor:
    """Attention of every token to every token of its picture, in the order of Transformers eager.

    Args:
        q, k, v: [pictures, heads, tokens, head_dim].
        wide_softmax: whether the softmax is taken in float32 whatever the dtype.

    Returns:
        [pictures, tokens, heads × head_dim].
    """
    scores = torch.matmul(q, k.transpose(-1, -2)) * scale
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32 if wide_softmax else None).to(q.dtype)
    return torch.matmul(weights, v).transpose(1, 2).flatten(2)


def hidden_states(embeddings: Tensor, layers: nn.ModuleList, wanted: Sequence[int]) -> list[Tensor]:
    """Hidden states number `wanted` (0: `embeddings`, i: output of layer i), run no further than needed."""
    states = [embeddings]
    for layer in layers[: max(wanted)]:
        states.append(layer(states[-1]))
    return [states[index] for index in wanted]


def pixel_shuffle(features: Tensor, factor: int) -> Tensor:
    """Put squares of factor × factor neighbours side by side in one wider row.

    [pictures, height, width, hidden] → [pictures, height / factor, width / factor,
    factor² × hidden]; inside a row the neighbours come line by line.
    """
    pictures, high, wide, hidden = features.shape
    blocks = features.reshape(pictures, high // factor, factor, wide // factor, factor, hidden)
    return blocks.transpose(2, 3).flatten(3)


class PatchEmbedding(nn.Module):
    """A convolution whose stride is its kernel, as the matrix product it is.

    The weight keeps the convolution's shape [out, channels, patch, patch].
    """

    def __init__(
        self,
        channels: int,
        out_features: int,
        patch: int,
        *,
        bias: bool,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.ops = ops
        self.patch = patch
        self.weight = new_parameter(out_features, channels, patch, patch, dtype=dtype, device=device)
        self.bias = new_parameter(out_features, dtype=dtype, device=device) if bias else None

    def forward(self, pixels: Tensor) -> Tensor:
        """[pictures, channels, height, width] → [pictures, patches, out], patches row by row.

        Raises:
            BadMedia: another number of channels.
        """
        if pixels.shape[1] != self.weight.shape[1]:
            raise BadMedia(f"pixel values have {pixels.shape[1]} channels, the model {self.weight.shape[1]}")
        side = self.patch
        patches = pixels.to(self.weight.dtype).unfold(2, side, side).unfold(3, side, side)
        pictures, _, high, wide, _, _ = patches.shape
        rows = patches.permute(0, 2, 3, 1, 4, 5).reshape(pictures * high * wide, -1)
        return self.ops.linear(rows, self.weight.flatten(1), self.bias).view(pictures, high * wide, -1)


class SelfAttention(nn.Module):
    """Multi-head attention with a bias on all four projections."""

    def __init__(self, config: ViTConfig, **kw: Any) -> None:
        super().__init__()
        size = config.hidden_size
        self.head_dim = size // config.num_attention_heads
        self.q_proj = Linear(size, size, bias=True, **kw)
        self.k_proj = Linear(size, size, bias=True, **kw)
        self.v_proj = Linear(size, size, bias=True, **kw)
        self.out_proj = Linear(size, size, bias=True, **kw)

    def forward(self, x: Tensor) -> Tensor:
        """[pictures, tokens, hidden] → the same."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        output: Tensor = self.out_proj(attend(q, k, v, self.head_dim**-0.5))
        return output


class MLP(nn.Module):
    """Two matrices with an activation between."""

    def __init__(self, hidden: int, inner: int, activation: str, **kw: Any) -> None:
        super().__init__()
        self.fc1 = Linear(hidden, inner, bias=True, **kw)
        self.act = Activation(activation, ops=kw["ops"])
        self.fc2 = Linear(inner, hidden, bias=True, **kw)

    def forward(self, x: Tensor) -> Tensor:
        """[…, hidden] → the same."""
        output: Tensor = self.fc2(self.act(self.fc1(x)))
        return output


class EncoderLayer(nn.Module):
    """Pre-norm residual block of CLIP and SigLIP."""

    def __init__(self, config: ViTConfig, **kw: Any) -> None:
        super().__init__()
        self.layer_norm1 = LayerNorm(config.hidden_size, config.layer_norm_eps, **kw)
        self.self_attn = SelfAttention(config, **kw)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.layer_norm_eps, **kw)
        self.mlp = MLP(config.hidden_size, config.intermediate_size, config.hidden_act, **kw)

    def forward(self, x: Tensor) -> Tensor:
        """[pictures, tokens, hidden] → the same."""
        x = x + self.self_attn(self.layer_norm1(x))
        mixed: Tensor = x + self.mlp(self.layer_norm2(x))
        return mixed


class Encoder(nn.Module):
    """The stack of layers; exists so that parameters are called "encoder.layers.…"."""

    def __init__(self, config: ViTConfig, **kw: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(config, **kw) for _ in range(config.num_hidden_layers))
