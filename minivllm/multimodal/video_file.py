"""Frames of a video file, through PyAV (FFmpeg): the optional extra `video`.

A file is opened twice: once to see how many frames it has, and once to decode those that the model is to
see. Frames are as FFmpeg converts them to RGB and in the order they are shown; turning a video by its
metadata is left to whoever made it, as in Transformers.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from PIL import Image

from minivllm.device import ran_out_of_memory
from minivllm.errors import BadMedia, UnsupportedError

if TYPE_CHECKING:
    from av.container import InputContainer
    from av.video.stream import VideoStream

__all__ = ["MAX_VIDEO_PIXELS", "VideoFile", "open_video"]

MAX_VIDEO_PIXELS = 2**30
"""Most pixels of all frames that are decoded of one video: 3 GiB in RGB, 517 frames of 1920 × 1080."""

#: Containers that hold their frames themselves. A playlist would have others read files and addresses
#: that whoever sent it chose.
_CONTAINERS = ("mov", "matroska", "webm", "avi", "gif")

_OPTIONS = {"format_whitelist": ",".join(_CONTAINERS), "protocol_whitelist": "none"}


@dataclass(frozen=True, eq=False, slots=True)
class VideoFile:
    """A video whose frames are decoded when it is known which.

    Attributes:
        source: the file, or what is in it.
        what: names it in messages.
        num_frames: how many frames it shows.
        fps: frames per second on the average; None if the file does not say.
        width, height: of a frame, in pixels.
    """

    source: Path | bytes
    what: str
    num_frames: int
    fps: float | None
    width: int
    height: int

    def read(self, indices: Sequence[int]) -> list[Image.Image]:
        """The frames of these numbers, in RGB.

        Args:
            indices: ascending, from 0 on; one may occur several times.

        Raises:
            BadMedia: a frame that cannot be decoded, or more than `MAX_VIDEO_PIXELS`.
        """
        pixels = len(set(indices)) * self.width * self.height
        if pixels > MAX_VIDEO_PIXELS:
            raise BadMedia(
                f"{len(set(indices))} frames of {self.width} × {self.height} of {self.what} are more than "
                f"{MAX_VIDEO_PIXELS} pixels, the most that are decoded; choose fewer with do_sample_frames "
                "and fps or num_frames"
            )
        wanted = set(indices)
        found: dict[int, Image.Image] = {}
        held = 0
        with _opened(self.source, self.what) as (container, stream):
            for number, frame in enumerate(container.decode(stream)):
                if frame.is_corrupt:
                    raise BadMedia(f"{self.what} is damaged: frame {number} of {self.num_frames}")
                if number in wanted:
                    held += frame.width * frame.height
                    if held > MAX_VIDEO_PIXELS:  # frames may be larger than the header says
                        raise BadMedia(
                            f"the frames of {self.what} up to number {number}, of {frame.width} × "
                            f"{frame.height}, are more than {MAX_VIDEO_PIXELS} pixels, the most decoded"
                        )
                    found[number] = Image.fromarray(frame.to_ndarray(format="rgb24"), "RGB")
                if len(found) == len(wanted):
                    break
        if missing := sorted(wanted - found.keys()):
            raise BadMedia(
                f"{self.what} is damaged or cut short: frame {missing[0]} of {self.num_frames} is not there"
            )
        if len(sizes := sorted({image.size for image in found.values()})) > 1:
            raise BadMedia(f"the frames of a video must have one size, got {sizes} in {self.what}")
        return [found[index] for index in indices]


def open_video(source: Path | bytes, what: str, max_pixels: int) -> VideoFile:
    """A video file, looked at but not decoded.

    Args:
        source: the file, or what is in it.
        what: names it in messages.
        max_pixels: the most that a frame may have.

    Raises:
        BadMedia: not there, in no container that is read, damaged, cut short, without video or frames, or
            with more than `max_pixels` in a frame.
        UnsupportedError: PyAV is not installed.
    """
    if source == b"":
        raise BadMedia(f"{what} is empty")
    with _opened(source, what) as (container, stream):
        if stream.width * stream.height > max_pixels:
            raise BadMedia(
                f"{what} has frames of {stream.width} × {stream.height} pixels, more than {max_pixels}, the "
                "most that are decoded; make it smaller"
            )
        rate = stream.average_rate or stream.guessed_rate
        fps = float(rate) if rate else None
        if container.format.name.startswith("matroska"):
            count = _count_by_decoding(container, stream, fps, what)
        else:
            count = _count_packets(container, stream, what)
        if not count:
            raise BadMedia(f"{what} has no frames")
        if container.format.name == "gif" and not _ends_as_gif(source):
            raise BadMedia(f"{what} is cut short: a GIF ends with a trailer, and this one does not")
        return VideoFile(source, what, count, fps, stream.width, stream.height)


@contextmanager
def _opened(source: Path | bytes, what: str) -> Iterator[tuple[InputContainer, VideoStream]]:
    """The container and its first video stream; what FFmpeg trips over is the file's fault.

    FFmpeg gets bytes to read and no names, so it can open nothing else.
    """
    try:
        import av
    except ImportError:
        raise UnsupportedError(
            f"decoding {what} needs PyAV: pip install 'minivllm[video]'; or give frames as "
            '{"frames": […], "fps": …}'
        ) from None
    if isinstance(source, Path) and source.exists() and not source.is_file():
        raise BadMedia(f"{what} is not a file")  # a pipe would be waited for
    try:
        file: BinaryIO = io.BytesIO(source) if isinstance(source, bytes) else source.open("rb")
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        if ran_out_of_memory(error):
            raise
        raise BadMedia(f"{what} cannot be read: {error}") from None
    try:
        with file, av.open(file, "r", options=_OPTIONS) as container:
            if not container.streams.video:
                raise BadMedia(f"{what} holds no video")
            yield container, container.streams.video[0]
    except BadMedia:
        raise
    except Exception as error:  # decoders raise anything on damaged data
        if ran_out_of_memory(error):
            raise
        raise BadMedia(
            f"{what} is damaged, cut short, or in none of the containers {', '.join(_CONTAINERS)}: {error}"
        ) from error


def _count_packets(container: InputContainer, stream: VideoStream, what: str) -> int:
    """Frames to show, of a container that says how many it should hold."""
    held = hidden = 0
    for packet in container.demux(stream):
        held += packet.size > 0
        hidden += packet.size > 0 and packet.is_discard  # cut off by an edit list
    if held < stream.frames:
        raise BadMedia(f"{what} is cut short: it holds {held} of {stream.frames} frames")
    return held - hidden


def _count_by_decoding(container: InputContainer, stream: VideoStream, fps: float | None, what: str) -> int:
    """Frames of a Matroska or WebM, where a packet need not be a frame, and only the length is told."""
    times = [frame.time for frame in container.decode(stream) if frame.time is not None]
    if not times or container.duration is None or len(container.streams) > 1:
        return len(times)
    gaps = [after - before for before, after in pairwise(times)]
    longest = max([*gaps, 1 / fps] if fps else gaps, default=math.inf)
    length = container.duration / 1_000_000
    if length - times[-1] > 1.5 * longest:
        raise BadMedia(
            f"{what} is cut short: it is said to last {length:.2f} s, and its last of {len(times)} frames is "
            f"at {times[-1]:.2f} s"
        )
    return len(times)


def _ends_as_gif(source: Path | bytes) -> bool:
    if isinstance(source, Path):
        with source.open("rb") as file:
            file.seek(max(0, source.stat().st_size - 1024))
            source = file.read()
    return source.rstrip(b"\0").endswith(b";")
