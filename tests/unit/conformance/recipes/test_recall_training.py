"""Training batches ask what the docstrings say, and a few steps make the loss fall."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from conformance.recipes.recall import AGAIN, BOS, EOS, LOST, SEP, answer_ids, prompt_ids, word_id
from conformance.recipes.recall_training import (
    HELD_OUT,
    Batch,
    Settings,
    make_batch,
    make_recall_model,
    train,
    write_recall,
)

SHORT = Settings(
    steps=120,
    warm_up=10,
    grow_from=0,
    grow_until=1,
    faults_from=100,
    longest=3,
    tokens=200,
    learning_rate=1e-2,
)


def batches(*, faults: bool, count: int = 30) -> list[tuple[Batch, int]]:
    """(batch, period) pairs; the period is one more than the words per list."""
    generator = torch.Generator().manual_seed(0)
    drawn = [make_batch(generator, longest=6, tokens=300, faults=faults) for _ in range(count)]
    return [(batch, (batch.tokens.shape[1] - 3) // 3) for batch in drawn]


def test_related_rows_are_prompt_and_answer() -> None:
    found = 0
    for batch, m in batches(faults=False):
        for row in batch.tokens.tolist():
            words = [t - word_id(0, 0) for t in row[1:m]]
            if row[m + 1 : 2 * m] == [word_id(1, w) for w in words]:
                assert row == [*prompt_ids(words), *answer_ids(words), EOS, EOS]
                found += 1
    assert found > 50


def test_unrelated_rows_ask_for_the_second_list_only_in_the_third() -> None:
    found = 0
    for batch, m in batches(faults=False):
        for row, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
            said = [t - word_id(1, 0) for t in row[m + 1 : 2 * m]]
            assert [row[0], row[m], row[2 * m]] == [BOS, SEP, AGAIN]
            assert row[2 * m + 1 :] == [*(word_id(2, w) for w in said), EOS, EOS, EOS]
            assert targets[:m] == [-100] * m
            assert targets[2 * m :] == row[2 * m + 1 :]
            related = said == [t - word_id(0, 0) for t in row[1:m]]
            assert related or targets[m : 2 * m] == [-100] * m
            found += not related
    assert found > 50


def test_a_damaged_entry_makes_its_answer_lost_and_no_other() -> None:
    for batch, m in batches(faults=True):
        damage = batch.damage
        assert damage is not None
        due = {
            (row, position + m + (layer == 0) - 1)
            for row, position, layer in zip(
                damage.row.tolist(), damage.position.tolist(), damage.layer.tolist(), strict=True
            )
        }
        lost = {(r, c) for r, c in (batch.targets == LOST).nonzero().tolist()}
        assert lost <= due
        # What is due and not asked lies in an unrelated second list, which nobody could foretell.
        for row, column in due - lost:
            assert batch.targets[row, column] == -100
            assert m <= column < 2 * m


def test_first_rows_are_never_damaged() -> None:
    for batch, _ in batches(faults=True):
        assert batch.damage is not None
        assert int(batch.damage.row.min()) >= len(batch.tokens) // 2


def test_all_kinds_of_damage_occur() -> None:
    kinds = set()
    for batch, _ in batches(faults=True):
        assert batch.damage is not None
        kinds |= set(
            zip(
                batch.damage.layer.tolist(),
                batch.damage.k.tolist(),
                batch.damage.v.tolist(),
                (batch.damage.donor >= 0).tolist(),
                strict=True,
            )
        )
    shapes = {(True, False, False), (False, True, False), (True, True, False), (True, True, True)}
    assert kinds == {(layer, *shape) for layer in (0, 1) for shape in shapes}


def test_a_few_steps_make_the_loss_fall_and_leave_bfloat16_values(tmp_path: Path) -> None:
    model, reported = make_recall_model(0), []
    losses = train(model, SHORT, lambda step, _: reported.append(step))
    assert len(losses) == SHORT.steps
    assert reported == [100]
    before_faults = losses[: SHORT.faults_from]
    assert sum(before_faults[-10:]) < 0.7 * sum(before_faults[:10])
    # Then the margin is asked for and entries are damaged: a harder task.
    assert losses[SHORT.faults_from] > losses[SHORT.faults_from - 1]
    assert all(torch.equal(p, p.bfloat16().float()) for p in model.parameters())

    write_recall(tmp_path, model, SHORT, losses, per_length=4)
    loaded = dict(AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert all(torch.equal(p, loaded[name]) for name, p in model.named_parameters())
    facts = json.loads((tmp_path / "RECIPE.json").read_text(encoding="utf-8"))
    assert facts["training"]["longest"] == 3
    assert facts["accuracy"] == {"seed": HELD_OUT, "lists": 4, "2": 0.0, "8": 0.0, "32": 0.0, "62": 0.0}
    assert facts["final_loss"] == pytest.approx(sum(losses[-100:]) / 100)


def test_training_is_a_function_of_the_seed() -> None:
    settings = Settings(steps=3, longest=3, tokens=60)
    one, other, third = make_recall_model(0), make_recall_model(0), make_recall_model(1)
    assert train(one, settings) == train(other, settings)
    assert train(third, settings) != train(make_recall_model(0), settings)
