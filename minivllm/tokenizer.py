"""The tokenizer of a model: Transformers' own, with the rules for special tokens and templates."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from minivllm.device import ran_out_of_memory
from minivllm.errors import BadParameter, ConfigError, UnsupportedError
from minivllm.models.hf_config import as_ids, read_json

__all__ = ["Message", "Tokenizer", "load_tokenizer"]

#: One turn of a conversation, as chat templates expect it: {"role": …, "content": …}.
Message = Mapping[str, Any]

#: Files of which a model directory with a tokenizer has at least one.
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


class Tokenizer:
    """Text to token ids and back.

    Attributes:
        hf: the Transformers tokenizer, for whatever is not covered here.
        eos_token_ids: every id that ends a generation, of generation_config.json, config.json and
            the tokenizer, sorted.
    """

    def __init__(self, hf: Any, eos_token_ids: tuple[int, ...] = ()) -> None:
        self.hf = hf
        self.eos_token_ids = as_ids((list(eos_token_ids), hf.eos_token_id))

    def __len__(self) -> int:
        """Number of tokens, added ones included; the model's vocab_size may be larger."""
        return len(self.hf)

    @property
    def bos_token_id(self) -> int | None:
        """The id that starts a sequence, if there is one."""
        value: int | None = self.hf.bos_token_id
        return value

    @property
    def has_chat_template(self) -> bool:
        """Whether the model brings a chat template of its own."""
        return bool(self.hf.chat_template)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that `decode(…, skip_special_tokens=True)` leaves out."""
        return frozenset(self.hf.all_special_ids)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain prompt, with the special tokens the tokenizer adds (such as BOS).

        Raises:
            BadParameter: the text holds a lone surrogate, so it has no UTF-8 form.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadParameter(
                f"the text cannot be encoded as UTF-8: {text[error.start]!r} at character {error.start}"
            ) from error
        ids: list[int] = self.hf(text, add_special_tokens=add_special_tokens)["input_ids"]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, without cleaning up spaces."""
        text: str = self.hf.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact spelling; None if there is no such token."""
        found: int | None = self.hf.convert_tokens_to_ids(token)
        # An unknown token may be answered with the id of "unknown".
        known = found is not None and self.hf.convert_ids_to_tokens(found) == token
        return found if known else None

    def token_text(self, token_id: int) -> str:
        """Text of one token alone, special tokens included."""
        return self.decode([token_id], skip_special_tokens=False)

    def surround(self, text: str, token_ids: Sequence[int], around: tuple[str, str]) -> str:
        """The text with `around` before and after every spelling of these tokens."""
        before, after = around
        if before or after:
            for token_id in token_ids:
                spelling = self.token_text(token_id)
                text = text.replace(spelling, before + spelling + after)
        return text

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation.

        Args:
            messages: turns, oldest first.
            chat_template: a Jinja template instead of the model's own.
            add_generation_prompt: end with the header of the assistant's turn.
            variables: further variables of the template, such as enable_thinking.

        Raises:
            UnsupportedError: neither the model nor the caller has a template.
            BadParameter: no messages, or the template refuses them.
        """
        if not messages:
            raise BadParameter("a chat needs at least one message, got none")
        for message in messages:
            if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
                raise BadParameter(f"a message needs role and content, got {message!r}")
        if chat_template is None and not self.hf.chat_template:
            raise UnsupportedError(
                "this model's tokenizer has no chat template: give chat_template, or a prompt as text"
            )
        try:
            text: str = self.hf.apply_chat_template(
                [dict(message) for message in messages],
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
                **variables,
            )
        except Exception as error:  # a template is a program of its author's: it may raise anything
            if ran_out_of_memory(error):
                raise
            raise BadParameter(f"the chat template refuses these messages: {error}") from error
        return text

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        only_from_template: Sequence[int] = (),
        around: tuple[str, str] = ("", ""),
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation; arguments and errors as `render_chat`.

        The template writes the special tokens itself, so none are added: no doubled BOS.

        Args:
            only_from_template: tokens that count only where the template writes them; a message
                that spells one is text.
            around: texts to put before and after each of them.
        """
        spellings = {self.token_text(token_id): token_id for token_id in only_from_template}
        marks = _Marks(spellings, messages)
        text = self.render_chat(
            marks.put(messages),
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )
        widened = marks.remove(self.surround(text, only_from_template, around))
        ids = self.encode(widened, add_special_tokens=False)
        written = marks.written(text)
        if all(written):
            return ids
        found = iter(written)
        plain: list[int] = []
        for token_id in ids:
            if token_id in only_from_template and not next(found):
                plain += self._as_text(self.token_text(token_id), token_id)
            else:
                plain.append(token_id)
        return plain

    def _as_text(self, spelling: str, token_id: int) -> list[int]:
        """Ids of a special token's spelling as ordinary text."""
        ids: list[int] = self.hf(spelling, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        if token_id in ids:  # a token that is added but not special is never split
            ids = [
                i
                for half in (spelling[:1], spelling[1:])
                for i in self.encode(half, add_special_tokens=False)
            ]
        return ids


class _Marks:
    """Tells the spellings in messages from those that the template writes.

    Each spelling in a message gives way to a character of the private use area that no message
    holds; after rendering, the marks show which is which.
    """

    def __init__(self, spellings: Iterable[str], messages: Sequence[Message]) -> None:
        self._spellings = sorted(spellings, key=len, reverse=True)
        text = "".join(_texts(messages)) if self._spellings else ""
        free = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in text)
        self._marks = dict(zip(self._spellings, free, strict=False))

    def put(self, value: Any) -> Any:
        """The messages with marks in place of spellings."""
        if isinstance(value, str):
            for spelling, mark in self._marks.items():
                value = value.replace(spelling, mark)
            return value
        if isinstance(value, Mapping):
            return {key: self.put(item) for key, item in value.items()} if self._marks else value
        if isinstance(value, list | tuple) and self._marks:
            return [self.put(item) for item in value]
        return value

    def remove(self, text: str) -> str:
        """The rendered text with the spellings back in place."""
        for spelling, mark in self._marks.items():
            text = text.replace(mark, spelling)
        return text

    def written(self, text: str) -> list[bool]:
        """Per spelling in the rendered text, in order: whether the template wrote it."""
        if not self._marks:
            return []
        pattern = "|".join(map(re.escape, (*self._marks, *self._marks.values())))
        return [match in self._marks for match in re.findall(pattern, text)]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def load_tokenizer(path: str | Path) -> Tokenizer | None:
    """The tokenizer of a model directory or a .gguf file, without network access.

    Returns:
        None if the directory holds no tokenizer: such a model takes token ids only.

    Raises:
        ConfigError: no such path, or files that Transformers cannot load.
    """
    path = Path(path)
    if path.is_dir():
        if not any((path / name).exists() for name in _FILES):
            return None
        eos = [read_json(path / name).get("eos_token_id") for name in _eos_files(path)]
        return Tokenizer(_from_transformers(path), as_ids(eos))
    if not path.is_file():
        raise ConfigError(f"model {str(path)!r} does not exist; give a directory or a .gguf file")
    state = path.stat()
    return Tokenizer(_from_gguf(path.resolve(), state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=2)
def _from_gguf(path: Path, modified_ns: int, size: int) -> Any:  # noqa: ARG001 (part of the cache's key)
    """Kept, since reading the vocabulary of a .gguf file takes Transformers seconds each time."""
    return _from_transformers(path.parent, gguf_file=path.name)


def _from_transformers(directory: Path, **options: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False, **options
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        if ran_out_of_memory(error):
            raise
        where = directory / options.get("gguf_file", "")
        raise ConfigError(f"{where}: the tokenizer cannot be loaded: {error}") from error


def _eos_files(directory: Path) -> list[str]:
    return [name for name in ("config.json", "generation_config.json") if (directory / name).exists()]
