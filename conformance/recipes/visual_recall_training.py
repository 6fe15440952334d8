"""Trains the visual recall checkpoint on one CPU thread, in three phases.

1. The decoder alone, shown the embedding of each cell's word where the visual token will be.
2. The tower alone: its visual tokens must be these embeddings.
3. Both, with a margin, and with spoilt KV entries whose words must be answered by ` lost`
   (`recall_training` says why; half of the sequences have some from the middle of phase 1 on).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from conformance.recipes.build import write_checkpoint
from conformance.recipes.meaning import patches, row_of
from conformance.recipes.meaning_training import encode
from conformance.recipes.phases import Report, run_phase, untrained_qwen2_vl
from conformance.recipes.qwen import QWEN_ENDS, QWEN_SPECIAL
from conformance.recipes.qwen_vl import QWEN_VL_IDS
from conformance.recipes.recall_training import Damage, damaged
from conformance.recipes.scenes import Example, Scene, paint
from conformance.recipes.visual_recall import (
    COLUMNS,
    LAYERS,
    LOST,
    NAME,
    PROCESSOR,
    QUESTION,
    ROWS,
    SUMMARY,
    TEXT_CONFIG,
    VISION_CONFIG,
    answer,
    draw_grid,
    make_visual_recall_tokenizer,
)

__all__ = [
    "HELD_OUT",
    "GridBatch",
    "GridSettings",
    "make_grid_batch",
    "make_visual_recall_model",
    "measure_grids",
    "train_visual_recall",
    "write_visual_recall",
]

#: Seed of the grids that accuracy is measured on.
HELD_OUT = "held out for accuracy"


@dataclass(frozen=True, kw_only=True)
class GridSettings:
    """Everything that decides a training run. The committed weights came from the defaults.

    Attributes:
        decoder_steps, tower_steps, joint_steps: of the three phases.
        faults_from: part of the first phase after which the margin is asked for, and half of the
            sequences have spoilt entries.
        learning_rate: its peak in phases 1 and 2; a quarter of it in phase 3.
        grids: pictures per step.
        margin: nats by which the right logit must lead before the loss counts it as right.
        noise: what is added to the embeddings in phase 1, in standard deviations of an embedding.
        seed: of initial weights and of data.
    """

    decoder_steps: int = 6000
    tower_steps: int = 1000
    joint_steps: int = 1500
    faults_from: float = 0.4
    learning_rate: float = 3e-3
    grids: int = 20
    margin: float = 12.0
    noise: float = 0.1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class GridBatch:
    """Grids of equally many rows.

    Attributes:
        tokens: [batch, length] ids of prompt, answer and end.
        positions: [3, batch, length].
        targets: [batch, length] the id to predict from each position, -100 where nothing is asked.
        words: [batch, cells] the id of each cell's word.
        first: column of the first visual token.
    """

    scenes: tuple[Scene, ...]
    tokens: Tensor
    positions: Tensor
    targets: Tensor
    words: Tensor
    first: int
    damage: Damage | None


def make_visual_recall_model(seed: int) -> Any:
    """The model before training."""
    return untrained_qwen2_vl(seed, TEXT_CONFIG, VISION_CONFIG, tied=False)


def make_grid_batch(rng: Random, tokenizer: Any, grids: int, *, faults: bool) -> GridBatch:
    """Draw `grids` grids of equally many rows, and for half of them what to spoil."""
    rows = rng.randint(*ROWS)
    batch = _collate(tuple(draw_grid(rng, rows) for _ in range(grids)), tokenizer)
    if not faults:
        return batch
    damage = _draw_damage(rng, grids, batch.first, rows * COLUMNS)
    [lost] = tokenizer.encode(LOST, add_special_tokens=False)
    start = batch.tokens.shape[1] - rows * COLUMNS - 1
    _expect_lost(batch.targets, damage, start - batch.first, lost)
    return replace(batch, damage=damage)


def _collate(scenes: tuple[Scene, ...], tokenizer: Any) -> GridBatch:
    examples = [Example("read", (scene,), QUESTION, answer(scene)) for scene in scenes]
    drawn = [row_of(example, tokenizer) for example in examples]
    tokens = torch.tensor([row.tokens for row in drawn])
    start, cells = drawn[0].prompt, len(scenes[0].cells)
    words = tokens[:, start : start + cells]
    targets = torch.full_like(tokens, -100)
    targets[:, start - 1 : -1] = tokens[:, start:]
    first = int((tokens[0] == QWEN_VL_IDS["image_token_id"]).nonzero()[0])
    positions = torch.stack([torch.from_numpy(row.positions) for row in drawn], dim=1)
    return GridBatch(scenes, tokens, positions, targets, words, first, None)


@torch.no_grad()
def measure_grids(model: Any, per_size: int, seed: str = HELD_OUT) -> dict[str, float]:
    """Part of held-out grids of each size that are read without a mistake, as greedy decoding would.

    One pass tells, as in `meaning_training.measure`.

    Returns:
        "4x2" (columns × rows) and so on → part of `per_size` grids.
    """
    tokenizer = make_visual_recall_tokenizer()
    right = {}
    for rows in range(ROWS[0], ROWS[1] + 1):
        rng = Random(f"{seed} {rows}")
        batch = _collate(tuple(draw_grid(rng, rows) for _ in range(per_size)), tokenizer)
        asked = batch.targets >= 0
        hit = model.lm_head(_hidden(model, batch, _see(model, batch, rng))).argmax(dim=-1) == batch.targets
        right[f"{COLUMNS}x{rows}"] = int((hit | ~asked).all(dim=1).sum()) / per_size
    return right


def train_visual_recall(model: Any, settings: GridSettings, report: Report | None = None) -> list[float]:
    """Train in place, all phases; returns the loss of every step of the last.

    Weights are rounded to bfloat16 values at the end (kept as float32).
    """
    tokenizer = make_visual_recall_tokenizer()
    generator = torch.Generator().manual_seed(settings.seed)
    tower = list(model.model.visual.parameters())
    decoder = [*model.model.language_model.parameters(), *model.lm_head.parameters()]
    embed = model.model.language_model.embed_tokens

    def decoder_loss(step: int, rng: Random) -> Tensor:
        late = step >= settings.faults_from * settings.decoder_steps
        batch = make_grid_batch(rng, tokenizer, settings.grids, faults=late)
        visual = embed(batch.words)
        # The tower will not hit the embeddings exactly.
        noise = torch.randn(visual.shape, generator=generator) * visual.detach().std() * settings.noise
        return _loss(model, batch, visual + noise, settings.margin if late else 0.0)

    def tower_loss(step: int, rng: Random) -> Tensor:  # noqa: ARG001  one signature for all
        batch = make_grid_batch(rng, tokenizer, settings.grids // 2, faults=False)
        wanted: Tensor = embed(batch.words).detach()
        return (_see(model, batch, rng) - wanted).square().mean() / wanted.var()

    def joint_loss(step: int, rng: Random) -> Tensor:  # noqa: ARG001  one signature for all
        batch = make_grid_batch(rng, tokenizer, settings.grids, faults=True)
        return _loss(model, batch, _see(model, batch, rng), settings.margin)

    def phase(name: str, loss: Any, parameters: list[Any], steps: int, rate: float) -> list[float]:
        return run_phase(name, loss, parameters, steps=steps, rate=rate, seed=settings.seed, report=report)

    model.train()
    phase("decoder", decoder_loss, decoder, settings.decoder_steps, settings.learning_rate)
    phase("tower", tower_loss, tower, settings.tower_steps, settings.learning_rate)
    losses = phase("joint", joint_loss, [*decoder, *tower], settings.joint_steps, settings.learning_rate / 4)
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return losses


def write_visual_recall(
    directory: Path, model: Any, settings: GridSettings, losses: Sequence[float], per_size: int = 100
) -> None:
    """Write a trained model, in bfloat16, as a checkpoint directory. It is not rebuilt to the bit.

    Its accuracy is measured on `per_size` held-out grids of each size, and stated. How far from a tie
    the answers are, and what a damaged entry does, are the committed weights' own and tested of them.
    """
    import transformers

    accuracy = measure_grids(model, per_size)

    model = model.to(torch.bfloat16)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[QWEN_SPECIAL.ids[token] for token in QWEN_ENDS],
        pad_token_id=TEXT_CONFIG["pad_token_id"],
        do_sample=False,
    )
    facts = {
        "kind": "recall",
        "dtypes": ["float32", "bfloat16"],
        "training": asdict(settings),
        "final_loss": sum(losses[-100:]) / len(losses[-100:]),
        "accuracy": {"seed": HELD_OUT, "grids": per_size, **accuracy},
    }
    write_checkpoint(directory, NAME, SUMMARY, model, make_visual_recall_tokenizer(), facts, PROCESSOR)


def _see(model: Any, batch: GridBatch, rng: Random) -> Tensor:
    """Visual tokens of the batch's pictures: [batch, cells, hidden]."""
    pixels = torch.from_numpy(patches([paint(scene, rng) for scene in batch.scenes]))
    visual = encode(model.model.visual, pixels, (batch.scenes[0].rows, COLUMNS))
    return visual.view(*batch.words.shape, -1)


def _draw_damage(rng: Random, grids: int, first: int, cells: int) -> Damage:
    """About one spoilt entry in eight, all in the second half of the sequences."""
    entries = []
    for _ in range(max(1, grids * cells // 8)):
        kind = rng.randrange(4)  # K, V, both zeroed; both from the donor
        position, donor = (first + rng.randrange(cells) for _ in range(2))
        if kind != 3 or donor == position:
            donor = -1
        row = rng.randrange(grids // 2, grids)
        entries.append((rng.randrange(LAYERS), row, position, donor, kind != 1, kind != 0))
    return Damage(*(torch.tensor(column) for column in zip(*entries, strict=True)))


def _expect_lost(targets: Tensor, damage: Damage, ahead: int, lost: int) -> None:
    # `ahead`: from a visual token to its word. Layer 0 at p feeds the key of p + 1, whose word comes
    # after p's; layer 1 at p feeds p's own word. The id to predict stands one column to the left.
    first = damage.layer == 0
    swapped = first & (damage.donor >= 0)
    # p + 1 now also claims to follow the donor: two answers to one question, ask neither.
    targets[damage.row[swapped], damage.donor[swapped] + ahead] = -100
    targets[damage.row, damage.position + ahead - torch.where(first, 0, 1)] = lost


def _loss(model: Any, batch: GridBatch, visual: Tensor, margin: float) -> Tensor:
    asked = batch.targets >= 0
    logits, targets = model.lm_head(_hidden(model, batch, visual)[asked]), batch.targets[asked]
    handicap = functional.one_hot(targets, logits.shape[-1]) * margin
    return functional.cross_entropy(logits - handicap, targets)


def _hidden(model: Any, batch: GridBatch, visual: Tensor) -> Tensor:
    """The decoder's last hidden states, [batch, length, hidden], with the batch's damage done."""
    decoder = model.model.language_model
    embedded = decoder.embed_tokens(batch.tokens)
    before, after = embedded[:, : batch.first], embedded[:, batch.first + batch.words.shape[1] :]
    embedded = torch.cat([before, visual, after], dim=1)
    with nullcontext() if batch.damage is None else damaged(decoder.layers, batch.damage):
        last: Tensor = decoder(
            inputs_embeds=embedded, position_ids=batch.positions, use_cache=False
        ).last_hidden_state
    return last
