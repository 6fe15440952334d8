from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from conformance.hf_models import NoTruth, load_hf
from conformance.hf_stages import traced_forward
from conformance.yardstick import forward

IDS = [5, 9, 11, 30, 31, 40, 6]
#: The last token is chosen, not computed.
PROMPT, TOKENS = IDS[:5], [*IDS[5:], 12]


@pytest.fixture(scope="module")
def module(tiny_checkpoint: Path) -> Any:
    return load_hf(tiny_checkpoint, torch.float64).module


def test_every_stage_is_there_with_its_shape_and_type(module: Any) -> None:
    _, stages = traced_forward(module, PROMPT, TOKENS, keep=3)
    assert {name: (a.shape, a.dtype.name) for name, a in stages.items()} == {
        "positions": ((7,), "int64"),
        "embeddings": ((7, 32), "float32"),
        "hidden.0": ((7, 32), "float32"),
        "hidden.1": ((7, 32), "float32"),
        "final": ((7, 32), "float32"),
        "k.0": ((7, 1, 16), "float32"),
        "v.0": ((7, 1, 16), "float32"),
        "k.1": ((7, 1, 16), "float32"),
        "v.1": ((7, 1, 16), "float32"),
        "logits": ((3, 96), "float32"),
    }


def test_stages_are_what_transformers_itself_reports(module: Any) -> None:
    logits, stages = traced_forward(module, PROMPT, TOKENS, keep=0)
    cache = DynamicCache()
    output = module(torch.tensor([IDS]), output_hidden_states=True, cache=cache)
    hidden = [h[0].float().numpy() for h in output.hidden_states]
    for name, wanted in zip(["embeddings", "hidden.0", "final"], hidden, strict=True):
        np.testing.assert_array_equal(stages[name], wanted)
    np.testing.assert_array_equal(stages["positions"], np.arange(7))
    np.testing.assert_array_equal(stages["logits"], output.logits[0, -3:].float().numpy())
    for i, layer in enumerate(cache.layers):
        np.testing.assert_array_equal(stages[f"k.{i}"][:, 0], layer.keys[0, 0].float().numpy())
        np.testing.assert_array_equal(stages[f"v.{i}"][:, 0], layer.values[0, 0].float().numpy())
    assert torch.equal(logits, output.logits[0])


def test_tracing_changes_no_bit_of_the_logits_and_leaves_no_hook(module: Any) -> None:
    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in module.modules())

    before = hooks()
    traced, _ = traced_forward(module, PROMPT, TOKENS, keep=3)
    assert torch.equal(traced, forward(module, IDS, keep=3))
    assert hooks() == before


def test_the_last_layers_output_leads_to_the_final_norm(module: Any) -> None:
    _, stages = traced_forward(module, IDS, TOKENS[-1:], keep=1)
    normed = module.model.norm(torch.from_numpy(stages["hidden.1"]).double())
    np.testing.assert_allclose(stages["final"], normed.float().numpy(), rtol=1e-5, atol=1e-5)


def test_a_decoder_of_another_build_is_refused() -> None:
    class Odd(torch.nn.Module):
        def get_decoder(self) -> torch.nn.Module:
            return self

    with pytest.raises(NoTruth, match="Odd has no layers and norm"):
        traced_forward(Odd(), IDS, TOKENS[-1:], keep=1)
