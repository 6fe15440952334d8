"""Trains the recall model on one CPU thread in a few minutes.

Each sequence of a list of n words has period m = n + 1: token i + m is token i's counterpart in
the next alphabet. Two layers can solve it as an induction head (arXiv:2209.11895): layer 0 tells
each position what stood before it, layer 1 looks for the position whose predecessor is the
counterpart of the current token, and copies.

In half of the sequences the second list is unrelated to the first, so that the third can only come
from the KV of the second, which an engine writes while it decodes.

So that damaged KV shows, half of the sequences of the second phase have some: K, V or both of a
position of one layer zeroed, or both replaced by those of another position. The one answer that
rests on it must then be `<lost>`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from conformance.recipes.build import write_checkpoint
from conformance.recipes.recall import (
    AGAIN,
    ALPHABET,
    BOS,
    CONFIG,
    EOS,
    LOST,
    NAME,
    SEP,
    SUMMARY,
    answer_ids,
    make_recall_tokenizer,
    prompt_ids,
    word_id,
)

__all__ = [
    "HELD_OUT",
    "Batch",
    "Damage",
    "Settings",
    "damaged",
    "make_batch",
    "make_recall_model",
    "measure_lists",
    "train",
    "write_recall",
]


#: Seed of the lists that accuracy is measured on, and how many words they have.
HELD_OUT = 1_000_003
LENGTHS = (2, 8, 32, ALPHABET)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides a training run. The committed weights came from the defaults.

    Attributes:
        steps: optimiser steps in all.
        warm_up: steps over which the learning rate rises.
        grow_from, grow_until: steps between which lists grow from 8 words to `longest`: with short
            ones the induction head appears sooner, with long ones perhaps never.
        faults_from: step from which damaged sequences are mixed in and `margin` is asked for.
        learning_rate: its peak; it then falls to zero as a cosine.
        tokens: tokens per step, about.
        margin: nats by which the right logit must lead before the loss counts it as right
            (additive margin softmax, arXiv:1801.05599).
        longest: most words in a list.
        seed: of initial weights and of data.
    """

    steps: int = 10_000
    warm_up: int = 100
    grow_from: int = 2000
    grow_until: int = 4000
    faults_from: int = 4500
    learning_rate: float = 3e-3
    tokens: int = 1000
    margin: float = 12.0
    longest: int = ALPHABET
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Damage:
    """KV entries to spoil; each field holds one element per entry.

    Attributes:
        layer, row, position: which entry.
        donor: position whose K and V replace it, -1 to zero it.
        k, v: bool, whether K and whether V is spoilt.
    """

    layer: Tensor
    row: Tensor
    position: Tensor
    donor: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of equal length, and what to spoil in them.

    Attributes:
        tokens: [batch, length] ids.
        targets: [batch, length - 1] ids to predict, -100 where nothing is asked.
    """

    tokens: Tensor
    targets: Tensor
    damage: Damage | None


def make_recall_model(seed: int) -> Any:
    """An untrained recall model: matrices of standard deviation 1 / sqrt(fan in)."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**CONFIG)
    config._attn_implementation = "sdpa"
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=1 / math.sqrt(parameter.shape[1]))
    return model


def make_batch(generator: torch.Generator, *, longest: int, tokens: int, faults: bool) -> Batch:
    """Draw one batch of about `tokens` tokens; all its lists are equally long, 2 to `longest` words."""
    n = int(torch.randint(2, longest + 1, (), generator=generator))
    m = n + 1
    size = max(1, tokens // (3 * m + 3))
    words = _draw_lists(generator, size, n)
    # Half of the rows state an unrelated second list: the third must repeat the second, not the first.
    unrelated = torch.rand(size, generator=generator) < 0.5
    said = torch.where(unrelated[:, None], _draw_lists(generator, size, n), words)
    columns = [
        *(_column(BOS, size), words + word_id(0, 0)),
        *(_column(SEP, size), said + word_id(1, 0)),
        *(_column(AGAIN, size), said + word_id(2, 0)),
        *[_column(EOS, size)] * 3,  # whoever ignores EOS gets more of it
    ]
    sequences = torch.cat(columns, dim=1)
    targets = sequences[:, 1:].clone()
    targets[:, :m] = -100
    damage = _draw_damage(generator, size, m) if faults else None
    if damage is not None:
        _expect_lost(targets, damage, m)
    targets[unrelated, m : 2 * m] = -100  # nobody could foretell the second list
    return Batch(sequences, targets, damage)


def _expect_lost(targets: Tensor, damage: Damage, m: int) -> None:
    # Layer 0 at p feeds the key of p + 1; layer 1 at p feeds the answer at p + m. Targets are one left.
    first = damage.layer == 0
    swapped = first & (damage.donor >= 0)
    # The key of p + 1 now also claims to follow the donor: two answers to one question, ask neither.
    targets[damage.row[swapped], damage.donor[swapped] + m] = -100
    targets[damage.row, damage.position + m - torch.where(first, 0, 1)] = LOST


def train(model: Any, settings: Settings, report: Callable[[int, float], None] | None = None) -> list[float]:
    """Train in place and round the weights to bfloat16 values (kept as float32).

    Returns the loss of every step. `report`, if any, is called every 100 steps with the number of
    steps done and the mean loss of the last 100.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    losses: list[float] = []
    model.train()
    for step in range(settings.steps):
        for group in optimiser.param_groups:
            group["lr"] = settings.learning_rate * _schedule(step, settings)
        second_phase = step >= settings.faults_from
        grown = min(
            1.0, max(0.0, step - settings.grow_from) / max(1, settings.grow_until - settings.grow_from)
        )
        longest = min(settings.longest, 8 + round(grown * (settings.longest - 8)))
        batch = make_batch(generator, longest=max(2, longest), tokens=settings.tokens, faults=second_phase)
        loss = _loss(model, batch, settings.margin if second_phase else 0.0)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
        if report is not None and step % 100 == 99:
            report(step + 1, sum(losses[-100:]) / 100)
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return losses


@torch.no_grad()
def measure_lists(model: Any, per_length: int, seed: int = HELD_OUT) -> dict[str, float]:
    """Part of held-out lists of each length that are repeated without a mistake, as greedy decoding would.

    One pass over list and answer tells: where every token is the likeliest after those before it,
    decoding makes the same ones.

    Returns:
        "8" (words) and so on → part of `per_length` lists.
    """
    right = {}
    for length in LENGTHS:
        words = _draw_lists(torch.Generator().manual_seed(seed + length), per_length, length).tolist()
        asked = torch.tensor([[*prompt_ids(each), *answer_ids(each)] for each in words])
        chosen = model(asked[:, :-1], use_cache=False).logits.argmax(dim=-1)
        first = length + 1  # the separator, which the answer follows
        right[str(length)] = int((chosen[:, first:] == asked[:, first + 1 :]).all(dim=1).sum()) / per_length
    return right


def _draw_damage(generator: torch.Generator, size: int, m: int) -> Damage:
    """About one spoilt answer in eight, all in the second half of the rows."""

    def draw(low: int, high: int) -> Tensor:
        return torch.randint(low, high, (max(1, size * m // 8),), generator=generator)

    layer, row, position, donor = draw(0, 2), draw(size // 2, size), draw(0, 2 * m), draw(0, 2 * m)
    position = torch.where(layer == 1, position + 1, position)
    kind = draw(0, 4)  # K, V, both zeroed; both from the donor
    donor = torch.where((kind == 3) & (donor != position), donor, -1)
    return Damage(layer, row, position, donor, kind != 1, kind != 0)


def _draw_lists(generator: torch.Generator, size: int, n: int) -> Tensor:
    return torch.rand(size, ALPHABET, generator=generator).argsort(dim=1)[:, :n]


def write_recall(
    directory: Path, model: Any, settings: Settings, losses: Sequence[float], per_length: int = 400
) -> None:
    """Write a trained model as a checkpoint directory. Unlike random ones it is not rebuilt to the bit.

    Its accuracy is measured on `per_length` held-out lists of each length, and stated.
    """
    import transformers

    accuracy = measure_lists(model, per_length)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=BOS, eos_token_id=[EOS], pad_token_id=EOS, do_sample=False
    )
    facts = {
        "kind": "recall",
        "dtypes": ["float32", "bfloat16"],
        "training": asdict(settings),
        "final_loss": sum(losses[-100:]) / len(losses[-100:]),
        "accuracy": {"seed": HELD_OUT, "lists": per_length, **accuracy},
    }
    write_checkpoint(directory, NAME, SUMMARY, model, make_recall_tokenizer(), facts)


def _column(token: int, size: int) -> Tensor:
    return torch.full((size, 1), token)


def _schedule(step: int, settings: Settings) -> float:
    if step < settings.warm_up:
        return (step + 1) / settings.warm_up
    return 0.5 * (
        1 + math.cos(math.pi * (step - settings.warm_up) / max(1, settings.steps - settings.warm_up))
    )


def _loss(model: Any, batch: Batch, margin: float) -> Tensor:
    with nullcontext() if batch.damage is None else damaged(model.model.layers, batch.damage):
        logits = model(batch.tokens[:, :-1], use_cache=False).logits
    asked = batch.targets >= 0
    logits, targets = logits[asked], batch.targets[asked]
    handicap = functional.one_hot(targets, logits.shape[-1]) * margin
    return functional.cross_entropy(logits - handicap, targets)


@contextmanager
def damaged(layers: Any, damage: Damage) -> Iterator[None]:
    """Within the context the k and v projections of decoder layers return spoilt entries."""

    def hook(chosen: Tensor) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        row, position, donor = damage.row[chosen], damage.position[chosen], damage.donor[chosen]

        def replace(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:  # noqa: ARG001  torch's signature
            new = output[row, donor.clamp(min=0)] * (donor >= 0)[:, None]
            return output.index_put((row, position), new)

        return replace

    handles = []
    for i, block in enumerate(layers):
        here = damage.layer == i
        handles.append(block.self_attn.k_proj.register_forward_hook(hook(here & damage.k)))
        handles.append(block.self_attn.v_proj.register_forward_hook(hook(here & damage.v)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
