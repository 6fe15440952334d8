"""In bfloat16, by tokens alone, the recall checkpoint catches single KV faults.

Each request has one fault in minivllm's paged cache. A request counts as caught when its greedy
tokens differ from the answer. Faults that arise on writing hold from the moment the entry is
written, for every reader; the others are planted between two steps of the engine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from torch import Tensor

from conformance.recipes.recall import ALPHABET, answer_ids, prompt_ids
from tests.integration.kv_faults import ENTRY_KINDS, Fault, Rig, spoil_writes, swap_blocks_when_read

LAYERS = 2


class ListRig(Rig):
    """A rig over recall-llama whose requests are lists of words."""

    def __init__(self, checkpoints: Path, block_size: int, *, requests: int, length: int) -> None:
        """Room for `requests` lists of `length` words at once."""
        super().__init__(checkpoints / "recall-llama", block_size, requests=requests, length=3 * length + 4)

    def ask(self, lists: Sequence[Sequence[int]]) -> None:
        prompts = [{"prompt_token_ids": prompt_ids(words)} for words in lists]
        self.start(prompts, [2 * len(words) + 2 for words in lists])

    def run(self, lists: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        self.ask(lists)
        return self.finish()


def draw_lists(count: int, length: int, seed: object) -> list[list[int]]:
    rng = random.Random(f"faults {seed}")
    return [rng.sample(range(ALPHABET), length) for _ in range(count)]


def caught(tokens: dict[int, list[int]], lists: Sequence[Sequence[int]]) -> list[bool]:
    return [tokens[i] != answer_ids(words) for i, words in enumerate(lists)]


def deciding_positions(layer: int, length: int) -> list[int]:
    """Positions whose entry some answer rests on: prompt and first answer list.

    The second answer list, and in the last layer BOS, is read by nobody afterwards: a fault there
    cannot change a token of any correct model (what BOS decides there is <sep>, which is given).
    """
    period = length + 1
    return list(range(period * 2)) if layer == 0 else list(range(1, period * 2 + 1))


@pytest.mark.parametrize("block_size", [1, 5, 16])
def test_without_a_fault_every_answer_is_right(checkpoints: Path, block_size: int) -> None:
    rig = ListRig(checkpoints, block_size, requests=6, length=ALPHABET)
    lists = [draw_lists(1, length, "none")[0] for length in (1, 2, 9, 20, 48, 62)]
    assert not any(caught(rig.run(lists), lists))


def test_at_least_nine_in_ten_single_faults_change_the_tokens(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kinds × layers × positions, in prompt and answer, block sizes that divide lengths and do not."""
    table: dict[tuple[str, int], list[bool]] = {}
    for block_size, length, every in ((4, 9, 3), (7, 24, 7), (16, 40, 23)):
        faults = list(entry_faults(length, every))
        rig = ListRig(checkpoints, block_size, requests=len(faults), length=length)
        rig.run(draw_lists(len(faults), length, "earlier requests, for something stale"))
        lists = draw_lists(len(faults), length, length)
        with monkeypatch.context() as patch:
            fired = spoil_writes(rig, faults, patch)
            seen = caught(rig.run(lists), lists)
        assert fired == dict.fromkeys(range(len(faults)), 1)
        for fault, hit in zip(faults, seen, strict=True):
            table.setdefault((fault.kind, fault.layer), []).append(hit)

    pairs = [(a, b) for b in range(8) for a in range(b)]
    rig = ListRig(checkpoints, 3, requests=len(pairs), length=24)
    lists = draw_lists(len(pairs), 24, "swapped")
    with monkeypatch.context() as patch:
        swap_blocks_when_read(rig, pairs, 0, patch)
        table["two blocks read in each other's place", 0] = caught(rig.run(lists), lists)

    for (kind, layer), hits in sorted(table.items()):
        print(f"layer {layer}  {kind:40} {sum(hits):4} of {len(hits):4}")
    hits = [hit for row in table.values() for hit in row]
    print(f"total {sum(hits)} of {len(hits)}")
    assert sum(hits) >= 0.9 * len(hits)
    assert all(sum(row) >= 0.9 * len(row) for row in table.values())


def entry_faults(length: int, every: int) -> Iterator[Fault]:
    for kind in ENTRY_KINDS:
        for layer in range(LAYERS):
            for position in deciding_positions(layer, length)[::every]:
                yield Fault(kind, layer, position)


Damage = Callable[[Tensor, Tensor, int], None]


def zero_k(keys: Tensor, values: Tensor, slot: int) -> None:  # noqa: ARG001  one signature for all
    keys[slot] = 0


def zero_v(keys: Tensor, values: Tensor, slot: int) -> None:  # noqa: ARG001  one signature for all
    values[slot] = 0


@pytest.mark.parametrize("damage", [zero_k, zero_v])
def test_damage_between_two_steps_shows_if_an_answer_still_rests_on_it(
    checkpoints: Path, damage: Damage
) -> None:
    """In the last layer, where answers read words. (Layer 0 tells a position what stood before it:
    once the next position is computed, nothing need read the entry again.)"""
    length, layer = 15, LAYERS - 1
    prompt = length + 2
    cases = [
        (steps, position)
        for steps in range(1, length + 1, 2)  # the first step computes the prompt
        for position in range(steps + 1, prompt + steps - 1, 3)
    ]
    rig = ListRig(checkpoints, 4, requests=len(cases), length=length)
    lists = draw_lists(len(cases), length, damage.__name__)
    rig.ask(lists)
    for step in range(1, length + 1):
        rig.engine.step()
        for i, (steps, position) in enumerate(cases):
            if steps == step:
                damage(*rig.entries(layer), rig.slot(i, position))
    seen = caught(rig.finish(), lists)
    print(f"{damage.__name__}: {sum(seen)} of {len(seen)}")
    assert sum(seen) >= 0.9 * len(seen)


def test_blocks_exchanged_between_two_requests_show_in_both(checkpoints: Path) -> None:
    rig = ListRig(checkpoints, 4, requests=40, length=20)
    lists = draw_lists(40, 20, "exchange")
    rig.ask(lists)
    rig.engine.step()
    for i in range(0, 40, 2):
        block = i % 5
        a, b = rig.table(i)[block], rig.table(i + 1)[block]
        for tensor in (*rig.cache.keys, *rig.cache.values):
            tensor[[a, b]] = tensor[[b, a]]
    assert all(caught(rig.finish(), lists))


def test_swapping_blocks_in_the_last_layer_is_an_equivalent_mutant(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not counted above. Attention sums over entries; a key carries its position by rope, so their
    order matters only to the causal mask. In the last layer only the last row of the prompt and
    the rows after it are used, and these may see all entries: no mask, no order, no difference."""
    lists = draw_lists(6, 20, "equivalent")
    rig = ListRig(checkpoints, 4, requests=6, length=20)
    pairs = [(a, b) for b in range(1, 4) for a in range(b)]
    swap_blocks_when_read(rig, pairs, LAYERS - 1, monkeypatch)
    assert not any(caught(rig.run(lists), lists))
