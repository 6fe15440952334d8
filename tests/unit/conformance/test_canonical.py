from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.canonical import (
    CanonicalError,
    canonical_request,
    media_parts,
    parse_canonical,
    request_key,
)

RED, BLUE = "sha256:" + "a" * 64, "sha256:" + "b" * 64
BASE: dict[str, Any] = {"model": "m", "prompt": {"text": "hi"}, "max_tokens": 4}


def test_defaults_are_written_out() -> None:
    assert canonical_request(**BASE) == {
        "model": "m",
        "dtype": "float32",
        "prompt": {"text": "hi"},
        "max_tokens": 4,
        "ignore_eos": False,
        "stop_token_ids": [],
        "prompt_logprobs": False,
    }


def test_the_key_of_a_request_never_changes_between_releases() -> None:
    # Literal: a new value would orphan every committed record.
    assert (
        request_key(canonical_request(**BASE))
        == "472587453df83455a6100fdb097dea9ea4e9e33769aa7137226c1ce68385b2bb"
    )


@pytest.mark.parametrize(
    "prompt",
    [
        {"chat": [{"text": "a"}, {"text": "b"}]},
        {"chat": ["ab"]},
        {"chat": [{"role": "user", "content": "ab"}]},
        {"messages": [{"role": "user", "content": [{"text": "a"}, "b"]}]},
    ],
)
def test_every_way_to_write_one_user_message_is_the_same_request(prompt: dict[str, Any]) -> None:
    request = canonical_request(model="m", prompt=prompt, max_tokens=4)
    assert request["prompt"] == {"messages": [{"role": "user", "content": "ab"}]}


def test_pictures_stay_where_they_stand_between_joined_texts() -> None:
    chat = ["a", {"text": "b"}, {"image": RED}, {"text": "c"}, {"video": {"fps": 2, "frames": [RED, BLUE]}}]
    request = canonical_request(model="m", prompt={"chat": chat}, max_tokens=4)
    video = {"video": {"frames": [RED, BLUE], "fps": 2.0}}
    content = [{"text": "ab"}, {"image": RED}, {"text": "c"}, video]
    assert request["prompt"] == {"messages": [{"role": "user", "content": content}]}
    assert media_parts(request["prompt"]) == [{"image": RED}, video]


def test_pictures_beside_a_text_or_ids_are_kept_in_order() -> None:
    for prompt in ({"text": "hi"}, {"token_ids": [1, 2]}):
        asked = {**prompt, "media": [{"image": BLUE}, {"image": RED}]}
        request = canonical_request(model="m", prompt=asked, max_tokens=4)
        assert request["prompt"] == asked
        assert media_parts(request["prompt"]) == [{"image": BLUE}, {"image": RED}]
    assert media_parts({"text": "hi"}) == []


def test_another_picture_order_or_setting_is_another_request() -> None:
    def key(*parts: Any, **settings: Any) -> str:
        prompt = {"chat": [*({"image": part} for part in parts), {"text": "hi"}]}
        return request_key(canonical_request(model="m", prompt=prompt, max_tokens=4, **settings))

    plain = key(RED, BLUE)
    others = [key(BLUE, RED), key(RED), key(), key(RED, BLUE, mm_processor_kwargs={"max_pixels": 9})]
    assert len({plain, *others}) == 5
    assert key(RED, BLUE, mm_processor_kwargs={}) == plain


def test_message_roles_and_order_are_kept() -> None:
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    request = canonical_request(model="m", prompt={"messages": messages}, max_tokens=4)
    assert request["prompt"] == {"messages": messages}


def test_stop_token_ids_are_a_set() -> None:
    assert canonical_request(**BASE, stop_token_ids=(7, 3, 7))["stop_token_ids"] == [3, 7]


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"dtype": "bfloat16"},
        {"prompt": {"text": "hi "}},
        {"prompt": {"token_ids": [1]}},
        {"prompt": {"chat": ["hi"]}},
        {"max_tokens": 5},
        {"ignore_eos": True},
        {"stop_token_ids": [1]},
        {"prompt_logprobs": True},
    ],
)
def test_everything_that_changes_the_truth_changes_the_key(change: dict[str, Any]) -> None:
    assert request_key(canonical_request(**{**BASE, **change})) != request_key(canonical_request(**BASE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ""}, "model must be a name"),
        ({"dtype": "float16"}, "dtype must be one of float32, bfloat16, got 'float16'"),
        ({"prompt": "hi"}, "prompt must hold exactly one"),
        ({"prompt": {"text": "a", "chat": ["b"]}}, "prompt must hold exactly one"),
        ({"prompt": {"prompt": "a"}}, "prompt must hold exactly one"),
        ({"prompt": {"text": 3}}, "prompt text must be a string"),
        ({"prompt": {"token_ids": []}}, "at least one id"),
        ({"prompt": {"token_ids": [1, -1]}}, "integer of at least 0, got -1"),
        ({"prompt": {"token_ids": [True]}}, "integer of at least 0, got True"),
        ({"prompt": {"token_ids": "12"}}, "must be a list of token ids"),
        ({"prompt": {"chat": []}}, "not empty"),
        ({"prompt": {"chat": "hi"}}, "must be a list"),
        ({"prompt": {"chat": [{"image": "x.png"}]}}, "named by its content, 'sha256:…' in hex, got 'x.png'"),
        ({"prompt": {"chat": [{"sound": "x"}]}}, "content part must be text"),
        ({"prompt": {"chat": [{"image": RED, "text": "a"}]}}, "content part must be text"),
        ({"prompt": {"chat": [{"image": RED}], "media": [{"image": RED}]}}, "media belong into the parts"),
        ({"prompt": {"text": "a", "media": []}}, "media must be a list that is not empty"),
        ({"prompt": {"text": "a", "media": [{"text": "b"}]}}, "content part must be text"),
        ({"prompt": {"chat": [{"video": [RED]}]}}, "a video must be"),
        ({"prompt": {"chat": [{"video": {"frames": []}}]}}, "a video must be"),
        (
            {"prompt": {"chat": [{"video": {"frames": [RED], "fps": 0}}]}},
            "fps must be a number above 0, got 0",
        ),
        ({"mm_processor_kwargs": [1]}, "mm_processor_kwargs must be a mapping of names"),
        ({"mm_processor_kwargs": {"size": {1, 2}}}, "mm_processor_kwargs must be plain data"),
        ({"prompt": {"messages": [{"role": "user"}]}}, "exactly role and content"),
        (
            {"prompt": {"messages": [{"role": "user", "content": "a", "name": "b"}]}},
            "exactly role and content",
        ),
        ({"prompt": {"messages": [{"role": 1, "content": "a"}]}}, "role must be a string"),
        ({"prompt": {"messages": [{"role": "user", "content": []}]}}, "content must be text"),
        ({"max_tokens": 0}, "max_tokens must be an integer of at least 1, got 0"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer"),
        ({"ignore_eos": 1}, "ignore_eos must be true or false"),
        ({"prompt_logprobs": 5}, "prompt_logprobs must be true or false"),
        ({"stop_token_ids": 3}, "stop_token_ids must be a list"),
    ],
)
def test_what_has_no_canonical_form_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CanonicalError, match=message):
        canonical_request(**{**BASE, **change})


def test_unknown_and_missing_fields_are_refused() -> None:
    with pytest.raises(CanonicalError, match="unknown field 'seed', 'temperature'"):
        parse_canonical({**BASE, "temperature": 0, "seed": 1})
    with pytest.raises(CanonicalError, match="missing field 'max_tokens', 'prompt'"):
        parse_canonical({"model": "m"})


DIGESTS = st.sampled_from([RED, BLUE])
PICTURES = st.one_of(
    st.fixed_dictionaries({"image": DIGESTS}),
    st.fixed_dictionaries(
        {
            "video": st.fixed_dictionaries(
                {"frames": st.lists(DIGESTS, min_size=1, max_size=2)}, optional={"fps": st.integers(1, 3)}
            )
        }
    ),
)
PARTS = st.lists(st.one_of(st.fixed_dictionaries({"text": st.text()}), PICTURES), min_size=1, max_size=3)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant"]),
            "content": st.one_of(st.text(), PARTS),
        }
    ),
    min_size=1,
    max_size=3,
)
REQUESTS = st.fixed_dictionaries(
    {
        "model": st.text(min_size=1),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
        "prompt": st.one_of(
            st.fixed_dictionaries({"text": st.text()}),
            st.fixed_dictionaries({"text": st.text(), "media": st.lists(PICTURES, min_size=1, max_size=2)}),
            st.fixed_dictionaries({"messages": MESSAGES}),
            st.fixed_dictionaries({"token_ids": st.lists(st.integers(0, 10**6), min_size=1)}),
        ),
        "max_tokens": st.integers(1, 10**6),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.lists(st.integers(0, 10**6), max_size=3),
        "prompt_logprobs": st.booleans(),
    },
    optional={"mm_processor_kwargs": st.dictionaries(st.text(), st.integers(), max_size=2)},
)


@given(REQUESTS)
def test_the_canonical_form_is_its_own_canonical_form(values: dict[str, Any]) -> None:
    request = parse_canonical(values)
    assert parse_canonical(request) == request
    assert request_key(values) == request_key(request)


@given(REQUESTS, REQUESTS)
def test_two_requests_share_a_key_only_with_the_same_canonical_form(
    first: dict[str, Any], second: dict[str, Any]
) -> None:
    same = parse_canonical(first) == parse_canonical(second)
    assert (request_key(first) == request_key(second)) == same
