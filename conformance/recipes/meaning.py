"""meaning-qwen2-vl: its shape, tokenizer, prompts, and what a batch of examples becomes as arrays.

Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.recipes.qwen import QWEN_ENDS, QWEN_SPECIAL
from conformance.recipes.qwen_vl import QWEN_VL_IDS, QWEN_VL_TURNS, qwen2_vl_processor
from conformance.recipes.recipe import MAX_POSITIONS
from conformance.recipes.scenes import CELL, GRIDS, TASKS, Example, draw_example, paint, scene_sentences
from conformance.recipes.tokenizer import NUM_BPE_TOKENS, text_tokenizer, wrap

__all__ = [
    "HELD_OUT",
    "NAME",
    "PATCH",
    "PROCESSOR",
    "SUMMARY",
    "TEXT_CONFIG",
    "VISION_CONFIG",
    "Row",
    "held_out",
    "make_meaning_tokenizer",
    "messages",
    "paint_example",
    "patches",
    "row_of",
]

NAME = "meaning-qwen2-vl"
SUMMARY = "trained to tell what a picture shows: caption, count, colour, place, two pictures, copy a text"

#: Seed of the examples that accuracy is measured on.
HELD_OUT = "held out"

#: Pixels per side of a patch; a cell is two by two patches, merged into one visual token.
PATCH = CELL // 2

_HIDDEN = 96

TEXT_CONFIG: Mapping[str, Any] = {
    "vocab_size": NUM_BPE_TOKENS + len(QWEN_SPECIAL.tokens),
    "hidden_size": _HIDDEN,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-5,
    "use_sliding_window": False,
    # Small, so that the slow frequencies, which are the columns', still tell one column from the next. With
    # base 8 and [2, 6, 8] the middle one is told better, but whether captions are learnt hangs on the seed.
    "rope_parameters": {"rope_type": "default", "rope_theta": 12.0, "mrope_section": [4, 6, 6]},
    "bos_token_id": None,
    "eos_token_id": QWEN_SPECIAL.ids[QWEN_ENDS[0]],
    "pad_token_id": QWEN_SPECIAL.ids[QWEN_SPECIAL.pad],
    "attention_dropout": 0.0,
}
VISION_CONFIG: Mapping[str, Any] = {
    "depth": 2,
    "embed_dim": 96,
    "hidden_size": _HIDDEN,
    "mlp_ratio": 2,
    "num_heads": 3,
}
PROCESSOR: Mapping[str, Any] = qwen2_vl_processor()

_PAD = QWEN_VL_IDS["image_token_id"]
_MEAN = np.array(PROCESSOR["image_processor"]["image_mean"], np.float32)
_STD = np.array(PROCESSOR["image_processor"]["image_std"], np.float32)


@dataclass(frozen=True, slots=True)
class Row:
    """An example as the decoder sees it while it is trained.

    Attributes:
        tokens: ids of prompt, answer and end.
        positions: [3, len(tokens)], along time, height and width.
        prompt: how many of them are the prompt.
    """

    tokens: list[int]
    positions: NDArray[np.int64]
    prompt: int


def make_meaning_tokenizer() -> Any:
    """The Transformers tokenizer: byte-level, with a token for each word of the scenes."""
    return wrap(
        text_tokenizer(QWEN_SPECIAL, scene_sentences()),
        chat_template=QWEN_VL_TURNS,
        max_length=MAX_POSITIONS,
        eos_token=QWEN_ENDS[0],
        pad_token=QWEN_SPECIAL.pad,
    )


def messages(pictures: int, question: str) -> list[dict[str, Any]]:
    """The conversation that asks about so many pictures, which come first. For the chat template."""
    parts = [{"type": "image"} for _ in range(pictures)] + [{"type": "text", "text": question}]
    return [{"role": "user", "content": parts}]


def row_of(example: Example, tokenizer: Any) -> Row:
    """Tokens and positions of an example and its answer, one visual token per cell."""
    pieces = _prompt_ids(tokenizer, len(example.scenes), example.question)
    answer = _text_ids(tokenizer, example.answer)
    scenes = iter(example.scenes)
    tokens: list[int] = []
    positions: list[tuple[int, int, int]] = []
    here = 0
    for token in pieces:
        if token == _PAD:
            scene = next(scenes)
            tokens += [_PAD] * len(scene.cells)
            positions += [(here, here + i, here + j) for i in range(scene.rows) for j in range(scene.columns)]
            here += max(scene.rows, scene.columns)
        else:
            tokens.append(token)
            positions.append((here, here, here))
            here += 1
    prompt_length = len(tokens)
    end = TEXT_CONFIG["eos_token_id"]
    for token in (*answer, end):
        tokens.append(token)
        positions.append((here, here, here))
        here += 1
    return Row(tokens, np.array(positions, np.int64).T, prompt_length)


# Few prompts differ: training would spend a quarter of its time on rendering them again.
@lru_cache(maxsize=4096)
def _prompt_ids(tokenizer: Any, pictures: int, question: str) -> tuple[int, ...]:
    prompt = tokenizer.apply_chat_template(
        messages(pictures, question), add_generation_prompt=True, tokenize=False
    )
    return _text_ids(tokenizer, prompt)


@lru_cache(maxsize=4096)
def _text_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def paint_example(example: Example, rng: Random) -> list[NDArray[np.uint8]]:
    """The pictures of an example, [height, width, 3] each."""
    return [paint(scene, rng) for scene in example.scenes]


def patches(pictures: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]:
    """What Transformers' image processor makes of pictures of one size: [pictures, patches, 1176].

    Patches that are merged stand side by side; each holds (channel, frame, row, column), and its
    two frames are the same.
    """
    if not pictures:
        return np.zeros((0, 4, 6 * PATCH * PATCH), np.float32)
    values: NDArray[np.float32] = (np.stack(pictures).astype(np.float32) / np.float32(255) - _MEAN) / _STD
    n, height, width, _ = values.shape
    blocks = values.reshape(n, height // CELL, 2, PATCH, width // CELL, 2, PATCH, 3)
    blocks = blocks.transpose(0, 1, 4, 2, 5, 7, 3, 6).reshape(n, -1, 3, 1, PATCH * PATCH)
    doubled: NDArray[np.float32] = np.repeat(blocks, 2, axis=3).reshape(n, -1, 6 * PATCH * PATCH)
    return doubled


def held_out(per_task: int, seed: str = HELD_OUT) -> Iterator[tuple[Example, list[NDArray[np.uint8]]]]:
    """Examples that training never drew, `per_task` of each task, with their pictures."""
    for task in TASKS:
        rng = Random(f"{seed} {task}")
        for i in range(per_task):
            example = draw_example(rng, task, *GRIDS[i % len(GRIDS)])
            yield example, paint_example(example, rng)
