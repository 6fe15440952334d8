"""Token ids to text, one token at a time.

`tokenizers.decoders.DecodeStream` does not serve: primed with a prompt that ends inside a
character, its first piece is the whole prompt (vllm-project/vllm#48853).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Detokenizer", "TextDecoder"]

_REPLACEMENT = "\ufffd"  # what decoding shows for bytes that are no character (yet)
_MIN_CONTEXT = 8  # prompt tokens decoded before the output, for spacing; more if they begin mid-character


class TextDecoder(Protocol):
    """What detokenising needs of a tokenizer."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of all the ids together."""
        ...


class Detokenizer:
    """The text that follows a prompt.

    The pieces returned by `push` and `flush` join to what decoding prompt and output together
    appends to the prompt's own text. A character whose bytes are not all there is held back. When
    the prompt ends inside a character and the output completes it, that character belongs to the
    output.

    Only a window of tokens is decoded per step: it starts where text was last complete, because
    how a token is written (its leading space) can depend on the one before.
    """

    def __init__(
        self, tokenizer: TextDecoder, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window = self._context(prompt_token_ids)
        self._prompt_text = self._decode(self._window)
        # Tokens of the window that a later step may leave out, and the length of their text.
        self._num_old, self._num_settled = self._settled(self._window)
        self._num_shown = 0  # characters of the window's text that were returned
        self._in_prompt = True  # no output text yet, so the prompt's last character may still change

    def push(self, token_id: int) -> str:
        """Add a token; returns the text that became certain."""
        self._window.append(token_id)
        text = self._decode(self._window)
        certain = text.rstrip(_REPLACEMENT)
        piece = certain[self._shown_of(text) :]
        if piece:
            self._in_prompt = False
            self._num_shown = len(certain)
            if certain == text:
                del self._window[: self._num_old]
                self._num_old = len(self._window)
                self._num_shown = len(self._decode(self._window))
        return piece

    def flush(self) -> str:
        """The rest, when no token will follow: bytes that never became a character are U+FFFD."""
        text = self._decode(self._window)
        piece = text[self._shown_of(text) :]
        self._in_prompt = False
        self._num_shown = len(text)
        return piece

    def _shown_of(self, text: str) -> int:
        if self._in_prompt:
            return max(self._num_settled, _common_length(self._prompt_text, text))
        return self._num_shown

    def _settled(self, token_ids: list[int]) -> tuple[int, int]:
        """How many tokens, and characters of text, come before a last character that is not whole.

        Byte fallback shows a whole run of bytes as U+FFFD while its last character is not whole,
        so what is settled is only seen without that character's tokens: at most three.
        """
        for count in range(len(token_ids), max(-1, len(token_ids) - 4), -1):
            text = self._decode(token_ids[:count])
            if not text.endswith(_REPLACEMENT):
                return count, len(text)
        return 0, 0

    def _context(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The shortest tail of the prompt that begins with a whole character."""
        length = _MIN_CONTEXT
        while length < len(prompt_token_ids):
            tail = list(prompt_token_ids[-length:])
            text = self._decode(tail)
            if text and not text.startswith(_REPLACEMENT):
                return tail
            length *= 2
        return list(prompt_token_ids)

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _common_length(a: str, b: str) -> int:
    """How many characters both begin with."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))
