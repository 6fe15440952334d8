"""vLLM is given the tensors of a GGUF file, unchanged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from conformance.adapters.vllm_checkpoints import loadable
from conformance.hf_models import load_hf, load_tokenizer


def test_a_directory_is_loaded_where_it_lies(tiny_checkpoint: Path) -> None:
    assert loadable(tiny_checkpoint) == tiny_checkpoint


def test_a_gguf_file_is_saved_once_with_every_tensor_as_it_was(
    square_checkpoint: Path, write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", square_checkpoint)
    saved = loadable(path)
    assert loadable(path) == saved
    theirs, ours = load_hf(path, torch.float32), load_hf(saved, torch.float32)
    assert ours.eos_token_ids == theirs.eos_token_ids == (2,)
    wanted, actual = theirs.module.state_dict(), ours.module.state_dict()
    assert actual.keys() == wanted.keys()
    assert all(torch.equal(actual[name], tensor) for name, tensor in wanted.items())
    tokenizers = load_tokenizer(path), load_tokenizer(saved)
    assert all(t is not None for t in tokenizers)
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
