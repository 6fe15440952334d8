"""Looks for the seed whose greedy continuations are furthest from a tie and least repetitive.

Run once per recipe; the winner is written into the recipe by hand. The prompts here choose the
seed, so margins on them flatter: tests measure on other prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from conformance.recipes.build import make_model, make_tokenizer
from conformance.recipes.recipe import MechanicsRecipe

__all__ = ["SEARCH_PROMPTS", "Score", "greedy", "score", "search"]

SEARCH_PROMPTS: tuple[str, ...] = (
    "Hello, world!",
    "The engine reads the cache before the next step.",
    "1 2 3 4 5",
    "What is the capital of France? Answer in one word.",
    "你好，世界 🌍",
    "def add(a, b):\n    return a + b\n\nprint(add(1, 2))",
)


@dataclass(frozen=True, slots=True, order=True)
class Score:
    """Sorts by the fewest distinct tokens up to 16 of 32, then by the smallest margin."""

    variety: int
    min_margin: float
    distinct: tuple[int, ...]
    seed: int


@torch.no_grad()
def greedy(model: Any, prompt_ids: Sequence[int], max_tokens: int) -> tuple[list[int], list[float]]:
    """Greedy ids and the margin (top-1 minus top-2 logit) of each; does not stop at EOS."""
    out = model.generate(
        torch.tensor([list(prompt_ids)]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    top = torch.stack([row[0].float() for row in out.logits]).topk(2).values
    return out.sequences[0, len(prompt_ids) :].tolist(), (top[:, 0] - top[:, 1]).tolist()


def score(recipe: MechanicsRecipe, seed: int, max_tokens: int = 32) -> Score:
    """How good one seed is on SEARCH_PROMPTS."""
    model, tokenizer = make_model(recipe, seed), make_tokenizer(recipe)
    runs = [greedy(model, tokenizer.encode(prompt), max_tokens) for prompt in SEARCH_PROMPTS]
    distinct = tuple(len(set(ids)) for ids, _ in runs)
    return Score(min(16, *distinct), min(min(margins) for _, margins in runs), distinct, seed)


def search(recipe: MechanicsRecipe, seeds: Iterable[int]) -> list[Score]:
    """Scores of `seeds`, best first."""
    return sorted((score(recipe, seed) for seed in seeds), reverse=True)
