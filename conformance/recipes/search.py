"""Looks for the seed whose greedy continuations are furthest from a tie and least repetitive.

Run once per recipe; the winner is written into the recipe by hand. The prompts here choose the
seed, so margins on them flatter: tests measure on other prompts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from conformance.hf_processors import load_processor
from conformance.recipes.build import MECHANICS, make_model, make_tokenizer
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
def greedy(
    model: Any, prompt_ids: Sequence[int], max_tokens: int, **media: Tensor
) -> tuple[list[int], list[float]]:
    """Greedy ids and the margin (top-1 minus top-2 logit) of each; does not stop at EOS."""
    out = model.generate(
        input_ids=torch.tensor([list(prompt_ids)]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
        **media,
    )
    top = torch.stack([row[0].float() for row in out.logits]).topk(2).values
    return out.sequences[0, len(prompt_ids) :].tolist(), (top[:, 0] - top[:, 1]).tolist()


def score(recipe: MechanicsRecipe, seed: int, max_tokens: int = 32) -> Score:
    """How good one seed is on SEARCH_PROMPTS, for models with eyes also on chats about pictures."""
    model, tokenizer = make_model(recipe, seed), make_tokenizer(recipe)
    text_model = model if recipe.vision is None or recipe.chat_template else model.language_model
    runs = [greedy(text_model, tokenizer.encode(prompt), max_tokens) for prompt in SEARCH_PROMPTS]
    if recipe.vision is not None:
        for inputs in _picture_prompts(recipe.name):
            media = {k: v for k, v in inputs.items() if k not in ("input_ids", "attention_mask")}
            runs.append(greedy(model, inputs["input_ids"][0].tolist(), max_tokens, **media))
    distinct = tuple(len(set(ids)) for ids, _ in runs)
    return Score(min(16, *distinct), min(min(margins) for _, margins in runs), distinct, seed)


def search(recipe: MechanicsRecipe, seeds: Iterable[int]) -> list[Score]:
    """Scores of `seeds`, best first."""
    return sorted((score(recipe, seed) for seed in seeds), reverse=True)


@lru_cache(maxsize=4)
def _picture_prompts(name: str) -> tuple[Mapping[str, Tensor], ...]:
    """Inputs of the model `name`: one picture, the other, and both in both orders where they may be two."""
    recipe = MECHANICS[name]
    assert recipe.vision is not None
    with TemporaryDirectory() as place:
        directory = Path(place)
        make_tokenizer(recipe).save_pretrained(directory)
        (directory / "processor_config.json").write_text(json.dumps(recipe.vision.processor))
        processor = load_processor(directory)
    one, other = _picture(112, 84), _picture(84, 120)
    if recipe.chat_template is None:
        return tuple(processor(images=[x], text=["What is this?"], return_tensors="pt") for x in (one, other))
    prompts = []
    for pictures in ([one], [other], [one, other], [other, one]):
        # A word between two pictures: some families need one.
        parts = [part for _ in pictures for part in ({"type": "image"}, {"type": "text", "text": " and "})]
        chat = [{"role": "user", "content": [*parts[:-1], {"type": "text", "text": "What is this?"}]}]
        text = processor.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        prompts.append(processor(images=[pictures], text=[text], return_tensors="pt"))
    return tuple(prompts)


def _picture(width: int, height: int) -> Image.Image:
    """A picture that no rotation, mirror or swap of channels leaves as it is."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    channels = (x * y, np.sin(9 * x + 2) ** 2 * y, (x - y * y) ** 2)
    return Image.fromarray((255 * np.stack(channels, axis=-1)).astype(np.uint8))
