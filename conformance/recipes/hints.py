"""What the meaning checkpoint is told of the way to an answer while its decoder is trained.

"What colour is the ring? It is …" needs two steps at once: from the question's word to the cell that it
names, and from there to the answer. While neither is there nothing rewards the other, and training on
answers alone learns such questions late or not at all. So the first step is asked for by itself: at the
last words of such a question the decoder is to predict what it names, and at the visual token of an
object which shape came before it, without which a caption does not know how to go on.

No answer holds these tokens: they are asked for in training only. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from conformance.recipes.qwen_vl import QWEN_VL_IDS
from conformance.recipes.scenes import NOTHING, SHAPES, Example, Scene

__all__ = ["Hint", "hints_of_objects", "hints_of_question", "word_id"]

#: Tasks whose question names one thing, and whose answer has two words before what it tells of it.
_ONE_THING = ("count", "colour", "place")


@dataclass(frozen=True, slots=True)
class Hint:
    """A token to be predicted from a place in the prompt.

    Attributes:
        place: index into the tokens of the row.
        token: the id.
    """

    place: int
    token: int


@cache
def word_id(tokenizer: Any, word: str) -> int:
    """The token of a word that stands behind a space.

    Raises:
        ValueError: the word is not one token.
    """
    ids = tokenizer.encode(f" {word}", add_special_tokens=False)
    if len(ids) != 1:
        raise ValueError(f"{word!r} is {len(ids)} tokens for this tokenizer, not one")
    return int(ids[0])


def hints_of_question(example: Example, tokens: Sequence[int], tokenizer: Any) -> Iterator[Hint]:
    """What the answer tells, at the words that ask for it: a number, a colour, or colour and shape.

    Args:
        tokens: the prompt's, or those of prompt and answer.
    """
    if example.task not in _ONE_THING:
        return
    _, _, *told = example.answer.split()
    [mark] = tokenizer.encode("?", add_special_tokens=False)
    end = list(tokens).index(mark)
    yield Hint(end - 1, word_id(tokenizer, told[0]))
    if example.task == "place":
        yield Hint(end, word_id(tokenizer, told[-1]))


def hints_of_objects(scenes: Sequence[Scene], tokens: Sequence[int], tokenizer: Any) -> Iterator[Hint]:
    """At each object the shape of the one before it in its picture; at the first "nothing"."""
    places = (i for i, token in enumerate(tokens) if token == QWEN_VL_IDS["image_token_id"])
    for scene in scenes:
        before = NOTHING
        for cell in scene.cells:
            place = next(places)
            if cell is not None:
                yield Hint(place, word_id(tokenizer, before))
                before = SHAPES[cell[1]]
