"""Loads pictures and videos from whatever a user has, or refuses them by name.

A picture keeps its mode (RGBA, L, P, I;16, CMYK, …): how it becomes RGB is up to the image
processor of the model, and part of what the model sees.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from minivllm.device import ran_out_of_memory
from minivllm.errors import BadMedia, UnsupportedError
from minivllm.multimodal.video_file import VideoFile, open_video

__all__ = ["MAX_PIXELS", "ImageSource", "Video", "load_image", "load_video"]

MAX_PIXELS = 89_478_485
"""Most pixels of one picture: Pillow's own limit, a quarter of a GiB in RGB. A small file may claim
more than memory holds (a decompression bomb)."""

#: A path, a data URI, the bytes of a file, a Pillow image, or uint8 [height, width, 3].
ImageSource: TypeAlias = "str | Path | bytes | Image.Image | np.ndarray[Any, Any] | torch.Tensor"


@dataclass(frozen=True, eq=False, slots=True)
class Video:
    """Frames of equal size, and when they were taken.

    Attributes:
        frames: in order.
        fps: frames per second of this list; None if unknown.
        timestamps: second of each frame; None if unknown, or implied by fps.
    """

    frames: tuple[Image.Image, ...]
    fps: float | None = None
    timestamps: tuple[float, ...] | None = None


def load_image(source: ImageSource) -> Image.Image:
    """A decoded picture, turned upright by its EXIF orientation, in its own mode.

    Of an animation it is the first frame.

    Raises:
        BadMedia: not an image, damaged, cut short, empty, of another shape or type than said, or
            more than `MAX_PIXELS`.
        UnsupportedError: a URL to fetch.
    """
    if isinstance(source, Image.Image):
        return _decoded(source, "the image")
    if isinstance(source, torch.Tensor):
        source = _as_array(source, "an image")
    if isinstance(source, np.ndarray):
        return _from_array(source)
    if isinstance(source, bytes | bytearray | memoryview):
        return _from_bytes(bytes(source), f"an image of {len(source)} bytes")
    if isinstance(source, Path):
        return _from_file(source)
    if not isinstance(source, str):
        raise BadMedia(
            "an image is a path, a data URI, bytes, a Pillow image or an array [height, width, 3] of uint8; "
            f"got {type(source).__name__}"
        )
    if source.startswith("data:"):
        return _from_data_uri(source)
    if source.startswith(("http://", "https://")):
        raise UnsupportedError(
            f"images are not fetched from the network, got {_short(source)}; download it and give its path "
            "or its bytes"
        )
    return _from_file(Path(source.removeprefix("file://")))


def load_video(source: Any) -> Video | VideoFile:
    """Frames from a list of images, an array [frames, height, width, 3] of uint8, or a mapping; or a file.

    Args:
        source: with {"frames": …, "fps": …} or {"frames": …, "timestamps": …} the times are known. A
            path, a data URI or bytes are a file, which may also be written {"file": …}; its frames are
            decoded when the model's processor knows which ones it wants.

    Raises:
        BadMedia: no frames, frames of different sizes, times that do not fit, or a bad frame; a file as
            `minivllm.multimodal.video_file.open_video` refuses it.
        UnsupportedError: a URL to fetch, or a file without PyAV.
    """
    if isinstance(source, Mapping) and set(source) == {"file"}:
        source = source["file"]
        if not isinstance(source, str | Path | bytes | bytearray | memoryview):
            raise BadMedia(f"a video file is a path, a data URI or bytes, got {type(source).__name__}")
    if isinstance(source, str | Path | bytes | bytearray | memoryview):
        return _video_file(source)
    fps: Any = None
    timestamps: Any = None
    if isinstance(source, Video):
        source, fps, timestamps = source.frames, source.fps, source.timestamps
    elif isinstance(source, Mapping):
        unknown = sorted(map(str, set(source) - {"frames", "fps", "timestamps"}))
        if "frames" not in source or unknown:
            raise BadMedia(
                "a video needs frames, and may have fps or timestamps, or is a file; got "
                f"{sorted(map(str, source))}"
            )
        source, fps, timestamps = source["frames"], source.get("fps"), source.get("timestamps")
    if isinstance(source, torch.Tensor):
        source = _as_array(source, "a video")
    if isinstance(source, np.ndarray):
        if source.ndim != 4:
            raise BadMedia(
                f"a video array must have the shape [frames, height, width, 3], got {list(source.shape)}"
            )
        source = list(source)
    if not isinstance(source, Sequence):
        raise BadMedia(
            "a video is a list of images, an array [frames, height, width, 3], or a file as a path, a data "
            f"URI or bytes; got {type(source).__name__}"
        )
    if not source:
        raise BadMedia("a video needs at least one frame, got none")
    frames = tuple(load_image(frame) for frame in source)
    sizes = sorted({frame.size for frame in frames})
    if len(sizes) > 1:
        raise BadMedia(f"the frames of a video must have one size, got {sizes}")
    return Video(frames, _checked_fps(fps), _checked_timestamps(timestamps, len(frames)))


def _video_file(source: str | Path | bytes | bytearray | memoryview) -> VideoFile:
    if isinstance(source, bytes | bytearray | memoryview):
        return open_video(bytes(source), f"a video of {len(source)} bytes", MAX_PIXELS)
    if isinstance(source, str):
        if source.startswith("data:"):
            return open_video(_data_uri_bytes(source), f"the video in {_short(source)}", MAX_PIXELS)
        if "://" in source and not source.startswith("file://"):
            raise UnsupportedError(
                f"videos are not fetched from the network, got {_short(source)}; download it and give its "
                "path or its bytes"
            )
        source = Path(source.removeprefix("file://"))
    return open_video(source, f"the video {_short(str(source))}", MAX_PIXELS)


def _checked_fps(fps: Any) -> float | None:
    if fps is None:
        return None
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not 0 < fps <= sys.float_info.max:
        raise BadMedia(f"fps must be a positive number, got {fps!r}")
    return float(fps)


def _checked_timestamps(timestamps: Any, count: int) -> tuple[float, ...] | None:
    if timestamps is None:
        return None
    try:
        times = tuple(float(t) for t in timestamps)
    except (OverflowError, TypeError, ValueError):
        raise BadMedia(f"timestamps must be a list of seconds, got {timestamps!r}") from None
    if len(times) != count:
        raise BadMedia(f"{count} frames need as many timestamps, got {len(times)}")
    if any(not math.isfinite(t) or t < 0 for t in times) or list(times) != sorted(times):
        raise BadMedia(f"timestamps must be seconds from 0 on that do not decrease, got {list(times)}")
    return times


def _from_file(path: Path) -> Image.Image:
    try:
        data = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        if ran_out_of_memory(error):
            raise
        raise BadMedia(f"the image {_short(str(path))} cannot be read: {error}") from None
    return _from_bytes(data, f"the image {_short(str(path))}")


def _from_data_uri(uri: str) -> Image.Image:
    return _from_bytes(_data_uri_bytes(uri), f"the image in {_short(uri)}")


def _data_uri_bytes(uri: str) -> bytes:
    head, comma, payload = uri.partition(",")
    if not comma or not head.endswith(";base64"):
        raise BadMedia(f"a data URI must be data:<type>;base64,<data>, got {_short(uri)}")
    try:
        return base64.b64decode(payload, validate=True)
    except binascii.Error as error:
        raise BadMedia(f"the data URI {_short(uri)} is not valid base64: {error}") from None


def _from_bytes(data: bytes, what: str) -> Image.Image:
    if not data:
        raise BadMedia(f"{what} is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # refused just below
            image = Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        raise BadMedia(
            f"{what} is in no image format that Pillow knows; it begins with {data[:16]!r}"
        ) from None
    except Image.DecompressionBombError:
        raise BadMedia(f"{what} has far more than {MAX_PIXELS} pixels, the most that are decoded") from None
    except Exception as error:  # decoders raise anything on damaged headers
        if ran_out_of_memory(error):
            raise
        raise BadMedia(f"{what} is damaged: {error}") from error
    return _decoded(image, what)


def _decoded(image: Image.Image, what: str) -> Image.Image:
    width, height = image.size
    if width < 1 or height < 1:
        raise BadMedia(f"{what} has no pixels: {width} × {height}")
    if width * height > MAX_PIXELS:
        raise BadMedia(
            f"{what} has {width} × {height} pixels, more than {MAX_PIXELS}, the most that are decoded; "
            "make it smaller"
        )
    try:
        image.load()
        upright = ImageOps.exif_transpose(image)
    except Exception as error:  # decoders raise anything on damaged data: OSError, SyntaxError, struct.error
        if ran_out_of_memory(error):
            raise
        raise BadMedia(f"{what} is damaged or cut short: {error}") from error
    return upright


def _as_array(tensor: torch.Tensor, what: str) -> np.ndarray[Any, Any]:
    try:
        array: np.ndarray[Any, Any] = tensor.detach().to("cpu").numpy()
    except (RuntimeError, TypeError) as error:  # no values, not dense, or a type that NumPy lacks
        if ran_out_of_memory(error):
            raise
        raise BadMedia(
            f"{what} must be dense and uint8, got a tensor {list(tensor.shape)} of {tensor.dtype} and layout "
            f"{tensor.layout} on {tensor.device}"
        ) from error
    return array


def _from_array(array: np.ndarray[Any, Any]) -> Image.Image:
    if array.ndim != 3 or array.shape[2] != 3 or array.dtype != np.uint8:
        raise BadMedia(
            "an image array must be uint8 of the shape [height, width, 3] (RGB), got "
            f"{array.dtype} of {list(array.shape)}"
        )
    if 0 in array.shape:
        raise BadMedia(f"the image array has no pixels: {list(array.shape)}")
    if array.shape[0] * array.shape[1] > MAX_PIXELS:
        raise BadMedia(
            f"the image array {list(array.shape)} has more than {MAX_PIXELS} pixels; make it smaller"
        )
    return Image.fromarray(np.ascontiguousarray(array), "RGB")


def _short(text: str) -> str:
    return repr(text if len(text) <= 80 else f"{text[:20]}…{text[-59:]}")  # a path ends in its name
