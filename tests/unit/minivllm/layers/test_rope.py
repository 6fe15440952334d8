"""Rope tables are Transformers' own float32 numbers, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from minivllm.config import RopeConfig
from minivllm.errors import ConfigError, InvariantError, UnsupportedError
from minivllm.layers.rope import ROPE_KINDS, RopeTable, rope_frequencies

LENGTH = 8192
SHORT = [1.0 + 0.05 * i for i in range(16)]
LONG = [2.0 + 0.5 * i for i in range(16)]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

#: id → rope_parameters without theta, for a model of 8192 positions.
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "linear-third": {"rope_type": "linear", "factor": 3},
    "llama3": {"rope_type": "llama3", "original_max_position_embeddings": 256, **LLAMA3},
    "llama3-32": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1,
        "high_freq_factor": 5.5,
        "original_max_position_embeddings": 1000,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
    "yarn-equal-mscales": {
        "rope_type": "yarn",
        "factor": 16.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 512,
    },
    "yarn-mscales": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 0.707,
        "mscale_all_dim": 1.2,
        "original_max_position_embeddings": 512,
    },
    "yarn-mscale-alone": {
        "rope_type": "yarn",
        "factor": 40.0,
        "mscale": 0.707,
        "original_max_position_embeddings": 512,
    },
    "yarn-attention-factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 0.9,
        "original_max_position_embeddings": 2048,
    },
    "yarn-untruncated": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 16,
        "beta_slow": 2.5,
        "truncate": False,
        "original_max_position_embeddings": 300,
    },
    "yarn-step": {
        "rope_type": "yarn",
        "factor": 4.0,
        "beta_fast": 4.0,
        "beta_slow": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 300,
    },
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic-rounding": {"rope_type": "dynamic", "factor": 1.1},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "longrope-attention-factor": {
        "rope_type": "longrope",
        "short_factor": SHORT,
        "long_factor": LONG,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 8192,
    },
}


def rope_config(parameters: dict[str, Any], theta: float) -> RopeConfig:
    rest = {k: tuple(v) if isinstance(v, list) else v for k, v in parameters.items() if k != "rope_type"}
    return RopeConfig(kind=parameters["rope_type"], theta=theta, parameters=tuple(sorted(rest.items())))


def hf_tables(
    parameters: dict[str, Any], theta: float, head_dim: int, positions: torch.Tensor, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    config = LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=limit,
        rope_parameters={"rope_theta": theta, **parameters},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    return cos[0], sin[0]


@pytest.mark.parametrize("theta", [100.0, 1000.0, 500_000])
@pytest.mark.parametrize("case", CASES)
def test_every_position_below_8192_has_the_bits_of_transformers(case: str, theta: float) -> None:
    positions = torch.arange(LENGTH)
    theirs = hf_tables(CASES[case], theta, 32, positions, LENGTH)
    table = RopeTable(
        rope_config(CASES[case], theta), head_dim=32, max_position_embeddings=LENGTH, max_model_len=LENGTH
    )
    ours = table.cos_sin(positions)
    for mine, reference in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        assert mine.shape == (LENGTH, 32)
        assert torch.equal(mine, reference)


@pytest.mark.parametrize("head_dim", [4, 24, 64, 80, 128, 256])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn", "dynamic"])
def test_every_head_size_has_the_bits_of_transformers(kind: str, head_dim: int) -> None:
    positions = torch.arange(1024)
    theirs = hf_tables(CASES[kind], 10_000.0, head_dim, positions, 1024)
    table = RopeTable(
        rope_config(CASES[kind], 10_000.0),
        head_dim=head_dim,
        max_position_embeddings=1024,
        max_model_len=1024,
    )
    assert all(torch.equal(a, b) for a, b in zip(table.cos_sin(positions), theirs, strict=True))


@settings(deadline=None, max_examples=30)
@given(rows=st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=40))
def test_a_row_does_not_depend_on_the_rows_beside_it(rows: list[int]) -> None:
    rope = rope_config(CASES["llama3"], 100.0)
    table = RopeTable(rope, head_dim=32, max_position_embeddings=LENGTH, max_model_len=LENGTH)
    together = table.cos_sin(torch.tensor(rows))
    for i, position in enumerate(rows):
        alone = table.cos_sin(torch.tensor([position]))
        assert torch.equal(together[0][i], alone[0][0])
        assert torch.equal(together[1][i], alone[1][0])


def test_angles_past_256_are_exact_enough_for_long_contexts() -> None:
    # angles computed in bfloat16 are wrong here: it cannot tell 4000 from 4001
    table = RopeTable(
        RopeConfig(theta=100.0), head_dim=32, max_position_embeddings=LENGTH, max_model_len=LENGTH
    )
    positions = torch.tensor([257, 4000, 4001, 8191])
    exact = positions[:, None].double() / 100.0 ** (torch.arange(0, 32, 2).double() / 32)
    cos, _ = table.cos_sin(positions)
    assert torch.allclose(cos[:, :16].double(), exact.cos(), atol=2e-3)
    assert not torch.equal(cos[1], cos[2])


def test_yarn_with_equal_mscales_scales_attention_by_one() -> None:
    _, scaling = rope_frequencies(
        rope_config(CASES["yarn-equal-mscales"], 100.0),
        head_dim=32,
        max_position_embeddings=LENGTH,
        max_model_len=LENGTH,
    )
    assert scaling == 1.0


def test_factors_divide_the_frequencies() -> None:
    plain, _ = frequencies(RopeConfig(theta=100.0))
    factors = tuple(1.0 + i for i in range(16))
    scaled, scaling = frequencies(RopeConfig(kind="factors", theta=100.0, parameters=(("factors", factors),)))
    assert torch.equal(scaled, plain / torch.tensor(factors))
    assert scaling == 1.0


def test_factors_can_say_what_llama3_says() -> None:
    plain, _ = frequencies(RopeConfig(theta=100.0))
    llama3, _ = frequencies(rope_config(CASES["llama3"], 100.0))
    said = RopeConfig(
        kind="factors", theta=100.0, parameters=(("factors", tuple((plain / llama3).tolist())),)
    )
    torch.testing.assert_close(frequencies(said)[0], llama3, rtol=1e-6, atol=0)


def frequencies(rope: RopeConfig, limit: int = LENGTH) -> tuple[torch.Tensor, float]:
    return rope_frequencies(rope, head_dim=32, max_position_embeddings=LENGTH, max_model_len=limit)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_kinds_that_depend_on_call_history_are_refused_past_the_original_length(kind: str) -> None:
    frequencies(rope_config(CASES[kind], 100.0), LENGTH)
    with pytest.raises(UnsupportedError, match=r"8193 past the original 8192.*how the sequence was cut"):
        frequencies(rope_config(CASES[kind], 100.0), LENGTH + 1)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_transformers_does_depend_on_call_history_past_the_original_length(kind: str) -> None:
    # the reason for the refusal above; when this fails, the refusal can go
    parameters = {**CASES[kind]}
    if kind == "longrope":
        parameters["original_max_position_embeddings"] = 64
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=64,
        rope_parameters={"rope_theta": 100.0, **parameters},
    )
    positions = torch.arange(65)
    whole = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])[0][0]
    module = LlamaRotaryEmbedding(config)
    parts = [module(torch.zeros(1), part[None])[0][0] for part in positions.split(64)]
    assert not torch.equal(whole[:64], parts[0])


def test_an_unknown_kind_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"'su' is not implemented; known: .*'yarn'"):
        frequencies(RopeConfig(kind="su"))


@pytest.mark.parametrize("kind", sorted(k for k, v in ROPE_KINDS.items() if v.required))
def test_missing_parameters_are_named(kind: str) -> None:
    with pytest.raises(ConfigError, match=sorted(ROPE_KINDS[kind].required)[0]):
        frequencies(RopeConfig(kind=kind))


@pytest.mark.parametrize("kind", sorted(ROPE_KINDS))
def test_unknown_parameters_are_named(kind: str) -> None:
    given = dict.fromkeys(ROPE_KINDS[kind].required, 2)
    with pytest.raises(ConfigError, match=r"unknown parameters \['wavelength'\]"):
        frequencies(RopeConfig(kind=kind, parameters=(*given.items(), ("wavelength", 3))))


def test_a_null_parameter_counts_as_absent() -> None:
    given = rope_config({**CASES["yarn"], "mscale": None, "beta_fast": None}, 100.0)
    assert torch.equal(frequencies(given)[0], frequencies(rope_config(CASES["yarn"], 100.0))[0])
    with pytest.raises(ConfigError, match=r"missing parameters \['factor'\]"):
        frequencies(rope_config({"rope_type": "linear", "factor": None}, 100.0))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("linear", "factor", 0),
        ("linear", "factor", -2.0),
        ("linear", "factor", float("nan")),
        ("linear", "factor", "8"),
        ("linear", "factor", True),
        ("yarn", "truncate", 1),
        ("yarn", "attention_factor", -1.0),
        ("yarn", "beta_fast", float("inf")),
        ("longrope", "short_factor", [1.0] * 15 + [0.0]),
        ("longrope", "short_factor", 3.0),
    ],
)
def test_impossible_parameters_are_refused(kind: str, name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        frequencies(rope_config({**CASES[kind], name: value}, 100.0))


def test_longrope_needs_one_factor_per_frequency() -> None:
    with pytest.raises(ConfigError, match="short_factor must hold head_dim / 2 = 16 numbers, got 15"):
        frequencies(rope_config({**CASES["longrope"], "short_factor": [1.0] * 15}, 100.0))


def test_llama3_needs_an_interval_of_wavelengths() -> None:
    with pytest.raises(ConfigError, match="high_freq_factor must exceed"):
        frequencies(rope_config({**CASES["llama3"], "high_freq_factor": 1.0}, 100.0))


@pytest.mark.parametrize("head_dim", [0, 2, 7, 33])
def test_odd_and_tiny_heads_are_refused(head_dim: int) -> None:
    with pytest.raises(ConfigError, match=f"got {head_dim}"):
        RopeTable(RopeConfig(), head_dim=head_dim, max_position_embeddings=8, max_model_len=8)


@pytest.mark.parametrize("theta", [0.0, 1.0, -5.0, float("nan"), float("inf")])
def test_a_base_that_is_no_base_is_refused(theta: float) -> None:
    with pytest.raises(ConfigError, match="theta"):
        frequencies(RopeConfig(theta=theta))


def test_a_table_needs_at_least_one_position() -> None:
    with pytest.raises(ConfigError, match="max_model_len must be at least 1"):
        RopeTable(RopeConfig(), head_dim=32, max_position_embeddings=8, max_model_len=0)


def test_positions_past_the_table_fail_loudly() -> None:
    table = RopeTable(RopeConfig(), head_dim=32, max_position_embeddings=8, max_model_len=8)
    with pytest.raises(IndexError):
        table.cos_sin(torch.tensor([8]))


def test_on_the_meta_device_a_table_has_shapes_only() -> None:
    table = RopeTable(
        RopeConfig(), head_dim=32, max_position_embeddings=8, max_model_len=8, device=torch.device("meta")
    )
    cos, sin = table.cos_sin(torch.zeros(3, dtype=torch.int64, device="meta"))
    assert cos.shape == sin.shape == (3, 32)
    assert cos.is_meta


# --- multimodal rope -----------------------------------------------------------------------------

#: Sections in order, or taking turns: section, config and rotary embedding of Transformers.
MULTIMODAL: dict[bool, tuple[tuple[int, ...], Any, Any]] = {
    False: ((4, 6, 6), Qwen2VLTextConfig, Qwen2VLRotaryEmbedding),
    True: ((6, 5, 5), Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding),
}


def multimodal(section: tuple[int, ...], interleaved: bool, max_model_len: int = 512) -> RopeTable:
    rope = RopeConfig(theta=100.0, mrope_section=section, mrope_interleaved=interleaved)
    return RopeTable(rope, head_dim=32, max_position_embeddings=8192, max_model_len=max_model_len)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("max_model_len", [512, 9])
def test_multimodal_tables_have_the_bits_of_transformers(interleaved: bool, max_model_len: int) -> None:
    """With a short table too: a slow video has positions beyond max_model_len."""
    section, config_class, rotary_class = MULTIMODAL[interleaved]
    config = config_class(
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0, "mrope_section": list(section)},
    )
    positions = torch.randint(0, 500, (3, 77), generator=torch.Generator().manual_seed(0))
    theirs = rotary_class(config)(torch.zeros(1), positions[:, None])
    ours = multimodal(section, interleaved, max_model_len).cos_sin(positions)
    assert all(torch.equal(a, b[0]) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("interleaved", [False, True])
def test_equal_axes_are_ordinary_rope(interleaved: bool) -> None:
    table = multimodal(MULTIMODAL[interleaved][0], interleaved)
    positions = torch.arange(40)
    plain = table.cos_sin(positions)
    assert all(torch.equal(a, b) for a, b in zip(table.cos_sin(positions.expand(3, -1)), plain, strict=True))
    ordinary = RopeTable(
        RopeConfig(theta=100.0), head_dim=32, max_position_embeddings=8192, max_model_len=512
    )
    assert all(torch.equal(a, b) for a, b in zip(ordinary.cos_sin(positions), plain, strict=True))


@pytest.mark.parametrize("section", [(4, 6, 5), (4, 12), (16, 0, 1), (18, -1, -1), (4, 4, 4, 4)])
def test_sections_must_divide_the_frequencies_among_three_axes(section: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="16 frequencies among 3 axes"):
        multimodal(section, interleaved=False)


def test_three_axes_need_multimodal_rope() -> None:
    table = RopeTable(RopeConfig(), head_dim=32, max_position_embeddings=64, max_model_len=64)
    with pytest.raises(InvariantError, match=r"shape \[3, 5\] need multimodal rope"):
        table.cos_sin(torch.zeros(3, 5, dtype=torch.int64))


def test_no_rows_have_no_angles() -> None:
    cos, sin = multimodal((4, 6, 6), interleaved=False).cos_sin(torch.zeros(3, 0, dtype=torch.int64))
    assert cos.shape == sin.shape == (0, 32)
