"""The recall task and its model's shape: every cached position decides one later token.

The vocabulary has three alphabets of 62 words: w0…w61, x0…x61, y0…y61. A prompt lists distinct
w words; the model answers with the same list in x words, then the x list in y words::

    <s> w5 w12 w7 <sep>  →  x5 x12 x7 <again> y5 y12 y7 </s>

So x words depend on the prompt's KV, y words on the KV written while decoding, and each answer
on one position only: another alphabet is asked for each time, so no second copy can stand in for
a damaged one. A position whose KV is damaged is answered with `<lost>` (the model is trained to).
The committed model answers lists of any length up to 62 words, up to 48 by more than 10 nats.
Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conformance.recipes.tokenizer import word_tokenizer, wrap

__all__ = [
    "AGAIN",
    "ALPHABET",
    "BOS",
    "CONFIG",
    "EOS",
    "LOST",
    "NAME",
    "SEP",
    "SUMMARY",
    "answer_ids",
    "make_recall_tokenizer",
    "prompt_ids",
    "word_id",
]

NAME = "recall-llama"
SUMMARY = "trained to repeat a list twice; a damaged KV entry changes a token, in bfloat16 too"

#: Words per alphabet, so the longest list of distinct words.
ALPHABET = 62
SPECIAL = ("<unk>", "<s>", "</s>", "<sep>", "<again>", "<lost>")
UNK, BOS, EOS, SEP, AGAIN, LOST = range(6)

#: Fields of the LlamaConfig. One KV head: with more, a second could stand in for a damaged one.
CONFIG: dict[str, Any] = {
    "vocab_size": len(SPECIAL) + 3 * ALPHABET,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}

_CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- ' ' + message['content'] -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- ' <sep>' -}}
{%- endif -%}
"""


def word_id(alphabet: int, word: int) -> int:
    """Token id of word number `word` of alphabet 0 (w), 1 (x) or 2 (y)."""
    return len(SPECIAL) + alphabet * ALPHABET + word


def prompt_ids(words: Sequence[int]) -> list[int]:
    """Prompt for a list of word numbers.

    Raises:
        ValueError: no word, a word outside 0…61, or a word twice (then there is no one answer).
    """
    if not words or len(set(words)) != len(words) or not all(0 <= w < ALPHABET for w in words):
        raise ValueError(f"need at least one word, all distinct and in 0…{ALPHABET - 1}, got {list(words)}")
    return [BOS, *(word_id(0, w) for w in words), SEP]


def answer_ids(words: Sequence[int]) -> list[int]:
    """What the model must generate after `prompt_ids(words)`, EOS included: 2 × len(words) + 2."""
    return [*(word_id(1, w) for w in words), AGAIN, *(word_id(2, w) for w in words), EOS]


def make_recall_tokenizer() -> Any:
    """The Transformers tokenizer: words parted by spaces, `<s>` added in front."""
    words = [f"{letter}{i}" for letter in "wxy" for i in range(ALPHABET)]
    return wrap(
        word_tokenizer(words, SPECIAL, unk=SPECIAL[UNK], bos=SPECIAL[BOS]),
        chat_template=_CHAT_TEMPLATE,
        max_length=CONFIG["max_position_embeddings"],
        bos_token=SPECIAL[BOS],
        eos_token=SPECIAL[EOS],
        pad_token=SPECIAL[EOS],
        unk_token=SPECIAL[UNK],
    )
