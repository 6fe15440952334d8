from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

from conformance.hf_models import NoTruth, load_hf
from conformance.records import ArmError
from conformance.yardstick import (
    ARMS,
    cached_logits,
    error_between,
    exact_rope,
    forward,
    full_logits,
    measure_yardstick,
)

PROMPT = [5, 9, 11, 30, 31]
TOKENS = [40, 6, 7, 80, 12, 13, 14, 15]


@pytest.fixture(scope="module")
def truth(tiny_checkpoint: Path) -> Any:
    return load_hf(tiny_checkpoint, torch.float64).module


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    return lambda attention: load_hf(path, dtype, attention).module


def top(rows: torch.Tensor, k: int = 20) -> tuple[Any, Any]:
    values, ids = rows.topk(k)
    return ids.numpy(), values.numpy()


def test_rows_kept_are_the_last_ones(truth: Any) -> None:
    everything = forward(truth, PROMPT)
    assert everything.shape == (5, 96)
    torch.testing.assert_close(forward(truth, PROMPT, keep=2), everything[-2:])


def test_cached_and_full_logits_are_the_same_function(truth: Any) -> None:
    cached, full = cached_logits(truth, PROMPT, TOKENS), full_logits(truth, PROMPT, TOKENS)
    assert cached.shape == full.shape == (8, 96)
    torch.testing.assert_close(cached, full, rtol=0, atol=1e-5)


def test_each_row_chooses_its_token_from_what_came_before(truth: Any) -> None:
    rows = full_logits(truth, PROMPT, TOKENS)
    for i in range(len(TOKENS)):
        alone = forward(truth, PROMPT + TOKENS[:i], keep=1)[0]
        torch.testing.assert_close(rows[i], alone, rtol=0, atol=1e-5)


def test_error_is_root_mean_square_and_largest_difference() -> None:
    error = error_between(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[1.0, 2.0], [3.0, 2.0]]))
    assert error == ArmError(rms=1.0, max=2.0)


def test_every_arm_is_measured_and_lies_near_the_truth(tiny_checkpoint: Path, truth: Any) -> None:
    ids, values = top(full_logits(truth, PROMPT, TOKENS))
    yardstick = measure_yardstick(load(tiny_checkpoint), PROMPT, TOKENS, ids, values)
    assert yardstick.arms.keys() == ARMS.keys()
    for name, error in yardstick.arms.items():
        assert 0 < error.rms <= error.max < 1e-3, name
    assert max(e.max for e in yardstick.arms.values()) == yardstick.M


def test_a_wrong_model_lies_far_outside_the_yardstick(tiny_checkpoint: Path, truth: Any) -> None:
    ids, values = top(full_logits(truth, PROMPT, TOKENS))
    yardstick = measure_yardstick(load(tiny_checkpoint), PROMPT, TOKENS, ids, values)
    wrong = load_hf(tiny_checkpoint, torch.float32).module
    for layer in wrong.model.layers:
        layer.self_attn.scaling *= 1.001
    rows = full_logits(wrong, PROMPT, TOKENS).double().gather(1, torch.from_numpy(ids)).numpy()
    assert error_between(rows, values).rms > 10 * yardstick.R


def test_bfloat16_arms_lie_much_further_off(tiny_checkpoint: Path, truth: Any) -> None:
    ids, values = top(full_logits(truth, PROMPT, TOKENS))
    low = measure_yardstick(load(tiny_checkpoint, torch.bfloat16), PROMPT, TOKENS, ids, values)
    high = measure_yardstick(load(tiny_checkpoint), PROMPT, TOKENS, ids, values)
    assert low.R > 1000 * high.R


def test_exact_rope_matters_at_large_positions_only_and_is_undone(tiny_checkpoint: Path) -> None:
    module = load_hf(tiny_checkpoint, torch.float32).module
    rotary, x = module.model.rotary_emb, torch.zeros(1)
    positions = torch.tensor([[0, 1, 100_000]])
    cos, sin = rotary(x, positions)
    with exact_rope(module):
        exact_cos, exact_sin = rotary(x, positions)
    torch.testing.assert_close(exact_cos[:, :2], cos[:, :2], rtol=0, atol=1e-6)
    assert (exact_sin[:, 2] - sin[:, 2]).abs().max() > 1e-4
    angle = 100_000 * rotary.inv_freq.double()
    assert torch.equal(exact_sin[0, 2, :8], angle.sin().float())
    assert torch.equal(rotary(x, positions)[0], cos)
    assert "forward" not in rotary.__dict__


def test_exact_rope_knows_models_with_a_rope_for_each_type_of_layer(checkpoints: Path) -> None:
    module = load_hf(checkpoints / "tiny-gemma3", torch.float32).module
    rotary, positions = module.model.rotary_emb, torch.tensor([[0, 1, 500_000]])
    x = torch.zeros(1, 3, 1)
    for kind in ("full_attention", "sliding_attention"):
        cos, _ = rotary(x, positions, kind)
        with exact_rope(module):
            exact_cos, _ = rotary(x, positions, kind)
        torch.testing.assert_close(exact_cos[:, :2], cos[:, :2], rtol=0, atol=1e-6)
        angle = positions[0, 2].double() * getattr(rotary, f"{kind}_inv_freq").double()
        assert torch.equal(exact_cos[0, 2, :16], angle.cos().float())


def test_exact_rope_is_undone_after_an_error(tiny_checkpoint: Path) -> None:
    module = load_hf(tiny_checkpoint, torch.float32).module
    with pytest.raises(RuntimeError, match="inside"), exact_rope(module):
        raise RuntimeError("inside")
    assert "forward" not in module.model.rotary_emb.__dict__


class OddRotaryEmbedding(torch.nn.Module):
    """Rotates by other angles than position × inv_freq."""

    def __init__(self) -> None:
        super().__init__()
        self.inv_freq = torch.ones(4)
        self.attention_scaling = 1.0

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angle = (position_ids[..., None] + 1) * torch.ones(8)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)


def test_a_rotary_class_whose_angles_stay_float32_is_refused() -> None:
    rotary = OddRotaryEmbedding()
    with pytest.raises(NoTruth, match="not written for OddRotaryEmbedding"), exact_rope(rotary):
        rotary(torch.zeros(1), torch.tensor([[3]]))


def layered() -> tuple[Any, dict[str, Any]]:
    config = transformers.Gemma3TextConfig(
        hidden_size=32,
        num_hidden_layers=2,
        head_dim=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    )
    return Gemma3RotaryEmbedding(config), {"layer_type": "full_attention"}


def multimodal() -> tuple[Any, dict[str, Any]]:
    config = transformers.Qwen2VLTextConfig(
        hidden_size=32,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    )
    return Qwen2VLRotaryEmbedding(config), {}


@pytest.mark.parametrize("make", [layered, multimodal])
def test_every_rotary_class_computes_its_own_angles_exactly(
    make: Callable[[], tuple[Any, dict[str, Any]]],
) -> None:
    rotary, options = make()
    x, positions = torch.zeros(1), torch.tensor([[0, 1, 99_991]])
    plain = rotary(x, positions, **options)
    with exact_rope(rotary):
        exact = rotary(x, positions, **options)
    for a, b in zip(exact, plain, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        torch.testing.assert_close(a[..., :2, :], b[..., :2, :], rtol=0, atol=1e-6)
        assert (a[..., 2, :] - b[..., 2, :]).abs().max() > 1e-6


def test_a_model_without_rotary_embedding_is_refused() -> None:
    with pytest.raises(NoTruth, match="Linear has no rotary embedding"), exact_rope(torch.nn.Linear(1, 1)):
        pass
