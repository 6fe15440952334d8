"""What Gemma 3 has of its own; its arithmetic is compared with Transformers in test_decoder.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from minivllm.config import RopeConfig
from minivllm.errors import ConfigError, UnsupportedError
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import load_model, load_model_config
from minivllm.models.gemma3 import Gemma3Details


def load(path: Any, dtype: torch.dtype = torch.float32) -> Any:
    return load_model(path, dtype=dtype, device="cpu", ops=TorchOps())


def test_the_config_has_two_ropes_a_window_by_layer_and_details(make_checkpoint: Callable[..., Any]) -> None:
    config = load_model_config(make_checkpoint("Gemma3", final_logit_softcapping=30.0).path)
    assert config.rope == RopeConfig(kind="linear", theta=1000.0, parameters=(("factor", 8.0),))
    assert config.local_rope == RopeConfig(kind="default", theta=100.0)
    assert config.windows == (7, None, 7)
    assert config.hidden_act == "gelu_pytorch_tanh"
    assert config.details == Gemma3Details(query_pre_attn_scalar=24, final_logit_softcapping=30.0)


def test_the_older_spelling_with_one_full_layer_in_six_is_understood(
    make_checkpoint: Callable[..., Any],
) -> None:
    config = load_model_config(
        make_checkpoint("Gemma3", num_hidden_layers=7, layer_types=None, rope_parameters=None).path
    )
    assert config.windows == (7, 7, 7, 7, 7, None, 7)
    assert config.rope == RopeConfig(theta=1_000_000.0)
    assert config.local_rope == RopeConfig(theta=10_000.0)


def test_layers_with_a_window_turn_by_the_local_rope(make_checkpoint: Callable[..., Any]) -> None:
    model = load(make_checkpoint("Gemma3").path)
    positions = torch.tensor([0, 5])
    local, full, again = model.rotations(positions)
    assert torch.equal(full[0], model.rope.cos_sin(positions)[0])
    assert torch.equal(local[0], model.local_rope.cos_sin(positions)[0])
    assert local is again
    assert not torch.equal(full[0], local[0])


def test_scores_are_scaled_by_the_config_s_number_not_by_head_dim(
    make_checkpoint: Callable[..., Any],
) -> None:
    model = load(make_checkpoint("Gemma3").path)
    assert {layer.self_attn.scale for layer in model.model.layers} == {24**-0.5}


def test_embeddings_are_scaled_by_a_root_rounded_to_the_dtype(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Gemma3").path
    for dtype, scale in ((torch.float32, 48**0.5), (torch.bfloat16, 6.9375)):
        model = load(path, dtype)
        table = model.model.embed_tokens.weight
        assert torch.equal(model.embed(torch.tensor([3])), table[[3]] * torch.tensor(scale, dtype=dtype))


def test_norms_multiply_by_one_plus_the_weight(make_checkpoint: Callable[..., Any]) -> None:
    norm = load(make_checkpoint("Gemma3").path).model.layers[0].input_layernorm
    norm.weight.fill_(-1.0)
    assert not norm(torch.ones(2, 48)).any()


def test_the_cap_bends_the_logits_and_keeps_their_order(make_checkpoint: Callable[..., Any]) -> None:
    hidden = torch.randn(4, 48, generator=torch.Generator().manual_seed(0)) * 5
    plain = load(make_checkpoint("Gemma3").path).logits(hidden)
    capped = load(make_checkpoint("Gemma3", final_logit_softcapping=5.0).path).logits(hidden)
    assert plain.abs().max() > 5 >= capped.abs().max()
    assert torch.equal(capped, torch.tanh(plain / 5.0) * 5.0)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"use_bidirectional_attention": True}, UnsupportedError, "use_bidirectional_attention"),
        ({"attn_logit_softcapping": 50.0}, UnsupportedError, r"attn_logit_softcapping 50\.0"),
        ({"hidden_activation": "silu"}, UnsupportedError, "hidden_act 'silu' .*known: gelu_pytorch_tanh"),
        ({"final_logit_softcapping": 0.0}, ConfigError, r"must be positive, got 24 and 0\.0"),
        ({"query_pre_attn_scalar": 0}, ConfigError, "must be positive, got 0 and None"),
    ],
)
def test_what_is_not_implemented_or_makes_no_sense_is_refused(
    make_checkpoint: Callable[..., Any], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = make_checkpoint("Gemma3").path
    text = path / "config.json"
    text.write_text(json.dumps({**json.loads(text.read_text()), **changes}))
    with pytest.raises(error, match=message):
        load_model_config(path)
