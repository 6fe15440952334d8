"""A request's prompt in the forms that minivllm and vLLM share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from conformance.adapters.base import EngineRequest, Media

__all__ = ["chat_messages", "shared_prompt"]


def shared_prompt(request: EngineRequest) -> dict[str, Any]:
    """{"prompt" | "prompt_token_ids" | "prompt_embeds": …} with multi_modal_data, where there is any.

    The first that the request has: embeddings, ids, text.
    """
    prompt: dict[str, Any]
    if request.prompt_embeds is not None:
        return {"prompt_embeds": torch.from_numpy(request.prompt_embeds.copy())}
    if request.prompt_token_ids is not None:
        prompt = {"prompt_token_ids": list(request.prompt_token_ids)}
    else:
        prompt = {"prompt": request.text}
    for media in request.media:
        key = media.modality
        prompt.setdefault("multi_modal_data", {}).setdefault(key, []).append(_source(media))
    if request.mm_processor_kwargs:
        prompt["mm_processor_kwargs"] = dict(request.mm_processor_kwargs)
    return prompt


def chat_messages(request: EngineRequest) -> list[dict[str, Any]]:
    """The request's chat, every picture and video in its content part."""
    media = iter(request.media)
    return [{**message, "content": _content(message["content"], media)} for message in request.chat or ()]


def _content(content: Any, media: Any) -> Any:
    if isinstance(content, str):
        return content
    return [
        part if part["type"] == "text" else {**part, part["type"]: _source(next(media))} for part in content
    ]


def _source(media: Media) -> Any:
    """What an engine reads: a file, the frames of a video, or embeddings with what places them."""
    if media.embeddings is not None:
        rows: dict[str, Any] = {f"{media.modality}_embeds": torch.from_numpy(media.embeddings.copy())}
        if media.deepstack:
            rows["deepstack"] = tuple(torch.from_numpy(level.copy()) for level in media.deepstack)
        return {**rows, **_places(media)}
    if media.modality == "image":
        return media.paths[0]
    return {"frames": list(media.paths), **({} if media.fps is None else {"fps": media.fps})}


def _places(media: Media) -> Mapping[str, Any]:
    """Facts that tell where the rows of an item come from, by the names families use."""
    found: dict[str, Any] = {}
    if "grid_thw" in media.facts:
        found[f"{media.modality}_grid_thw"] = torch.tensor([media.facts["grid_thw"]])
    if "crops" in media.facts:
        found["rows"], found["cols"] = media.facts["crops"]
    return found
