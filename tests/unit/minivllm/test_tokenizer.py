"""Special tokens are added once, EOS ids are united, and errors are named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from minivllm.errors import BadParameter, ConfigError, UnsupportedError
from minivllm.tokenizer import Tokenizer, load_tokenizer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] not in ['user', 'assistant', 'system'] %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}<eot>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{% if thought %}{{ thought }}{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<eot>", "<|user|>", "<|assistant|>", "<|system|>"]
USER = [{"role": "user", "content": "hi"}]


def byte_tokenizer(chat_template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Every byte is a token after the special ones; a BOS is added to plain text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL, *alphabet])}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<s>", eos_token="</s>", additional_special_tokens=SPECIAL[2:]
    )
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """Save a tokenizer, with config.json and generation_config.json if given."""

    def saving(
        *,
        chat_template: str | None = TEMPLATE,
        config: dict[str, Any] | None = None,
        generation: dict[str, Any] | None = None,
    ) -> Path:
        byte_tokenizer(chat_template).save_pretrained(tmp_path)
        for name, values in (("config.json", config), ("generation_config.json", generation)):
            if values is not None:
                (tmp_path / name).write_text(json.dumps(values))
        return tmp_path

    return saving


def load(path: Path) -> Tokenizer:
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    return tokenizer


def byte_ids(text: str) -> list[int]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = byte_tokenizer().backend_tokenizer.encode(text, add_special_tokens=False)
    assert len(raw.ids) == len(text.encode())
    assert all(i >= len(SPECIAL) for i in raw.ids)
    assert len(alphabet) == 256
    return list(raw.ids)


def test_plain_text_gets_the_tokenizers_special_tokens(save: Callable[..., Path]) -> None:
    tokenizer = load(save())
    assert tokenizer.encode("hi") == [0, *byte_ids("hi")]
    assert tokenizer.encode("hi", add_special_tokens=False) == byte_ids("hi")


def test_a_chat_has_exactly_the_bos_its_template_writes(save: Callable[..., Path]) -> None:
    tokenizer = load(save())
    assert tokenizer.render_chat(USER) == "<s><|user|>hi<eot><|assistant|>"
    assert tokenizer.encode_chat(USER) == [0, 3, *byte_ids("hi"), 2, 4]


def test_a_template_without_bos_gets_none(save: Callable[..., Path]) -> None:
    tokenizer = load(save(chat_template=TEMPLATE.removeprefix("{{ bos_token }}")))
    assert tokenizer.encode_chat(USER) == [3, *byte_ids("hi"), 2, 4]


def test_chat_ids_are_those_of_transformers(save: Callable[..., Path]) -> None:
    tokenizer = load(save())
    messages = [
        {"role": "system", "content": "short answers"},
        {"role": "user", "content": "grüß dich ☃"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "<eot>?"},
    ]
    theirs = tokenizer.hf.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(messages) == theirs


def test_the_generation_prompt_and_variables_reach_the_template(save: Callable[..., Path]) -> None:
    tokenizer = load(save())
    assert tokenizer.render_chat(USER, add_generation_prompt=False) == "<s><|user|>hi<eot>"
    assert tokenizer.render_chat(USER, thought="hm").endswith("<|assistant|>hm")


def test_a_template_of_the_callers_own_is_used(save: Callable[..., Path]) -> None:
    tokenizer = load(save(chat_template=None))
    own = "{{ messages[0]['content'] }}!"
    assert tokenizer.render_chat(USER, chat_template=own) == "hi!"
    assert tokenizer.encode_chat(USER, chat_template=own) == byte_ids("hi!")


def test_without_any_template_a_chat_is_refused(save: Callable[..., Path]) -> None:
    with pytest.raises(UnsupportedError, match="has no chat template: give chat_template"):
        load(save(chat_template=None)).encode_chat(USER)


def test_what_the_template_refuses_is_told(save: Callable[..., Path]) -> None:
    with pytest.raises(BadParameter, match="the chat template refuses these messages: unknown role tool"):
        load(save()).encode_chat([{"role": "tool", "content": "x"}])


@pytest.mark.parametrize("template", ["{{ oh", "{{ messages + 3 }}"])
def test_a_broken_template_is_told(save: Callable[..., Path], template: str) -> None:
    with pytest.raises(BadParameter, match="the chat template refuses these messages"):
        load(save()).encode_chat(USER, chat_template=template)


@pytest.mark.parametrize("messages", [[{"role": "user"}], [{"content": "x"}], ["hi"], [USER]])
def test_a_message_needs_role_and_content(save: Callable[..., Path], messages: Any) -> None:
    with pytest.raises(BadParameter, match="a message needs role and content, got"):
        load(save()).encode_chat(messages)


def test_a_chat_needs_a_message(save: Callable[..., Path]) -> None:
    with pytest.raises(BadParameter, match="at least one message"):
        load(save()).encode_chat([])


@pytest.mark.parametrize("text", ["", "plain", "two  spaces , odd .", "grüß dich ☃ 🧑‍🚀", "\n\t\r "])
def test_text_survives_the_round_trip(save: Callable[..., Path], text: str) -> None:
    tokenizer = load(save())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_decoding_leaves_special_tokens_out_unless_told_otherwise(save: Callable[..., Path]) -> None:
    tokenizer = load(save())
    ids = tokenizer.encode_chat(USER)
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s><|user|>hi<eot><|assistant|>"
    assert tokenizer.token_text(2) == "<eot>"
    assert tokenizer.special_token_ids == frozenset(range(6))


def test_size_and_bos(save: Callable[..., Path]) -> None:
    tokenizer = load(save())
    assert len(tokenizer) == 262
    assert tokenizer.bos_token_id == 0


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (None, None, (1,)),
        ({"eos_token_id": 2}, None, (1, 2)),
        ({"eos_token_id": 2}, {"eos_token_id": [1, 5]}, (1, 2, 5)),
        ({"eos_token_id": None}, {"eos_token_id": None}, (1,)),
        ({}, {"eos_token_id": [7]}, (1, 7)),
    ],
)
def test_eos_ids_unite_generation_config_config_and_tokenizer(
    save: Callable[..., Path],
    config: dict[str, Any] | None,
    generation: dict[str, Any] | None,
    expected: tuple[int, ...],
) -> None:
    if config is not None:
        config = {"model_type": "llama", **config}
    assert load(save(config=config, generation=generation)).eos_token_ids == expected


def test_a_tokenizer_without_eos_has_the_ids_it_was_given() -> None:
    hf = byte_tokenizer()
    hf.eos_token = None
    assert Tokenizer(hf).eos_token_ids == ()
    assert Tokenizer(hf, (9, 4)).eos_token_ids == (4, 9)


def test_a_directory_without_tokenizer_files_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert load_tokenizer(tmp_path) is None
    assert load_tokenizer(str(tmp_path)) is None


def test_a_path_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere' does not exist"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_damaged_tokenizer_is_named(save: Callable[..., Path]) -> None:
    path = save()
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="the tokenizer cannot be loaded"):
        load_tokenizer(path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match=r"x\.gguf: the tokenizer cannot be loaded"):
        load_tokenizer(tmp_path / "x.gguf")


def test_a_token_is_found_by_its_exact_spelling_only(checkpoints: Path) -> None:
    tokenizer = load(checkpoints / "tiny-llava")
    assert tokenizer.token_id("<image>") == 444
    assert tokenizer.token_id("<img>") is None
    with_unknown = byte_tokenizer()
    with_unknown.unk_token = "<s>"
    assert Tokenizer(with_unknown).token_id("<eot>") == 2
    assert Tokenizer(with_unknown).token_id("<image>") is None


# --- placeholders ----------------------------------------------------------------------------------


def chat_about(
    text: str, *, template: str | None = None, special: bool = True
) -> tuple[Tokenizer, list[int]]:
    """A conversation whose template writes the placeholder <eot> once, after the text."""
    hf = byte_tokenizer(template or TEMPLATE)
    if not special:
        hf.add_tokens(["<pic>"], special_tokens=False)
    tokenizer = Tokenizer(hf)
    token = tokenizer.token_id("<eot>" if special else "<pic>")
    assert token is not None
    return tokenizer, tokenizer.encode_chat(
        [{"role": "user", "content": text}], add_generation_prompt=False, only_from_template=[token]
    )


@pytest.mark.parametrize("text", ["a <eot> b", "<eot>", "<eot><eot>", "x<eot", "<<eot>>"])
def test_a_placeholder_in_a_message_is_text_and_one_of_the_template_a_token(text: str) -> None:
    tokenizer, ids = chat_about(text)
    eot = tokenizer.token_id("<eot>")
    assert [i for i, token in enumerate(ids) if token == eot] == [len(ids) - 1]
    assert tokenizer.decode(ids, skip_special_tokens=False) == f"<s><|user|>{text}<eot>"


def test_without_such_spellings_the_ids_are_the_usual_ones() -> None:
    tokenizer, ids = chat_about("hello <|user|>")
    assert ids == tokenizer.encode_chat(
        [{"role": "user", "content": "hello <|user|>"}], add_generation_prompt=False
    )


def test_added_tokens_that_are_not_special_are_split_too() -> None:
    template = "{{ messages[0]['content'] }}<pic>."
    tokenizer, ids = chat_about("a<pic>b", template=template, special=False)
    assert ids.count(tokenizer.token_id("<pic>") or -1) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<pic>b<pic>."


def test_marks_give_way_to_characters_that_the_messages_hold() -> None:
    tokenizer, ids = chat_about("\ue000 <eot> \ue001")
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s><|user|>\ue000 <eot> \ue001<eot>"


def test_what_belongs_around_a_placeholder_is_put_there_before_tokenising() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    eot = tokenizer.token_id("<eot>")
    assert eot is not None
    assert tokenizer.surround("a<eot>b<eot>", [eot], ("[", "]")) == "a[<eot>]b[<eot>]"
    assert tokenizer.surround("a<eot>b", [eot], ("", "")) == "a<eot>b"
    assert tokenizer.surround("a<eot>b", [], ("[", "]")) == "a<eot>b"


def test_only_the_template_s_placeholders_are_surrounded() -> None:
    tokenizer = Tokenizer(byte_tokenizer())
    eot = tokenizer.token_id("<eot>")
    assert eot is not None
    ids = tokenizer.encode_chat(
        [{"role": "user", "content": "a <eot> b"}],
        add_generation_prompt=False,
        only_from_template=[eot],
        around=("[", "]"),
    )
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s><|user|>a <eot> b[<eot>]"
    assert ids.count(eot) == 1
