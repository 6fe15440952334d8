"""The shared decoder computes what Transformers' eager float32 modules compute, bit for bit."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import DynamicCache

import minivllm.models
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import MODELS, DecoderModel, load_model, load_model_config

CPU = torch.device("cpu")

WINDOW = {"use_sliding_window": True, "sliding_window": 7}

PLAIN_ROPE = {"rope_type": "default", "rope_theta": 100.0}

#: id → family and config overrides; every flag of ModelConfig is on in one of them.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("Llama", {"num_key_value_heads": 1}),
    "llama-all-kv-heads": ("Llama", {"num_key_value_heads": 4}),
    "llama-rope3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 100.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 100.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {}),
    "glm": ("Glm", {}),
    "glm-tied-no-bias": ("Glm", {"attention_bias": False, "tie_word_embeddings": True}),
    "glm-whole-head": ("Glm", {"rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 1.0}}),
    "glm4": ("Glm4", {}),
    "gemma3": ("Gemma3", {}),
    "gemma3-capped": ("Gemma3", {"final_logit_softcapping": 20.0, "attention_bias": True}),
    "gemma3-all-sliding": ("Gemma3", {"layer_types": ["sliding_attention"] * 3}),
    "gemma3-all-full": ("Gemma3", {"layer_types": ["full_attention"] * 3}),
    "opt": ("OPT", {}),
    "qwen2-window": ("Qwen2", {**WINDOW, "max_window_layers": 1}),
    "qwen3-window": ("Qwen3", {**WINDOW, "max_window_layers": 2}),
    "qwen3-bias-tied": ("Qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
}


def load(path: Path, dtype: torch.dtype = torch.float32) -> DecoderModel:
    return load_model(path, dtype=dtype, device=CPU, ops=TorchOps())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_whole_prefill_has_the_bits_of_transformers_eager(
    variant: str,
    make_checkpoint: Callable[..., Any],
    run_model: Callable[..., Any],
    token_ids: torch.Tensor,
) -> None:
    family, overrides = VARIANTS[variant]
    checkpoint = make_checkpoint(family, **overrides)
    ours = run_model(load(checkpoint.path), token_ids)
    with torch.no_grad():
        theirs = checkpoint.hf(token_ids[None], output_hidden_states=True)
    # hidden_states[0] are the embeddings, and the last one has been through the final norm
    for layer, expected in enumerate(theirs.hidden_states[1:-1]):
        assert torch.equal(ours.stages[f"hidden.{layer}"], expected[0])
    assert torch.equal(ours.logits, theirs.logits[0])


@pytest.mark.parametrize(
    "variant", ["llama-biases", "qwen2", "qwen3", "qwen2-window", "glm", "glm4", "gemma3", "opt"]
)
def test_decoding_token_by_token_has_the_bits_of_transformers_cached_decode(
    variant: str,
    make_checkpoint: Callable[..., Any],
    run_model: Callable[..., Any],
    token_ids: torch.Tensor,
) -> None:
    family, overrides = VARIANTS[variant]
    checkpoint = make_checkpoint(family, **overrides)
    chunks = [30, *[1] * 7]
    ours = run_model(load(checkpoint.path), token_ids, chunks)
    cache = DynamicCache()  # without a config it keeps the positions that no window shows
    with torch.no_grad():
        theirs = [checkpoint.hf(part[None], cache=cache).logits[0] for part in token_ids.split(chunks)]
    assert torch.equal(ours.logits, torch.cat(theirs))


@pytest.mark.parametrize("variant", ["llama-biases", "qwen2", "qwen3", "glm", "glm4", "gemma3-capped", "opt"])
def test_in_bfloat16_a_whole_prefill_has_the_bits_of_transformers_eager(
    variant: str,
    make_checkpoint: Callable[..., Any],
    run_model: Callable[..., Any],
    token_ids: torch.Tensor,
) -> None:
    family, overrides = VARIANTS[variant]
    checkpoint = make_checkpoint(family, **overrides)
    reference = getattr(transformers, f"{family}ForCausalLM").from_pretrained(
        checkpoint.path, dtype=torch.bfloat16, attn_implementation="eager"
    )
    ours = run_model(load(checkpoint.path, torch.bfloat16), token_ids)
    with torch.no_grad():
        theirs = reference(token_ids[None]).logits[0]
    assert ours.logits.dtype == torch.bfloat16
    assert torch.equal(ours.logits, theirs)


@pytest.mark.parametrize("flag", ["rope", "qk_norm", "bias", "kv_heads", "window"])
def test_the_tiny_checkpoints_notice_what_they_are_meant_to_notice(
    flag: str,
    make_checkpoint: Callable[..., Any],
    run_model: Callable[..., Any],
    token_ids: torch.Tensor,
) -> None:
    checkpoint = make_checkpoint("Qwen3", attention_bias=True, **WINDOW, max_window_layers=1)
    model = load(checkpoint.path)
    before = run_model(model, token_ids).logits
    layers: list[Any] = list(model.model.layers)
    if flag == "rope":
        model.rope = load(make_checkpoint("Llama").path).rope
        model.rope._cos = model.rope._cos.roll(1, 0)
    elif flag == "qk_norm":
        layers[1].self_attn.k_norm = layers[1].self_attn.q_norm
    elif flag == "bias":
        layers[2].self_attn.o_proj.bias.zero_()
    elif flag == "window":
        layers[2].self_attn.window += 1
    else:
        weight = layers[0].self_attn.v_proj.weight
        weight.copy_(torch.cat(tuple(reversed(weight.chunk(2)))))
    after = run_model(model, token_ids).logits
    # about a hundred thousand times the rounding of float32 logits of this size
    assert (before - after).abs().max() > 0.1


def test_the_qk_norm_is_over_one_head_with_weights_shared_by_all(
    make_checkpoint: Callable[..., Any],
) -> None:
    layers: list[Any] = list(load(make_checkpoint("Qwen3").path).model.layers)
    attention = layers[0].self_attn
    assert attention.q_norm.weight.shape == attention.k_norm.weight.shape == (32,)
    assert attention.q_proj.weight.shape == (4 * 32, 48)


def test_tied_models_share_one_parameter(make_checkpoint: Callable[..., Any]) -> None:
    model = load(make_checkpoint("Qwen2", tie_word_embeddings=True).path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in dict(model.named_parameters())


def test_parameters_have_the_names_and_shapes_of_transformers(make_checkpoint: Callable[..., Any]) -> None:
    for family in ("Llama", "Qwen2", "Qwen3", "Glm", "Glm4", "Gemma3", "OPT"):
        checkpoint = make_checkpoint(family)
        theirs = {name: tuple(p.shape) for name, p in checkpoint.hf.named_parameters()}
        ours = {name: tuple(p.shape) for name, p in load(checkpoint.path).named_parameters()}
        assert ours == theirs


def test_no_parameter_has_a_gradient(make_checkpoint: Callable[..., Any], token_ids: torch.Tensor) -> None:
    model = load(make_checkpoint("Llama").path)
    assert not any(p.requires_grad for p in model.parameters())
    assert not model.training
    assert not model.embed(token_ids).requires_grad


def test_weights_can_be_exchanged_in_place(
    make_checkpoint: Callable[..., Any], run_model: Callable[..., Any], token_ids: torch.Tensor
) -> None:
    checkpoint = make_checkpoint("Llama")
    model = load(checkpoint.path)
    original = run_model(model, token_ids).logits
    saved = {name: p.clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.mul_(0.5)
    assert not torch.equal(run_model(model, token_ids).logits, original)
    for name, parameter in model.named_parameters():
        parameter.copy_(saved[name])
    assert torch.equal(run_model(model, token_ids).logits, original)


def test_use_ops_reaches_every_linear_norm_and_activation(
    make_checkpoint: Callable[..., Any], run_model: Callable[..., Any], token_ids: torch.Tensor
) -> None:
    class Counting(TorchOps):
        def __init__(self) -> None:
            self.calls = {"linear": 0, "rms_norm": 0, "silu": 0}

        def linear(
            self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            self.calls["linear"] += 1
            return super().linear(x, weight, bias)

        def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
            self.calls["rms_norm"] += 1
            return super().rms_norm(x, weight, eps)

        def silu(self, x: torch.Tensor) -> torch.Tensor:
            self.calls["silu"] += 1
            return super().silu(x)

    model = load(make_checkpoint("Qwen3").path)
    ops = Counting()
    model.use_ops(ops)
    run_model(model, token_ids)
    assert model.ops is ops
    assert ops.calls == {"linear": 3 * 7 + 1, "rms_norm": 3 * 4 + 1, "silu": 3}


@pytest.mark.parametrize("name", sorted(n for n in MODELS if issubclass(MODELS.get(n), DecoderModel)))
def test_every_registered_decoder_can_be_built_on_the_meta_device(
    name: str, make_checkpoint: Callable[..., Any]
) -> None:
    config = load_model_config(make_checkpoint(name.removesuffix("ForCausalLM")).path)
    model = MODELS.get(name)(config, dtype=torch.bfloat16, device="meta", ops=TorchOps())
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in model.parameters())
    assert model.embed(torch.zeros(5, dtype=torch.int64, device="meta")).shape == (5, 48)
    assert model.logits(torch.empty(5, 48, dtype=torch.bfloat16, device="meta")).shape == (5, 101)


def test_max_model_len_sizes_the_rope_table(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Llama").path
    assert load(path).max_model_len == 256
    short = load_model(path, dtype=torch.float32, device=CPU, ops=TorchOps(), max_model_len=16)
    assert short.max_model_len == 16
    with pytest.raises(IndexError):
        short.rope.cos_sin(torch.tensor([16]))


def test_an_observer_is_optional(make_checkpoint: Callable[..., Any]) -> None:
    class Nothing:
        def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
            del layer, k, v

        def attend(
            self, layer: int, q: torch.Tensor, scale: float, window: int | None = None
        ) -> torch.Tensor:
            del layer, scale, window
            return q.flatten(1)

    model = load(make_checkpoint("Llama").path)
    out = model(model.embed(torch.tensor([3, 4])), torch.tensor([0, 1]), Nothing())
    assert out.shape == (2, 48)


def test_a_family_must_say_which_flags_it_has() -> None:
    with pytest.raises(NotImplementedError, match="DecoderModel does not say"):
        DecoderModel.config_flags({})


def test_models_hold_no_matrix_product_and_no_attention_of_their_own() -> None:
    forbidden = {
        "matmul",
        "mm",
        "bmm",
        "addmm",
        "einsum",
        "linear",
        "scaled_dot_product_attention",
        "softmax",
    }
    directory = Path(minivllm.models.__file__).parent
    for file in directory.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            assert not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult)), file
            if isinstance(node, ast.Attribute) and node.attr in forbidden:
                assert isinstance(node.value, ast.Attribute), (file, node.lineno)
                assert node.value.attr == "ops", (file, node.lineno)
