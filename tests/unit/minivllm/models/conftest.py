"""Tiny random checkpoints saved by Transformers, and a way to run our models over one sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from transformers import PreTrainedModel

from minivllm.attention import AttentionMetadata, KVCache
from minivllm.attention.dense import DenseBackend
from minivllm.models import DecoderModel

VOCAB = 101

#: What all families share; head_dim differs from hidden_size / heads on purpose.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: What a family needs beyond SHAPE.
FAMILY: dict[str, dict[str, Any]] = {
    "Gemma3": {
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "Glm": {"pad_token_id": 2},
    "Glm4": {"pad_token_id": 2},
    "OPT": {"word_embed_proj_dim": 48, "ffn_dim": 80, "dropout": 0.0},
}


class Checkpoint(NamedTuple):
    """A saved model and Transformers' own copy of it, eager and in float32."""

    path: Path
    hf: PreTrainedModel


class Trace(NamedTuple):
    """What one sequence gave: logits at every position, and the stages observed."""

    logits: torch.Tensor
    stages: dict[str, torch.Tensor]


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Checkpoint]:
    """`make_checkpoint("Llama", mlp_bias=True)` → Checkpoint with random, uneven weights."""

    def make(family: str, **overrides: Any) -> Checkpoint:
        config_class = getattr(transformers, f"{family}{'Text' if family == 'Gemma3' else ''}Config")
        # a copy: some classes write their defaults into the tables they are given
        config = config_class(**copy.deepcopy({**SHAPE, **FAMILY.get(family, {}), **overrides}))
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                noise = torch.randn(parameter.shape, generator=generator)
                if name.endswith("norm.weight"):
                    parameter.copy_(1 + 0.2 * noise)  # a norm of ones would hide a dropped one
                elif name.endswith("bias"):
                    parameter.copy_(0.3 * noise)
                elif "embed" in name:
                    parameter.copy_(noise)
                else:
                    parameter.copy_(noise * 1.5 / parameter.shape[1] ** 0.5)
        path = tmp_path / family
        model.save_pretrained(path)
        return Checkpoint(path, model)

    return make


@pytest.fixture
def token_ids() -> torch.Tensor:
    """[37] a fixed random sequence."""
    return torch.randint(0, VOCAB, (37,), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def run_model() -> Callable[..., Trace]:
    """Run a model over one sequence through the paged cache, in the given chunks."""

    def run(model: DecoderModel, token_ids: torch.Tensor, chunks: Sequence[int] | None = None) -> Trace:
        length = len(token_ids)
        cache = KVCache(
            model.config, num_blocks=length // 4 + 3, block_size=4, dtype=model.dtype, device=model.device
        )
        backend = DenseBackend(cache)
        table = tuple(reversed(range(1, length // 4 + 2)))
        stages: dict[str, list[torch.Tensor]] = {}
        rows = []
        start = 0
        for size in chunks or [length]:
            end = start + size
            plan = backend.plan(
                AttentionMetadata(
                    query_start_loc=(0, size),
                    starts=(start,),
                    seq_lens=(end,),
                    block_tables=(table,),
                    slot_mapping=cache.slots(table, start, end),
                    block_size=4,
                )
            )
            hidden = model(
                model.embed(token_ids[start:end]),
                torch.arange(start, end),
                plan,
                lambda name, x: stages.setdefault(name, []).append(x.clone()),
            )
            rows.append(model.logits(hidden))
            start = end
        assert start == length
        return Trace(torch.cat(rows), {name: torch.cat(parts) for name, parts in stages.items()})

    return run


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Write a Transformers model as llama.cpp's converter would, with the gguf package.

    `write_gguf(hf, kind=GGMLQuantizationType.Q8_0, metadata={"llama.expert_count": 8}, drop={…},
    extra={…})`; metadata overrides or (with None) removes the converter's own.
    """

    def write(
        hf: PreTrainedModel,
        *,
        kind: GGMLQuantizationType = GGMLQuantizationType.F32,
        metadata: Mapping[str, Any] | None = None,
        drop: Collection[str] = (),
        extra: Mapping[str, np.ndarray[Any, Any]] | None = None,
        name: str = "model.gguf",
    ) -> Path:
        config = hf.config
        arch = config.model_type.removesuffix("_text")
        gemma = arch == "gemma3"
        rope = config.rope_parameters["full_attention"] if gemma else config.rope_parameters
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, arch)
        values = {
            f"{arch}.context_length": config.max_position_embeddings,
            f"{arch}.block_count": config.num_hidden_layers,
            f"{arch}.embedding_length": config.hidden_size,
            f"{arch}.feed_forward_length": config.intermediate_size,
            f"{arch}.attention.head_count": config.num_attention_heads,
            f"{arch}.attention.head_count_kv": config.num_key_value_heads,
            f"{arch}.attention.key_length": config.head_dim,
            f"{arch}.attention.value_length": config.head_dim,
            f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            f"{arch}.rope.freq_base": float(rope["rope_theta"]),
            f"{arch}.attention.sliding_window": config.sliding_window if gemma else None,
            f"{arch}.rope.dimension_count": config.head_dim,
            f"{arch}.vocab_size": config.vocab_size,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            **(metadata or {}),
        }
        for key, value in values.items():
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, list):
                writer.add_array(key, value)
            elif value is not None:
                writer.add_uint32(key, value)
        # what a vocabulary looks like: arrays of text, of numbers, and of scores
        writer.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(config.vocab_size)])
        writer.add_array("tokenizer.ggml.token_type", [1] * config.vocab_size)
        writer.add_array("tokenizer.ggml.scores", [0.5] * config.vocab_size)
        names = gguf.get_tensor_name_map(
            {v: k for k, v in gguf.MODEL_ARCH_NAMES.items()}[arch], config.num_hidden_layers
        )
        tensors = {}
        for hf_name, parameter in hf.named_parameters():
            base, suffix = hf_name.rsplit(".", 1)
            data = parameter.detach().numpy()
            if arch == "llama" and base.endswith(("q_proj", "k_proj")):
                heads = config.num_attention_heads if base.endswith("q_proj") else config.num_key_value_heads
                halves = data.reshape(heads, 2, -1, *data.shape[1:])
                data = halves.swapaxes(1, 2).reshape(data.shape)
            if gemma and base.endswith("norm"):
                data = data + 1
            tensors[f"{names.get_name(base)}.{suffix}"] = np.ascontiguousarray(data)
        tensors.update(extra or {})
        for tensor_name, data in tensors.items():
            if tensor_name in drop:
                continue
            stored = kind if data.ndim > 1 else GGMLQuantizationType.F32
            writer.add_tensor(tensor_name, gguf.quantize(data, stored), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
