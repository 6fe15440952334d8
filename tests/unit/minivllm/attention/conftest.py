"""A little paged world: sequences of random q, k and v, run step by step through a backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from minivllm.attention import ATTENTION_BACKENDS, AttentionMetadata, KVCache
from minivllm.config import ModelConfig, RopeConfig
from minivllm.request import MediaSpan, Request, SamplingParams, ScheduledRequest, TokenView

CPU = torch.device("cpu")


def model_config(heads: int = 4, kv_heads: int = 2, dim: int = 32, layers: int = 2) -> ModelConfig:
    """A configuration of which only the attention matters."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=50,
        hidden_size=heads * dim,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        hidden_act="silu",
        dtype="float32",
        bos_token_id=None,
        eos_token_ids=(),
    )


def scheduled(
    name: str, start: int, end: int, table: tuple[int, ...], whole: Sequence[tuple[int, int]] = ()
) -> ScheduledRequest:
    """A request that computes positions start … end - 1; those of each span in `whole` see one another."""
    tokens = list(range(end))
    media = tuple(MediaSpan(first, last - first, "image", "i", 0, True) for first, last in whole)
    return ScheduledRequest(
        request_id=name,
        start=start,
        num_tokens=end - start,
        tokens=TokenView(tokens),
        num_prompt_tokens=end,
        block_table=table,
        sample=False,
        request=Request(name, tokens, end, SamplingParams(), media=media),
    )


@dataclass
class World:
    """Sequences and how they are laid out.

    Attributes:
        sequences: (q [n, heads, dim], k and v [n, kv_heads, dim]) each.
        shuffle: seed of the placement; None gives ascending blocks.
        poison: fill every slot with NaN first; a slot is then valid only once it is written.
        whole: spans (start, end) of each sequence whose positions see one another.
    """

    config: ModelConfig
    sequences: Sequence[tuple[Tensor, Tensor, Tensor]]
    block_size: int = 16
    shuffle: int | None = 0
    poison: bool = False
    whole: Sequence[Sequence[tuple[int, int]]] = ()

    def run(
        self,
        backend: str,
        steps: Sequence[Sequence[tuple[int, int, int]]],
        scale: float = 0.2,
        window: int | None = None,
    ) -> list[Tensor]:
        """Each step is a batch of (sequence, start, end); returns the rows of every sequence, layer 1."""
        dtype = self.sequences[0][0].dtype
        needed = [-(-len(q) // self.block_size) for q, _, _ in self.sequences]
        cache = KVCache(
            self.config, num_blocks=sum(needed) + 3, block_size=self.block_size, dtype=dtype, device=CPU
        )
        if self.poison:
            cache.poison(range(cache.num_blocks), {})
        order = torch.arange(1, cache.num_blocks)
        if self.shuffle is not None:
            order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(self.shuffle))]
        free = order.tolist()
        tables = [tuple(free.pop() for _ in range(n)) for n in needed]
        planned = ATTENTION_BACKENDS.get(backend)(cache)
        out = [torch.full_like(q.flatten(1), float("nan")) for q, _, _ in self.sequences]
        for step in steps:
            requests = [
                scheduled(str(i), start, end, tables[i], self.whole[i] if self.whole else ())
                for i, start, end in step
            ]
            attention = planned.plan(AttentionMetadata.from_requests(requests, cache))
            q, k, v = (torch.cat([self.sequences[i][part][s:e] for i, s, e in step]) for part in range(3))
            attention.write(1, k, v)
            rows = attention.attend(1, q, scale, window).split([e - s for _, s, e in step])
            for (i, start, end), mine in zip(step, rows, strict=True):
                out[i][start:end] = mine
        return out


@pytest.fixture
def world() -> Callable[..., World]:
    """Make a world: lengths of the sequences, shapes, dtype, and World's own options."""

    def make(
        lengths: Sequence[int],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        dim: int = 32,
        dtype: torch.dtype = torch.float32,
        **options: object,
    ) -> World:
        generator = torch.Generator().manual_seed(0)

        def draw(n: int, h: int) -> Tensor:
            return (torch.randn(n, h, dim, generator=generator) * 2).to(dtype)

        sequences = [(draw(n, heads), draw(n, kv_heads), draw(n, kv_heads)) for n in lengths]
        return World(model_config(heads, kv_heads, dim), sequences, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture
def config() -> Callable[..., ModelConfig]:
    """Make a model configuration: heads, kv_heads, dim, layers."""
    return model_config


@pytest.fixture
def schedule() -> Callable[..., ScheduledRequest]:
    """Make a ScheduledRequest: name, start, end, block table, spans that are whole."""
    return scheduled
