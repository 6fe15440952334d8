"""A step that breaks off (an interrupt, memory that ran out) is done again, and changes no token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import cycle
from operator import attrgetter
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


COPIES = ("swap_out", "swap_in", "copy")

#: Where a step may break off: the owner inside the engine, and what it calls.
STAGES = (
    ("_runner._cache", "swap_out"),
    ("_runner._cache", "swap_in"),
    ("_runner._cache", "copy"),
    ("model", "embed"),
    ("model", "forward"),
    ("model", "logits"),
    ("_runner._sampler", "sample"),
    ("_stages", "collect"),
)


def make_brittle(engine: LLMEngine, broken: Callable[[str], bool]) -> Counter[str]:
    """Let steps break off at the stages for which `broken` says so. Copies break off in the middle: half of
    them are made. Returns a counter by stage."""
    errors = cycle([KeyboardInterrupt, MemoryError, OSError])
    count: Counter[str] = Counter()

    def brittle(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            copies = arguments[0] if name in COPIES else None
            if copies == () or not broken(name):
                return plain(*arguments)
            if copies is not None:
                plain(copies[: len(copies) // 2])
            count[name] += 1
            raise next(errors)

        return call

    for path, name in STAGES:
        owner = attrgetter(path)(engine)
        setattr(owner, name, brittle(name, getattr(owner, name)))
    return count


def serve(engine: LLMEngine, requests: list[tuple[Any, SamplingParams]]) -> list[tuple[tuple[int, ...], ...]]:
    """Tokens of every sequence; a step that breaks off is simply done again."""
    for number, (prompt, sampling) in enumerate(requests):
        engine.add_request(str(number), prompt, sampling)
    done = {}
    while engine.has_unfinished_requests():
        try:
            outputs = engine.step()
        except (KeyboardInterrupt, MemoryError, OSError):
            continue
        done.update((o.request_id, tuple(c.token_ids for c in o.outputs)) for o in outputs if o.finished)
    assert engine.pool_counts().in_use == engine.host_pool_counts().in_use == 0
    return [done[str(number)] for number in range(len(requests))]


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("sampling", [GREEDY, SEVERAL], ids=["one", "several"])
def test_swapped_and_forked_requests_survive_broken_steps(
    checkpoints: Path, sampling: SamplingParams, caching: bool
) -> None:
    model, requests = checkpoints / "tiny-llama", [(prompt, sampling) for prompt in PROMPTS]
    expected = serve(engine_of(model, block_size=4, num_kv_blocks=400), requests)
    broken: Counter[str] = Counter()
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
        count = make_brittle(tight, lambda name, rng=rng: rng.random() < (0.5 if name in COPIES else 0.1))  # type: ignore[misc]  # its own
        assert serve(tight, requests) == expected
        broken += count
    never = {name for _, name in STAGES} - set(broken)
    assert never <= (set() if sampling is SEVERAL else set(COPIES)), "one sequence each is seldom swapped"


def test_pictures_are_encoded_again_after_a_broken_step(checkpoints: Path) -> None:
    model = checkpoints / "tiny-qwen2-vl"
    engine = engine_of(model, num_kv_blocks=200, encoder_cache_embeddings=12)  # room for one picture
    chats = [
        [{"role": "user", "content": [{"type": "image", "image": Image.new("RGB", (112, 84), colour)}]}]
        for colour in ("red", "blue", "green")
    ]
    requests = [(engine.chat_prompt(chat), GREEDY) for chat in chats]
    expected = serve(engine, requests)
    engine.reset_prefix_cache()
    whole = [False] * 5
    turns = cycle([i == stage for stage in range(5) for i in range(stage + 1)] + whole)  # at each in turn
    count = make_brittle(engine, lambda _: next(turns))
    assert serve(engine, requests) == expected
    assert set(count) == {"embed", "forward", "logits", "sample", "collect"}


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
    [expected] = serve(engine, requests)
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
