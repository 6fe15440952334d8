"""Pictures and videos in the requests of a scenario: names of assets in, files and digests out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.assets import Asset, AssetError, find_asset
from conformance.yaml_lines import Location

__all__ = ["MediaError", "MediaRef", "engine_chat", "find_media", "with_digests"]

#: A part of a prompt that is no text, and where it stands below the request.
_Place = tuple[Location, Mapping[str, Any]]


class MediaError(ValueError):
    """A prompt names a picture that is not there, or in a form that is not understood.

    Attributes:
        where: location below the request.
    """

    def __init__(self, where: Location, message: str) -> None:
        super().__init__(message)
        self.where = where


@dataclass(frozen=True, slots=True)
class MediaRef:
    """One picture or video of a prompt, by its files.

    Attributes:
        modality: "image" or "video".
        assets: the picture, or the frames of the video.
        fps: frames per second of a video, if the scenario tells them.
    """

    modality: str
    assets: tuple[Asset, ...]
    fps: float | None = None


def find_media(prompt: Mapping[str, Any], directory: Path) -> tuple[MediaRef, ...]:
    """The pictures and videos of a scenario's prompt, in its order.

    Args:
        prompt: {"text" | "chat" | "messages" | "token_ids": …} and perhaps "media"; parts name
            assets.
        directory: scenarios/assets.

    Raises:
        MediaError: naming the part.
    """
    return tuple(_find(where, part, directory) for where, part in _places(prompt))


def with_digests(prompt: Mapping[str, Any], media: Sequence[MediaRef]) -> dict[str, Any]:
    """The prompt with every file named by its content, as `conformance.canonical` wants it."""
    digests = iter(media)

    def named() -> dict[str, Any]:
        ref = next(digests)
        if ref.modality == "image":
            return {"image": ref.assets[0].digest}
        frames = [asset.digest for asset in ref.assets]
        return {"video": {"frames": frames, **({} if ref.fps is None else {"fps": ref.fps})}}

    return _mapped(prompt, named)


def engine_chat(messages: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Canonical messages as an engine gets them: {"type": "text", …}, {"type": "image"}, …"""
    return tuple(
        message
        if isinstance(message["content"], str)
        else {**message, "content": [_typed(part) for part in message["content"]]}
        for message in messages
    )


def _typed(part: Mapping[str, Any]) -> dict[str, Any]:
    [(kind, value)] = part.items()
    return {"type": "text", "text": value} if kind == "text" else {"type": kind}


def _places(prompt: Mapping[str, Any]) -> Iterator[_Place]:
    for form, value in prompt.items():
        if form in ("chat", "messages", "media"):
            yield from _below(value, (form,))


def _below(items: Any, where: Location) -> Iterator[_Place]:
    for i, item in enumerate(items if isinstance(items, list) else []):
        if not isinstance(item, Mapping):
            continue
        if "role" in item:
            yield from _below(item.get("content"), (*where, i, "content"))
        elif "text" not in item or where == ("media",):
            yield (*where, i), item


def _mapped(prompt: Mapping[str, Any], change: Callable[[], Any]) -> dict[str, Any]:
    def walk(item: Any) -> Any:
        if isinstance(item, Mapping) and "role" in item:
            return {**item, "content": walk(item["content"])}
        if isinstance(item, Mapping) and "text" not in item:
            return change()
        return [walk(one) for one in item] if isinstance(item, list) else item

    return {f: walk(v) if f in ("chat", "messages", "media") else v for f, v in prompt.items()}


def _find(where: Location, part: Mapping[str, Any], directory: Path) -> MediaRef:
    if set(part) == {"image"}:
        return MediaRef("image", (_asset((*where, "image"), part["image"], directory),))
    if set(part) != {"video"}:
        raise MediaError(where, f"expected {{text: …}}, {{image: …}} or {{video: …}}, got {dict(part)!r}")
    video, where = part["video"], (*where, "video")
    if not isinstance(video, Mapping) or not {"frames"} <= set(video) <= {"frames", "fps"}:
        raise MediaError(where, f"expected {{frames: [file, …], fps: number}}, got {video!r}")
    frames, fps = video["frames"], video.get("fps")
    if not isinstance(frames, list) or not frames:
        raise MediaError((*where, "frames"), f"expected a list of files, got {frames!r}")
    if fps is not None and (isinstance(fps, bool) or not isinstance(fps, int | float) or not fps > 0):
        raise MediaError((*where, "fps"), f"expected a number above 0, got {fps!r}")
    assets = tuple(_asset((*where, "frames", i), name, directory) for i, name in enumerate(frames))
    return MediaRef("video", assets, None if fps is None else float(fps))


def _asset(where: Location, name: Any, directory: Path) -> Asset:
    if not isinstance(name, str):
        raise MediaError(where, f"expected the name of a file below assets/, got {name!r}")
    try:
        return find_asset(directory, name)
    except AssetError as error:
        raise MediaError(where, str(error)) from error
