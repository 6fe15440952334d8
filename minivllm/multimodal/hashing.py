"""What identifies a picture: SHA-256 over everything its embeddings depend on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from minivllm.errors import BadParameter

if TYPE_CHECKING:
    from minivllm.multimodal.load import Video

__all__ = ["content_hash", "image_hash", "tensors_hash", "video_hash"]


def content_hash(
    kind: str, mode: str, size: Sequence[int], pixels: bytes | Iterable[bytes], settings: Mapping[str, Any]
) -> str:
    """Hex SHA-256 over length-framed parts, so that no two contents run into one another.

    Bytes alone would not do: an image of 30 × 150 and one of 150 × 30 can hold the same (Dynamo
    pull request 8341), and the same file processed in another way has other embeddings (vLLM pull
    request 49975).

    Args:
        kind: "image", "video", …
        mode: how to read the bytes: a Pillow mode, a dtype.
        size: width and height, and whatever else shapes the bytes.
        pixels: the bytes, in one piece or several; where one piece ends counts.
        settings: of the processor.

    Raises:
        BadParameter: a setting that has no JSON form.
    """
    try:
        plain = json.dumps(dict(settings), sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise BadParameter(
            f"processor settings must be plain data, got {dict(settings)!r}: {error}"
        ) from None
    digest = hashlib.sha256()
    pieces = [pixels] if isinstance(pixels, bytes) else pixels
    texts = (kind, mode, ",".join(str(int(n)) for n in size), plain)
    for part in (*(text.encode() for text in texts), *pieces):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def image_hash(image: Image.Image, settings: Mapping[str, Any]) -> str:
    """`content_hash` of one picture: its pixels, its palette and its transparent colour."""
    return content_hash("image", image.mode, image.size, _pieces(image), settings)


def video_hash(video: Video, settings: Mapping[str, Any]) -> str:
    """`content_hash` of a video: its frames and when they were taken."""
    first = video.frames[0]
    pieces = [piece for frame in video.frames for piece in (frame.mode.encode(), *_pieces(frame))]
    times = repr((video.fps, video.timestamps)).encode()
    return content_hash("video", first.mode, (*first.size, len(video.frames)), [*pieces, times], settings)


def tensors_hash(kind: str, tensors: Mapping[str, Tensor], settings: Mapping[str, Any]) -> str:
    """`content_hash` of supplied tensors, such as embeddings with their grid, by name."""
    pieces = []
    for name, tensor in sorted(tensors.items()):
        plain = tensor.detach().to("cpu").contiguous()
        raw = plain.flatten().view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        pieces += [name.encode(), str(plain.dtype).encode(), repr(tuple(plain.shape)).encode(), raw]
    return content_hash(kind, "tensors", (len(tensors),), pieces, settings)


def _pieces(image: Image.Image) -> list[bytes]:
    palette = image.getpalette("RGBA") if image.mode in ("P", "PA") else None
    transparent = image.info.get("transparency")
    return [image.tobytes(), bytes(palette or ()), repr(transparent).encode()]
