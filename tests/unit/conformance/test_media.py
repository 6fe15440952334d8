"""Pictures and videos of a scenario: from names to files and digests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.canonical import canonical_request
from conformance.manifest import sign
from conformance.media import MediaError, engine_chat, find_media, with_digests


@pytest.fixture
def assets(tmp_path: Path) -> Path:
    for name in ("a.png", "b.png", "c.png"):
        (tmp_path / name).write_bytes(name.encode())
    sign(tmp_path, "first")
    return tmp_path


def names(prompt: dict[str, Any], assets: Path) -> list[tuple[str, list[str]]]:
    return [(ref.modality, [asset.name for asset in ref.assets]) for ref in find_media(prompt, assets)]


def test_a_prompt_of_text_has_none(assets: Path) -> None:
    for prompt in ({"text": "hi"}, {"token_ids": [1]}, {"chat": ["hi", {"text": "a"}]}):
        assert find_media(prompt, assets) == ()
        assert with_digests(prompt, ()) == prompt


def test_pictures_of_a_chat_come_in_its_order(assets: Path) -> None:
    chat = [{"image": "b.png"}, {"text": "and"}, {"video": {"frames": ["a.png", "c.png"], "fps": 2}}]
    expected = [("image", ["b.png"]), ("video", ["a.png", "c.png"])]
    assert names({"chat": chat}, assets) == expected
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": chat}]
    assert names({"messages": messages}, assets) == expected


def test_pictures_beside_a_text(assets: Path) -> None:
    prompt = {"text": "<image> and <image>", "media": [{"image": "b.png"}, {"image": "a.png"}]}
    assert names(prompt, assets) == [("image", ["b.png"]), ("image", ["a.png"])]


def test_names_become_digests_where_they_stand(assets: Path) -> None:
    chat = [{"image": "b.png"}, {"text": "and"}, {"video": {"frames": ["a.png"], "fps": 2}}]
    prompt = {"messages": [{"role": "user", "content": chat}]}
    media = find_media(prompt, assets)
    b, a = (ref.assets[0].digest for ref in media)
    request = canonical_request(model="m", prompt=with_digests(prompt, media), max_tokens=1)
    [message] = request["prompt"]["messages"]
    assert message["content"] == [
        {"image": b},
        {"text": "and"},
        {"video": {"frames": [a], "fps": 2.0}},
    ]


def test_engines_get_typed_parts(assets: Path) -> None:
    prompt = {"chat": ["look: ", {"image": "a.png"}, {"video": {"frames": ["b.png"]}}]}
    media = find_media(prompt, assets)
    request = canonical_request(model="m", prompt=with_digests(prompt, media), max_tokens=1)
    [message] = engine_chat(request["prompt"]["messages"])
    assert message["content"] == [{"type": "text", "text": "look: "}, {"type": "image"}, {"type": "video"}]
    assert engine_chat([{"role": "user", "content": "hi"}]) == ({"role": "user", "content": "hi"},)


@pytest.mark.parametrize(
    ("prompt", "where", "message"),
    [
        ({"chat": [{"text": "a"}, {"image": "x.png"}]}, ("chat", 1, "image"), "no asset 'x.png'"),
        ({"chat": [{"image": 3}]}, ("chat", 0, "image"), "expected the name of a file"),
        ({"chat": [{"sound": "a.png"}]}, ("chat", 0), "expected {text: …}, {image: …} or {video: …}"),
        ({"text": "a", "media": [{"text": "b"}]}, ("media", 0), "expected {text: …}, {image: …}"),
        ({"chat": [{"video": ["a.png"]}]}, ("chat", 0, "video"), "expected {frames:"),
        ({"chat": [{"video": {"frames": []}}]}, ("chat", 0, "video", "frames"), "expected a list of files"),
        (
            {"chat": [{"video": {"frames": ["a.png", "x.png"]}}]},
            ("chat", 0, "video", "frames", 1),
            "no asset 'x.png'",
        ),
        (
            {"chat": [{"video": {"frames": ["a.png"], "fps": 0}}]},
            ("chat", 0, "video", "fps"),
            "expected a number above 0, got 0",
        ),
        (
            {"messages": [{"role": "user", "content": [{"image": "x.png"}]}]},
            ("messages", 0, "content", 0, "image"),
            "no asset 'x.png'",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_place(
    assets: Path, prompt: dict[str, Any], where: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(MediaError) as error:
        find_media(prompt, assets)
    assert error.value.where == where
    assert message in str(error.value)
