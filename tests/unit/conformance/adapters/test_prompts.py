"""Prompts in the forms that engines with vLLM's interface take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from conformance.adapters.base import EngineRequest, Media
from conformance.adapters.prompts import chat_messages, shared_prompt

RED, BLUE = Media("image", (Path("red.png"),)), Media("image", (Path("blue.png"),))
FILM = Media("video", (Path("0.png"), Path("1.png")), 2.0)
ROWS = Media(
    "image",
    (Path("red.png"),),
    embeddings=np.ones((4, 2), np.float32),
    deepstack=(np.zeros((4, 2), np.float32),),
    facts={"grid_thw": [1, 4, 4], "crops": [2, 1]},
)


def request(**given: Any) -> EngineRequest:
    return EngineRequest("one", {"temperature": 0.0}, **given)


def test_ids_come_before_text_and_embeddings_before_both() -> None:
    assert shared_prompt(request(text="hi")) == {"prompt": "hi"}
    assert shared_prompt(request(text="hi", prompt_token_ids=(1, 2))) == {"prompt_token_ids": [1, 2]}
    embeds = np.ones((3, 2), np.float32)
    made = shared_prompt(request(prompt_token_ids=(1, 2, 3), prompt_embeds=embeds))
    assert made.keys() == {"prompt_embeds"}
    assert torch.equal(made["prompt_embeds"], torch.ones(3, 2))


def test_pictures_and_videos_go_by_kind_in_order() -> None:
    made = shared_prompt(request(text="hi", media=(RED, FILM, BLUE), mm_processor_kwargs={"max_pixels": 9}))
    assert made == {
        "prompt": "hi",
        "multi_modal_data": {
            "image": [Path("red.png"), Path("blue.png")],
            "video": [{"frames": [Path("0.png"), Path("1.png")], "fps": 2.0}],
        },
        "mm_processor_kwargs": {"max_pixels": 9},
    }


def test_supplied_embeddings_bring_what_places_them() -> None:
    [rows] = shared_prompt(request(prompt_token_ids=(1,), media=(ROWS,)))["multi_modal_data"]["image"]
    assert torch.equal(rows["image_embeds"], torch.ones(4, 2))
    assert [level.shape for level in rows["deepstack"]] == [(4, 2)]
    assert rows["image_grid_thw"].tolist() == [[1, 4, 4]]
    assert (rows["rows"], rows["cols"]) == (2, 1)


def test_a_chat_holds_each_picture_in_its_part() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "video"}]
    chat = ({"role": "system", "content": "s"}, {"role": "user", "content": parts})
    assert chat_messages(request(chat=chat, media=(RED, FILM))) == [
        {"role": "system", "content": "s"},
        {
            "role": "user",
            "content": [
                {"type": "image", "image": Path("red.png")},
                {"type": "text", "text": "and"},
                {"type": "video", "video": {"frames": [Path("0.png"), Path("1.png")], "fps": 2.0}},
            ],
        },
    ]
    [_, user] = chat_messages(request(chat=chat, media=(ROWS, FILM)))
    assert set(user["content"][0]) == {"type", "image"}
