"""An engine whose paged cache can be damaged, one entry per request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minivllm import EngineConfig, SamplingParams
from minivllm.attention import KVCache
from minivllm.engine import LLMEngine

__all__ = ["ENTRY_KINDS", "Fault", "Rig", "spoil_writes", "swap_blocks_when_read"]

ENTRY_KINDS = ("zeroed K", "zeroed V", "zeroed K+V", "stale K+V", "K+V of the slot before")


@dataclass(frozen=True)
class Fault:
    """One damaged KV entry of the request of the same index."""

    kind: str
    layer: int
    position: int


class Rig:
    """A bfloat16 engine over a recall checkpoint, and its paged cache to damage."""

    def __init__(self, model: Path, block_size: int, *, requests: int, length: int) -> None:
        """Room for `requests` of `length` tokens at once: nothing is preempted, all is written once."""
        self.engine = LLMEngine(
            EngineConfig(
                model=str(model),
                dtype="bfloat16",
                device="cpu",
                block_size=block_size,
                num_kv_blocks=1 + requests * -(-length // block_size),
                max_num_seqs=requests,
                max_num_batched_tokens=100_000,
                enable_prefix_caching=False,
                attention_backend="dense",
            )
        )
        # Tests of faults reach into the engine on purpose: nothing public may damage its cache.
        self.cache: KVCache = self.engine._runner._cache
        self.layers = len(self.cache.keys)
        self.block_size = block_size

    def start(self, prompts: Sequence[Mapping[str, Any]], num_tokens: Sequence[int]) -> None:
        """Add requests "0", "1", … that generate so many tokens, whatever they are."""
        for i, (prompt, count) in enumerate(zip(prompts, num_tokens, strict=True)):
            self.engine.add_request(
                str(i), dict(prompt), SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            )

    def finish(self) -> dict[int, list[int]]:
        tokens = {}
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                if output.finished:
                    tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
        return tokens

    def table(self, index: int) -> tuple[int, ...]:
        return self.engine._scheduler.block_manager.block_table(str(index))

    def slot(self, index: int, position: int) -> int:
        return self.table(index)[position // self.block_size] * self.block_size + position % self.block_size

    def entries(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer by slot: [slots, kv_heads, head_dim], views."""
        return self.cache.keys[layer].flatten(0, 1), self.cache.values[layer].flatten(0, 1)


def spoil_writes(rig: Rig, faults: Sequence[Fault], monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """From now on, entry i of `faults` is wrong from the moment request i writes it. Counts firings."""
    genuine, fired = rig.cache.write, Counter[int]()
    before = [(k.clone(), v.clone()) for k, v in map(rig.entries, range(rig.layers))]

    def write(layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        genuine(layer, slots, k, v)
        written = set(slots.tolist())
        keys, values = rig.entries(layer)
        for i, fault in enumerate(faults):
            if fault.layer != layer or str(i) not in rig.engine._scheduler.requests:
                continue
            if fault.position >= len(rig.table(i)) * rig.block_size:
                continue
            slot = rig.slot(i, fault.position)
            if slot not in written:
                continue
            fired[i] += 1
            if fault.kind in ("zeroed K", "zeroed K+V"):
                keys[slot] = 0
            if fault.kind in ("zeroed V", "zeroed K+V"):
                values[slot] = 0
            if fault.kind == "stale K+V":
                keys[slot], values[slot] = before[layer][0][slot], before[layer][1][slot]
            if fault.kind == "K+V of the slot before":
                other = rig.slot(i, (fault.position or 2) - 1)  # the first takes the entry after it
                keys[slot], values[slot] = keys[other].clone(), values[other].clone()

    monkeypatch.setattr(rig.cache, "write", write)
    return fired


def swap_blocks_when_read(
    rig: Rig, pairs: Sequence[tuple[int, int]], layer: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From now on one layer reads two blocks of each request in each other's place (in its table)."""
    genuine = rig.cache.gather

    def gather(at: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        if at == layer:
            blocks = torch.arange(rig.cache.num_blocks)
            for i, (a, b) in enumerate(pairs):
                if str(i) in rig.engine._scheduler.requests:
                    table = rig.table(i)
                    blocks[table[a]], blocks[table[b]] = table[b], table[a]
            slots = blocks[slots // rig.block_size] * rig.block_size + slots % rig.block_size
        return genuine(at, slots)

    monkeypatch.setattr(rig.cache, "gather", gather)
