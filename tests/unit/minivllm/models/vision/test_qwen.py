"""What the Qwen towers share: places of patches, the rope over them, and what a grid must be."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen2VLConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLVisionRotaryEmbedding

from minivllm.errors import BadMedia, ConfigError, UnsupportedError
from minivllm.models.vision.qwen import as_grid, axial_rope, frame_lengths, patch_positions
from minivllm.models.vision.qwen2_vl import read_qwen2_vl_tower


def values(**changes: Any) -> dict[str, Any]:
    return {**Qwen2VLConfig().vision_config.to_dict(), **changes}


def test_patches_come_block_by_block() -> None:
    places = patch_positions((2, 2, 4), 2)
    frame = [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert places.tolist() == frame * 2


def test_the_rope_is_that_of_transformers_by_bits() -> None:
    config = Qwen2VLConfig(vision_config={"embed_dim": 64, "num_heads": 2}).vision_config
    places = patch_positions((1, 6, 10), 2)
    expected = Qwen2VLVisionRotaryEmbedding(config)(torch.zeros(1), places)
    for got, table in zip(axial_rope(places, 32, 10000.0), expected, strict=True):
        assert torch.equal(got, table)


def test_a_frame_pair_sees_only_itself() -> None:
    assert frame_lengths((3, 4, 6)) == [24, 24, 24]


@pytest.mark.parametrize(
    ("grid", "patches", "message"),
    [
        ([[1, 4, 4], [1, 4, 4]], 32, r"the grid of one item must be 3 numbers, got shape \[2, 3\]"),
        ([[1, 3, 4]], 12, "grid 1 × 3 × 4 is not one of whole 2 × 2 blocks"),
        ([[0, 4, 4]], 0, "grid 0 × 4 × 4 is not one of whole 2 × 2 blocks"),
        (
            [[1, 4, 4]],
            15,
            r"shape \[15, 1176\]: grid 1 × 4 × 4 of this model needs \[16, 1176\]",
        ),
    ],
)
def test_a_grid_that_does_not_fit_the_pixels_is_refused(
    grid: list[list[int]], patches: int, message: str
) -> None:
    config = read_qwen2_vl_tower(values())
    with pytest.raises(BadMedia, match=message):
        as_grid(torch.zeros(patches, 1176), torch.tensor(grid), config)


def test_heads_must_divide_the_width_into_multiples_of_four() -> None:
    with pytest.raises(ConfigError, match=r"the width 50 must be a multiple of num_heads \(2\)"):
        read_qwen2_vl_tower(values(embed_dim=50, num_heads=2))


def test_patches_that_are_not_square_and_another_rope_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"patch_size \[14, 16\] is not square"):
        read_qwen2_vl_tower(values(patch_size=[14, 16]))
    with pytest.raises(UnsupportedError, match="rope_type 'default' is not implemented"):
        read_qwen2_vl_tower(values(rope_parameters={"rope_type": "default", "rope_theta": 1.0}))
