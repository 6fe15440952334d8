"""The three Qwen towers against Transformers eager, on pictures and videos."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2VLConfig, Qwen3VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from minivllm.errors import ConfigError
from minivllm.layers.ops_torch import TorchOps
from minivllm.models.vision.qwen2_5_vl import Qwen25VLTower, WindowTowerConfig, windows
from minivllm.models.vision.qwen2_vl import Qwen2VLTower, read_qwen2_vl_tower
from minivllm.models.vision.qwen3_vl import DeepstackTowerConfig, Qwen3VLTower, bilinear_taps
from tests.unit.minivllm.models.vision.conftest import fill_unevenly

PATCH = 4
COMMON = {"depth": 3, "num_heads": 2, "patch_size": PATCH}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": {**COMMON, "embed_dim": 48, "mlp_ratio": 2, "hidden_size": 40},
    # Windows of 3 × 3 blocks.
    "qwen2_5_vl": {
        **COMMON,
        "hidden_size": 48,
        "intermediate_size": 56,
        "out_hidden_size": 40,
        "window_size": 24,
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        **COMMON,
        "hidden_size": 48,
        "intermediate_size": 56,
        "out_hidden_size": 40,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0, 2],
    },
}
#: One placeholder, less than a window, whole windows, cut windows, wider than the table, a video.
GRIDS = [(1, 2, 2), (1, 4, 2), (1, 6, 12), (1, 10, 8), (1, 2, 26), (3, 8, 4)]


class Towers(NamedTuple):
    hf: Any
    ours: nn.Module


@pytest.fixture(scope="module")
def make() -> Callable[[str], Towers]:
    parts: dict[str, tuple[Any, Any, Any, Any]] = {
        "qwen2_vl": (
            Qwen2VLConfig,
            Qwen2VisionTransformerPretrainedModel,
            read_qwen2_vl_tower,
            Qwen2VLTower,
        ),
        "qwen2_5_vl": (
            Qwen2_5_VLConfig,
            Qwen2_5_VisionTransformerPretrainedModel,
            WindowTowerConfig.read,
            Qwen25VLTower,
        ),
        "qwen3_vl": (Qwen3VLConfig, Qwen3VLVisionModel, DeepstackTowerConfig.read, Qwen3VLTower),
    }

    def build(family: str) -> Towers:
        config_class, hf_class, read, tower_class = parts[family]
        config = config_class(vision_config=CONFIGS[family]).vision_config
        config._attn_implementation = "eager"
        hf = hf_class(config).eval()
        fill_unevenly(hf)
        ours = tower_class(
            read(config.to_dict()), ops=TorchOps(), dtype=torch.float32, device=torch.device("cpu")
        )
        ours.load_state_dict(hf.state_dict(), strict=True)
        return Towers(hf, ours)

    return build


def patches_of(grid: tuple[int, int, int], seed: int = 1) -> Tensor:
    count = grid[0] * grid[1] * grid[2]
    return torch.randn(count, 3 * 2 * PATCH**2, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", CONFIGS)
@torch.inference_mode()
def test_rows_and_deepstack_features_are_those_of_transformers(
    make: Callable[[str], Towers], family: str
) -> None:
    hf, ours = make(family)
    for grid in GRIDS:
        pixels, grid_thw = patches_of(grid), torch.tensor([grid])
        truth = hf(pixels, grid_thw=grid_thw)
        rows, deepstack = ours(pixels, grid_thw)
        assert rows.shape == (grid[0] * grid[1] * grid[2] // 4, 40)
        torch.testing.assert_close(rows, truth.pooler_output, rtol=1e-4, atol=1e-4)
        expected = getattr(truth, "deepstack_features", None) or []
        assert len(deepstack) == len(expected) == (2 if family == "qwen3_vl" else 0)
        for got, feature in zip(deepstack, expected, strict=True):
            torch.testing.assert_close(got, feature, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", CONFIGS)
@torch.inference_mode()
def test_a_picture_gives_the_rows_it_has_among_others(make: Callable[[str], Towers], family: str) -> None:
    """Transformers encodes all pictures of a batch at once; here it is one at a time."""
    hf, ours = make(family)
    first, second = patches_of((1, 6, 4), 1), patches_of((1, 4, 10), 2)
    together = hf(torch.cat((first, second)), grid_thw=torch.tensor([[1, 6, 4], [1, 4, 10]])).pooler_output
    alone = [ours(first, torch.tensor([[1, 6, 4]]))[0], ours(second, torch.tensor([[1, 4, 10]]))[0]]
    torch.testing.assert_close(torch.cat(alone), together, rtol=1e-4, atol=1e-4)


def test_windows_cover_every_block_once_and_are_cut_at_the_edges() -> None:
    order, lengths = windows((1, 4, 6), 2, 2)
    assert order.tolist() == [0, 1, 3, 4, 2, 5]
    assert lengths == [16, 8]
    order, lengths = windows((2, 6, 6), 2, 2)
    assert sorted(order.tolist()) == list(range(18))
    assert lengths == [16, 8, 8, 4] * 2


def test_the_outermost_patches_take_the_outermost_positions() -> None:
    taps, weights = bilinear_taps(torch.tensor([0, 1, 2]), 3, 6)
    assert taps.tolist() == [[0, 1], [2, 3], [5, 5]]
    assert weights.tolist() == [[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]]
    taps, weights = bilinear_taps(torch.tensor([0]), 1, 6)
    assert (taps.tolist(), weights.tolist()) == ([[0, 1]], [[1.0, 0.0]])


def test_impossible_towers_are_refused() -> None:
    window = Qwen2_5_VLConfig(vision_config={**CONFIGS["qwen2_5_vl"], "window_size": 7}).vision_config
    with pytest.raises(ConfigError, match=r"window_size \(7 pixels\) is smaller than a block"):
        WindowTowerConfig.read(window.to_dict())
    for changes, message in (
        ({"num_position_embeddings": 24}, "must be a square, got 24"),
        ({"deepstack_visual_indexes": [0, 3]}, r"distinct layers of 3, got \[0, 3\]"),
        ({"deepstack_visual_indexes": [1, 1]}, r"distinct layers of 3, got \[1, 1\]"),
    ):
        config = Qwen3VLConfig(vision_config={**CONFIGS["qwen3_vl"], **changes}).vision_config
        with pytest.raises(ConfigError, match=message):
            DeepstackTowerConfig.read(config.to_dict())
