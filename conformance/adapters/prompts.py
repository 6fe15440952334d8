"""A request's prompt in the forms that engines share, and teacher forcing by prompt logprobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from conformance.adapters.base import EngineError, EngineOutput, EngineRequest, Media

__all__ = ["chat_messages", "engine_error", "file_chat", "forced_output", "forced_prompt", "shared_prompt"]


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


def file_chat(request: EngineRequest) -> list[dict[str, Any]]:
    """The request's chat in the form of OpenAI, every picture as the URL of its file."""
    media = iter(request.media)

    def content(value: Any) -> Any:
        if isinstance(value, str):
            return value
        return [
            part if part["type"] == "text" else {"type": "image_url", "image_url": {"url": url(next(media))}}
            for part in value
        ]

    def url(one: Media) -> str:
        return one.paths[0].absolute().as_uri()

    return [{**message, "content": content(message["content"])} for message in request.chat or ()]


def engine_error(error: BaseException) -> EngineError:
    """The error by the name everybody knows: an engine's own kind of ValueError is a ValueError."""
    known = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return EngineError(known.__name__, f"{error}" or type(error).__name__)


def forced_prompt(request: EngineRequest) -> tuple[list[int], dict[str, Any]]:
    """Teacher forcing by prompt logprobs: prompt plus forced ids as one prompt, and its sampling."""
    forced = list(request.forced_token_ids or ())[: request.sampling["max_tokens"]]
    wanted = max(1, int(request.sampling.get("logprobs") or 0))
    sampling = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": wanted, "ignore_eos": True}
    return [*(request.prompt_token_ids or ()), *forced], sampling


def forced_output(request: EngineRequest, output: EngineOutput) -> EngineOutput:
    """The answer along the forced ids, read from the prompt logprobs of `forced_prompt`.

    Text and ending are empty: nothing was decoded.
    """
    prompt = tuple(request.prompt_token_ids or ())
    forced = tuple(request.forced_token_ids or ())[: request.sampling["max_tokens"]]
    rows = (output.prompt_logprobs or ())[len(prompt) : len(prompt) + len(forced)]
    known = tuple(row for row in rows if row)
    complete = len(known) == len(forced)
    return replace(
        output,
        text="",
        prompt_token_ids=prompt,
        token_ids=forced,
        choice_token_ids=tuple(max(row, key=lambda e: e.logprob).token_id for row in known)
        if complete
        else None,
        logprobs=known if complete and request.sampling.get("logprobs") is not None else None,
        prompt_logprobs=None,
        finish_reason=None if not output.finished else "length",
        stop_reason=None,
    )
