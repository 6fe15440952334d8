"""A step that breaks off (an interrupt, memory that ran out) is done again, and changes no token."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from PIL import Image

from minivllm import LLM, SamplingParams
from minivllm.engine import LLMEngine

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SEVERAL = SamplingParams(n=3, seed=1, max_tokens=12, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": [3 + (7 * i + j * (i + 2)) % 29 for j in range(20 + i)]} for i in range(6)]


def engine_of(model: Path, **options: Any) -> LLMEngine:
    return LLM(str(model), dtype="float32", batch_invariant=True, **options).engine


def serve(
    engine: LLMEngine, requests: list[tuple[Any, SamplingParams]], broken: Callable[[], bool] = lambda: False
) -> tuple[list[tuple[tuple[int, ...], ...]], int]:
    """Tokens of every sequence, and how many steps broke off, which they do after the forward pass."""
    plain, count = engine.model.logits, 0

    def logits(hidden: Any) -> Any:
        if broken():
            raise KeyboardInterrupt
        return plain(hidden)

    engine.model.logits = logits  # type: ignore[method-assign]  # where a step is to break off
    for number, (prompt, sampling) in enumerate(requests):
        engine.add_request(str(number), prompt, sampling)
    done = {}
    while engine.has_unfinished_requests():
        try:
            outputs = engine.step()
        except KeyboardInterrupt:
            count += 1
            continue
        done.update((o.request_id, tuple(c.token_ids for c in o.outputs)) for o in outputs if o.finished)
    assert engine.pool_counts().in_use == engine.host_pool_counts().in_use == 0
    return [done[str(number)] for number in range(len(requests))], count


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, SEVERAL], ids=["one", "several"])
def test_swapped_and_forked_requests_survive_broken_steps(
    checkpoints: Path, sampling: SamplingParams, caching: bool
) -> None:
    model, requests = checkpoints / "tiny-llama", [(prompt, sampling) for prompt in PROMPTS]
    expected, _ = serve(engine_of(model, block_size=4, num_kv_blocks=400), requests)
    for seed in range(3):
        tight = engine_of(
            model,
            block_size=4,
            num_kv_blocks=30,
            swap_space_bytes=10**7,
            preemption_mode="swap",
            max_num_batched_tokens=24,
            enable_prefix_caching=caching,
        )
        rng = Random(seed)
        got, count = serve(tight, requests, lambda rng=rng: rng.random() < 0.3)  # type: ignore[misc]  # its own
        assert count > 10
        assert got == expected


def test_pictures_are_encoded_again_after_a_broken_step(checkpoints: Path) -> None:
    model = checkpoints / "tiny-qwen2-vl"
    engine = engine_of(model, num_kv_blocks=200, encoder_cache_embeddings=12)  # room for one picture
    chats = [
        [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (112, 84), colour)}]}]
        for colour in ("red", "blue", "green")
    ]
    requests = [(engine.chat_prompt(chat), GREEDY) for chat in chats]
    expected, _ = serve(engine, requests)
    engine.reset_prefix_cache()
    turns = cycle([True, False])  # each step breaks off once
    got, count = serve(engine, requests, lambda: next(turns))
    assert count > 5
    assert got == expected


@pytest.mark.parametrize(
    "shortage",
    [
        MemoryError("Unable to allocate 8.00 GiB"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_memory_that_runs_out_while_encoding_breaks_the_step_off(
    checkpoints: Path, shortage: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(checkpoints / "tiny-qwen2-vl", num_kv_blocks=200)
    content = [{"type": "image", "image": Image.new("RGB", (112, 84), "red")}]
    requests = [(engine.chat_prompt([{"role": "user", "content": content}]), GREEDY)]
    [expected], _ = serve(engine, requests)
    engine.update_weights({})  # forgets blocks and embeddings
    plain, errors = engine.model.encode, iter([shortage])

    def encode(item: Any) -> Any:
        for error in errors:
            raise error
        return plain(item)

    monkeypatch.setattr(engine.model, "encode", encode)
    engine.add_request("again", *requests[0])
    with pytest.raises(type(shortage), match=r"alloc|memory"):
        engine.step()
    while engine.has_unfinished_requests():
        outputs = engine.step()
    assert tuple(c.token_ids for c in outputs[-1].outputs) == expected
