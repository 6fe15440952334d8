"""Pictures and videos from every kind of source, and every bad one refused by name."""

from __future__ import annotations

import base64
import errno
import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from minivllm.errors import BadMedia, UnsupportedError
from minivllm.multimodal import Video, load_image, load_video
from minivllm.multimodal import load as module

#: Unequal sides and a colour per pixel, so that a turned or mirrored copy differs.
PIXELS = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 14


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


PNG = encoded(Image.fromarray(PIXELS))


def as_path(folder: Path) -> Path:
    path = folder / "picture.png"
    path.write_bytes(PNG)
    return path


def test_memory_that_runs_out_is_not_called_the_file_s_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = as_path(tmp_path)

    def read_bytes(_: Path) -> bytes:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        load_image(path)


@pytest.mark.parametrize(
    "source",
    [
        as_path,
        lambda folder: str(as_path(folder)),
        lambda folder: f"file://{as_path(folder)}",
        lambda _: PNG,
        lambda _: bytearray(PNG),
        lambda _: f"data:image/png;base64,{base64.b64encode(PNG).decode()}",
        lambda _: Image.fromarray(PIXELS),
        lambda _: PIXELS,
        lambda _: PIXELS[:, ::-1][:, ::-1],
        lambda _: torch.from_numpy(PIXELS),
    ],
)
def test_every_source_gives_the_same_picture(source: Callable[[Path], Any], tmp_path: Path) -> None:
    image = load_image(source(tmp_path))
    assert image.mode == "RGB"
    assert image.size == (3, 2)
    assert np.array_equal(np.asarray(image), PIXELS)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_as_the_camera_meant(orientation: int) -> None:
    upright = np.zeros((16, 24, 3), dtype=np.uint8)
    upright[:8, :8] = (255, 0, 0)
    # how a camera stores it, so that a viewer who applies the orientation sees `upright`
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, 3),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(np.ascontiguousarray(stored)), exif=exif)
    assert np.array_equal(np.asarray(load_image(data)), upright)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_the_mode_is_left_to_the_image_processor(mode: str) -> None:
    image = Image.new("I;16", (5, 4), 700) if mode == "I;16" else Image.fromarray(PIXELS).convert(mode)
    data = encoded(image, "TIFF")
    assert load_image(data).mode == mode
    assert load_image(image).mode == mode


def test_of_an_animation_the_first_frame_is_taken() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in ((255, 0, 0), (0, 255, 0))]
    data = encoded(frames[0], save_all=True, append_images=frames[1:])
    assert load_image(data).convert("RGB").getpixel((0, 0)) == (255, 0, 0)


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadMedia, match=r"cannot be read.*nothing\.png"):
        load_image(tmp_path / "nothing.png")
    with pytest.raises(BadMedia, match="cannot be read"):
        load_image("a\0b.png")
    with pytest.raises(BadMedia, match="cannot be read"):
        load_image(tmp_path)


def test_a_text_renamed_png_is_no_image(tmp_path: Path) -> None:
    path = tmp_path / ("deep-" * 20) / "note.png"  # the message names the file however long the path
    path.parent.mkdir()
    path.write_text("Dear reader, this is not a picture.")
    with pytest.raises(BadMedia, match=r"note\.png.* no image format .*b'Dear reader"):
        load_image(path)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP"])
@pytest.mark.parametrize("keep", [0.3, 0.6, 0.9])
def test_a_picture_cut_short_is_refused(kind: str, keep: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), kind)
    with pytest.raises(BadMedia, match=r"damaged|no image format"):
        load_image(data[: int(len(data) * keep)])


def test_a_damaged_picture_is_refused() -> None:
    data = bytearray(
        encoded(Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)))
    )
    data[len(data) // 2] ^= 0xFF  # a checksum fails
    with pytest.raises(BadMedia, match="damaged or cut short"):
        load_image(bytes(data))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"", "is empty"),
        ("data:image/png;base64,", "is empty"),
        ("data:image/png,abc", "must be data:<type>;base64"),
        ("data:image/png;base64", "must be data:<type>;base64"),
        ("data:image/png;base64,@@@@", "not valid base64"),
        (Image.new("RGB", (0, 5)), "no pixels: 0 × 5"),
        (np.zeros((0, 5, 3), np.uint8), "no pixels"),
        (np.zeros((5, 5), np.uint8), r"uint8 of \[5, 5\]"),
        (np.zeros((5, 5, 4), np.uint8), r"uint8 of \[5, 5, 4\]"),
        (np.zeros((5, 5, 3), np.float32), r"float32 of \[5, 5, 3\]"),
        (torch.zeros(3, 5, 5), r"float32 of \[3, 5, 5\]"),
        (torch.zeros(5, 5, 3, dtype=torch.bfloat16), r"\[5, 5, 3\] of torch.bfloat16"),
        (torch.zeros(5, 5, 3, dtype=torch.uint8, device="meta"), "must be dense and uint8, .* on meta"),
        (torch.zeros(5, 5, 3, dtype=torch.uint8).to_sparse(), "layout torch.sparse_coo"),
        (7, "got int"),
        (None, "got NoneType"),
    ],
)
def test_what_is_no_picture_is_refused_with_what_it_is(source: Any, message: str) -> None:
    with pytest.raises(BadMedia, match=message):
        load_image(source)


@pytest.mark.parametrize("url", ["http://example.org/a.png", "https://example.org/a.png"])
def test_urls_are_not_fetched(url: str) -> None:
    with pytest.raises(UnsupportedError, match="give its path or its bytes"):
        load_image(url)


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes that claims this size."""
    head = PNG[:16] + width.to_bytes(4, "big") + height.to_bytes(4, "big") + PNG[24:29]
    from zlib import crc32

    return head + crc32(head[12:29]).to_bytes(4, "big") + PNG[33:]


@pytest.mark.parametrize("size", [(10_000, 8_948), (60_000, 60_000)])
def test_a_decompression_bomb_is_refused_before_it_is_decoded(size: tuple[int, int]) -> None:
    with pytest.raises(BadMedia, match=r"more than 89478485"):
        load_image(bomb(*size))


def test_the_limit_itself_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PIXELS", 6)
    assert load_image(PNG).size == (3, 2)
    assert load_image(PIXELS).size == (3, 2)
    monkeypatch.setattr(module, "MAX_PIXELS", 5)
    for source in (PNG, PIXELS, Image.fromarray(PIXELS)):
        with pytest.raises(BadMedia, match="more than 5"):
            load_image(source)


FRAMES = np.stack([PIXELS, PIXELS // 2, PIXELS // 3])


@pytest.mark.parametrize(
    "source",
    [
        FRAMES,
        torch.from_numpy(FRAMES),
        list(FRAMES),
        [Image.fromarray(f) for f in FRAMES],
        {"frames": FRAMES},
    ],
)
def test_a_video_is_frames_in_any_form(source: Any) -> None:
    video = load_video(source)
    assert video.fps is video.timestamps is None
    assert all(np.array_equal(np.asarray(a), b) for a, b in zip(video.frames, FRAMES, strict=True))


def test_a_video_may_say_when_its_frames_were_taken() -> None:
    assert load_video({"frames": FRAMES, "fps": 2}).fps == 2.0
    video = load_video({"frames": FRAMES, "timestamps": [0, 0.5, 2]})
    assert video.timestamps == (0.0, 0.5, 2.0)
    assert load_video(video).timestamps == (0.0, 0.5, 2.0)
    assert isinstance(load_video(video), Video)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ([], "at least one frame"),
        (np.zeros((0, 5, 5, 3), np.uint8), "at least one frame"),
        (PIXELS, r"\[frames, height, width, 3\], got \[2, 3, 3\]"),
        ([PIXELS, PIXELS[:1]], r"one size, got \[\(3, 1\), \(3, 2\)\]"),
        ([PIXELS, b"junk"], "no image format"),
        (5, "got int"),
        (io.BytesIO(b""), "or a file as a path, a data URI or bytes; got BytesIO"),
        ({"fps": 2}, "needs frames"),
        ({"frames": FRAMES, "speed": 2}, "needs frames"),
        ({"frames": FRAMES, "fps": 0}, "positive number, got 0"),
        ({"frames": FRAMES, "fps": "2"}, "positive number, got '2'"),
        ({"frames": FRAMES, "fps": float("nan")}, "positive number, got nan"),
        ({"frames": FRAMES, "fps": 10**400}, "positive number, got 1000"),
        ({"frames": FRAMES, "timestamps": [0, 1, 10**400]}, "list of seconds"),
        ({"frames": FRAMES, "timestamps": [0, 1]}, "3 frames need as many timestamps, got 2"),
        ({"frames": FRAMES, "timestamps": [0, 2, 1]}, "do not decrease"),
        ({"frames": FRAMES, "timestamps": 1.0}, "list of seconds"),
        ({"frames": FRAMES, 1: 2}, r"may have fps or timestamps.*got \['1', 'frames'\]"),
        (torch.zeros(1, 5, 5, 3, device="meta"), "a video must be dense .* on meta"),
    ],
)
def test_what_is_no_video_is_refused_with_what_it_is(source: Any, message: str) -> None:
    with pytest.raises(BadMedia, match=message):
        load_video(source)


@pytest.mark.parametrize("source", ["clip.mp4", Path("clip.mp4"), b"\0\0\0 ftyp", {"file": "clip.mp4"}])
def test_a_video_file_without_the_extra_is_refused_with_its_name(
    source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)  # importing it fails now
    with pytest.raises(UnsupportedError, match=r"pip install 'minivllm\[video\]'; or give frames as"):
        load_video(source)


def test_videos_are_not_fetched() -> None:
    with pytest.raises(UnsupportedError, match=r"not fetched from the network, got 'https://x\.y/clip\.mp4'"):
        load_video("https://x.y/clip.mp4")
    with pytest.raises(BadMedia, match="a path, a data URI or bytes, got list"):
        load_video({"file": [PIXELS]})
