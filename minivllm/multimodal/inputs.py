"""What users write for media, in prompts and in conversations, in one form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from minivllm.errors import BadMedia, BadParameter
from minivllm.multimodal.load import load_image, load_video
from minivllm.multimodal.supplied import checked_embeddings

__all__ = ["read_media", "split_conversation"]

#: Keys of multi_modal_data → modality.
_KEYS = {"image": "image", "image_embeds": "image", "video": "video", "video_embeds": "video"}

#: Kinds of content parts → where their media is, and under which key of multi_modal_data.
_PARTS = {
    "image": ("image", "image"),
    "image_url": ("image_url", "image"),
    "image_embeds": ("image_embeds", "image_embeds"),
    "video": ("video", "video"),
    "video_embeds": ("video_embeds", "video_embeds"),
}


def read_media(data: Any, hidden_size: int, limits: Mapping[str, int]) -> dict[str, list[Any]]:
    """`multi_modal_data`, loaded: modality → Pillow images, videos, video files or supplied embeddings.

    Args:
        data: {"image": one or several, "video": …, "image_embeds": …, "video_embeds": …}. Among
            the images may be {"image_embeds": …}, and so for videos.
        limits: modality → most items.

    Raises:
        BadMedia: an item cannot be loaded, or there are too many.
        BadParameter: not a mapping, or an unknown key.
    """
    if not isinstance(data, Mapping):
        raise BadParameter(f"multi_modal_data is a mapping, got {data!r}")
    if unknown := sorted(str(key) for key in data if key not in _KEYS):
        raise BadParameter(f"unknown multi_modal_data {unknown}; known: {', '.join(_KEYS)}")
    for modality in ("image", "video"):
        if data.get(modality) is not None and data.get(f"{modality}_embeds") is not None:
            raise BadMedia(
                f"give {modality} or {modality}_embeds, not both: which comes first would be unclear; put "
                f'{{"{modality}_embeds": …}} among the {modality}s'
            )
    found: dict[str, list[Any]] = {}
    for key, value in data.items():
        modality = _KEYS[key]
        sources = [] if value is None else _listed(key, value)
        if len(sources) > limits.get(modality, len(sources)):
            raise BadMedia(
                f"at most {limits[modality]} {modality}s per prompt are allowed, got {len(sources)}; raise "
                "limit_mm_per_prompt"
            )
        if sources:
            found[modality] = [_load(key, source, hidden_size) for source in sources]
    return found


def _listed(key: str, value: Any) -> list[Any]:
    if key == "video":  # a list of frames is one video, a list of such lists several
        several = isinstance(value, list | tuple) and value and all(_is_video(one) for one in value)
        return list(value) if several else [value]
    return list(value) if isinstance(value, list | tuple) else [value]


def _is_video(value: Any) -> bool:
    return (
        isinstance(value, list | tuple | Mapping)
        or getattr(value, "ndim", 0) == 4
        or hasattr(value, "frames")  # a Video
    )


def _load(key: str, source: Any, hidden_size: int) -> Any:
    modality = _KEYS[key]
    name = f"{modality}_embeds"
    if key == name or (isinstance(source, Mapping) and name in source):
        return checked_embeddings(source, name, hidden_size)
    return load_video(source) if modality == "video" else load_image(source)


def split_conversation(
    messages: Sequence[Mapping[str, Any]], *, text_only: bool
) -> tuple[list[dict[str, Any]], dict[str, list[Any]]]:
    """Messages as a chat template takes them, and `multi_modal_data` of their media in order.

    Content parts are {"type": "text", "text": …}, {"type": "image", "image": source},
    {"type": "image_url", "image_url": {"url": …}}, {"type": "video", "video": source}, and
    {"type": "image_embeds", "image_embeds": …} and the like for video.

    Args:
        text_only: the model takes no media: parts of text become one text, joined by newlines.

    Raises:
        BadParameter: no list of messages, or a part of another form.
    """
    given: object = messages
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise BadParameter(f"a conversation is a list of messages, got {given!r}")
    media: dict[str, list[Any]] = {}
    plain = []
    for message in messages:
        known = isinstance(message, Mapping) and "content" in message
        if not known or (text_only and not isinstance(message["content"], list | tuple)):
            plain.append(message)  # as it is, or refused where it is rendered
            continue
        parts = list(_parts(message["content"], media))
        content: Any = parts
        if text_only and all(part["type"] == "text" for part in parts):
            content = "\n".join(part["text"] for part in parts)
        plain.append({**message, "content": content})
    return plain, media  # type: ignore[return-value]  # what is no mapping is refused later


def _parts(content: Any, media: dict[str, list[Any]]) -> Iterator[dict[str, str]]:
    """Parts for the template; appends their media."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}
        return
    if not isinstance(content, list | tuple):
        raise BadParameter(f"the content of a message is text or a list of parts, got {content!r}")
    for part in content:
        if not isinstance(part, Mapping):
            raise BadParameter(f"a part of a message is a mapping with a type, got {part!r}")
        kind = part.get("type")
        field, key = _PARTS.get(kind, ("", "")) if isinstance(kind, str) else ("", "")
        if kind == "text" and isinstance(part.get("text"), str):
            yield {"type": "text", "text": part["text"]}
            continue
        if not field or field not in part:
            raise BadParameter(
                f"a part of a message has type text with text, or {', '.join(_PARTS)} with the like; got a "
                f"part of type {kind!r} with {sorted(map(str, part))}"
            )
        source = part[field]
        if kind == "image_url":
            source = source.get("url") if isinstance(source, Mapping) else source
        if kind == "video" and isinstance(source, str | Path | bytes):
            source = {"file": source}  # in a list of videos, a name alone would be a frame
        if key.endswith("_embeds") and not isinstance(source, Mapping):
            source = {key: source}
        modality = _KEYS[key]
        media.setdefault(modality, []).append(source)
        yield {"type": modality}
