"""Tiny Hugging Face checkpoints for the tests of the golden files, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors import torch as safetensors
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from conformance.hf_models import load_config

WORDS = ["<pad>", "<s>", "</s>", "<user>", "<assistant>"] + [f"w{i}" for i in range(91)]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

SaveTiny = Callable[..., Path]


@pytest.fixture(scope="session")
def save_tiny() -> SaveTiny:
    """save(directory, **config changes) writes a random Llama of 2 layers and 96 words."""

    def save(directory: Path, *, tokenizer: bool = True, **changes: Any) -> Path:
        values: dict[str, Any] = {
            "vocab_size": len(WORDS),
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "initializer_range": 0.4,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "tie_word_embeddings": False,
        }
        torch.manual_seed(3)
        config = transformers.LlamaConfig(**{**values, **changes})
        transformers.LlamaForCausalLM(config).save_pretrained(directory)
        if tokenizer:
            _tokenizer().save_pretrained(directory)
        return directory

    return save


@pytest.fixture(scope="session")
def tiny_checkpoint(save_tiny: SaveTiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a tokenizer and a chat template; read only."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny-random")


def _tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture
def square_checkpoint(save_tiny: SaveTiny, tmp_path: Path) -> Path:
    """Transformers takes head_dim of a GGUF Llama as hidden_size / heads, so it must be that."""
    return save_tiny(tmp_path / "square", hidden_size=32, num_attention_heads=2, head_dim=16)


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """Writes a Llama checkpoint as a .gguf file."""
    return _write_gguf


def _write_gguf(path: Path, checkpoint: Path, leave_out: str = "") -> Path:
    """The same Llama as a .gguf file, float32, with q and k rows in llama.cpp's order."""
    config = load_config(checkpoint)
    weights = safetensors.load_file(checkpoint / "model.safetensors")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", "0", *(f"t{i}" for i in range(config.vocab_size - 2))])
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in weights.items():
        array = tensor.float().numpy()
        for kind, count in heads.items():
            if kind in name:
                split = array.reshape(count, 2, -1, array.shape[1])
                array = split.swapaxes(1, 2).reshape(array.shape)
        if name != leave_out:
            writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
