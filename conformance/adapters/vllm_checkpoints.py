"""What vLLM is given to load: a checkpoint as it lies there, or a GGUF file's tensors as safetensors."""

from __future__ import annotations

import atexit
import functools
from pathlib import Path
from tempfile import TemporaryDirectory

__all__ = ["loadable"]


def loadable(path: Path) -> Path:
    """The directory vLLM can load this checkpoint from.

    vLLM left GGUF files to a plugin. Transformers reads one (as for the golden files) and saves config,
    tokenizer and tensors, de-quantized to float32, in a directory that lasts as long as this process.

    Args:
        path: a directory with config.json, or a .gguf file.

    Raises:
        NoTruth: Transformers cannot read the GGUF file.
    """
    return _saved(path, path.stat().st_mtime_ns) if path.suffix == ".gguf" else path


@functools.cache
def _saved(path: Path, changed: int) -> Path:  # noqa: ARG001  (changed: part of the cache's key)
    import torch
    import transformers

    from conformance.hf_models import load_hf, load_tokenizer

    directory = TemporaryDirectory(prefix=f"{path.stem}-")
    atexit.register(directory.cleanup)
    model = load_hf(path, torch.float32)
    model.module.generation_config = transformers.GenerationConfig(eos_token_id=list(model.eos_token_ids))
    model.module.save_pretrained(directory.name)
    tokenizer = load_tokenizer(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory.name)
    return Path(directory.name)
