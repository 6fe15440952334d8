"""The seed search scores by what the suite needs."""

from __future__ import annotations

from dataclasses import replace

import torch

from conformance.recipes import search as module
from conformance.recipes.build import MECHANICS, make_model
from conformance.recipes.search import Score, greedy, score, search


def test_greedy_ids_are_the_argmax_of_a_full_forward_and_margins_its_gaps() -> None:
    model = make_model(MECHANICS["tiny-llama"])
    ids, margins = greedy(model, [440, 71, 80, 90], 6)
    with torch.no_grad():
        logits = model(torch.tensor([[440, 71, 80, 90, *ids]])).logits[0, 3:-1]
    top = logits.topk(2).values
    assert ids == logits.argmax(-1).tolist()
    torch.testing.assert_close(torch.tensor(margins), top[:, 0] - top[:, 1], atol=1e-3, rtol=0)


def test_variety_counts_before_margin_and_only_up_to_16() -> None:
    dull = Score(3, 1.0, (3,), 0)
    near_tie = Score(16, 0.01, (30,), 1)
    better = Score(16, 0.02, (16,), 2)
    assert sorted([dull, near_tie, better], reverse=True) == [better, near_tie, dull]


def test_score_takes_the_worst_prompt() -> None:
    recipe = MECHANICS["tiny-llama"]
    found = score(recipe, recipe.seed, max_tokens=4)
    assert len(found.distinct) == len(module.SEARCH_PROMPTS)
    assert found.variety == min(found.distinct)
    assert found.seed == recipe.seed
    assert found.min_margin > 0


def test_search_returns_the_best_first() -> None:
    recipe = replace(MECHANICS["tiny-llama"], seed=99)
    results = search(recipe, [0, 1])
    assert {r.seed for r in results} == {0, 1}
    assert results[0] > results[1]


def test_models_with_eyes_are_scored_on_pictures_too() -> None:
    recipe = MECHANICS["tiny-smolvlm"]
    found = score(recipe, recipe.seed, max_tokens=2)
    assert len(found.distinct) == len(module.SEARCH_PROMPTS) + 4  # two pictures, alone and in both orders


def test_blip2_gets_one_picture_a_prompt_and_text_without_any() -> None:
    recipe = MECHANICS["tiny-blip2"]
    found = score(recipe, recipe.seed, max_tokens=2)
    assert len(found.distinct) == len(module.SEARCH_PROMPTS) + 2
