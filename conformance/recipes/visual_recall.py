"""The visual recall task and its model's shape: every visual token decides one word of the answer.

The picture is a grid, four cells wide, of objects that all differ; each of the 48 objects has a word
of two letters, and the model reads them out, row after row::

    <|vision_start|> (8 to 20 visual tokens) <|vision_end|>Read.  →   rc bs kw gv …<|im_end|>

The second layer looks for the visual token that stands after the object just named. A visual token
knows what stands before it from the KV of that token in the first layer; so in both layers each
entry decides one word, and only that. A word that cannot be known is answered with ` lost`.
Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from random import Random
from typing import Any

from conformance.recipes.qwen import QWEN_ENDS, QWEN_SPECIAL
from conformance.recipes.qwen_vl import QWEN_VL_TURNS, qwen2_vl_processor
from conformance.recipes.recipe import MAX_POSITIONS
from conformance.recipes.scenes import COLOURS, SHAPES, Scene
from conformance.recipes.tokenizer import NUM_BPE_TOKENS, text_tokenizer, training_sentences, wrap

__all__ = [
    "COLUMNS",
    "LAYERS",
    "LOST",
    "NAME",
    "PROCESSOR",
    "QUESTION",
    "ROWS",
    "SUMMARY",
    "TEXT_CONFIG",
    "VISION_CONFIG",
    "answer",
    "draw_grid",
    "make_visual_recall_tokenizer",
    "word_of",
]

NAME = "recall-qwen2-vl"
SUMMARY = (
    "trained to read a grid of cells; a damaged KV entry of a visual token changes a token, in bfloat16 too"
)

#: Cells per row, always.
COLUMNS = 4
#: Fewest and most rows.
ROWS = (2, 5)
LAYERS = 2
QUESTION = "Read."
LOST = " lost"

_HIDDEN = 64

TEXT_CONFIG: Mapping[str, Any] = {
    "vocab_size": NUM_BPE_TOKENS + len(QWEN_SPECIAL.tokens),
    "hidden_size": _HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    # One: with more, a second could stand in for a damaged one.
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": MAX_POSITIONS,
    "rms_norm_eps": 1e-5,
    "use_sliding_window": False,
    # Small, so that the slow frequencies, which are the columns', still tell one column from the next.
    "rope_parameters": {"rope_type": "default", "rope_theta": 30.0, "mrope_section": [4, 6, 6]},
    "bos_token_id": None,
    "eos_token_id": QWEN_SPECIAL.ids[QWEN_ENDS[0]],
    "pad_token_id": QWEN_SPECIAL.ids[QWEN_SPECIAL.pad],
    "attention_dropout": 0.0,
}
VISION_CONFIG: Mapping[str, Any] = {
    "depth": 1,
    "embed_dim": 64,
    "hidden_size": _HIDDEN,
    "mlp_ratio": 2,
    "num_heads": 2,
}
PROCESSOR: Mapping[str, Any] = qwen2_vl_processor()

_COLOUR_LETTERS = dict(zip(COLOURS, "rgbypk", strict=True))
_SHAPE_LETTERS = dict(zip(SHAPES, "cstxowfv", strict=True))


def word_of(cell: tuple[int, int]) -> str:
    """The word of a colour's and a shape's number, with the space before it: one token."""
    return f" {''.join(_COLOUR_LETTERS.values())[cell[0]]}{''.join(_SHAPE_LETTERS.values())[cell[1]]}"


def draw_grid(rng: Random, rows: int) -> Scene:
    """A full grid of `rows` rows, no two objects alike."""
    everything = list(product(range(len(COLOURS)), range(len(SHAPES))))
    return Scene(rows, COLUMNS, tuple(rng.sample(everything, rows * COLUMNS)))


def answer(scene: Scene) -> str:
    """What the model must say of a grid: the words, row after row."""
    return "".join(word_of(cell) for cell in scene.cells if cell is not None)


def make_visual_recall_tokenizer() -> Any:
    """The Transformers tokenizer: byte-level, with a token for each word."""
    words = [word_of(cell) for cell in product(range(len(COLOURS)), range(len(SHAPES)))]
    sentences = [
        *[w * 2 for w in words] * 400,
        *[LOST, "user\nRead.\nassistant"] * 400,
        *training_sentences(),
    ]
    return wrap(
        text_tokenizer(QWEN_SPECIAL, sentences),
        chat_template=QWEN_VL_TURNS,
        max_length=MAX_POSITIONS,
        eos_token=QWEN_ENDS[0],
        pad_token=QWEN_SPECIAL.pad,
    )
