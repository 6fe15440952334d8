"""The tower in batches is the genuine one, batches ask what the docstrings say, and training learns."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from torch.nn import functional

from conformance.recipes.meaning import make_meaning_tokenizer, patches, row_of
from conformance.recipes.meaning_training import (
    Batch,
    Settings,
    collate,
    encode,
    loss_of,
    make_batch,
    make_meaning_model,
    measure,
    sums,
    train,
    write_meaning,
)
from conformance.recipes.qwen_vl import QWEN_VL_IDS
from conformance.recipes.scenes import GRIDS, TASKS, draw_example, draw_scene, paint

SHORT = Settings(decoder_steps=6, tower_steps=30, joint_steps=3, examples=4)


def genuine_logits(model: Any, batch: Batch) -> torch.Tensor:
    """Transformers' own forward of a batch: [batch, length, vocabulary]."""
    grids = torch.tensor([[1, 2 * batch.grid[0], 2 * batch.grid[1]]] * len(batch.pixels))
    logits: torch.Tensor = model(
        input_ids=batch.tokens,
        position_ids=batch.positions,
        pixel_values=batch.pixels.flatten(0, 1),
        image_grid_thw=grids,
        mm_token_type_ids=(batch.tokens == QWEN_VL_IDS["image_token_id"]).int(),
    ).logits
    return logits


@pytest.mark.parametrize("grid", GRIDS)
def test_many_pictures_at_once_are_encoded_as_each_alone_by_transformers(grid: tuple[int, int]) -> None:
    tower, rng = make_meaning_model(0).model.visual, Random("encode")
    pixels = torch.from_numpy(patches([paint(draw_scene(rng, *grid, 3), rng) for _ in range(3)]))
    grids = torch.tensor([[1, 2 * grid[0], 2 * grid[1]]])
    with torch.no_grad():
        genuine = torch.cat([tower(one, grid_thw=grids).pooler_output for one in pixels])
        torch.testing.assert_close(encode(tower, pixels, grid), genuine, atol=1e-5, rtol=1e-5)
        assert encode(tower, pixels[:0], grid).shape == (0, genuine.shape[1])


def test_a_batch_asks_for_the_answers_and_for_nothing_else() -> None:
    tokenizer = make_meaning_tokenizer()
    examples = [draw_example(Random(task), task, 2, 3) for task in TASKS]
    batch = collate(examples, [], tokenizer, (2, 3))
    for i, example in enumerate(examples):
        row = row_of(example, tokenizer)
        n, asked = len(row.tokens), batch.targets[i] >= 0
        assert batch.tokens[i, :n].tolist() == row.tokens
        assert batch.targets[i, asked].tolist() == row.tokens[row.prompt :]
        assert asked.nonzero().flatten().tolist() == list(range(row.prompt - 1, n - 1))
    cells = [cell for example in examples for scene in example.scenes for cell in scene.cells]
    assert batch.words.shape == (2, len(cells))
    [nothing] = tokenizer.encode(" nothing")
    assert (batch.words == nothing).all(dim=0).tolist() == [cell is None for cell in cells]


def test_the_loss_is_that_of_the_genuine_forward_and_every_answer_counts_alike() -> None:
    model, tokenizer = make_meaning_model(0), make_meaning_tokenizer()
    batch = make_batch(Random(5), tokenizer, 5)
    lengths = (batch.targets >= 0).sum(dim=1)
    assert lengths.min() < lengths.max()
    with torch.no_grad():
        ours = loss_of(model, batch, encode(model.model.visual, batch.pixels, batch.grid))
        logits = genuine_logits(model, batch).transpose(1, 2)
    each = functional.cross_entropy(logits, batch.targets, reduction="none")
    torch.testing.assert_close(ours, (each.sum(dim=1) / lengths).mean(), atol=1e-5, rtol=1e-5)


def test_the_hints_weigh_as_a_batch_says() -> None:
    model, tokenizer = make_meaning_model(0), make_meaning_tokenizer()
    batch = make_batch(Random(5), tokenizer, 5)
    at = batch.hints >= 0
    assert not (at & (batch.targets >= 0)).any()
    with torch.no_grad():
        visual = encode(model.model.visual, batch.pixels, batch.grid)
        added = loss_of(model, batch, visual, 0.5) - loss_of(model, batch, visual)
        logits = genuine_logits(model, batch)
    each = functional.cross_entropy(logits[at], batch.hints[at], reduction="none")
    expected = 0.5 * (each * batch.hint_weights[at]).sum()
    torch.testing.assert_close(added, expected, atol=1e-5, rtol=1e-5)


def test_hints_of_objects_weigh_one_together_and_those_of_questions_one_per_example() -> None:
    tokenizer = make_meaning_tokenizer()
    examples = [draw_example(Random(task), task, 2, 3) for task in ("caption", "colour", "copy")]
    batch = collate(examples, [], tokenizer, (2, 3))
    visual = batch.tokens == QWEN_VL_IDS["image_token_id"]
    assert float(batch.hint_weights[visual].sum()) == pytest.approx(1)
    assert sorted(set(batch.hint_weights[~visual].tolist())) == pytest.approx([0, 1 / 3])
    assert ((batch.hint_weights > 0) == (batch.hints >= 0)).all()
    text_only = collate(examples[2:], [], tokenizer, (2, 3))
    assert (text_only.hints < 0).all()


def test_training_changes_the_loss_and_leaves_bfloat16_values(tmp_path: Path) -> None:
    model = make_meaning_model(0)
    tokenizer = make_meaning_tokenizer()
    batch = make_batch(Random(6), tokenizer, 16)

    def distance() -> float:
        wanted = sums(model, batch.words)
        seen = encode(model.model.visual, batch.pixels, batch.grid)
        return float(((seen - wanted).square().mean() / wanted.var()).detach())

    before = distance()
    losses = train(model, SHORT)
    assert len(losses) == SHORT.joint_steps
    assert distance() < before
    assert all(torch.equal(p, p.bfloat16().float()) for p in model.parameters())
    write_meaning(tmp_path, model, SHORT, losses, per_task=3)
    facts = json.loads((tmp_path / "RECIPE.json").read_text(encoding="utf-8"))
    assert facts["training"]["decoder_steps"] == 6
    assert facts["accuracy"] == {"seed": "held out", "examples": 3, **dict.fromkeys(TASKS, 0.0)}


def test_an_untrained_model_answers_nothing_right() -> None:
    assert measure(make_meaning_model(0), 2) == dict.fromkeys(TASKS, 0.0)
