"""Rotary position embedding: tables of cosines and sines, as Transformers computes them.

The float32 expressions are part of the model, not rounding detail: one unit in the last place of
a frequency is visible in the logits a few thousand positions later. So the frequencies and the
angles are computed in float32 on the CPU, in the order of operations of
`transformers.modeling_rope_utils`, and only then moved to the device.

Sources: RoFormer (https://arxiv.org/abs/2104.09864), YaRN (https://arxiv.org/abs/2309.00071),
LongRoPE (https://arxiv.org/abs/2402.13753), `rope_parameters` of the Transformers configs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minivllm.config import RopeConfig
from minivllm.errors import ConfigError, InvariantError, UnsupportedError

__all__ = ["ROPE_KINDS", "RopeTable", "rope_frequencies"]


class RopeTable:
    """Cosines and sines of every position a request may reach.

    Multimodal rope gives a token three positions (time, height, width), and each frequency follows
    one of them, as `rope.mrope_section` says (Qwen2-VL, https://arxiv.org/abs/2409.12191).

    Args:
        rope: kind, base and parameters.
        head_dim: size of an attention head; even.
        max_position_embeddings: the checkpoint's own limit, which some kinds build on.
        max_model_len: positions 0 … max_model_len - 1 are tabulated. The table grows when a
            multimodal position lies beyond, as that of a slow video may.
        device: where the tables live; "meta" gives shapes only.

    Raises:
        ConfigError: unknown kind, missing, unknown or impossible parameter; sections that do not
            divide head_dim / 2 among three axes.
        UnsupportedError: `dynamic` or `longrope` past the original length.
    """

    def __init__(
        self,
        rope: RopeConfig,
        *,
        head_dim: int,
        max_position_embeddings: int,
        max_model_len: int,
        device: torch.device | str = "cpu",
    ) -> None:
        if max_model_len < 1:
            raise ConfigError(f"max_model_len must be at least 1, got {max_model_len}")
        inv_freq, scaling = rope_frequencies(
            rope,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            max_model_len=max_model_len,
        )
        self.head_dim = head_dim
        self.attention_scaling = scaling
        self._inv_freq = inv_freq
        self._device = torch.device(device)
        self._columns = torch.arange(head_dim // 2, device=device)
        self._axes = _axes(rope, head_dim // 2).to(device) if rope.mrope_section else None
        self._tabulate(max_model_len)

    def cos_sin(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines: two tensors [rows, head_dim] float32.

        Args:
            positions: [rows] int64, or [3, rows] for multimodal rope.

        Raises:
            InvariantError: three axes, but this is not multimodal rope.
        """
        if positions.dim() == 1:
            cos = self._cos.index_select(0, positions)
            sin = self._sin.index_select(0, positions)
        else:
            if self._axes is None:
                raise InvariantError(f"positions of shape {list(positions.shape)} need multimodal rope")
            if not positions.is_meta and positions.numel():
                longest = int(positions.max()) + 1
                if longest > len(self._cos):
                    self._tabulate(max(longest, 2 * len(self._cos)))
            wanted = positions.index_select(0, self._axes).T
            cos, sin = self._cos[wanted, self._columns], self._sin[wanted, self._columns]
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)

    def _tabulate(self, length: int) -> None:
        """Make the tables for positions 0 … length - 1."""
        if self._device.type == "meta":
            self._cos = torch.empty(length, self.head_dim // 2, device=self._device)
            self._sin = torch.empty(length, self.head_dim // 2, device=self._device)
        else:
            angles = torch.arange(length, device="cpu")[:, None].float() * self._inv_freq
            # both halves of a head share their angles: half a row is stored
            self._cos = (angles.cos() * self.attention_scaling).to(self._device)
            self._sin = (angles.sin() * self.attention_scaling).to(self._device)


def _axes(rope: RopeConfig, num_frequencies: int) -> Tensor:
    """[head_dim / 2] int64: which axis of the position (0 time, 1 height, 2 width) a frequency follows."""
    section = rope.mrope_section
    if len(section) != 3 or any(n < 0 for n in section) or sum(section) != num_frequencies:
        raise ConfigError(
            f"rope mrope_section must divide head_dim / 2 = {num_frequencies} frequencies among 3 axes, "
            f"got {list(section)}"
        )
    if not rope.mrope_interleaved:
        return torch.arange(3, device="cpu").repeat_interleave(torch.tensor(section, device="cpu"))
    axes = torch.zeros(num_frequencies, dtype=torch.int64, device="cpu")
    for axis in (1, 2):
        axes[axis : 3 * section[axis] : 3] = axis
    return axes


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a kind's formula may depend on, already checked."""

    theta: float
    head_dim: int
    max_position_embeddings: int
    max_model_len: int
    parameters: Mapping[str, Any]

    def powers(self) -> Tensor:
        """[head_dim / 2] float32: theta ** (2i / head_dim)."""
        exponents = torch.arange(0, self.head_dim, 2, device="cpu", dtype=torch.float) / self.head_dim
        powers: Tensor = self.theta**exponents
        return powers

    def base_frequencies(self) -> Tensor:
        """[head_dim / 2] float32: the frequencies without any scaling."""
        return 1.0 / self.powers()


def _default(inputs: _Inputs) -> tuple[Tensor, float]:
    return inputs.base_frequencies(), 1.0


def _linear(inputs: _Inputs) -> tuple[Tensor, float]:
    return inputs.base_frequencies() / inputs.parameters["factor"], 1.0


def _llama3(inputs: _Inputs) -> tuple[Tensor, float]:
    factor = inputs.parameters["factor"]
    low = inputs.parameters["low_freq_factor"]
    high = inputs.parameters["high_freq_factor"]
    original = inputs.parameters["original_max_position_embeddings"]
    if high <= low:
        raise ConfigError(f"rope high_freq_factor must exceed low_freq_factor, got {high} and {low}")
    inv_freq = inputs.base_frequencies()
    wavelength = 2 * math.pi / inv_freq
    is_long = wavelength > original / low
    is_short = wavelength < original / high
    scaled = torch.where(is_long, inv_freq / factor, inv_freq)
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * scaled / factor + smooth * scaled
    return torch.where(~is_short & ~is_long, blended, scaled), 1.0


def _yarn(inputs: _Inputs) -> tuple[Tensor, float]:
    given = inputs.parameters
    original = given["original_max_position_embeddings"]
    factor = given["factor"]
    dim = inputs.head_dim

    def mscale(weight: float = 1) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scaling = given.get("attention_factor")
    if scaling is None:
        if given.get("mscale") and given.get("mscale_all_dim"):
            scaling = float(mscale(given["mscale"]) / mscale(given["mscale_all_dim"]))
        else:
            scaling = mscale()

    def turning_dim(rotations: float) -> float:
        """The dimension whose wavelength makes `rotations` turns within the original length."""
        return (dim * math.log(original / (rotations * 2 * math.pi))) / (2 * math.log(inputs.theta))

    low = turning_dim(given.get("beta_fast") or 32)
    high = turning_dim(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp; the same width as Transformers'
    ramp = torch.clamp((torch.arange(dim // 2, device="cpu", dtype=torch.float32) - low) / (high - low), 0, 1)
    keep = 1 - ramp
    powers = inputs.powers()
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep, float(scaling)


def _dynamic(inputs: _Inputs) -> tuple[Tensor, float]:
    original = inputs.max_position_embeddings
    _refuse_past("dynamic", inputs.max_model_len, original)
    factor, dim = inputs.parameters["factor"], inputs.head_dim
    # within the original length the stretch is 1 up to rounding, and the rounding counts
    stretch = ((factor * original / original) - (factor - 1)) ** (dim / (dim - 2))
    exponents = torch.arange(0, dim, 2, device="cpu", dtype=torch.float) / dim
    return 1.0 / ((inputs.theta * stretch) ** exponents), 1.0


def _longrope(inputs: _Inputs) -> tuple[Tensor, float]:
    given = inputs.parameters
    original = given["original_max_position_embeddings"]
    _refuse_past("longrope", inputs.max_model_len, original)
    factor = given.get("factor")
    if factor is None:
        factor = inputs.max_position_embeddings / original
    scaling = given.get("attention_factor")
    if scaling is None:
        scaling = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    short = _per_frequency("short_factor", given["short_factor"], inputs.head_dim)
    return 1.0 / (short * inputs.powers()), float(scaling)


def _factors(inputs: _Inputs) -> tuple[Tensor, float]:
    divisors = _per_frequency("factors", inputs.parameters["factors"], inputs.head_dim)
    return inputs.base_frequencies() / divisors, 1.0


@dataclass(frozen=True, slots=True)
class _Kind:
    formula: Callable[[_Inputs], tuple[Tensor, float]]
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()


_YARN_OPTIONAL = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}

#: Kind → formula and parameters. All but "factors" are Transformers' `rope_type`s; "factors"
#: divides each frequency by a given number, as the `rope_freqs` tensor of a GGUF file does.
ROPE_KINDS: Mapping[str, _Kind] = {
    "default": _Kind(_default),
    "linear": _Kind(_linear, frozenset({"factor"})),
    "llama3": _Kind(
        _llama3,
        frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    ),
    "yarn": _Kind(
        _yarn, frozenset({"factor", "original_max_position_embeddings"}), frozenset(_YARN_OPTIONAL)
    ),
    "dynamic": _Kind(_dynamic, frozenset({"factor"})),
    "longrope": _Kind(
        _longrope,
        frozenset({"short_factor", "long_factor", "original_max_position_embeddings"}),
        frozenset({"attention_factor", "factor"}),
    ),
    "factors": _Kind(_factors, frozenset({"factors"})),
}


def rope_frequencies(
    rope: RopeConfig, *, head_dim: int, max_position_embeddings: int, max_model_len: int
) -> tuple[Tensor, float]:
    """Angle per position of each pair of dimensions, and the factor on cosines and sines.

    Returns:
        [head_dim / 2] float32 on the CPU, and the attention scaling.

    Raises:
        ConfigError, UnsupportedError: as `RopeTable`.
    """
    kind = ROPE_KINDS.get(rope.kind)
    if kind is None:
        raise UnsupportedError(f"rope kind {rope.kind!r} is not implemented; known: {sorted(ROPE_KINDS)}")
    if head_dim < 4 or head_dim % 2:
        raise ConfigError(f"rope needs an even head_dim of at least 4, got {head_dim}")
    if not 1 < rope.theta < math.inf:
        raise ConfigError(f"rope theta must be finite and exceed 1, got {rope.theta}")
    # a field that is present but null is a field left out, as in Transformers
    given = {name: value for name, value in rope.parameters if value is not None}
    missing = sorted(kind.required - set(given))
    unknown = sorted(set(given) - kind.required - kind.optional)
    if missing or unknown:
        raise ConfigError(
            f"rope kind {rope.kind!r}: missing parameters {missing}, unknown parameters {unknown}; "
            f"it needs {sorted(kind.required)} and may have {sorted(kind.optional)}"
        )
    for name, value in given.items():
        _check_number(rope.kind, name, value)
    return kind.formula(
        _Inputs(
            theta=rope.theta,
            head_dim=head_dim,
            max_position_embeddings=max_position_embeddings,
            max_model_len=max_model_len,
            parameters=given,
        )
    )


def _check_number(kind: str, name: str, value: object) -> None:
    if name == "truncate":
        good = isinstance(value, bool)
    elif name in ("short_factor", "long_factor", "factors"):
        good = isinstance(value, tuple | list) and all(_is_positive(v) for v in value)
    elif name in ("mscale", "mscale_all_dim", "attention_factor"):
        good = _is_positive(value) or value == 0
    else:
        good = _is_positive(value)
    if not good:
        raise ConfigError(f"rope kind {kind!r}: {name} must be positive and finite, got {value!r}")


def _is_positive(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0
    )


def _per_frequency(name: str, values: Any, head_dim: int) -> Tensor:
    if len(values) != head_dim // 2:
        raise ConfigError(f"rope {name} must hold head_dim / 2 = {head_dim // 2} numbers, got {len(values)}")
    return torch.tensor(values, device="cpu", dtype=torch.float32)


def _refuse_past(kind: str, max_model_len: int, original: int) -> None:
    if max_model_len > original:
        raise UnsupportedError(
            f"rope kind {kind!r} with max_model_len {max_model_len} past the original {original} positions: "
            "there Transformers changes the frequencies in the middle of a sequence while cached keys keep "
            "the old ones, so its answer depends on how the sequence was cut into calls and there is no one "
            f"right result. Set max_model_len to at most {original}."
        )
