"""The Q-Former of BLIP-2: learned queries that look at a picture. Post-norm, as BERT."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from minivllm.errors import ConfigError, UnsupportedError
from minivllm.models.modules import Activation, LayerNorm, Linear
from minivllm.models.vision.vit import attend

__all__ = ["QFormer", "QFormerConfig"]


@dataclass(frozen=True, kw_only=True)
class QFormerConfig:
    """Its shape; field names follow the Transformers config.

    Attributes:
        cross_attention_frequency: layers 0, this, twice this, … look at the picture.
        encoder_hidden_size: width of the tower's rows.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    hidden_act: str
    layer_norm_eps: float
    cross_attention_frequency: int
    encoder_hidden_size: int

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> QFormerConfig:
        """From the `qformer_config` of a config.json with defaults filled in.

        Raises:
            ConfigError: sizes that do not divide each other.
            UnsupportedError: it reads text.
        """
        if values["use_qformer_text_input"]:
            raise UnsupportedError("qformer_config: use_qformer_text_input is not implemented")
        config = cls(**{name: values[name] for name in cls.__dataclass_fields__})
        if config.hidden_size % config.num_attention_heads or config.cross_attention_frequency < 1:
            raise ConfigError(
                f"qformer_config: hidden_size ({config.hidden_size}) must be a multiple of "
                f"num_attention_heads ({config.num_attention_heads}), and cross_attention_frequency "
                f"({config.cross_attention_frequency}) positive"
            )
        return config


class Projections(nn.Module):
    """Queries of one sequence against keys and values of another, or of its own."""

    def __init__(self, config: QFormerConfig, kv_size: int, **kw: Any) -> None:
        super().__init__()
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.query = Linear(config.hidden_size, config.hidden_size, bias=True, **kw)
        self.key = Linear(kv_size, config.hidden_size, bias=True, **kw)
        self.value = Linear(kv_size, config.hidden_size, bias=True, **kw)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """[pictures, queries, hidden] and [pictures, rows, kv_size] → [pictures, queries, hidden].

        The softmax is in the dtype of the model.
        """
        q, k, v = (
            rows.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for rows in (self.query(x), self.key(seen), self.value(seen))
        )
        return attend(q, k, v, self.head_dim**-0.5, wide_softmax=False)


class AddNorm(nn.Module):
    """A matrix, the residual, then the norm."""

    def __init__(self, inner: int, config: QFormerConfig, **kw: Any) -> None:
        super().__init__()
        self.dense = Linear(inner, config.hidden_size, bias=True, **kw)
        self.LayerNorm = LayerNorm(config.hidden_size, config.layer_norm_eps, **kw)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        """[…, inner] and [pictures, queries, hidden] → the latter's shape."""
        normed: Tensor = self.LayerNorm(self.dense(x) + residual)
        return normed


class AttentionBlock(nn.Module):
    """Attention, then its output's `AddNorm`; names are the checkpoints'."""

    def __init__(self, config: QFormerConfig, kv_size: int, **kw: Any) -> None:
        super().__init__()
        self.attention = Projections(config, kv_size, **kw)
        self.output = AddNorm(config.hidden_size, config, **kw)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        """See `Projections.forward`."""
        output: Tensor = self.output(self.attention(x, seen), x)
        return output


class Intermediate(nn.Module):
    """The first matrix of the feed-forward part, and its activation."""

    def __init__(self, config: QFormerConfig, **kw: Any) -> None:
        super().__init__()
        self.dense = Linear(config.hidden_size, config.intermediate_size, bias=True, **kw)
        self.act = Activation(config.hidden_act, ops=kw["ops"])

    def forward(self, x: Tensor) -> Tensor:
        """[…, hidden] → […, intermediate]."""
        inner: Tensor = self.act(self.dense(x))
        return inner


class Layer(nn.Module):
    """The queries look at each other, in some layers at the picture, and think."""

    def __init__(self, config: QFormerConfig, index: int, **kw: Any) -> None:
        super().__init__()
        self.attention = AttentionBlock(config, config.hidden_size, **kw)
        looks = index % config.cross_attention_frequency == 0
        self.crossattention = AttentionBlock(config, config.encoder_hidden_size, **kw) if looks else None
        self.intermediate_query = Intermediate(config, **kw)
        self.output_query = AddNorm(config.intermediate_size, config, **kw)

    def forward(self, x: Tensor, picture: Tensor) -> Tensor:
        """[pictures, queries, hidden] and [pictures, rows, encoder_hidden_size] → the former's shape."""
        x = self.attention(x, x)
        if self.crossattention is not None:
            x = self.crossattention(x, picture)
        output: Tensor = self.output_query(self.intermediate_query(x), x)
        return output


class Encoder(nn.Module):
    """The stack of layers; exists so that parameters are called "encoder.layer.…"."""

    def __init__(self, config: QFormerConfig, **kw: Any) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(config, i, **kw) for i in range(config.num_hidden_layers))


class QFormer(nn.Module):
    """Queries and a picture in, as many rows as queries out."""

    def __init__(self, config: QFormerConfig, **kw: Any) -> None:
        super().__init__()
        self.layernorm = LayerNorm(config.hidden_size, config.layer_norm_eps, **kw)
        self.encoder = Encoder(config, **kw)

    def forward(self, queries: Tensor, picture: Tensor) -> Tensor:
        """[1, queries, hidden] and [pictures, rows, encoder_hidden_size] → [pictures, queries, hidden]."""
        x: Tensor = self.layernorm(queries).expand(len(picture), -1, -1)
        for layer in self.encoder.layer:
            x = layer(x, picture)
        return x
