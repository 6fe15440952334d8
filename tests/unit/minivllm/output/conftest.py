from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SENTENCES = [
    "Hello, world! How are you today? I am fine, thank you. It's 3.5 degrees.",
    "The cat sat on the mat. The dog didn't. Naïve café, Zürich, Ελληνικά, русский.",
    "你好,世界。今天天气很好。日本語のテキスト。한국어 문장.",
    "Emoji: 😀 👍🏽 👨‍👩‍👧 🏳️‍🌈 and combining: é ñ ä ạ̈.\n\tTabs  and   spaces .",
]
SPECIAL = ["<s>", "</s>", "<unk>"]


class Text:
    """A tokenizer of the `tokenizers` library behind the two methods that minivllm uses."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner
        self.num_tokens = inner.get_vocab_size()

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        ids: list[int] = self.inner.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        text: str = self.inner.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text


@pytest.fixture(scope="session")
def byte_level() -> Text:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen use: any bytes, no unknown token."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(SENTENCES * 2, trainer)
    return Text(inner)


@pytest.fixture(scope="session")
def metaspace() -> Text:
    """BPE over whole words marked by ▁, as SentencePiece writes them."""
    inner = Tokenizer(models.BPE(unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.train_from_iterator(
        SENTENCES * 2, trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    )
    return Text(inner)


@pytest.fixture(scope="session")
def byte_fallback(metaspace: Text) -> Text:
    """The Llama 2 arrangement: ▁ for spaces, and bytes for characters that are not in the vocabulary."""
    trained = json.loads(metaspace.inner.to_str())["model"]
    vocab: dict[str, int] = trained["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [tuple(pair) for pair in trained["merges"]]
    inner = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    inner.add_special_tokens(SPECIAL)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return Text(inner)


@pytest.fixture(params=["byte_level", "metaspace", "byte_fallback"])
def tokenizer(request: pytest.FixtureRequest) -> Text:
    """Each of the three kinds in turn."""
    text: Text = request.getfixturevalue(request.param)
    return text
