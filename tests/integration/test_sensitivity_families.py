"""The checkpoints of GLM, GLM-4, Gemma 3 and of windows show the faults that only these families can have.

Planted in Transformers and measured as in test_sensitivity.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.glm import modeling_glm
from transformers.models.glm4 import modeling_glm4

from tests.integration.test_sensitivity import (
    MAX_TOKENS,
    Fault,
    cases,
    check,
    default_inv_freq,
    k_bias_dropped,
    load,
    measure,
    ones,
    q_bias_dropped,
    qkv_bias_dropped,
    rope_on_q_only,
    rounding,
    truths,
    v_bias_dropped,
)

MODULES = {"glm": modeling_glm, "glm4": modeling_glm4, "gemma3_text": modeling_gemma3}
GLMS = ("tiny-glm", "tiny-glm4")
GEMMA = ("tiny-gemma3",)
WINDOWS = ("tiny-qwen2-window", "tiny-gemma3")
ALL = (*GLMS, *WINDOWS)


# --- GLM ---------------------------------------------------------------------------------------------


def whole_head_turns(model: Any) -> None:
    model.model.rotary_emb.inv_freq = default_inv_freq(100.0, 32)


def frequencies_of_a_whole_head(model: Any) -> None:
    """Half of the head turns, by the first half of a whole head's angles."""
    model.model.rotary_emb.inv_freq = default_inv_freq(100.0, 32)[:8]


def up_before_gate(model: Any) -> None:
    for layer in model.model.layers:
        weight = layer.mlp.gate_up_proj.weight
        weight.data = torch.cat(tuple(reversed(weight.data.chunk(2))))


def last_half_turns(module: Any, patch: pytest.MonkeyPatch) -> None:
    genuine = module.apply_rotary_pos_emb

    def apply(q: torch.Tensor, k: torch.Tensor, *angles: Any) -> tuple[torch.Tensor, ...]:
        turned = genuine(q.roll(16, -1), k.roll(16, -1), *angles)
        return tuple(x.roll(-16, -1) for x in turned)

    patch.setattr(module, "apply_rotary_pos_emb", apply)


def halves_turn_instead_of_neighbours(module: Any, patch: pytest.MonkeyPatch) -> None:
    def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        size = cos.shape[-1]
        part, rest = x[..., :size], x[..., size:]
        first, second = part.chunk(2, dim=-1)
        turned = part * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]
        return torch.cat((turned, rest), dim=-1)

    patch.setattr(
        module, "apply_rotary_pos_emb", lambda q, k, cos, sin: (turn(q, cos, sin), turn(k, cos, sin))
    )


def norm_after_attention_is_plain(model: Any) -> None:
    ones(model, "post_self_attn_layernorm.weight")


def norm_after_mlp_is_plain(model: Any) -> None:
    ones(model, "post_mlp_layernorm.weight")


def norms_after_branches_are_dropped(model: Any) -> None:
    for layer in model.model.layers:
        layer.post_self_attn_layernorm = torch.nn.Identity()
        layer.post_mlp_layernorm = torch.nn.Identity()


# --- windows -----------------------------------------------------------------------------------------


def window_ignored(model: Any) -> None:
    model.config.sliding_window = 1_000_000


def window_one_longer(model: Any) -> None:
    assert model.config.sliding_window == 16
    model.config.sliding_window = 17


def window_one_shorter(model: Any) -> None:
    model.config.sliding_window = 15


# --- Gemma 3 -----------------------------------------------------------------------------------------


def window_on_the_full_layer(module: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "create_causal_mask", module.create_sliding_window_causal_mask)


def weight_instead_of_one_plus_weight(module: Any, patch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return (self._norm(x.float()) * self.weight.float()).type_as(x)

    patch.setattr(module.Gemma3RMSNorm, "forward", forward)


def ropes_swapped(model: Any) -> None:
    rotary = model.model.rotary_emb
    full, local = rotary.full_attention_inv_freq, rotary.sliding_attention_inv_freq
    rotary.full_attention_inv_freq, rotary.sliding_attention_inv_freq = local, full


def full_rope_everywhere(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.sliding_attention_inv_freq = rotary.full_attention_inv_freq


def linear_scaling_ignored(model: Any) -> None:
    model.model.rotary_emb.full_attention_inv_freq = default_inv_freq(1000.0)


def linear_scaling_everywhere(model: Any) -> None:
    model.model.rotary_emb.sliding_attention_inv_freq = default_inv_freq(100.0) / 8


def embeddings_not_scaled(model: Any) -> None:
    assert model.model.embed_tokens.embed_scale == 8
    model.model.embed_tokens.embed_scale = torch.tensor(1.0)


def scores_scaled_by_head_dim(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = 32**-0.5


def gelu_without_tanh(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.GELU()


def silu_for_gelu(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.act_fn = torch.nn.SiLU()


def cap_missing(model: Any) -> None:
    model.config.final_logit_softcapping = None


def cap_without_scale_back(model: Any) -> None:
    """The logits end in ±1: the order is right, no logprob is."""
    model.lm_head.register_forward_hook(lambda _module, _inputs, logits: torch.tanh(logits / 30.0))
    model.config.final_logit_softcapping = None


def plain_norms(model: Any, suffix: str) -> None:
    changed = [p for n, p in model.named_parameters() if n.endswith(suffix)]
    assert changed
    for parameter in changed:
        parameter.data.zero_()


def norm_before_mlp_is_plain(model: Any) -> None:
    plain_norms(model, "pre_feedforward_layernorm.weight")


def norm_behind_mlp_is_plain(model: Any) -> None:
    plain_norms(model, "post_feedforward_layernorm.weight")


def norm_behind_attention_is_plain(model: Any) -> None:
    plain_norms(model, "post_attention_layernorm.weight")


def head_norms_are_plain(model: Any) -> None:
    plain_norms(model, "q_norm.weight")
    plain_norms(model, "k_norm.weight")


#: fault → (checkpoints, least change in roundings, least flipped tokens of 24 on every prompt)
IN_PLACE: dict[Fault, tuple[tuple[str, ...], float, int]] = {
    whole_head_turns: (GLMS, 10_000, 12),
    frequencies_of_a_whole_head: (GLMS, 10_000, 12),
    up_before_gate: (GLMS, 10_000, 6),
    qkv_bias_dropped: (GLMS, 10_000, 6),
    q_bias_dropped: (GLMS, 10_000, 3),
    k_bias_dropped: (GLMS, 10_000, 1),
    v_bias_dropped: (GLMS, 10_000, 3),
    norm_after_attention_is_plain: (("tiny-glm4",), 10_000, 6),
    norm_after_mlp_is_plain: (("tiny-glm4",), 10_000, 6),
    norms_after_branches_are_dropped: (("tiny-glm4",), 10_000, 12),
    window_ignored: (WINDOWS, 10_000, 12),
    window_one_longer: (WINDOWS, 10_000, 3),
    window_one_shorter: (WINDOWS, 10_000, 6),
    ropes_swapped: (GEMMA, 10_000, 12),
    full_rope_everywhere: (GEMMA, 10_000, 12),
    linear_scaling_ignored: (GEMMA, 10_000, 12),
    linear_scaling_everywhere: (GEMMA, 10_000, 12),
    embeddings_not_scaled: (GEMMA, 10_000, 12),
    scores_scaled_by_head_dim: (GEMMA, 10_000, 3),
    gelu_without_tanh: (GEMMA, 50, 0),
    silu_for_gelu: (GEMMA, 10_000, 6),
    # The cap is monotone: no greedy token shows it, so engines without logprobs cannot be held to it.
    cap_missing: (GEMMA, 10_000, 0),
    cap_without_scale_back: (GEMMA, 10_000, 0),
    norm_before_mlp_is_plain: (GEMMA, 10_000, 6),
    norm_behind_mlp_is_plain: (GEMMA, 10_000, 6),
    norm_behind_attention_is_plain: (GEMMA, 10_000, 6),
    head_norms_are_plain: (GEMMA, 10_000, 6),
}
IN_MODULE: dict[Fault, tuple[tuple[str, ...], float, int]] = {
    halves_turn_instead_of_neighbours: (GLMS, 10_000, 12),
    last_half_turns: (GLMS, 10_000, 12),
    rope_on_q_only: ((*GLMS, *GEMMA), 10_000, 12),
    window_on_the_full_layer: (GEMMA, 10_000, 6),
    weight_instead_of_one_plus_weight: (GEMMA, 10_000, 12),
}


@pytest.mark.parametrize(("name", "fault", "change", "flips"), cases(IN_PLACE))
def test_a_wrong_model_is_told_from_rounding(name: str, fault: Fault, change: float, flips: int) -> None:
    truths(name), rounding(name)  # measured before the model is damaged
    model = load(name)
    fault(model)
    check(name, model, change, flips)


@pytest.mark.parametrize(("name", "fault", "change", "flips"), cases(IN_MODULE))
def test_wrong_arithmetic_is_told_from_rounding(
    name: str, fault: Fault, change: float, flips: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    truths(name), rounding(name)
    model = load(name)
    fault(MODULES[model.config.model_type], monkeypatch)
    check(name, model, change, flips)


@pytest.mark.parametrize("name", ALL)
def test_a_healthy_model_is_within_rounding_varied_and_decided_by_more_than_rounding(name: str) -> None:
    change, flips = measure(name, load(name))
    assert change == pytest.approx(1.0)
    assert rounding(name) < 2e-3
    assert flips == [0, 0, 0]
    stops = set(load(name).generation_config.eos_token_id)
    for truth in truths(name):
        margins = truth.logits.topk(2).values.diff().neg()[:, 0]
        assert margins.min() > 10 * rounding(name)
        answer = truth.ids[0, -MAX_TOKENS:].tolist()
        assert len(set(answer)) >= 12
        assert not stops & set(answer)


def test_a_missing_cap_flips_no_token() -> None:
    model = load("tiny-gemma3")
    cap_missing(model)
    assert measure("tiny-gemma3", model)[1] == [0, 0, 0]
