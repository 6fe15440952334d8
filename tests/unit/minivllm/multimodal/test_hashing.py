"""Equal hashes mean equal embeddings: whatever changes these changes the hash."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from minivllm.errors import BadParameter
from minivllm.multimodal import Video, content_hash, image_hash, tensors_hash, video_hash

RGB = Image.fromarray(np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3))


def test_equal_content_has_equal_hashes() -> None:
    assert image_hash(RGB.copy(), {"b": 1, "a": [2]}) == image_hash(RGB, {"a": [2], "b": 1})
    assert len(image_hash(RGB, {})) == 64


def test_every_argument_counts() -> None:
    base = ("image", "RGB", (4, 6), b"pixels", {"size": 1})
    others = [
        ("video", *base[1:]),
        (base[0], "HSV", *base[2:]),
        (*base[:2], (6, 4), *base[3:]),
        (*base[:3], b"pixelt", base[4]),
        (*base[:4], {"size": 2}),
        (*base[:4], {"sizes": 1}),
        (*base[:4], {}),
        (*base[:3], [b"pix", b"els"], base[4]),
        (*base[:3], [b"pixe", b"ls"], base[4]),
        ("imageR", "GB", *base[2:]),
    ]
    hashes = [content_hash(*arguments) for arguments in [base, *others]]
    assert len(set(hashes)) == len(hashes)


def test_the_same_bytes_in_another_shape_are_another_picture() -> None:
    data = bytes(range(8 * 32))
    assert image_hash(Image.frombytes("L", (8, 32), data), {}) != image_hash(
        Image.frombytes("L", (32, 8), data), {}
    )


def test_palette_and_transparency_are_part_of_the_picture() -> None:
    indexed = Image.frombytes("P", (2, 2), bytes([0, 1, 2, 3]))
    indexed.putpalette([0, 0, 0, 10, 10, 10, 20, 20, 20, 30, 30, 30])
    other = indexed.copy()
    other.putpalette([0, 0, 0, 10, 10, 10, 20, 20, 20, 31, 30, 30])
    clear = indexed.copy()
    clear.info["transparency"] = 1
    grey = Image.frombytes("L", (2, 2), indexed.tobytes())
    assert len({image_hash(image, {}) for image in (indexed, other, clear, grey)}) == 4


def test_pictures_that_differ_in_the_last_pixel_only_differ() -> None:
    """vllm-mlx pull request 206 hashed only the beginning."""
    changed = RGB.copy()
    changed.putpixel((5, 3), (1, 2, 3))
    assert image_hash(changed, {}) != image_hash(RGB, {})


def test_thousands_of_pictures_have_as_many_hashes() -> None:
    """SGLang issue 2151 kept too few bits."""
    pixels = np.random.default_rng(0).integers(0, 256, (5000, 2, 2, 3), dtype=np.uint8)
    assert len(np.unique(pixels.reshape(5000, -1), axis=0)) == 5000
    assert len({image_hash(Image.fromarray(one), {}) for one in pixels}) == 5000


def test_frames_and_their_times_identify_a_video() -> None:
    turned = RGB.rotate(180)
    videos = [
        Video((RGB, turned)),
        Video((turned, RGB)),
        Video((RGB, turned, turned)),
        Video((RGB, turned), fps=1.0),
        Video((RGB, turned), fps=2.0),
        Video((RGB, turned), timestamps=(0.0, 1.0)),
    ]
    hashes = {video_hash(video, {}) for video in videos}
    assert len(hashes) == len(videos)
    assert video_hash(Video((RGB,)), {}) != image_hash(RGB, {})


def test_supplied_tensors_count_by_name_dtype_shape_and_value() -> None:
    rows = torch.arange(6.0).reshape(2, 3)
    different = [
        {"embeddings": rows},
        {"embeddings": rows.reshape(3, 2)},
        {"embeddings": rows.double()},
        {"embeddings": rows.bfloat16()},
        {"embeddings": rows + 1},
        {"grid": rows},
        {"embeddings": rows, "grid": rows},
        {"embeddings": rows[:0]},
    ]
    assert len({tensors_hash("image", tensors, {}) for tensors in different}) == len(different)
    assert tensors_hash("image", {"a": rows.T}, {}) == tensors_hash("image", {"a": rows.T.contiguous()}, {})


def test_settings_must_be_plain_data() -> None:
    with pytest.raises(BadParameter, match="plain data"):
        image_hash(RGB, {"resample": object()})
