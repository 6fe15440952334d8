"""Video files: the frames that were put in come out, and what is no video is refused by name."""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from minivllm.errors import BadMedia
from minivllm.multimodal import VideoFile, load_video, read_media
from minivllm.multimodal import load as load_module
from minivllm.multimodal import video_file as module
from tests.unit.minivllm.video_files import FRAMES, KINDS, encoded, sound_only

av = pytest.importorskip("av", reason="the extra minivllm[video] is not installed")


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return {kind: encoded(kind) for kind in KINDS}


def as_path(folder: Path, data: bytes) -> Path:
    (folder / "clip.bin").write_bytes(data)  # what it is called does not matter
    return folder / "clip.bin"


@pytest.mark.parametrize("kind", KINDS)
def test_frames_come_out_as_they_were_put_in(files: dict[str, bytes], kind: str) -> None:
    video = load_video(files[kind])
    assert isinstance(video, VideoFile)
    assert (video.num_frames, video.fps, video.width, video.height) == (5, 2.0, 84, 56)
    frames = video.read(range(5))
    assert all(np.array_equal(np.asarray(image), frame) for image, frame in zip(frames, FRAMES, strict=True))
    some = video.read([1, 1, 4])
    assert [np.array_equal(np.asarray(image), FRAMES[i]) for image, i in zip(some, (1, 1, 4), strict=True)]
    assert some[0] is some[1]


@pytest.mark.parametrize(
    "source",
    [
        as_path,
        lambda folder, data: str(as_path(folder, data)),
        lambda folder, data: f"file://{as_path(folder, data)}",
        lambda folder, data: {"file": as_path(folder, data)},
        lambda _, data: bytearray(data),
        lambda _, data: f"data:video/mp4;base64,{base64.b64encode(data).decode()}",
    ],
)
def test_every_source_gives_the_same_frames(
    files: dict[str, bytes], source: Callable[[Path, bytes], Any], tmp_path: Path
) -> None:
    video = load_video(source(tmp_path, files["mp4"]))
    assert isinstance(video, VideoFile)
    assert np.array_equal(np.asarray(video.read([3])[0]), FRAMES[3])


def test_a_name_is_a_file_and_a_list_of_names_are_frames(files: dict[str, bytes], tmp_path: Path) -> None:
    path = str(as_path(tmp_path, files["mp4"]))
    assert [type(video) for video in read_media({"video": path}, 8, {})["video"]] == [VideoFile]
    several = read_media({"video": [{"file": path}, {"file": files["webm"]}]}, 8, {})["video"]
    assert [video.num_frames for video in several] == [5, 5]
    Image.fromarray(FRAMES[0]).save(tmp_path / "frame.png")
    [frames] = read_media({"video": [str(tmp_path / "frame.png")] * 3}, 8, {})["video"]
    assert len(frames.frames) == 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep", [0.1, 0.3, 0.6, 0.9, 0.98])
def test_a_video_cut_short_is_refused(files: dict[str, bytes], kind: str, keep: float) -> None:
    with pytest.raises(BadMedia, match=r"a video of \d+ bytes .*(damaged|cut short|no frames)"):
        whole(files[kind][: int(len(files[kind]) * keep)])


def test_a_gif_cut_short_is_refused() -> None:
    stream = io.BytesIO()
    first, *rest = (Image.fromarray(frame) for frame in FRAMES)
    first.save(stream, "GIF", save_all=True, append_images=rest, duration=500)
    data = stream.getvalue()
    assert len(whole(data)) == 5
    with pytest.raises(BadMedia, match="cut short: a GIF ends with a trailer"):
        load_video(data[:-100])


@pytest.mark.parametrize("kind", ["mov", "avi"])  # their frames have a checksum
def test_a_damaged_frame_is_refused(files: dict[str, bytes], kind: str) -> None:
    data = bytearray(files[kind])
    data[len(data) // 2] ^= 0xFF
    with pytest.raises(BadMedia, match="is damaged"):
        whole(bytes(data))


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/hostname\n#EXT-X-ENDLIST\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "a video of 0 bytes is empty"),
        (b"Dear reader, this is not a video. " * 9, "in none of the containers mov, matroska"),
        (PLAYLIST, "in none of the containers"),
        (b"ffconcat version 1.0\nfile '/etc/hostname'\n", "in none of the containers"),
    ],
)
def test_what_is_no_video_is_refused(data: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadMedia, match=message):
        load_video(data)
    if data:
        (tmp_path / "clip.mp4").write_bytes(data)
        with pytest.raises(BadMedia, match=rf"clip\.mp4.*{message}"):
            load_video(tmp_path / "clip.mp4")


def test_a_picture_and_sound_are_no_video() -> None:
    stream = io.BytesIO()
    Image.fromarray(FRAMES[0]).save(stream, "PNG")
    with pytest.raises(BadMedia, match="in none of the containers"):
        load_video(stream.getvalue())
    with pytest.raises(BadMedia, match="holds no video"):
        load_video(sound_only())


def test_a_video_without_frames_is_refused(files: dict[str, bytes]) -> None:
    """The head of a WebM, which says how large frames are, and the beginning of its first frame."""
    cluster = files["webm"].index(bytes.fromhex("1f43b675"))
    with pytest.raises(BadMedia, match=r"a video of \d+ bytes .*no frames"):
        load_video(files["webm"][: cluster + 40])


def test_paths_that_are_no_files_are_refused(tmp_path: Path) -> None:
    for path, message in (
        (tmp_path / "nothing.mp4", r"nothing\.mp4.* cannot be read"),
        (tmp_path, "is not a file"),
        ("a\0b.mp4", "cannot be read"),
        ("concat:one.mp4|two.mp4", "cannot be read"),
    ):
        with pytest.raises(BadMedia, match=message):
            load_video(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    with pytest.raises(BadMedia, match=r"pipe\.mp4.* is not a file"):
        load_video(tmp_path / "pipe.mp4")


def test_frames_beyond_the_limits_are_not_decoded(
    files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    video = load_video(files["mp4"])
    assert isinstance(video, VideoFile)
    monkeypatch.setattr(module, "MAX_VIDEO_PIXELS", 3 * 84 * 56)
    assert len(video.read([0, 2, 2, 4])) == 4
    with pytest.raises(BadMedia, match=r"4 frames of 84 × 56 .* more than 14112 pixels.* do_sample_frames"):
        video.read(range(4))
    with pytest.raises(BadMedia, match="up to number 3, of 84 × 56, are more than 14112 pixels"):
        replace(video, width=1, height=1).read(range(4))  # a header that says less than is there
    monkeypatch.setattr(load_module, "MAX_PIXELS", 84 * 56 - 1)
    with pytest.raises(BadMedia, match="frames of 84 × 56 pixels, more than 4703"):
        load_video(files["mp4"])


def whole(data: bytes) -> list[Image.Image]:
    video = load_video(data)
    assert isinstance(video, VideoFile)
    return video.read(range(video.num_frames))
