"""What only the model's vocabulary and tokenizer can tell about sampling parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from minivllm.errors import BadParameter
from minivllm.request import SamplingParams

__all__ = ["TextEncoder", "bad_word_token_ids", "check_sampling"]


class TextEncoder(Protocol):
    """What bad words need of a tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of the text."""
        ...


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters that name tokens the model does not have.

    Raises:
        BadParameter: naming every offending parameter and the vocabulary's size.
    """
    named = {
        "logit_bias": tuple(params.logit_bias or ()),
        "forced_token_ids": tuple(params.forced_token_ids or ()),
        "stop_token_ids": tuple(params.stop_token_ids),
    }
    problems = []
    for name, token_ids in named.items():
        outside = sorted({t for t in token_ids if t >= vocab_size})
        if outside:
            problems.append(f"{name} holds {outside[:5]}, and token ids end at {vocab_size - 1}")
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > vocab_size:
            problems.append(f"{name} is {count}, and the vocabulary has {vocab_size} tokens (-1 returns all)")
    if problems:
        raise BadParameter("; ".join(problems))


def bad_word_token_ids(words: Sequence[str], tokenizer: TextEncoder | None) -> tuple[tuple[int, ...], ...]:
    """Every token sequence that spells one of the words, without and with a leading space.

    vLLM takes the spaced spelling only when it has as many tokens as the plain one, which lets a
    word through whose spaced form is one token and whose plain form is two; here both count.

    Raises:
        BadParameter: there is no tokenizer, or a word has no tokens.
    """
    if not words:
        return ()
    if tokenizer is None:
        raise BadParameter(f"bad_words {list(words)!r} need a tokenizer, and this model has none")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not token_ids:
                raise BadParameter(f"the bad word {word!r} has no tokens: {text!r} encodes to nothing")
            found[token_ids] = None
    return tuple(found)
