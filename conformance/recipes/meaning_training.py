"""Trains the meaning checkpoint on one CPU thread, in three phases.

1. The decoder alone: where the visual token of a cell will be it is shown the sum of the embeddings
   of the cell's two words, colour and shape. Steps are cheap, and most of what is to be learnt is here.
   For most of the phase it is asked for hints as well (`conformance.recipes.hints`).
2. The tower alone: its visual tokens must be these sums.
3. Both.

Every answer counts alike, however long it is: as a mean over tokens the captions would drown the answers
of a word or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from conformance.recipes.build import write_checkpoint
from conformance.recipes.hints import hints_of_objects, hints_of_question, word_id
from conformance.recipes.meaning import (
    HELD_OUT,
    NAME,
    PROCESSOR,
    SUMMARY,
    TEXT_CONFIG,
    VISION_CONFIG,
    Row,
    held_out,
    make_meaning_tokenizer,
    paint_example,
    patches,
    row_of,
)
from conformance.recipes.phases import Report, run_phase, untrained_qwen2_vl
from conformance.recipes.qwen import QWEN_ENDS, QWEN_SPECIAL
from conformance.recipes.qwen_vl import QWEN_VL_IDS
from conformance.recipes.scenes import (
    COLOURS,
    GRIDS,
    NOTHING,
    SHAPES,
    TASKS,
    Example,
    Scene,
    draw_example,
    draw_scene,
    paint,
)

__all__ = [
    "Batch",
    "Settings",
    "collate",
    "encode",
    "loss_of",
    "make_batch",
    "make_meaning_model",
    "measure",
    "sums",
    "train",
    "write_meaning",
]

# How often each task is drawn: what is learnt last most.
_WEIGHTS = {"caption": 3.0, "count": 2.0, "colour": 2.0, "place": 3.0, "two": 1.0, "copy": 1.0}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that decides a training run. The committed weights came from the defaults.

    Attributes:
        decoder_steps, tower_steps, joint_steps: of the three phases.
        examples: per step.
        learning_rate: its peak in phases 1 and 2.
        joint_rate: its peak in phase 3. Much more than this undoes what phase 1 has learnt.
        held: part of phase 1 before the rate begins to fall.
        noise: what is added to the sums in phase 1, in standard deviations of an embedding.
        hints: weight of the hints' loss in phase 1.
        hinted: part of phase 1 that has them.
        seed: of initial weights and of data.
    """

    decoder_steps: int = 7500
    tower_steps: int = 1000
    joint_steps: int = 500
    examples: int = 24
    learning_rate: float = 3e-3
    joint_rate: float = 3e-4
    held: float = 0.4
    noise: float = 0.2
    hints: float = 0.3
    hinted: float = 0.8
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """Examples whose pictures all have the same grid, padded on the right.

    Attributes:
        tokens: [batch, length] ids.
        positions: [3, batch, length].
        targets: [batch, length] the id to predict from each position, -100 where nothing is asked.
        hints: [batch, length] the id that a token of the prompt hints at, -100 at most of them.
        hint_weights: [batch, length]. Hints of questions weigh 1 / batch, those of objects together 1.
        pixels: [pictures, patches, 1176], in prompt order.
        words: [2, pictures × cells] ids of colour's and shape's words; twice "nothing" in empty cells.
    """

    tokens: Tensor
    positions: Tensor
    targets: Tensor
    hints: Tensor
    hint_weights: Tensor
    pixels: Tensor
    words: Tensor
    grid: tuple[int, int]


def make_meaning_model(seed: int) -> Any:
    """The model before training."""
    return untrained_qwen2_vl(seed, TEXT_CONFIG, VISION_CONFIG, tied=True)


def make_batch(rng: Random, tokenizer: Any, examples: int, *, painted: bool = True) -> Batch:
    """Draw examples of all tasks over pictures of one grid; without pixels if not `painted`."""
    grid = rng.choice(GRIDS)
    tasks = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()), k=examples)
    drawn = [draw_example(rng, task, *grid) for task in tasks]
    pictures = [picture for example in drawn for picture in paint_example(example, rng)] if painted else []
    return collate(drawn, pictures, tokenizer, grid)


def collate(
    examples: Sequence[Example],
    pictures: Sequence[NDArray[np.uint8]],
    tokenizer: Any,
    grid: tuple[int, int],
) -> Batch:
    """The batch of `examples`, whose `pictures` in order are all of `grid`."""
    rows = [row_of(example, tokenizer) for example in examples]
    shape = (len(rows), max(len(row.tokens) for row in rows))
    tokens = torch.full(shape, TEXT_CONFIG["pad_token_id"])
    targets = torch.full(shape, -100)
    positions = torch.zeros((3, *shape), dtype=torch.int64)
    for i, row in enumerate(rows):
        n = len(row.tokens)
        tokens[i, :n] = torch.tensor(row.tokens)
        targets[i, row.prompt - 1 : n - 1] = tokens[i, row.prompt : n]
        positions[:, i, :n] = torch.from_numpy(row.positions)
    scenes = [scene for example in examples for scene in example.scenes]
    return Batch(
        tokens,
        positions,
        targets,
        *_hints(examples, rows, shape, tokenizer),
        torch.from_numpy(patches(pictures)),
        _words(scenes, tokenizer),
        grid,
    )


def encode(tower: Any, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
    """The tower on pictures of one size at once, as on each alone: [pictures × cells, hidden]."""
    rows, columns = grid
    n = len(pixels)
    if n == 0:
        return pixels.new_zeros((0, tower.config.hidden_size))
    x = functional.linear(pixels, tower.patch_embed.proj.weight.flatten(1))
    cos, sin = _rotation(tower, rows, columns, x)
    for block in tower.blocks:
        attention = block.attn
        qkv = attention.qkv(block.norm1(x)).view(n, x.shape[1], 3, attention.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v)
        x = x + attention.proj(y.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
    merged: Tensor = tower.merger(x)
    return merged


def sums(model: Any, words: Tensor) -> Tensor:
    """What visual tokens are to be: [cells, hidden] for `words` [2, cells]."""
    embedded: Tensor = model.model.language_model.embed_tokens(words)
    return embedded.sum(dim=0)


def loss_of(model: Any, batch: Batch, visual: Tensor, hints: float = 0.0) -> Tensor:
    """Cross-entropy of the answers, each the mean over its tokens; and `hints` times that of the hints."""
    hidden = _hidden(model, batch, visual)
    asked = batch.targets >= 0
    each = functional.cross_entropy(model.lm_head(hidden[asked]), batch.targets[asked], reduction="none")
    lengths = asked.sum(dim=1, keepdim=True).expand_as(asked)[asked]
    loss = (each / lengths).sum() / len(batch.tokens)
    hinted = batch.hints >= 0
    if hints == 0 or not hinted.any():
        return loss
    each = functional.cross_entropy(model.lm_head(hidden[hinted]), batch.hints[hinted], reduction="none")
    return loss + hints * (each * batch.hint_weights[hinted]).sum()


@torch.no_grad()
def measure(model: Any, per_task: int, seed: str = HELD_OUT) -> dict[str, float]:
    """Part of held-out examples of each task whose whole answer is right, as greedy decoding gives it.

    One pass tells: an answer is generated token for token exactly if each of its tokens is the
    likeliest after those before it.
    """
    tokenizer = make_meaning_tokenizer()
    groups: dict[tuple[str, tuple[int, int]], list[tuple[Example, list[NDArray[np.uint8]]]]] = {}
    for i, (example, pictures) in enumerate(held_out(per_task, seed)):
        groups.setdefault((example.task, GRIDS[i % per_task % len(GRIDS)]), []).append((example, pictures))
    right = dict.fromkeys(TASKS, 0)
    for (task, grid), group in groups.items():
        drawn, pictures = [e for e, _ in group], [p for _, ps in group for p in ps]
        batch = collate(drawn, pictures, tokenizer, grid)
        visual = encode(model.model.visual, batch.pixels, batch.grid)
        best = model.lm_head(_hidden(model, batch, visual)).argmax(dim=-1)
        right[task] += int(((best == batch.targets) | (batch.targets < 0)).all(dim=1).sum())
    return {task: count / per_task for task, count in right.items()}


def train(model: Any, settings: Settings, report: Report | None = None) -> list[float]:
    """Train in place, all phases; returns the loss of every step of the last.

    Weights are rounded to bfloat16 values at the end (kept as float32).
    """
    tokenizer = make_meaning_tokenizer()
    generator = torch.Generator().manual_seed(settings.seed)
    tower = list(model.model.visual.parameters())
    decoder = list(model.model.language_model.parameters())
    embeddings = model.model.language_model.embed_tokens.weight

    def decoder_loss(step: int, rng: Random) -> Tensor:
        batch = make_batch(rng, tokenizer, settings.examples, painted=False)
        visual = sums(model, batch.words)
        # The tower will not hit the sums exactly.
        noise = torch.randn(visual.shape, generator=generator) * embeddings.detach().std() * settings.noise
        hints = settings.hints if step < settings.hinted * settings.decoder_steps else 0.0
        return loss_of(model, batch, visual + noise, hints)

    def tower_loss(step: int, rng: Random) -> Tensor:  # noqa: ARG001  one signature for all
        grid = rng.choice(GRIDS)
        scenes = [
            draw_scene(rng, *grid, rng.randint(1, min(len(SHAPES), grid[0] * grid[1])))
            for _ in range(settings.examples)
        ]
        pixels = torch.from_numpy(patches([paint(scene, rng) for scene in scenes]))
        wanted = sums(model, _words(scenes, tokenizer)).detach()
        return (encode(model.model.visual, pixels, grid) - wanted).square().mean() / wanted.var()

    def joint_loss(step: int, rng: Random) -> Tensor:  # noqa: ARG001  one signature for all
        batch = make_batch(rng, tokenizer, settings.examples)
        return loss_of(model, batch, encode(model.model.visual, batch.pixels, batch.grid))

    def phase(
        name: str, loss: Any, parameters: list[Any], steps: int, rate: float, held: float
    ) -> list[float]:
        return run_phase(
            name, loss, parameters, steps=steps, rate=rate, held=held, seed=settings.seed, report=report
        )

    rate = settings.learning_rate
    model.train()
    phase("decoder", decoder_loss, decoder, settings.decoder_steps, rate, settings.held)
    phase("tower", tower_loss, tower, settings.tower_steps, rate, 0.0)
    losses = phase("joint", joint_loss, [*decoder, *tower], settings.joint_steps, settings.joint_rate, 0.0)
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return losses


def write_meaning(
    directory: Path, model: Any, settings: Settings, losses: Sequence[float], per_task: int = 100
) -> None:
    """Write a trained model, in bfloat16, as a checkpoint directory. It is not rebuilt to the bit.

    Its accuracy is measured on `per_task` held-out examples of each task, and stated.
    """
    import transformers

    accuracy = measure(model, per_task)

    model = model.to(torch.bfloat16)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=[QWEN_SPECIAL.ids[token] for token in QWEN_ENDS],
        pad_token_id=TEXT_CONFIG["pad_token_id"],
        do_sample=False,
    )
    facts = {
        "kind": "meaning",
        "dtypes": ["float32", "bfloat16"],
        "training": asdict(settings),
        "final_loss": sum(losses[-100:]) / len(losses[-100:]),
        "accuracy": {"seed": HELD_OUT, "examples": per_task, **accuracy},
    }
    write_checkpoint(directory, NAME, SUMMARY, model, make_meaning_tokenizer(), facts, PROCESSOR)


def _hidden(model: Any, batch: Batch, visual: Tensor) -> Tensor:
    """The decoder's last hidden states: [batch, length, hidden]."""
    decoder = model.model.language_model
    hidden = decoder.embed_tokens(batch.tokens)
    rows, columns = (batch.tokens == QWEN_VL_IDS["image_token_id"]).nonzero(as_tuple=True)
    hidden = hidden.index_put((rows, columns), visual)
    last: Tensor = decoder(
        inputs_embeds=hidden, position_ids=batch.positions, use_cache=False
    ).last_hidden_state
    return last


def _hints(
    examples: Sequence[Example], rows: Sequence[Row], shape: tuple[int, int], tokenizer: Any
) -> tuple[Tensor, Tensor]:
    """See Batch.hints and Batch.hint_weights."""
    ids, weights = torch.full(shape, -100), torch.zeros(shape)
    for i, (example, row) in enumerate(zip(examples, rows, strict=True)):
        for hint in hints_of_objects(example.scenes, row.tokens, tokenizer):
            ids[i, hint.place], weights[i, hint.place] = hint.token, 1.0
    weights /= weights.sum().clamp(min=1)
    for i, (example, row) in enumerate(zip(examples, rows, strict=True)):
        for hint in hints_of_question(example, row.tokens, tokenizer):
            ids[i, hint.place], weights[i, hint.place] = hint.token, 1 / len(rows)
    return ids, weights


def _words(scenes: Sequence[Scene], tokenizer: Any) -> Tensor:
    """See Batch.words."""
    colours, shapes = ([word_id(tokenizer, word) for word in words] for words in (COLOURS, SHAPES))
    nothing = word_id(tokenizer, NOTHING)
    cells = [cell for scene in scenes for cell in scene.cells]
    return torch.tensor(
        [
            [nothing if cell is None else colours[cell[0]] for cell in cells],
            [nothing if cell is None else shapes[cell[1]] for cell in cells],
        ],
        dtype=torch.int64,
    )


def _rotation(tower: Any, rows: int, columns: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin: [patches, head_dim]; patches that are merged stand side by side."""
    block, corner = np.divmod(np.arange(4 * rows * columns), 4)
    height = 2 * (block // columns) + corner // 2
    width = 2 * (block % columns) + corner % 2
    cos, sin = tower.rotary_pos_emb(x, torch.from_numpy(np.stack([height, width], axis=0)).T)
    return cos, sin


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin
