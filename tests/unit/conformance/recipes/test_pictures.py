"""The pictures of the scenarios: drawn again they are the committed ones, and each has a purpose."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps, UnidentifiedImageError

from conformance.manifest import Manifest
from conformance.recipes.pictures import BROKEN, PICTURES, draw, write_pictures

ASSETS = Path(__file__).parents[4] / "scenarios" / "assets"

LOSSLESS = [name for name in PICTURES if not name.endswith(".jpg")]
JPEGS = [name for name in PICTURES if name.endswith(".jpg")]


def opened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def pixels(name: str) -> np.ndarray:
    return np.asarray(opened((ASSETS / name).read_bytes()).convert("RGB"))


def test_the_committed_files_are_those_of_the_script_and_of_the_manifest() -> None:
    assert Manifest.load(ASSETS).faults(ASSETS) == []
    assert set(Manifest.load(ASSETS).entries) == {*PICTURES, *BROKEN}


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_picture_drawn_again_has_the_committed_pixels(name: str) -> None:
    committed, drawn = opened((ASSETS / name).read_bytes()), opened(draw(name))
    assert (drawn.mode, drawn.size, drawn.info.get("transparency")) == (
        committed.mode,
        committed.size,
        committed.info.get("transparency"),
    )
    np.testing.assert_array_equal(np.asarray(drawn), np.asarray(committed))
    if drawn.mode == "P":
        assert drawn.getpalette() == committed.getpalette()


@pytest.mark.parametrize("name", JPEGS)
def test_a_photograph_drawn_again_is_the_committed_one_up_to_the_codec(name: str) -> None:
    committed, drawn = opened((ASSETS / name).read_bytes()), opened(draw(name))
    assert drawn.getexif()[0x0112] == committed.getexif()[0x0112]
    difference = np.asarray(drawn).astype(int) - np.asarray(committed).astype(int)
    assert np.abs(difference).max() <= 4


def test_orientations_show_five_different_pictures_of_the_same_pixels() -> None:
    images = [opened((ASSETS / name).read_bytes()) for name in JPEGS]
    assert len({image.tobytes() for image in images}) == 1
    shown = [ImageOps.exif_transpose(image) for image in images]
    assert len({(image.size, image.tobytes()) for image in shown}) == len(JPEGS) == 5


def test_no_two_pictures_look_the_same_and_no_ordinary_one_is_symmetric() -> None:
    shapes = [name for name in PICTURES if name.startswith("shapes/")]
    assert len({pixels(name).tobytes() for name in shapes}) == len(shapes)
    for name in shapes:
        values = pixels(name).astype(int)
        for other in (values[::-1], values[:, ::-1], values[::-1, ::-1]):
            assert np.abs(values - other).max() > 60, name
        assert values.shape[0] != values.shape[1] or np.abs(values - values.swapaxes(0, 1)).max() > 60, name


def test_the_two_circles_differ_in_nothing_but_the_disc() -> None:
    red, blue = pixels("shapes/red_circle.png"), pixels("shapes/blue_circle.png")
    rows, columns = np.nonzero((red != blue).any(axis=-1))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (10, 62, 14, 66)


def test_the_two_noises_are_the_same_bytes_in_another_shape() -> None:
    a, b = pixels("sizes/noise_112x84.png"), pixels("sizes/noise_84x112.png")
    assert a.shape == (84, 112, 3)
    assert b.shape == (112, 84, 3)
    assert a.tobytes() == b.tobytes()


def test_every_colour_mode_is_stored_as_such() -> None:
    modes = {
        name: opened((ASSETS / name).read_bytes()).mode for name in PICTURES if name.startswith("modes/")
    }
    assert sorted(modes.values()) == ["1", "CMYK", "I;16", "L", "LA", "P", "P", "RGBA"]


def test_what_is_invisible_in_the_transparent_picture_has_a_colour_of_its_own() -> None:
    values = np.asarray(opened((ASSETS / "modes/rgba.png").read_bytes()))
    hidden = values[..., 3] == 0
    assert hidden.any()
    assert (values[hidden][:, :3] == (210, 30, 40)).all()
    assert sorted(set(values[..., 3].ravel().tolist())) == [0, 128, 255]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_committed_as_drawn_and_cannot_be_read(name: str) -> None:
    data = (ASSETS / name).read_bytes()
    expected = (OSError, UnidentifiedImageError, Image.DecompressionBombError)
    with pytest.raises(expected):
        opened(data)
    with pytest.raises(expected):
        opened(draw(name))


def test_all_files_are_written(tmp_path: Path) -> None:
    paths = write_pictures(tmp_path)
    assert {p.relative_to(tmp_path).as_posix() for p in paths} == {*PICTURES, *BROKEN}
    assert all(p.is_file() for p in paths)
