"""Tiny Hugging Face checkpoints for the tests of the golden files, made once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

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
