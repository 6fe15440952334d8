"""The pictures of a scenario's requests, small enough to travel inside a report."""

from __future__ import annotations

import base64
import functools
import io
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageOps

from conformance.scenario import Scenario

__all__ = ["SIDE", "Thumbnail", "thumbnails_of"]

#: The longer side of a thumbnail, in pixels.
SIDE = 56

#: Frames of a video that are shown.
_MOST_FRAMES = 4


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """One picture, or one frame of a video.

    Attributes:
        requests: the requests that show it to the model.
        name: the asset's, with its place among the frames of a video.
        size: width and height of the picture itself; None if it cannot be read.
        uri: a PNG as a data URI; "" if it cannot be read, as some assets are broken on purpose.
    """

    requests: tuple[str, ...]
    name: str
    size: tuple[int, int] | None
    uri: str


def thumbnails_of(scenario: Scenario) -> Iterator[Thumbnail]:
    """Each picture of the scenario once, in the order of its requests."""
    users: dict[tuple[str, Path], list[str]] = {}
    for request in scenario.requests.values():
        for ref in request.media:
            for i, asset in enumerate(ref.assets[:_MOST_FRAMES]):
                frame = f", frame {i + 1} of {len(ref.assets)}" if ref.modality == "video" else ""
                names = users.setdefault((asset.name + frame, asset.path), [])
                if request.name not in names:
                    names.append(request.name)
    for (name, path), requests in users.items():
        size, uri = _small(path, path.stat().st_mtime_ns)
        yield Thumbnail(tuple(requests), name, size, uri)


@functools.lru_cache(maxsize=512)
def _small(path: Path, changed: int) -> tuple[tuple[int, int] | None, str]:  # noqa: ARG001  (part of the key)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as opened:
                size = opened.size
                picture = ImageOps.exif_transpose(opened).convert("RGBA")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError, Image.DecompressionBombWarning):
        return None, ""
    picture.thumbnail((SIDE, SIDE))
    out = io.BytesIO()
    picture.quantize(64, method=Image.Quantize.FASTOCTREE).save(out, "PNG", optimize=True)
    return size, "data:image/png;base64," + base64.b64encode(out.getvalue()).decode("ascii")
