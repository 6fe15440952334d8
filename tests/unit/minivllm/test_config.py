"""A configuration is wrong as a whole: every problem is told at once."""

from __future__ import annotations

import pytest

from minivllm.config import EngineConfig
from minivllm.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"model": ""}, "model"),
        ({"dtype": "int8"}, "dtype"),
        ({"block_size": 0}, "block_size"),
        ({"block_size": True}, "block_size"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens"),
        ({"num_kv_blocks": 1}, "num_kv_blocks"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"num_kv_blocks": 8, "kv_cache_memory_bytes": 100}, "not both"),
        ({"swap_space_bytes": -1}, "swap_space_bytes"),
        ({"swap_space_bytes": "4"}, "swap_space_bytes"),
        ({"device": None}, "device"),
        ({"ops_backend": None}, "ops_backend"),
        ({"batch_invariant": "no"}, "batch_invariant"),
        ({"enable_prefix_caching": 0}, "enable_prefix_caching"),
        ({"enable_chunked_prefill": None}, "enable_chunked_prefill"),
        ({"seed": None}, "seed"),
        ({"prefix_cache_seed": 1.5}, "prefix_cache_seed"),
        ({"preemption_mode": "drop"}, "preemption_mode"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy"),
        ({"limit_mm_per_prompt": {"image": -1}}, "limit_mm_per_prompt"),
        ({"limit_mm_per_prompt": {"sound": 1}}, "limit_mm_per_prompt"),
        ({"limit_mm_per_prompt": [2]}, "limit_mm_per_prompt"),
        ({"mm_processor_kwargs": {1: 2}}, "mm_processor_kwargs"),
        ({"mm_processor_kwargs": "size"}, "mm_processor_kwargs"),
        ({"encoder_cache_embeddings": 0}, "encoder_cache_embeddings"),
        ({"batch_invariant": True, "ops_backend": "torch"}, "torch-pad"),
        ({"batch_invariant": True, "attention_backend": "sdpa"}, "tiled"),
    ],
)
def test_a_bad_option_is_refused_by_its_name(values: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        EngineConfig.from_dict({"model": "m", **values})


def test_all_bad_options_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as refusal:
        EngineConfig(model="m", block_size=0, dtype="int8", max_num_seqs=0)
    assert all(word in str(refusal.value) for word in ("block_size", "dtype", "max_num_seqs"))


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization.*block_size"):
        EngineConfig.from_dict({"model": "m", "gpu_memory_utilization": 0.9})
