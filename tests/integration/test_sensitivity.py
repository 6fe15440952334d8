"""The mechanics checkpoints show the faults they are for.

Each fault is planted in Transformers itself. The truth is Transformers in float64; rounding is the
largest error of the healthy float32 model over the same rows. A fault is measured by teacher
forcing the truth's tokens: how far it moves a logit, as a multiple of rounding, and how many of
the 24 greedy tokens it flips.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama import modeling_llama
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from conformance.paths import data_root

CHECKPOINTS = data_root() / "golden" / "checkpoints"
MODULES = {"llama": modeling_llama, "qwen2": modeling_qwen2, "qwen3": modeling_qwen3}
LLAMAS = ("tiny-llama", "tiny-llama-tied", "tiny-llama-linear", "tiny-llama-yarn")
ALL = (*LLAMAS, "tiny-qwen2", "tiny-qwen3")

# None of these chose a seed (conformance/recipes/search.py has other ones).
PROMPTS = (
    "The quick brown fox jumps over the lazy dog. " * 4,
    "How many blocks does a request of 100 tokens need if a block holds 16 of them?",
    "Les œufs 🥚 coûtent 3 € la douzaine; 六个一块钱。",
)
MAX_TOKENS = 24


def load(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        CHECKPOINTS / name, dtype=dtype, attn_implementation="eager"
    ).eval()


@dataclass(frozen=True)
class Truth:
    """Prompt and answer ids of one prompt, and the float64 logits [24, vocab] that chose them."""

    ids: torch.Tensor
    logits: torch.Tensor


@torch.no_grad()
def forced_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, use_cache=False).logits[0, -MAX_TOKENS - 1 : -1].double()


@cache
def truths(name: str) -> tuple[Truth, ...]:
    model, tokenizer = load(name, torch.float64), AutoTokenizer.from_pretrained(CHECKPOINTS / name)
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=None)
        found.append(Truth(out, forced_logits(model, out)))
    return tuple(found)


@cache
def rounding(name: str) -> float:
    """Largest float32 error of a healthy model, in logits."""
    model = load(name)
    return max((forced_logits(model, t.ids) - t.logits).abs().max().item() for t in truths(name))


def measure(name: str, model: Any) -> tuple[float, list[int]]:
    """(largest change of a logit / rounding, flipped tokens per prompt) of a damaged model."""
    change, flips = 0.0, []
    for truth in truths(name):
        logits = forced_logits(model, truth.ids)
        change = max(change, (logits - truth.logits).abs().max().item())
        flips.append(int((logits.argmax(-1) != truth.ids[0, -MAX_TOKENS:]).sum()))
    return change / rounding(name), flips


# --- faults in place -------------------------------------------------------------------------------


def set_inv_freq(model: Any, inv_freq: torch.Tensor, attention_scaling: float | None = None) -> None:
    rotary = model.model.rotary_emb
    assert not torch.equal(rotary.inv_freq, inv_freq) or attention_scaling not in (
        None,
        rotary.attention_scaling,
    )
    rotary.inv_freq = inv_freq
    if attention_scaling is not None:
        rotary.attention_scaling = attention_scaling


def default_inv_freq(theta: float, head_dim: int = 32) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)


def theta_of(model: Any) -> float:
    return float(model.config.rope_parameters["rope_theta"])


def wrong_theta(model: Any) -> None:
    set_inv_freq(model, default_inv_freq(10_000.0))


def rope_kind_ignored(model: Any) -> None:
    set_inv_freq(model, default_inv_freq(theta_of(model)), 1.0)


def yarn_attention_factor_ignored(model: Any) -> None:
    set_inv_freq(model, model.model.rotary_emb.inv_freq, 1.0)


def yarn_as_linear(model: Any) -> None:
    set_inv_freq(model, default_inv_freq(theta_of(model)) / model.config.rope_parameters["factor"])


def llama3_without_smoothing(model: Any) -> None:
    """Frequencies between the two wavelengths stay as they are instead of being blended."""
    plain, rotary = default_inv_freq(theta_of(model)), model.model.rotary_emb
    rope = model.config.rope_parameters
    fully_scaled = torch.isclose(rotary.inv_freq, plain / rope["factor"])
    set_inv_freq(model, torch.where(fully_scaled, rotary.inv_freq, plain))


def attention_scale(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= 1.01


def attention_scale_of_hidden_size(model: Any) -> None:
    """hidden_size / heads taken for head_dim."""
    for layer in model.model.layers:
        layer.self_attn.scaling = (model.config.hidden_size / model.config.num_attention_heads) ** -0.5


def rms_eps(model: Any) -> None:
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon *= 10
        layer.post_attention_layernorm.variance_epsilon *= 10


def ones(model: Any, suffix: str) -> None:
    changed = [p for n, p in model.named_parameters() if n.endswith(suffix)]
    assert changed
    for parameter in changed:
        parameter.data.fill_(1.0)


def input_norm_weights_ignored(model: Any) -> None:
    ones(model, "input_layernorm.weight")


def final_norm_weights_ignored(model: Any) -> None:
    # Only the pattern: a common factor is kept, or the head would be flattened as well.
    weight = model.model.norm.weight.data
    weight.fill_(weight.mean())


def q_norm_weights_ignored(model: Any) -> None:
    ones(model, "q_norm.weight")


def k_norm_weights_ignored(model: Any) -> None:
    ones(model, "k_norm.weight")


def zero_bias(model: Any, *names: str) -> None:
    for layer in model.model.layers:
        for name in names:
            getattr(layer.self_attn, name).bias.data.zero_()


def qkv_bias_dropped(model: Any) -> None:
    zero_bias(model, "q_proj", "k_proj", "v_proj")


def q_bias_dropped(model: Any) -> None:
    zero_bias(model, "q_proj")


def k_bias_dropped(model: Any) -> None:
    zero_bias(model, "k_proj")


def v_bias_dropped(model: Any) -> None:
    zero_bias(model, "v_proj")


def head_tied(model: Any) -> None:
    model.lm_head.weight.data.copy_(model.model.embed_tokens.weight)


def head_untied(model: Any) -> None:
    """The head is loaded from nowhere: it keeps a fresh initialisation."""
    torch.manual_seed(0)
    fresh = torch.empty_like(model.lm_head.weight).normal_(std=0.02)
    model.lm_head.weight = torch.nn.Parameter(fresh)


def gate_and_up_swapped(model: Any) -> None:
    for layer in model.model.layers:
        layer.mlp.gate_proj, layer.mlp.up_proj = layer.mlp.up_proj, layer.mlp.gate_proj


def two_norms_swapped(model: Any) -> None:
    for layer in model.model.layers:
        a, b = layer.input_layernorm, layer.post_attention_layernorm
        layer.input_layernorm, layer.post_attention_layernorm = b, a


def k_and_v_swapped(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.k_proj, layer.self_attn.v_proj = layer.self_attn.v_proj, layer.self_attn.k_proj


def two_layers_swapped(model: Any) -> None:
    model.model.layers[0], model.model.layers[1] = model.model.layers[1], model.model.layers[0]


def one_matrix_in_bfloat16(model: Any) -> None:
    weight = model.model.layers[1].mlp.down_proj.weight
    weight.data = weight.data.bfloat16().float()


def one_key_zeroed(model: Any) -> None:
    """The first key of one head of one layer."""

    def hook(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:  # noqa: ARG001  torch's signature
        output = output.clone()
        output[:, 0, :32] = 0
        return output

    model.model.layers[1].self_attn.k_proj.register_forward_hook(hook)


# --- faults in a function of the modelling module ----------------------------------------------------


def gqa_repeated_instead_of_interleaved(module: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "repeat_kv", lambda x, n: x.repeat(1, n, 1, 1))


def rotate_pairs_instead_of_halves(module: Any, patch: pytest.MonkeyPatch) -> None:
    def rotate(x: torch.Tensor) -> torch.Tensor:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)

    patch.setattr(module, "rotate_half", rotate)


def rope_on_q_only(module: Any, patch: pytest.MonkeyPatch) -> None:
    genuine = module.apply_rotary_pos_emb
    patch.setattr(module, "apply_rotary_pos_emb", lambda q, k, *a, **kw: (genuine(q, k, *a, **kw)[0], k))


Fault = Callable[..., None]

#: fault → (checkpoints, least change in roundings, least flipped tokens of 24 on every prompt)
IN_PLACE: dict[Fault, tuple[tuple[str, ...], float, int]] = {
    wrong_theta: (ALL, 10_000, 12),
    rope_kind_ignored: (("tiny-llama", "tiny-llama-linear", "tiny-llama-yarn"), 10_000, 12),
    llama3_without_smoothing: (("tiny-llama",), 10_000, 6),
    yarn_attention_factor_ignored: (("tiny-llama-yarn",), 10_000, 6),
    yarn_as_linear: (("tiny-llama-yarn",), 10_000, 12),
    attention_scale: (ALL, 1000, 0),
    attention_scale_of_hidden_size: (ALL, 10_000, 6),
    rms_eps: (ALL, 50, 0),
    input_norm_weights_ignored: (ALL, 10_000, 6),
    final_norm_weights_ignored: (ALL, 10_000, 1),
    q_norm_weights_ignored: (("tiny-qwen3",), 10_000, 12),
    k_norm_weights_ignored: (("tiny-qwen3",), 10_000, 12),
    qkv_bias_dropped: (("tiny-qwen2",), 10_000, 6),
    q_bias_dropped: (("tiny-qwen2",), 10_000, 3),
    k_bias_dropped: (("tiny-qwen2",), 10_000, 3),
    v_bias_dropped: (("tiny-qwen2",), 10_000, 3),
    head_tied: (("tiny-llama", "tiny-llama-linear", "tiny-llama-yarn", "tiny-qwen3"), 10_000, 20),
    head_untied: (("tiny-llama-tied", "tiny-qwen2"), 10_000, 20),
    gate_and_up_swapped: (ALL, 10_000, 6),
    two_norms_swapped: (ALL, 10_000, 6),
    k_and_v_swapped: (ALL, 10_000, 12),
    two_layers_swapped: (ALL, 10_000, 12),
    one_matrix_in_bfloat16: (ALL, 200, 0),
    one_key_zeroed: (ALL, 5000, 0),
}
IN_MODULE: dict[Fault, tuple[tuple[str, ...], float, int]] = {
    gqa_repeated_instead_of_interleaved: (ALL, 10_000, 12),
    rotate_pairs_instead_of_halves: (ALL, 10_000, 12),
    rope_on_q_only: (ALL, 10_000, 12),
}


def cases(table: dict[Fault, tuple[tuple[str, ...], float, int]]) -> list[Any]:
    return [
        pytest.param(name, fault, change, flips, id=f"{name}-{fault.__name__}")
        for fault, (names, change, flips) in table.items()
        for name in names
    ]


@pytest.mark.parametrize(("name", "fault", "change", "flips"), cases(IN_PLACE))
def test_a_wrong_model_is_told_from_rounding(name: str, fault: Fault, change: float, flips: int) -> None:
    model = load(name)
    fault(model)
    check(name, model, change, flips)


@pytest.mark.parametrize(("name", "fault", "change", "flips"), cases(IN_MODULE))
def test_wrong_arithmetic_is_told_from_rounding(
    name: str, fault: Fault, change: float, flips: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    truths(name), rounding(name)  # measured before the module is damaged
    model = load(name)
    fault(MODULES[model.config.model_type], monkeypatch)
    check(name, model, change, flips)


@pytest.mark.parametrize("name", ALL)
def test_a_healthy_model_is_within_rounding_and_flips_nothing(name: str) -> None:
    change, flips = measure(name, load(name))
    assert change == pytest.approx(1.0)
    assert rounding(name) < 2e-3
    assert flips == [0, 0, 0]


@pytest.mark.parametrize("name", ALL)
def test_greedy_tokens_are_decided_by_more_than_rounding(name: str) -> None:
    """On prompts that chose no seed. Rounding is the largest float32 error of the same rows."""
    margins = torch.cat([t.logits.topk(2).values.diff().neg()[:, 0] for t in truths(name)])
    print(
        f"{name}: margin ≥ {margins.min():.4f}, median {margins.median():.2f}; rounding {rounding(name):.1e}"
    )
    assert margins.min() > 10 * rounding(name)
    assert margins.median() > 0.3


@pytest.mark.parametrize("name", ALL)
def test_greedy_text_is_varied_and_does_not_end_by_itself(name: str) -> None:
    stops = set(load(name).generation_config.eos_token_id)
    for truth in truths(name):
        answer = truth.ids[0, -MAX_TOKENS:].tolist()
        assert len(set(answer)) >= 12
        assert not stops & set(answer)


def check(name: str, model: Any, change: float, flips: int) -> None:
    found_change, found_flips = measure(name, model)
    print(f"{name}: {found_change:.0f} × rounding, flips {found_flips}")
    assert found_change >= change
    assert min(found_flips) >= flips
