"""Pictures of any mode, orientation and size: taken as Transformers takes them, or refused by name."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from conformance.hf_processors import load_image_processor
from conformance.paths import data_root
from conformance.recipes.build import MECHANICS
from minivllm.errors import BadMedia
from minivllm.models import load_model_config
from minivllm.multimodal import MULTIMODAL, Expansion, MultiModalProcessor, load_image
from minivllm.tokenizer import load_tokenizer
from tests.unit.minivllm.media_prompts import picture

CHECKPOINTS = data_root() / "golden" / "checkpoints"
ASSETS = data_root() / "scenarios" / "assets"
FAMILIES = sorted(name for name, recipe in MECHANICS.items() if recipe.vision is not None)
#: What Transformers' processor tells its image processor, whatever the file says.
SETTINGS: Mapping[str, dict[str, Any]] = {
    "tiny-gemma3-vision": {"do_convert_rgb": True, "do_pan_and_scan": False},
    "tiny-internvl": {"crop_to_patches": True},
}

MODES = ("1", "CMYK", "F", "I", "I;16", "L", "LA", "P", "PA", "RGB", "RGBA", "YCbCr", "transparent P")
SIZES = [(1, 1), (2, 3), (13, 14), (27, 28), (31, 639), (1, 100), (100, 1), (1, 10_000), (10_000, 1)]


@cache
def processors(name: str) -> tuple[MultiModalProcessor, Any]:
    path = CHECKPOINTS / name
    config = load_model_config(path)
    ours = MULTIMODAL.get(config.architecture)(path, config, load_tokenizer(path), {})
    return ours, load_image_processor(path)


def truth(name: str, image: Image.Image, **settings: Any) -> dict[str, Tensor] | Exception:
    """What Transformers' image processor makes of one picture, or how it fails."""
    try:
        made = processors(name)[1]([[image]], return_tensors="pt", **SETTINGS.get(name, {}), **settings)
    except Exception as error:  # it has no errors of its own
        return error
    return dict(made)


def expand(name: str, image: Image.Image, **settings: Any) -> Expansion:
    family = processors(name)[0]
    (made,) = family.expand("image", [image], settings)
    assert family.count_tokens("image", [image], settings) == len(made.token_ids)
    return made


@pytest.mark.parametrize("name", FAMILIES)
@given(sizes=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=2))
@settings(max_examples=25)
def test_tokens_are_counted_before_there_are_pixels(name: str, sizes: list[tuple[int, int]]) -> None:
    family = processors(name)[0]
    pictures = [Image.new("RGB", size) for size in sizes]
    more: list[dict[str, Any]] = [{}]
    if "qwen" in name:
        more += [{"max_pixels": 9000}, {"min_pixels": 30000}]
    elif "smolvlm" in name or "idefics3" in name:
        more += [{"size": {"longest_edge": 146}}, {"do_resize": False}, {"do_image_splitting": False}]
    elif "internvl" in name:
        more += [{"crop_to_patches": False}, {"min_patches": 2, "max_patches": 6}]
    for change in more:
        count = family.count_tokens("image", pictures, change)
        try:
            made = family.expand("image", pictures, change)
        except BadMedia:  # far longer than wide
            continue
        assert count == sum(len(expansion.token_ids) for expansion in made)


def compare(name: str, source: Any, upright: Image.Image) -> bool:
    """Ours and theirs give equal tensors, or both refuse. Returns whether there are tensors."""
    expected = truth(name, upright)
    if isinstance(expected, Exception):
        with pytest.raises(BadMedia, match=rf"{upright.width} × {upright.height}"):
            expand(name, load_image(source))
        return False
    check(expand(name, load_image(source)), expected)
    return True


def check(made: Expansion, expected: Mapping[str, Tensor]) -> None:
    """Every tensor that the model gets is theirs; tokens, rows and picture parts are equally many."""
    assert sum(made.is_embed) == made.item.num_embeddings == len(made.item.patches) > 0
    shared = made.item.data.keys() & expected.keys()
    assert "pixel_values" in shared
    for key in shared:
        theirs = expected[key].squeeze(0) if expected[key].ndim > made.item.data[key].ndim else expected[key]
        assert torch.equal(made.item.data[key], theirs), key


def colourful(mode: str) -> Image.Image:
    """A gradient in a mode, with hidden red where there is transparency."""
    wide, high = np.meshgrid(np.arange(90), np.arange(70))
    layers = np.stack((wide * 2, high * 3, wide + high, (wide > 30) * 200), axis=-1).astype(np.uint8)
    layers[(wide < 20) & (high < 30)] = (255, 0, 0, 0)
    rgb, alpha = Image.fromarray(layers[..., :3].copy()), Image.fromarray(layers[..., 3].copy())
    if mode in ("RGBA", "LA", "PA"):
        image = rgb.convert({"RGBA": "RGBA", "LA": "LA", "PA": "PA"}[mode])
        image.putalpha(alpha)
        return image
    if mode == "transparent P":
        image = rgb.convert("P", palette=Image.Palette.ADAPTIVE, colors=32)
        image.info["transparency"] = 3
        return image
    if mode == "I;16":
        return Image.fromarray((layers[..., 0].astype(np.uint16) << 8) + layers[..., 1])
    if mode in ("I", "F"):
        dtype = {"I": np.int32, "F": np.float32}[mode]
        return Image.fromarray(layers[..., 0].astype(dtype))
    return rgb if mode == "RGB" else rgb.convert(mode)


def with_orientation(image: Image.Image, orientation: int) -> bytes:
    """A PNG file that says how the camera was held. (PNG, so that pixels are exact.)"""
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    return file.getvalue()


#: What to do to stored pixels so that they are upright, as the EXIF standard has it.
UPRIGHT = {
    1: lambda pixels: pixels,
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.swapaxes(0, 1),
    6: lambda pixels: pixels[::-1].swapaxes(0, 1),
    7: lambda pixels: pixels[::-1, ::-1].swapaxes(0, 1),
    8: lambda pixels: pixels[:, ::-1].swapaxes(0, 1),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_mode_gives_the_pixels_of_transformers(name: str, mode: str) -> None:
    image = colourful(mode)
    assert image.mode == mode.removeprefix("transparent ")
    assert compare(name, image, image)


@pytest.mark.parametrize("file", sorted(path.name for path in (ASSETS / "modes").iterdir()))
@pytest.mark.parametrize("name", FAMILIES)
def test_files_of_every_mode_give_the_pixels_of_transformers(name: str, file: str) -> None:
    path = ASSETS / "modes" / file
    with Image.open(path) as image:
        assert compare(name, path, image)
        assert expand(name, load_image(path)).item.facts["mode"] == image.mode


@pytest.mark.parametrize("name", FAMILIES)
def test_transparency_is_dropped_or_kept_as_transformers_has_it_and_hidden_colours_count(name: str) -> None:
    shown = colourful("RGBA")
    hidden = shown.copy()
    pixels = np.array(hidden)
    pixels[pixels[..., 3] == 0, :3] = (0, 0, 255)
    hidden = Image.fromarray(pixels)
    assert compare(name, hidden, hidden)
    hashes = {expand(name, image).item.content_hash for image in (shown, hidden, shown.convert("RGB"))}
    assert len(hashes) == 3


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("name", FAMILIES)
def test_pictures_are_turned_upright(name: str, orientation: int) -> None:
    stored = picture(90, 60, orientation)
    upright = Image.fromarray(np.ascontiguousarray(UPRIGHT[orientation](np.array(stored))))
    assert compare(name, with_orientation(stored, orientation), upright)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_upright_picture_and_its_turned_file_are_one_picture(name: str) -> None:
    stored = picture(90, 60)
    upright = Image.fromarray(np.array(stored).swapaxes(0, 1)[:, ::-1].copy())
    turned = load_image(with_orientation(stored, 6))
    assert expand(name, turned).item.content_hash == expand(name, upright).item.content_hash
    assert expand(name, turned).item.content_hash != expand(name, stored).item.content_hash


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FAMILIES)
def test_any_size_gives_the_pixels_of_transformers_or_is_refused(name: str, size: tuple[int, int]) -> None:
    image = picture(*size)
    compare(name, image, image)


def test_families_of_any_size_take_all_but_the_thinnest_pictures() -> None:
    taken = {
        name: [size for size in SIZES if not isinstance(truth(name, picture(*size)), Exception)]
        for name in FAMILIES
    }
    thin = [(1, 10_000), (10_000, 1)]
    assert all(size in taken[name] for name in FAMILIES for size in SIZES[:5])
    assert [name for name in FAMILIES if set(thin) & set(taken[name]) != set(thin)] == [
        "tiny-qwen2-5-vl",
        "tiny-qwen2-vl",
        "tiny-qwen3-vl",
    ]


@pytest.mark.parametrize("name", ["tiny-qwen2-vl", "tiny-qwen2-5-vl", "tiny-qwen3-vl"])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_the_limit_of_pixels_is_where_transformers_has_it(name: str, more: int) -> None:
    """Around the largest picture that is not made smaller: one line less, exactly, one line more."""
    side = {"tiny-qwen3-vl": 32}.get(name, 28)
    limit = processors(name)[1].size["longest_edge"]
    rows = limit // side**2 // 8
    image = picture(8 * side, rows * side + more * side)
    assert compare(name, image, image)
    _, high, wide = expand(name, image).item.facts["grid"]
    assert high * wide * (side // 2) ** 2 <= limit
    assert ((high, wide) == (2 * (rows + more), 16)) == (more < 1)


@pytest.mark.parametrize("name", ["tiny-qwen2-vl", "tiny-qwen2-5-vl", "tiny-qwen3-vl"])
@pytest.mark.parametrize(("ours", "edge"), [("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")])
def test_limits_of_a_request_act_as_in_transformers(name: str, ours: str, edge: str) -> None:
    """Transformers is to drop these names, and warns; what it has in their place is `size`."""
    own = processors(name)[1].size
    for pixels in (9000, 12_544, 20_000):
        size = {"shortest_edge": own.shortest_edge, "longest_edge": own.longest_edge, edge: pixels}
        for image in (picture(40, 30), picture(300, 200)):
            expected = truth(name, image, size=size)
            assert isinstance(expected, dict)
            check(expand(name, image, **{ours: pixels}), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_colour_is_not_mistaken_for_padding(name: str) -> None:
    """A black or grey picture may become zeros; its rows must still be there."""
    for colour in ((0, 0, 0), (128, 128, 128), (255, 255, 255)):
        image = Image.new("RGB", (90, 60), colour)
        assert compare(name, image, image)
