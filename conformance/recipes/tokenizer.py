"""Two small tokenizers, built the same way to the byte on every machine.

The text tokenizer is a byte-level BPE (arXiv:1508.07909 over bytes, as in GPT-2): any text
round-trips, and characters outside the training sentences fall apart into single bytes, so that
one token is often less than one character. The list tokenizer knows whole words only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

__all__ = ["SpecialTokens", "text_tokenizer", "training_sentences", "word_tokenizer", "wrap"]

#: Byte alphabet and merges. Special tokens come after, as in the published Llama 3 and Qwen vocabularies.
NUM_BPE_TOKENS = 440

_WHO = ("the engine", "a request", "the scheduler", "her cat", "every block", "my neighbour", "the model")
_DOES = ("reads", "writes", "shares", "forgets", "counts", "waits for", "returns")
_WHAT = ("the cache", "two tokens", "a long prompt", "an answer", "the window", "bread and butter", "nothing")
_WHEN = ("today", "in the morning", "before the next step", "again and again")
_OTHER = (
    "What is the capital of France? Paris is the capital of France.",
    "def add(a, b):\n    return a + b\n",
    "1 2 3 4 5 6 7 8 9 10 100 2024",
    "你好，世界。今天天气很好。",
    "Grüße aus Köln, où êtes-vous ?",
    '{"name": "value", "list": [1, 2, 3]}',
)


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The special tokens of one family, in the order of their ids, and the parts some play.

    Attributes:
        tokens: all of them; the first gets the first id after the BPE vocabulary.
        pad: fills up batches; an end-of-text token, as in the published checkpoints.
        bos: begins a text; added by the tokenizer itself when not None.
        qwen: whether text is normalised (NFC) and split as Qwen does, which Llama does not.
            Transformers does so for every Qwen2 model whatever its tokenizer.json says, so the
            file must say the same for engines that read it without Transformers.
    """

    tokens: tuple[str, ...]
    pad: str
    bos: str | None = None
    qwen: bool = False

    @property
    def ids(self) -> dict[str, int]:
        return {token: NUM_BPE_TOKENS + i for i, token in enumerate(self.tokens)}


def training_sentences() -> Iterator[str]:
    """The sentences the merges are learnt from: all combinations, no randomness."""
    for who, does, what, when in product(_WHO, _DOES, _WHAT, _WHEN):
        yield f"{who[0].upper()}{who[1:]} {does} {what} {when}."
    for sentence in _OTHER:
        yield from [sentence] * 40


def text_tokenizer(special: SpecialTokens, sentences: Iterable[str] | None = None) -> Tokenizer:
    """Train the byte-level BPE and add `special`. Equal arguments give equal bytes of JSON.

    The merges are learnt from `sentences`; None: from `training_sentences`.
    """
    tokenizer = Tokenizer(models.BPE())
    if special.qwen:
        from transformers import Qwen2Tokenizer

        genuine = Qwen2Tokenizer().backend_tokenizer
        tokenizer.normalizer, tokenizer.pre_tokenizer = genuine.normalizer, genuine.pre_tokenizer
    else:
        split = Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s+")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(split, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_BPE_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_sentences() if sentences is None else sentences, trainer)
    tokenizer.add_special_tokens(list(special.tokens))
    _add_bos(tokenizer, special.bos)
    return tokenizer


def word_tokenizer(words: Sequence[str], special: Sequence[str], *, unk: str, bos: str) -> Tokenizer:
    """A tokenizer of whole words parted by spaces. Ids: `special` in order, then `words`."""
    vocabulary = {word: i for i, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=unk))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(special))
    _add_bos(tokenizer, bos)
    return tokenizer


def wrap(tokenizer: Tokenizer, *, chat_template: str | None, max_length: int, **tokens: Any) -> Any:
    """Make the Transformers tokenizer that `save_pretrained` writes; what is None is left out."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_length,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **{k: v for k, v in {"chat_template": chat_template, **tokens}.items() if v is not None},
    )


def _add_bos(tokenizer: Tokenizer, bos: str | None) -> None:
    if bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokenizer.token_to_id(bos))],
        )
