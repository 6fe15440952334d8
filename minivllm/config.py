"""What the user asked for (`EngineConfig`), and what was resolved from it (`ResolvedConfig`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from minivllm.errors import ConfigError

__all__ = ["EngineConfig", "ModelConfig", "PreemptionMode", "ResolvedConfig", "RopeConfig"]

PreemptionMode = Literal["recompute", "swap", "auto"]


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What the user asked for; names are vLLM's where vLLM has the option.

    Attributes:
        model: a directory with config.json and safetensors, or a .gguf file.
        dtype: "auto" (the checkpoint's), "float32" or "bfloat16" or "float16".
        device: "auto" (cuda, then mps, then cpu), or one of them, or "cuda:1".
        block_size: tokens per KV block; any positive number.
        num_kv_blocks: size of the pool in blocks, the null block included.
        kv_cache_memory_bytes: size of the pool in bytes, instead of num_kv_blocks.
            With neither, the pool holds max_num_seqs sequences of max_model_len, at most 1 GiB.
        swap_space_bytes: host memory for swapped-out blocks.
        max_model_len: most tokens (prompt + output) of one request; None: the model's own limit.
        max_num_seqs: most requests in one step.
        max_num_batched_tokens: most tokens in one step.
        enable_prefix_caching: reuse the KV of common prefixes.
        enable_chunked_prefill: split a prompt over several steps. Off, a prompt is computed in
            one step, and one longer than max_num_batched_tokens is refused.
        preemption_mode: what a preempted request loses: "recompute", "swap" or "auto".
        attention_backend: "auto" or a registered name ("dense", "sdpa", "tiled").
        ops_backend: "auto" or a registered name ("torch", "torch-pad").
        batch_invariant: bitwise equal results whatever the batch, chunks, hits and preemptions.
        seed: seed of requests that bring none, and of the synthetic parts of a run.
        prefix_cache_seed: fixes the root of the prefix keys; None: random per process.
        scheduling_policy: "fcfs" or "priority".
        limit_mm_per_prompt: modality → most items in one prompt; None: no limit.
        mm_processor_kwargs: settings of the image processor for every request, such as max_pixels;
            a request may override them.
        encoder_cache_embeddings: rows of vision embeddings to keep; None: as many as fit in
            max_model_len, between 2,048 and 16,384.

    Raises:
        ConfigError: naming every contradictory or out-of-range value, all at once.
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    block_size: int = 16
    num_kv_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    swap_space_bytes: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    preemption_mode: PreemptionMode = "recompute"
    attention_backend: str = "auto"
    ops_backend: str = "auto"
    batch_invariant: bool = False
    seed: int = 0
    prefix_cache_seed: int | None = None
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    limit_mm_per_prompt: Mapping[str, int] | None = None
    mm_processor_kwargs: Mapping[str, Any] | None = None
    encoder_cache_embeddings: int | None = None

    def __post_init__(self) -> None:
        problems = self._problems()
        if problems:
            raise ConfigError("; ".join(problems))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EngineConfig:
        """Build from plain data; unknown names raise ConfigError that lists the known ones."""
        known = {f.name for f in fields(cls)}
        unknown = sorted(map(str, set(values) - known))
        if unknown:
            raise ConfigError(f"unknown engine option {unknown}; known: {sorted(known)}")
        return cls(**values)

    def _problems(self) -> list[str]:
        problems = []
        if not self.model:
            problems.append("model must be a directory or a .gguf file, got an empty path")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            problems.append(f"dtype must be auto, float32, bfloat16 or float16, got {self.dtype!r}")
        for name in ("device", "attention_backend", "ops_backend"):
            if not isinstance(value := getattr(self, name), str):
                problems.append(f"{name} must be a name, got {value!r}")
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "batch_invariant"):
            if not isinstance(value := getattr(self, name), bool):
                problems.append(f"{name} must be True or False, got {value!r}")
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            if not _is_integer(value := getattr(self, name)) or value < 1:
                problems.append(f"{name} must be a positive integer, got {value!r}")
        for name, low in (
            ("num_kv_blocks", 2),
            ("kv_cache_memory_bytes", 1),
            ("max_model_len", 2),
            ("encoder_cache_embeddings", 1),
        ):
            value = getattr(self, name)
            if value is not None and (not _is_integer(value) or value < low):
                problems.append(f"{name} must be an integer of at least {low}, got {value!r}")
        if not _is_integer(self.seed):
            problems.append(f"seed must be an integer, got {self.seed!r}")
        if self.prefix_cache_seed is not None and not _is_integer(self.prefix_cache_seed):
            problems.append(f"prefix_cache_seed must be an integer or None, got {self.prefix_cache_seed!r}")
        if self.num_kv_blocks is not None and self.kv_cache_memory_bytes is not None:
            problems.append("give num_kv_blocks or kv_cache_memory_bytes, not both")
        if not _is_integer(self.swap_space_bytes) or self.swap_space_bytes < 0:
            problems.append(
                f"swap_space_bytes must be an integer of at least 0, got {self.swap_space_bytes!r}"
            )
        if self.preemption_mode not in ("recompute", "swap", "auto"):
            problems.append(f"preemption_mode must be recompute, swap or auto, got {self.preemption_mode!r}")
        if self.scheduling_policy not in ("fcfs", "priority"):
            problems.append(f"scheduling_policy must be fcfs or priority, got {self.scheduling_policy!r}")
        problems += self._media_problems()
        if self.batch_invariant:
            if self.ops_backend not in ("auto", "torch-pad"):
                problems.append(f"batch_invariant needs ops_backend torch-pad, got {self.ops_backend!r}")
            if self.attention_backend not in ("auto", "tiled"):
                problems.append(
                    f"batch_invariant needs attention_backend tiled, got {self.attention_backend!r}"
                )
        return problems

    def _media_problems(self) -> list[str]:
        problems = []
        limits: object = self.limit_mm_per_prompt or {}
        if not isinstance(limits, Mapping) or any(
            name not in ("image", "video") or not _is_integer(most) or most < 0
            for name, most in limits.items()
        ):
            problems.append(
                f"limit_mm_per_prompt maps image or video to an integer of at least 0, got {limits!r}"
            )
        settings: object = self.mm_processor_kwargs or {}
        if not isinstance(settings, Mapping) or any(not isinstance(name, str) for name in settings):
            problems.append(f"mm_processor_kwargs maps names to settings, got {settings!r}")
        return problems


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding, as in the `rope_parameters` of a Transformers config.

    Attributes:
        kind: "default", "linear", "llama3", "yarn", "dynamic" or "longrope" (these two within the
            original length), or "factors" (divisors from a GGUF file).
        theta: base of the frequencies.
        parameters: the remaining fields of the config for this kind (factor, …).
        rotary_fraction: the part of a head's dimensions that turns (`partial_rotary_factor`); the
            first ones, rounded down.
        mrope_section: how many frequencies follow the (time, height, width) position of a token
            in multimodal rope; () for ordinary rope.
        mrope_interleaved: whether the axes take turns (Qwen3-VL) or come in sections (Qwen2-VL).
    """

    kind: str = "default"
    theta: float = 10000.0
    parameters: tuple[tuple[str, Any], ...] = ()
    rotary_fraction: float = 1.0
    mrope_section: tuple[int, ...] = ()
    mrope_interleaved: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """What the decoder looks like; field names follow the Transformers config.

    `architecture` is the Transformers class name ("LlamaForCausalLM"), the key of the model
    registry. `rope` is None where positions are learned embeddings. `dtype` is the checkpoint's own.
    `eos_token_ids` unites config and generation_config. `windows` says for each layer how many
    positions a token sees, its own included (None: all before it); () if no layer has a window.
    `local_rope` is the rope of the layers with a window, if it is another. `details` is what only
    this decoder's family has, a frozen dataclass of its own.

    Of a vision-language model this is the decoder inside it, whose `model_type` is
    `text_model_type`; `vision` is whatever its family reads about the rest, None for a decoder.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig | None
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    hidden_act: str
    dtype: str
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    windows: tuple[int | None, ...] = ()
    local_rope: RopeConfig | None = None
    details: Any = None
    text_model_type: str = ""
    vision: Any = None


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """`EngineConfig` with every "auto" and None decided; what a report prints.

    Attributes:
        num_host_blocks: host blocks that swap_space_bytes pays for.
        kv_block_bytes: bytes of one block over all layers, K and V.
        max_encoder_embeddings: rows of vision embeddings that are kept.
        why: option → reason of each automatic choice.
    """

    engine: EngineConfig
    model: ModelConfig
    dtype: str
    device: str
    max_model_len: int
    num_kv_blocks: int
    num_host_blocks: int
    kv_block_bytes: int
    attention_backend: str
    ops_backend: str
    max_encoder_embeddings: int
    why: tuple[tuple[str, str], ...] = ()
