"""Draws the pictures of the scenarios: scenarios/assets, equal pixel for pixel wherever it runs.

Shapes are drawn by arithmetic on integers, not by a graphics library, whose edges move between
versions. No picture is square and plain: every one has a shape off its centre and a mark in one
corner, so that a turned, mirrored, transposed or shifted picture is another picture.

    python -m conformance.recipes pictures --out scenarios/assets
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from random import Random

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from conformance.recipes.scenes import DIGITS, paint, scene_of
from conformance.recipes.visual_recall import draw_grid

__all__ = ["BROKEN", "PICTURES", "draw", "write_pictures"]

Pixels = NDArray[np.uint8]
Colour = tuple[int, int, int]

RED, BLUE, GREEN, YELLOW = (210, 30, 40), (30, 60, 200), (20, 150, 70), (240, 210, 40)
WHITE, BLACK, GREY, PURPLE = (250, 250, 250), (12, 12, 12), (130, 135, 140), (120, 40, 160)


def canvas(width: int, height: int, colour: Colour) -> Pixels:
    """[height, width, 3], lit from the left and darker towards the bottom right corner."""
    y, x = np.mgrid[0:height, 0:width]
    shade = 255 - (60 * x) // max(1, width - 1) - (30 * y) // max(1, height - 1)
    pixels: Pixels = (np.array(colour)[None, None] * shade[..., None] // 255).astype(np.uint8)
    return pixels


def disc(pixels: Pixels, x: int, y: int, radius: int, colour: Colour) -> None:
    rows, columns = np.mgrid[0 : pixels.shape[0], 0 : pixels.shape[1]]
    pixels[(columns - x) ** 2 + (rows - y) ** 2 <= radius**2] = colour


def box(pixels: Pixels, x: int, y: int, width: int, height: int, colour: Colour) -> None:
    pixels[y : y + height, x : x + width] = colour


def triangle(pixels: Pixels, x: int, y: int, size: int, colour: Colour) -> None:
    """Right-angled, the right angle at its lower left corner (x, y + size)."""
    rows, columns = np.mgrid[0 : pixels.shape[0], 0 : pixels.shape[1]]
    pixels[(columns >= x) & (rows <= y + size) & (columns - x <= rows - y)] = colour


def stripes(pixels: Pixels, period: int, colour: Colour) -> None:
    """Slanted, rising to the right."""
    rows, columns = np.mgrid[0 : pixels.shape[0], 0 : pixels.shape[1]]
    pixels[(columns + 2 * rows) % (2 * period) < period] = colour


def digit(pixels: Pixels, which: str, x: int, y: int, scale: int, colour: Colour) -> None:
    for row, bits in enumerate(DIGITS[which]):
        for column, bit in enumerate(bits):
            if bit == "1":
                box(pixels, x + column * scale, y + row * scale, scale, scale, colour)


def mark(pixels: Pixels, colour: Colour = WHITE) -> Pixels:
    """A small mark in the lower left corner."""
    height, width = pixels.shape[:2]
    box(pixels, 0, height - height // 8, width // 10, height // 8, colour)
    return pixels


def _red_circle() -> Pixels:
    pixels = canvas(112, 84, GREY)
    disc(pixels, 40, 36, 26, RED)
    return mark(pixels)


def _blue_circle() -> Pixels:
    pixels = canvas(112, 84, GREY)
    disc(pixels, 40, 36, 26, BLUE)
    return mark(pixels)


def _green_triangle() -> Pixels:
    pixels = canvas(84, 120, WHITE)
    triangle(pixels, 18, 20, 56, GREEN)
    return mark(pixels, BLACK)


def _yellow_seven() -> Pixels:
    pixels = canvas(84, 56, PURPLE)
    digit(pixels, "seven", 50, 6, 5, YELLOW)
    return mark(pixels)


def _square_four() -> Pixels:
    pixels = canvas(56, 56, YELLOW)
    digit(pixels, "four", 6, 8, 5, BLUE)
    return mark(pixels, BLACK)


def _striped() -> Pixels:
    pixels = canvas(140, 84, WHITE)
    stripes(pixels, 6, GREEN)
    disc(pixels, 110, 24, 16, RED)
    return mark(pixels, BLACK)


def _wide() -> Pixels:
    pixels = canvas(200, 40, BLUE)
    digit(pixels, "two", 150, 4, 4, WHITE)
    return mark(pixels, YELLOW)


def _tall() -> Pixels:
    pixels = canvas(40, 200, GREEN)
    digit(pixels, "seven", 8, 20, 4, BLACK)
    return mark(pixels)


def _small() -> Pixels:
    pixels = canvas(30, 20, YELLOW)
    disc(pixels, 9, 8, 6, RED)
    return mark(pixels, BLACK)


def _large() -> Pixels:
    pixels = canvas(640, 360, GREY)
    disc(pixels, 180, 130, 90, PURPLE)
    triangle(pixels, 380, 80, 200, YELLOW)
    return mark(pixels)


def _thin() -> Pixels:
    """Wider than 200 times its height: some processors refuse such a picture."""
    return canvas(2010, 10, RED)


def _noise(width: int, height: int) -> Pixels:
    """The same bytes whatever the shape; width × height must be 112 × 84."""
    values = np.arange(112 * 84 * 3, dtype=np.uint64)
    return ((values * 2654435761 >> 13) % 251).astype(np.uint8).reshape(height, width, 3)


def _scene(name: str) -> Pixels:
    """The file name says what it shows: rows parted by "_and_", cells by "-", "none" for an empty one."""
    cells = [[cell.replace("_", " ") for cell in row.split("-")] for row in name.split("_and_")]
    return paint(scene_of(cells), Random(name))


def _grid(name: str) -> Pixels:
    rng = Random(name)
    return paint(draw_grid(rng, _GRIDS[name]), rng)


def _frame(number: int, width: int, height: int) -> Pixels:
    """A disc that moves to the right and down, and a box that grows."""
    pixels = canvas(width, height, WHITE)
    disc(pixels, 14 + 9 * number, 16 + 4 * number, 10, RED)
    box(pixels, 60, 4, 4 + 3 * number, 10, BLUE)
    return mark(pixels, BLACK)


def _transparent(pixels: Pixels) -> Pixels:
    """RGBA: a wedge of it is invisible, and red where nobody should see it."""
    alpha = np.full(pixels.shape[:2], 255, np.uint8)
    rows, columns = np.mgrid[0 : pixels.shape[0], 0 : pixels.shape[1]]
    hidden = columns > rows + 30
    alpha[hidden] = 0
    alpha[(columns > rows + 10) & ~hidden] = 128
    colours = pixels.copy()
    colours[hidden] = RED
    return np.dstack([colours, alpha])


def _palette(transparent: bool) -> Image.Image:
    image = Image.fromarray(_striped()[:84, :112]).quantize(8, method=Image.Quantize.FASTOCTREE)
    if transparent:
        image.info["transparency"] = 0
    return image


def _grey(pixels: Pixels) -> Pixels:
    weights = np.array([299, 587, 114], np.uint32)
    grey: Pixels = ((pixels.astype(np.uint32) * weights).sum(axis=-1) // 1000).astype(np.uint8)
    return grey


def _cmyk() -> Image.Image:
    ink = 255 - _red_circle().astype(np.int64)
    black = ink.min(axis=-1, keepdims=True) // 2
    return Image.fromarray(np.dstack([ink - black, black]).astype(np.uint8), mode="CMYK")


def _film(number: int, width: int, height: int) -> Callable[[], Image.Image]:
    return lambda: Image.fromarray(_frame(number, width, height))


def _rgb(make: Callable[[], Pixels]) -> Callable[[], Image.Image]:
    return lambda: Image.fromarray(make())


_SCENES = (
    "red_circle-none-blue_seven_and_none-green_square-none",
    "none-none-none_and_none-yellow_cross-none",
    "none-black_two-none_and_none-none-none",
    "purple_ring-red_four_and_blue_cross-green_triangle_and_yellow_seven-black_square",
    "blue_circle-none_and_none-purple_triangle_and_red_ring-none",
    "red_circle-blue_four-red_seven_and_red_square-none-none",
    "blue_circle-none-red_seven_and_none-blue_square-green_ring",
)

# Grids that the visual recall checkpoint reads.
_GRIDS = {"three_rows": 3, "five_rows": 5}

#: File name → the picture. The suffix says how it is stored; all but JPEG keep every pixel.
PICTURES: Mapping[str, Callable[[], Image.Image]] = {
    "shapes/red_circle.png": _rgb(_red_circle),
    "shapes/blue_circle.png": _rgb(_blue_circle),
    "shapes/green_triangle.png": _rgb(_green_triangle),
    "shapes/yellow_seven.png": _rgb(_yellow_seven),
    "shapes/square_four.png": _rgb(_square_four),
    "shapes/striped.png": _rgb(_striped),
    "sizes/wide_200x40.png": _rgb(_wide),
    "sizes/tall_40x200.png": _rgb(_tall),
    "sizes/small_30x20.png": _rgb(_small),
    "sizes/large_640x360.png": _rgb(_large),
    "sizes/thin_2010x10.png": _rgb(_thin),
    "sizes/dot_1x1.png": _rgb(lambda: np.array([[RED]], np.uint8)),
    "sizes/noise_112x84.png": _rgb(lambda: _noise(112, 84)),
    "sizes/noise_84x112.png": _rgb(lambda: _noise(84, 112)),
    **{
        f"scenes/{name}.png": (lambda name=name: Image.fromarray(_scene(name)))  # type: ignore[misc]  # mypy cannot type a lambda default
        for name in _SCENES
    },
    **{
        f"grids/{name}.png": (lambda name=name: Image.fromarray(_grid(name)))  # type: ignore[misc]  # mypy cannot type a lambda default
        for name in _GRIDS
    },
    "modes/rgba.png": _rgb(lambda: _transparent(_striped()[:84, :112])),
    "modes/la.png": lambda: Image.fromarray(
        np.dstack([_grey(_red_circle()), _transparent(_red_circle())[..., 3]]), mode="LA"
    ),
    "modes/l.png": _rgb(lambda: _grey(_red_circle())),
    "modes/1.png": lambda: Image.fromarray(_grey(_red_circle()) > 100),
    "modes/p.png": lambda: _palette(transparent=False),
    "modes/p_transparent.png": lambda: _palette(transparent=True),
    "modes/i16.png": lambda: Image.fromarray(_grey(_red_circle()).astype(np.uint16) * 257),
    "modes/cmyk.tif": _cmyk,
    **{f"exif/orientation_{n}.jpg": _rgb(_red_circle) for n in (1, 2, 3, 6, 8)},
    # Multiples of 28 and of 32: the merged patches of the families that take videos.
    **{f"video/frame_{n}.png": _film(n, 84, 56) for n in range(6)},
    **{f"video/clip_{n}.png": _film(n, 96, 64) for n in range(6)},
}


def _png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size, with next to no data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(64), 0))
        + chunk(b"IEND", b"")
    )


def _encoded(name: str) -> bytes:
    return draw(name)


def _flipped(data: bytes) -> bytes:
    """One byte of the compressed pixels changed, so that their checksum is wrong."""
    at = data.index(b"IDAT") + 24
    return data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]


#: File name → the bytes of a file that is no picture, or only part of one.
BROKEN: Mapping[str, Callable[[], bytes]] = {
    "broken/truncated.jpg": lambda: _encoded("exif/orientation_1.jpg")[:900],
    "broken/truncated.png": lambda: _encoded("shapes/red_circle.png")[:400],
    "broken/corrupt.png": lambda: _flipped(_encoded("shapes/red_circle.png")),
    "broken/text.png": lambda: b"This is a text, whatever its name says.\n",
    "broken/empty.png": lambda: b"",
    "broken/bomb.png": lambda: _png_header(60000, 60000),
}


def draw(name: str) -> bytes:
    """The bytes of one file of PICTURES or BROKEN.

    Pixels are the same everywhere; how they are compressed depends on the libraries installed.
    """
    if name in BROKEN:
        return BROKEN[name]()
    image, out = PICTURES[name](), io.BytesIO()
    suffix = name.rpartition(".")[2]
    if suffix == "jpg":
        exif = Image.Exif()
        exif[0x0112] = int(name.rpartition("_")[2].removesuffix(".jpg"))
        image.save(out, "JPEG", quality=95, subsampling=0, exif=exif)
    elif suffix == "tif":
        image.save(out, "TIFF", compression="tiff_adobe_deflate")
    else:
        image.save(out, "PNG", optimize=True)
    return out.getvalue()


def write_pictures(directory: Path) -> list[Path]:
    """Write every file below `directory`; returns their paths."""
    return list(_written(directory))


def _written(directory: Path) -> Iterator[Path]:
    for name in (*PICTURES, *BROKEN):
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(draw(name))
        yield path
