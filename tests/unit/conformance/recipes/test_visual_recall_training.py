"""Batches of grids ask what the docstrings say; training runs through its phases."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import torch

from conformance.recipes.visual_recall import COLUMNS, LOST, answer, make_visual_recall_tokenizer
from conformance.recipes.visual_recall_training import (
    HELD_OUT,
    GridBatch,
    GridSettings,
    make_grid_batch,
    make_visual_recall_model,
    train_visual_recall,
    write_visual_recall,
)

SHORT = GridSettings(decoder_steps=4, tower_steps=3, joint_steps=2, grids=4)
TOKENIZER = make_visual_recall_tokenizer()
[LOST_ID] = TOKENIZER.encode(LOST)


def batches(*, faults: bool, count: int = 12) -> list[GridBatch]:
    rng = Random(0)
    return [make_grid_batch(rng, TOKENIZER, 8, faults=faults) for _ in range(count)]


def test_a_batch_is_prompt_words_and_end() -> None:
    for batch in batches(faults=False):
        cells = batch.scenes[0].rows * COLUMNS
        assert batch.damage is None
        assert batch.tokens[:, batch.first : batch.first + cells].unique().tolist() == [445]
        for scene, row, targets in zip(batch.scenes, batch.tokens, batch.targets, strict=True):
            expected = [*TOKENIZER.encode(answer(scene)), 442]
            assert row[-cells - 1 :].tolist() == expected
            assert targets[targets >= 0].tolist() == expected
            assert int(targets[-1]) == -100


def test_a_damaged_entry_makes_its_word_lost_and_no_other() -> None:
    found = 0
    for batch in batches(faults=True):
        damage = batch.damage
        assert damage is not None
        cells = batch.scenes[0].rows * COLUMNS
        start = batch.tokens.shape[1] - cells - 2  # the column whose target is the first word
        due = {
            (row, start + position - batch.first + (layer == 0))
            for row, position, layer in zip(
                damage.row.tolist(), damage.position.tolist(), damage.layer.tolist(), strict=True
            )
        }
        lost = {(r, c) for r, c in (batch.targets == LOST_ID).nonzero().tolist()}
        assert lost == due
        assert int(damage.row.min()) >= len(batch.tokens) // 2
        assert int(damage.position.min()) >= batch.first
        assert int(damage.position.max()) < batch.first + cells
        found += len(lost)
    assert found > 50


def test_all_kinds_of_damage_occur() -> None:
    kinds = set()
    for batch in batches(faults=True):
        assert batch.damage is not None
        d = batch.damage
        columns = (d.layer.tolist(), d.k.tolist(), d.v.tolist(), (d.donor >= 0).tolist())
        kinds |= set(zip(*columns, strict=True))
    shapes = {(True, False, False), (False, True, False), (True, True, False), (True, True, True)}
    assert kinds == {(layer, *shape) for layer in (0, 1) for shape in shapes}


def test_training_runs_all_phases_and_is_a_function_of_the_seed(tmp_path: Path) -> None:
    model, other = make_visual_recall_model(0), make_visual_recall_model(0)
    losses = train_visual_recall(model, SHORT)
    assert losses == train_visual_recall(other, SHORT)
    assert len(losses) == SHORT.joint_steps
    assert all(torch.equal(p, p.bfloat16().float()) for p in model.parameters())
    write_visual_recall(tmp_path, model, SHORT, losses, per_size=4)
    facts = json.loads((tmp_path / "RECIPE.json").read_text(encoding="utf-8"))
    assert (facts["kind"], facts["training"]["joint_steps"]) == ("recall", 2)
    assert facts["accuracy"] == {"seed": HELD_OUT, "grids": 4, "4x2": 0.0, "4x3": 0.0, "4x4": 0.0, "4x5": 0.0}
