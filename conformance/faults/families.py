"""Faults of the models: rope, norms, activations, heads, and loading."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import minivllm.models as models_module
from conformance.faults.attention import tiny
from conformance.faults.base import GREEDY, HF, LOGITS, VLLM, Seam, Table
from minivllm.layers import rope as rope_module
from minivllm.models import decoder as decoder_module
from minivllm.models import gemma3 as gemma3_module
from minivllm.models import glm as glm_module
from minivllm.models import modules as modules_module
from minivllm.models import weights as weights_module
from minivllm.models.safetensors_dir import SafetensorsSource

__all__ = ["LOADING", "MODELS"]

MODELS = Table("models")
LOADING = Table("loading")


# --- rope ----------------------------------------------------------------------------------------


def _rope_fault(seam: Seam, change: Callable[[Any, dict[str, Any]], Any]) -> None:
    """Other frequencies: `change(genuine, arguments)` → (inv_freq, scaling)."""
    seam.fresh_models()

    def frequencies(rope: Any, **sizes: Any) -> Any:
        seam.fire()
        return change(genuine, {"rope": rope, **sizes})

    genuine = seam.set(rope_module, "rope_frequencies", frequencies)


@MODELS.add(
    "rope-base-default",
    tiny("tiny-llama"),
    origin=f"{HF}/issues/25681",
    at="rope_frequencies: theta",
    detector=GREEDY,
)
def _theta(seam: Seam) -> None:
    """The base of the rope is 10,000 whatever the config says."""
    _rope_fault(seam, lambda f, a: f(**{**a, "rope": replace(a["rope"], theta=10_000.0)}))


@MODELS.add(
    "rope-scaling-ignored",
    "parity/rope-kinds[model=tiny-llama-linear]",
    origin="https://github.com/ggml-org/llama.cpp/issues/26207 (a setting of the request is not looked at)",
    at="rope_frequencies: kind",
    detector=GREEDY,
)
def _kind(seam: Seam) -> None:
    """The kind of rope in the config is ignored."""
    _rope_fault(seam, lambda f, a: f(**{**a, "rope": replace(a["rope"], kind="default", parameters=())}))


@MODELS.add(
    "yarn-factor-ignored",
    "parity/rope-kinds[model=tiny-llama-yarn]",
    origin=f"{VLLM}/issues/48621",
    at="rope_frequencies: attention scaling",
    detector=GREEDY,
)
def _mscale(seam: Seam) -> None:
    """The factor that YaRN puts on cosines and sines is left out."""
    _rope_fault(seam, lambda f, a: (f(**a)[0], 1.0))


@MODELS.add(
    "rope-in-low-precision",
    "parity/rope-kinds[model=tiny-llama]",
    origin=f"{HF}/pull/29285",
    at="RopeTable._tabulate: dtype of angles",
    detector=GREEDY,
)
def _rope_precision(seam: Seam) -> None:
    """Positions are bfloat16, in which integers above 256 are not exact."""
    seam.fresh_models()

    def tabulate(self: Any, length: int) -> None:
        genuine(self, length)
        if self._device.type != "meta":
            seam.fire()
            angles = torch.arange(length).bfloat16()[:, None].float() * self._inv_freq
            self._cos = angles.cos() * self.attention_scaling
            self._sin = angles.sin() * self.attention_scaling

    genuine = seam.set(rope_module.RopeTable, "_tabulate", tabulate)


@MODELS.add(
    "whole-head-turns",
    tiny("tiny-glm"),
    origin=f"{VLLM}/pull/43770",
    at="DecoderModel.make_rope: rotary_fraction",
    detector=GREEDY,
)
def _partial(seam: Seam) -> None:
    """The whole head turns although only a part of it should."""
    seam.fresh_models()

    def make_rope(self: Any, rope: Any, device: Any) -> Any:
        seam.fire(rope.rotary_fraction != 1)
        return genuine(self, replace(rope, rotary_fraction=1.0), device)

    genuine = seam.set(decoder_module.DecoderModel, "make_rope", make_rope)


@MODELS.add(
    "halves-turn-instead-of-neighbours",
    tiny("tiny-glm4"),
    origin="first principles: interleaved rope taken for the one by halves",
    at="glm.rotate_pairs: pairs",
    detector=GREEDY,
)
def _pairs(seam: Seam) -> None:
    """Dimensions are paired with those half a head away instead of with their neighbours."""

    def rotate(x: Any, cos: Any, sin: Any) -> Any:
        seam.fire()
        size = cos.shape[-1]
        turning, passing = x[..., :size], x[..., size:]
        return torch.cat((decoder_module.rotate_halves(turning, cos, sin), passing), dim=-1)

    seam.set(glm_module, "rotate_pairs", rotate)


@MODELS.add(
    "keys-are-not-turned",
    tiny("tiny-qwen2"),
    origin="https://github.com/ml-explore/mlx-lm/pull/1100",
    at="Attention.rotate: keys",
    detector=GREEDY,
)
def _q_only(seam: Seam) -> None:
    """Only queries are turned by their positions."""

    def rotate(self: Any, x: Any, rotation: Any) -> Any:
        if x.shape[1] == self.k_proj.weight.shape[0] // self.head_dim:
            seam.fire()
            return x
        return genuine(self, x, rotation)

    genuine = seam.set(decoder_module.Attention, "rotate", rotate)


@MODELS.add(
    "ropes-of-layers-exchanged",
    tiny("tiny-gemma3"),
    origin="https://github.com/InternLM/lmdeploy/issues/3767 (layers of two kinds)",
    at="DecoderModel.rotations: local rope",
    detector=GREEDY,
)
def _ropes_swapped(seam: Seam) -> None:
    """Layers with a window use the rope of those without."""

    def rotations(self: Any, positions: Any) -> Any:
        found = genuine(self, positions)
        full = [r for r, window in zip(found, self.config.windows, strict=True) if window is None]
        seam.fire()
        return [full[0]] * len(found)

    genuine = seam.set(decoder_module.DecoderModel, "rotations", rotations)


# --- norms, activations, heads -------------------------------------------------------------------


@MODELS.add(
    "head-norm-over-the-projection",
    tiny("tiny-qwen3"),
    origin="https://github.com/vllm-project/vllm-metal/issues/767",
    at="RMSNorm.forward: axis of q and k norms",
    detector=GREEDY,
)
def _norm_axis(seam: Seam) -> None:
    """The norm of queries and keys is over all heads together instead of each."""

    def forward(self: Any, x: Any) -> Any:
        if x.dim() == 3:
            seam.fire()
            flat = x.flatten(1)
            return self.ops.rms_norm(flat, self.weight.repeat(x.shape[1]), self.eps).view_as(x)
        return genuine(self, x)

    genuine = seam.set(modules_module.RMSNorm, "forward", forward)


@MODELS.add(
    "norm-without-plus-one",
    tiny("tiny-gemma3"),
    origin="https://github.com/ml-explore/mlx-lm/issues/1197",
    at="RMSNormPlusOne.forward: one",
    detector=GREEDY,
)
def _plus_one(seam: Seam) -> None:
    """The norm multiplies by its weight instead of by one more."""

    def forward(self: Any, x: Any) -> Any:
        seam.fire()
        return self.ops.rms_norm(x, self.weight, self.eps)

    seam.set(modules_module.RMSNormPlusOne, "forward", forward)


@MODELS.add(
    "norm-eps-ten-times",
    tiny("tiny-qwen3"),
    origin="first principles: eps of another family",
    at="RMSNorm.forward: eps",
    detector=LOGITS,
)
def _eps(seam: Seam) -> None:
    """The eps of norms is ten times as large."""

    def forward(self: Any, x: Any) -> Any:
        seam.fire()
        return self.ops.rms_norm(x, self.weight, self.eps * 10)

    seam.set(modules_module.RMSNorm, "forward", forward)


@MODELS.add(
    "logits-not-capped",
    "parity/logprobs[model=tiny-gemma3]",
    origin="https://github.com/InternLM/lmdeploy/pull/2842",
    at="Gemma3ForCausalLM.logits: cap",
    detector="logprobs_by_value",
)
def _cap(seam: Seam) -> None:
    """The cap of the logits is left out: their order stays, no log-probability does."""

    def logits(self: Any, hidden: Any) -> Any:
        seam.fire()
        return decoder_module.DecoderModel.logits(self, hidden)

    seam.set(gemma3_module.Gemma3ForCausalLM, "logits", logits)


@MODELS.add(
    "embeddings-not-scaled",
    tiny("tiny-gemma3"),
    origin="first principles: a factor that only one family has",
    at="Gemma3ForCausalLM.embed: scale",
    detector=GREEDY,
)
def _embed_scale(seam: Seam) -> None:
    """Embeddings are not multiplied by the square root of their width."""

    def embed(self: Any, token_ids: Any) -> Any:
        seam.fire()
        return decoder_module.DecoderModel.embed(self, token_ids)

    seam.set(gemma3_module.Gemma3ForCausalLM, "embed", embed)


@MODELS.add(
    "gelu-of-the-other-kind",
    tiny("tiny-gemma3"),
    origin="first principles: exact GELU for its tanh approximation",
    at="Gemma3MLP.activate: approximation",
    detector=LOGITS,
)
def _gelu(seam: Seam) -> None:
    """GELU is exact where the model was trained with an approximation."""

    def activate(self: Any, gate: Any) -> Any:
        seam.fire()
        return self.ops.gelu(gate)

    seam.set(gemma3_module.Gemma3MLP, "activate", activate)


@MODELS.add(
    "gate-and-up-exchanged",
    tiny("tiny-glm"),
    origin="https://github.com/pie-project/pie/pull/491 (fused parts unpacked in the wrong order)",
    at="GlmMLP.forward: halves of gate_up_proj",
    detector=GREEDY,
)
def _gate_up(seam: Seam) -> None:
    """The fused matrix is taken for up, then gate."""

    def forward(self: Any, x: Any) -> Any:
        seam.fire()
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(up * self.ops.silu(gate))

    seam.set(glm_module.GlmMLP, "forward", forward)


# --- loading -------------------------------------------------------------------------------------


def _loaded_fault(seam: Seam, change: Callable[[dict[str, Any]], bool]) -> None:
    """Change the parameters after loading; `change(parameters)` tells whether it did."""
    seam.fresh_models()

    def fill(model: Any, source: Any) -> None:
        genuine(model, source)
        with torch.no_grad():
            seam.fire(change(dict(model.named_parameters())))

    genuine = seam.set(models_module, "fill", fill)


def _zeroed(suffix: str) -> Callable[[dict[str, Any]], bool]:
    def change(parameters: dict[str, Any]) -> bool:
        found = [parameter for name, parameter in parameters.items() if name.endswith(suffix)]
        for parameter in found:
            parameter.zero_()
        return bool(found)

    return change


@LOADING.add(
    "bias-of-queries-dropped",
    tiny("tiny-qwen2"),
    origin=f"{VLLM}/pull/46835 (biases skipped by a prefix)",
    at="fill: q_proj.bias",
    detector=GREEDY,
)
def _q_bias(seam: Seam) -> None:
    """The bias of the queries is not loaded."""
    _loaded_fault(seam, _zeroed("q_proj.bias"))


@LOADING.add(
    "bias-of-values-dropped",
    tiny("tiny-qwen2"),
    origin=f"{VLLM}/pull/46835 (biases skipped by a prefix)",
    at="fill: v_proj.bias",
    detector=GREEDY,
)
def _v_bias(seam: Seam) -> None:
    """The bias of the values is not loaded."""
    _loaded_fault(seam, _zeroed("v_proj.bias"))


@LOADING.add(
    "head-tied-by-force",
    "parity/tied-and-untied-heads[model=tiny-llama]",
    origin="https://github.com/sgl-project/sglang/pull/15398",
    at="fill: lm_head.weight",
    detector=GREEDY,
)
def _tied(seam: Seam) -> None:
    """The head is overwritten by the embeddings although the config says that it is not tied."""

    def change(parameters: dict[str, Any]) -> bool:
        head = parameters.get("lm_head.weight")
        if head is not None:
            head.copy_(parameters["model.embed_tokens.weight"])
        return head is not None

    _loaded_fault(seam, change)


@LOADING.add(
    "two-layers-exchanged",
    tiny("tiny-llama"),
    origin="first principles: layers sorted by name as text",
    at="fill: order of layers",
    detector=GREEDY,
)
def _layers(seam: Seam) -> None:
    """Two layers have each other's weights."""

    def change(parameters: dict[str, Any]) -> bool:
        for name, parameter in parameters.items():
            if ".layers.0." in name:
                other = parameters[name.replace(".layers.0.", ".layers.1.")]
                kept = parameter.clone()
                parameter.copy_(other)
                other.copy_(kept)
        return True

    _loaded_fault(seam, change)


@LOADING.add(
    "one-matrix-in-bfloat16",
    tiny("tiny-llama"),
    origin="https://github.com/vllm-project/vllm-metal/pull/125 (a dtype that differs from the model's)",
    at="fill: dtype of one matrix",
    detector=LOGITS,
)
def _one_rounded(seam: Seam) -> None:
    """One matrix has been through bfloat16."""

    def change(parameters: dict[str, Any]) -> bool:
        weight = parameters["model.layers.1.mlp.down_proj.weight"]
        weight.copy_(weight.bfloat16().float())
        return True

    _loaded_fault(seam, change)


@LOADING.add(
    "missing-tensor-tolerated",
    "loading/missing-tensor",
    origin="https://github.com/sgl-project/sglang/pull/32279",
    at="weights._check: missing tensors",
    detector="error",
)
def _missing(seam: Seam) -> None:
    """A tensor that is not in the checkpoint is left as it is, and the engine starts."""

    def tolerant(where: str, found: Any, parameters: Any) -> None:
        missing = [name for name in parameters if name not in found]
        seam.fire(missing)
        genuine(where, found, {n: p for n, p in parameters.items() if n not in missing})

    def fill_what_is_there(model: Any, source: Any) -> None:
        held = source.shapes()
        for name, parameter in model.named_parameters():
            if name in held:
                parameter.copy_(source.read(name))
            else:
                torch.nn.init.normal_(parameter, std=0.02)

    def unchecked(self: Any, path: Any, expected: Any) -> None:  # noqa: ARG001 - the index is not asked
        opened(self, path, expected=None)

    seam.fresh_models()
    genuine = seam.set(weights_module, "_check", tolerant)
    seam.set(models_module, "fill", fill_what_is_there)
    opened = seam.set(SafetensorsSource, "_open", unchecked)


@LOADING.add(
    "unknown-tensor-ignored",
    "loading/unknown-tensor",
    origin="https://github.com/sgl-project/sglang/pull/32279 (what is loaded is not checked)",
    at="weights._check: unknown tensors",
    detector="error",
)
def _unknown(seam: Seam) -> None:
    """A tensor that belongs to nothing is skipped in silence."""

    def check(where: str, found: Any, parameters: Any) -> None:
        known = {name: shape for name, shape in found.items() if name in parameters}
        seam.fire(len(known) < len(found))
        genuine(where, known, parameters)

    genuine = seam.set(weights_module, "_check", check)
