"""Turns an `EngineConfig` into the parts of an engine, deciding every "auto" on the way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from minivllm.attention import ATTENTION_BACKENDS, AUTO_ORDER, KVCache
from minivllm.cache import BlockManager
from minivllm.config import EngineConfig, ModelConfig, ResolvedConfig
from minivllm.device import resolve_device, total_memory
from minivllm.errors import BadParameter, ConfigError
from minivllm.layers import make_ops
from minivllm.models import LanguageModel, load_model, load_model_config
from minivllm.multimodal import MULTIMODAL, MultiModalProcessor
from minivllm.output import OutputProcessor
from minivllm.processor import Processor
from minivllm.runner import ModelRunner
from minivllm.sampling import Sampler
from minivllm.scheduler import Scheduler
from minivllm.stages import StageStore
from minivllm.tokenizer import Tokenizer, load_tokenizer
from minivllm.trace import TraceSink

__all__ = ["DEFAULT_KV_CACHE_BYTES", "EngineParts", "build_engine", "resolve"]

#: The pool's size when neither num_kv_blocks nor kv_cache_memory_bytes is given.
DEFAULT_KV_CACHE_BYTES = 2**30


_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts that `LLMEngine` drives."""

    resolved: ResolvedConfig
    model: LanguageModel
    tokenizer: Tokenizer | None
    processor: Processor
    scheduler: Scheduler
    runner: ModelRunner
    output: OutputProcessor
    stages: StageStore


def resolve(config: EngineConfig, model: ModelConfig) -> ResolvedConfig:
    """Decide every "auto" and None of `config` for this model and machine.

    Raises:
        ConfigError: an option does not fit the model, the device, or another option.
    """
    why: list[tuple[str, str]] = []
    device = resolve_device(config.device)
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    if dtype not in _DTYPES:
        raise ConfigError(f"the checkpoint's dtype {dtype!r} cannot be computed with; set dtype: {_DTYPES}")
    if config.dtype == "auto":
        why.append(("dtype", f"the checkpoint's own is {model.dtype}"))
    if config.device == "auto":
        why.append(("device", f"first of cuda, mps, cpu that is here: {device}"))

    longest = model.max_position_embeddings
    # Dynamic rope has no last position; the rope table refuses what lies beyond the original length.
    bounded = model.rope is None or model.rope.kind != "dynamic"
    if bounded and config.max_model_len is not None and config.max_model_len > longest:
        raise ConfigError(f"max_model_len {config.max_model_len} exceeds the model's {longest} positions")
    max_model_len = config.max_model_len or longest

    ops = config.ops_backend
    if ops == "auto":
        ops = "torch-pad" if config.batch_invariant else "torch"
        why.append(("ops_backend", f"batch_invariant is {config.batch_invariant}"))
    attention, reason = _choose_attention(config, model, getattr(torch, dtype), device)
    why.append(("attention_backend", reason))

    block_bytes = KVCache.bytes_per_block(model, config.block_size, getattr(torch, dtype))
    blocks_per_request = -(-max_model_len // config.block_size)
    if config.num_kv_blocks is not None:
        num_blocks = config.num_kv_blocks
    else:
        budget = config.kv_cache_memory_bytes or DEFAULT_KV_CACHE_BYTES
        num_blocks = min(budget // block_bytes, config.max_num_seqs * blocks_per_request + 1)
        why.append(("num_kv_blocks", f"{budget} bytes hold {budget // block_bytes} blocks of {block_bytes}"))
        if num_blocks < 2:
            raise ConfigError(
                f"{budget} bytes of KV cache hold {num_blocks} blocks of {block_bytes} bytes; at least 2 are "
                f"needed (block 0 is the null block): raise kv_cache_memory_bytes or lower block_size"
            )
    embeddings = config.encoder_cache_embeddings
    if embeddings is None:
        embeddings = min(max(max_model_len, 2048), 16384)
        why.append(("encoder_cache_embeddings", f"between 2048 and 16384, for max_model_len {max_model_len}"))
    num_host_blocks = config.swap_space_bytes // block_bytes
    if config.preemption_mode == "swap" and num_host_blocks < 1:
        raise ConfigError(
            f"preemption_mode swap needs host memory, and swap_space_bytes {config.swap_space_bytes} holds "
            f"no block of {block_bytes} bytes: set swap_space_bytes to a multiple of {block_bytes}, or "
            f"preemption_mode to recompute"
        )
    # Half a head of cosines and of sines per position, in float32.
    rope_bytes = sum(4 * model.head_dim for rope in (model.rope, model.local_rope) if rope is not None)
    _check_memory("num_kv_blocks", num_blocks, block_bytes, device)
    _check_memory("swap_space_bytes", num_host_blocks * block_bytes, 1, torch.device("cpu"))
    _check_memory("max_model_len", max_model_len, rope_bytes, device)
    return ResolvedConfig(
        engine=config,
        model=model,
        dtype=dtype,
        device=str(device),
        max_model_len=max_model_len,
        num_kv_blocks=num_blocks,
        num_host_blocks=num_host_blocks,
        kv_block_bytes=block_bytes,
        attention_backend=attention,
        ops_backend=ops,
        max_encoder_embeddings=embeddings,
        why=tuple(why),
    )


def _check_memory(name: str, count: int, size: int, device: torch.device) -> None:
    """Refuse to ask the allocator for more than there is: it may also say yes, and the system kill us."""
    memory = total_memory(device)
    if memory is not None and count * size > memory:
        raise ConfigError(
            f"{name} {count} takes {count * size} bytes, but {device} has {memory}"
            + (f"; lower {name} to at most {memory // size}" if memory >= 2 * size else "")
        )


def build_engine(config: EngineConfig, *, trace: TraceSink, model: LanguageModel | None) -> EngineParts:
    """Load the model and wire the parts; see `LLMEngine` for the arguments and errors."""
    path = Path(config.model)
    resolved = resolve(config, load_model_config(path) if model is None else model.config)
    device, dtype = torch.device(resolved.device), getattr(torch, resolved.dtype)
    ops = make_ops(resolved.ops_backend, device)
    if model is None:
        model = load_model(path, dtype=dtype, device=device, ops=ops, max_model_len=resolved.max_model_len)
    else:
        model.use_ops(ops)
    tokenizer = load_tokenizer(path)
    if tokenizer is not None:
        eos = tuple(sorted({*resolved.model.eos_token_ids, *tokenizer.eos_token_ids}))
        resolved = replace(resolved, model=replace(resolved.model, eos_token_ids=eos))
    # Every token of a step is stored, so the pool bounds a step too.
    slots = resolved.num_kv_blocks * config.block_size
    ops.prepare(model.batched, max_rows=min(config.max_num_batched_tokens, slots))

    kv_cache = KVCache(
        resolved.model,
        num_blocks=resolved.num_kv_blocks,
        block_size=config.block_size,
        dtype=dtype,
        device=device,
        num_host_blocks=resolved.num_host_blocks,
    )
    backend = ATTENTION_BACKENDS.get(resolved.attention_backend)(kv_cache)
    scheduler = Scheduler(
        block_manager=BlockManager(
            resolved.num_kv_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            prefix_seed=config.prefix_cache_seed,
            num_host_blocks=resolved.num_host_blocks,
            trace=trace,
        ),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=resolved.max_model_len,
        max_encoder_embeddings=resolved.max_encoder_embeddings,
        enable_chunked_prefill=config.enable_chunked_prefill,
        policy=config.scheduling_policy,
        preemption_mode=config.preemption_mode,
        trace=trace,
    )
    sampler = Sampler(ops, resolved.model.vocab_size)
    return EngineParts(
        resolved=resolved,
        model=model,
        tokenizer=tokenizer,
        processor=Processor(resolved, tokenizer, _multimodal(resolved, tokenizer, path)),
        scheduler=scheduler,
        runner=ModelRunner(model, kv_cache, backend, sampler, device),
        output=OutputProcessor(tokenizer, scheduler.finish),
        stages=StageStore(),
    )


def _multimodal(
    resolved: ResolvedConfig, tokenizer: Tokenizer | None, directory: Path
) -> MultiModalProcessor | None:
    """What the model's family does with media; None for a text-only model."""
    model, settings = resolved.model, resolved.engine.mm_processor_kwargs or {}
    if model.architecture not in MULTIMODAL:
        if settings:
            raise ConfigError(f"mm_processor_kwargs is of no use to {model.architecture}, a text-only model")
        return None
    if tokenizer is None:
        raise ConfigError(f"{directory} has no tokenizer, which {model.architecture} needs for its media")
    try:
        return MULTIMODAL.get(model.architecture)(directory, model, tokenizer, settings)
    except BadParameter as error:
        raise ConfigError(f"mm_processor_kwargs: {error}") from error


def _choose_attention(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device
) -> tuple[str, str]:
    """The backend's name and why; an explicit choice that cannot serve raises ConfigError."""
    if config.batch_invariant:
        wanted: tuple[str, ...] = ("tiled",)
        reason = "batch_invariant"
    elif config.attention_backend != "auto":
        wanted, reason = (config.attention_backend,), "asked for"
    else:
        wanted, reason = AUTO_ORDER, f"first of {', '.join(AUTO_ORDER)} that supports this model and device"
    refusals = []
    for name in wanted:
        refusal = ATTENTION_BACKENDS.get(name).supports(model, dtype, device)
        if refusal is None:
            return name, reason
        refusals.append(f"{name}: {refusal}")
    raise ConfigError(f"no attention backend can serve this model on {device}: {'; '.join(refusals)}")
