"""Models: one file per family, a registry keyed by Transformers class name, strict loading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from minivllm.config import ModelConfig
from minivllm.errors import ConfigError, MiniVLLMError, WeightError
from minivllm.layers.ops import Ops
from minivllm.models.base import LanguageModel
from minivllm.models.decoder import DecoderModel
from minivllm.models.gguf_file import GGUFSource
from minivllm.models.hf_config import read_config
from minivllm.models.safetensors_dir import SafetensorsSource
from minivllm.models.vlm import MediaEmbeddings, VisionLanguageModel
from minivllm.models.weights import check_weights, fill, replace_weights
from minivllm.registry import Registry

__all__ = [
    "MODELS",
    "DecoderModel",
    "LanguageModel",
    "MediaEmbeddings",
    "VisionLanguageModel",
    "load_model",
    "load_model_config",
    "replace_weights",
]

#: Transformers class name → our class. Others may add theirs in the entry point group.
MODELS: Registry[type[DecoderModel] | type[VisionLanguageModel]] = Registry(
    "model", entry_point_group="minivllm.models"
)
MODELS.register("Blip2ForConditionalGeneration", "minivllm.models.blip2:Blip2ForConditionalGeneration")
MODELS.register("Gemma3ForCausalLM", "minivllm.models.gemma3:Gemma3ForCausalLM")
MODELS.register(
    "Gemma3ForConditionalGeneration", "minivllm.models.gemma3_vision:Gemma3ForConditionalGeneration"
)
MODELS.register("Glm4ForCausalLM", "minivllm.models.glm4:Glm4ForCausalLM")
MODELS.register("GlmForCausalLM", "minivllm.models.glm:GlmForCausalLM")
MODELS.register(
    "Idefics3ForConditionalGeneration", "minivllm.models.smolvlm:Idefics3ForConditionalGeneration"
)
MODELS.register(
    "InternVLForConditionalGeneration", "minivllm.models.internvl:InternVLForConditionalGeneration"
)
MODELS.register("LlamaForCausalLM", "minivllm.models.llama:LlamaForCausalLM")
MODELS.register("LlavaForConditionalGeneration", "minivllm.models.llava:LlavaForConditionalGeneration")
MODELS.register(
    "LlavaOnevisionForConditionalGeneration",
    "minivllm.models.llava_onevision:LlavaOnevisionForConditionalGeneration",
)
MODELS.register("OPTForCausalLM", "minivllm.models.opt:OPTForCausalLM")
MODELS.register("Qwen2ForCausalLM", "minivllm.models.qwen2:Qwen2ForCausalLM")
MODELS.register("Qwen3ForCausalLM", "minivllm.models.qwen3:Qwen3ForCausalLM")
MODELS.register("Qwen2VLForConditionalGeneration", "minivllm.models.qwen2_vl:Qwen2VLForConditionalGeneration")
MODELS.register(
    "Qwen2_5_VLForConditionalGeneration", "minivllm.models.qwen2_5_vl:Qwen2_5_VLForConditionalGeneration"
)
MODELS.register("Qwen3VLForConditionalGeneration", "minivllm.models.qwen3_vl:Qwen3VLForConditionalGeneration")
MODELS.register("SmolVLMForConditionalGeneration", "minivllm.models.smolvlm:SmolVLMForConditionalGeneration")


def load_model_config(path: str | Path) -> ModelConfig:
    """The configuration of a model directory or a .gguf file.

    Raises:
        ConfigError: no such path; missing, malformed or contradictory configuration.
        UnsupportedError: an architecture or option minivllm does not implement.
        WeightError: a damaged .gguf file.
    """
    path = Path(path)
    if _is_gguf(path):
        return GGUFSource(path, MODELS).config
    config = read_config(path, MODELS)
    return config if config.dtype else replace(config, dtype=SafetensorsSource(path).stored_dtype())


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    ops: Ops,
    max_model_len: int | None = None,
) -> LanguageModel:
    """Build the model of a directory or a .gguf file and fill it, cast to `dtype`.

    Args:
        path: a directory with config.json and safetensors, or a .gguf file (dequantised).
        max_model_len: positions to prepare; None: the model's own limit.

    Raises:
        ConfigError, UnsupportedError: as `load_model_config`.
        WeightError: weights missing, damaged, unknown, or of another shape.
    """
    path = Path(path)
    source: GGUFSource | SafetensorsSource
    if _is_gguf(path):
        source = GGUFSource(path, MODELS)
        config = source.config
    else:
        config = load_model_config(path)
        source = SafetensorsSource(path)
    family = MODELS.get(config.architecture)
    if config.num_hidden_layers > (held := len(source.shapes())):
        raise WeightError(
            f"{path}: {config.num_hidden_layers} layers, but the checkpoint holds {held} tensors"
        )
    try:
        # Shapes first: no memory is taken for a model that the checkpoint does not hold.
        check_weights(
            family(config, dtype=dtype, device="meta", ops=ops, max_model_len=max_model_len), source
        )
    except MiniVLLMError:
        raise
    except RuntimeError as error:  # a size that no number holds
        raise ConfigError(f"{path}: the configuration describes impossible tensors: {error}") from error
    model = family(config, dtype=dtype, device=device, ops=ops, max_model_len=max_model_len)
    fill(model, source)
    return model


def _is_gguf(path: Path) -> bool:
    """Whether `path` is a file (.gguf) or a directory; ConfigError if it is neither."""
    if path.is_dir():
        return False
    if not path.exists():
        raise ConfigError(f"model {str(path)!r} does not exist; give a directory or a .gguf file")
    if path.suffix != ".gguf":
        raise ConfigError(f"model {str(path)!r} is neither a directory nor a .gguf file")
    return True
