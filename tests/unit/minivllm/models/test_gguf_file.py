"""A GGUF file gives the configuration and the tensors that went into it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from minivllm.config import RopeConfig
from minivllm.errors import ConfigError, MiniVLLMError, UnsupportedError, WeightError
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import MODELS, LanguageModel, load_model, load_model_config
from minivllm.models.gguf_file import GGUFSource

#: Quantisation blocks are 32 wide.
WIDE = {"hidden_size": 64, "intermediate_size": 96}


def load(path: Path) -> LanguageModel:
    return load_model(path, dtype=torch.float32, device="cpu", ops=TorchOps())


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("Qwen2", {}),
        ("Qwen2", {"tie_word_embeddings": True}),
        ("Qwen3", {}),
    ],
)
def test_a_model_written_in_float32_comes_back_bit_for_bit(
    family: str,
    overrides: dict[str, Any],
    make_checkpoint: Callable[..., Any],
    write_gguf: Callable[..., Path],
    run_model: Callable[..., Any],
    token_ids: torch.Tensor,
) -> None:
    hf = make_checkpoint(family, **overrides).hf
    model = load(write_gguf(hf))
    theirs = dict(hf.named_parameters())
    ours = dict(model.named_parameters())
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    with torch.no_grad():
        expected = hf(token_ids[None]).logits[0]
    # the eps comes back rounded to float32, as which it is used
    assert torch.equal(run_model(model, token_ids).logits, expected)


def test_a_gemma3_file_has_its_norms_less_one_and_the_published_pattern_of_windows(
    make_checkpoint: Callable[..., Any],
    write_gguf: Callable[..., Path],
    run_model: Callable[..., Any],
    token_ids: torch.Tensor,
) -> None:
    """Transformers adds and takes off the 1 in float32, too: the tensors are its own, bit for bit."""
    types = ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    ropes = {
        "full_attention": {"rope_type": "default", "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    }
    hf = make_checkpoint(
        "Gemma3",
        num_hidden_layers=7,
        layer_types=types,
        rope_parameters=ropes,
        query_pre_attn_scalar=32,
    ).hf
    path = write_gguf(hf)
    model = load(path)
    assert model.config.windows == (7, 7, 7, 7, 7, None, 7)
    assert model.config.local_rope == RopeConfig(theta=10_000.0)
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=hf)["tensors"]
    ours = dict(model.named_parameters())
    assert set(ours) == set(tensors)
    assert all(torch.equal(ours[name], tensors[name]) for name in tensors)
    hf.load_state_dict(tensors, strict=False)
    with torch.no_grad():
        expected = hf(token_ids[None]).logits[0]
    assert torch.equal(run_model(model, token_ids).logits, expected)


@pytest.mark.parametrize(
    ("metadata", "layers", "scalar", "cap"),
    [({}, 2, 32, None), ({"gemma3.final_logit_softcapping": 30.0}, 2, 32, 30.0), ({}, 62, 48 / 4, None)],
)
def test_what_a_gemma3_file_does_not_tell_is_as_published(
    make_checkpoint: Callable[..., Any],
    write_gguf: Callable[..., Path],
    metadata: dict[str, Any],
    layers: int,
    scalar: float,
    cap: float | None,
) -> None:
    hf = make_checkpoint("Gemma3", num_hidden_layers=2, layer_types=["full_attention"] * 2).hf
    config = GGUFSource(write_gguf(hf, metadata={"gemma3.block_count": layers, **metadata}), MODELS).config
    assert config.details.query_pre_attn_scalar == scalar
    assert config.details.final_logit_softcapping == cap
    with pytest.raises(ConfigError, match=r"gemma3\.attention\.sliding_window must be a positive integer"):
        GGUFSource(write_gguf(hf, metadata={"gemma3.attention.sliding_window": None}), MODELS)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_metadata_says_what_config_json_says(
    family: str, make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    checkpoint = make_checkpoint(family)
    from_json = load_model_config(checkpoint.path)
    from_gguf = load_model_config(write_gguf(checkpoint.hf))
    assert from_gguf.rms_norm_eps == pytest.approx(from_json.rms_norm_eps)
    different = {"rms_norm_eps"}
    for name in set(vars(from_json)) - different:
        assert getattr(from_gguf, name) == getattr(from_json, name), name


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_dequantised_tensors_are_those_of_transformers(
    family: str, kind: str, make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    hf = make_checkpoint(family, **WIDE).hf
    path = write_gguf(hf, kind=GGMLQuantizationType[kind])
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=hf)["tensors"]
    ours = dict(load(path).named_parameters())
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not torch.equal(ours["lm_head.weight"], dict(hf.named_parameters())["lm_head.weight"])


def test_without_output_weight_the_head_is_tied(
    make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(make_checkpoint("Llama").hf, drop={"output.weight"})
    model = load(path)
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_missing_tensor_is_named_as_transformers_names_it(
    make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(make_checkpoint("Llama").hf, drop={"blk.1.ffn_up.weight"})
    with pytest.raises(WeightError, match=r"missing 1 tensors \(model\.layers\.1\.mlp\.up_proj\.weight\)"):
        load(path)


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "cls.weight", "blk.0.attn_q.scale"])
def test_an_unknown_tensor_is_named(
    name: str, make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(make_checkpoint("Llama").hf, extra={name: np.ones(3, np.float32)})
    with pytest.raises(WeightError, match="unknown to the model 1 tensors"):
        load(path)


def test_stored_rotary_tensors_are_ignored(
    make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    load(write_gguf(make_checkpoint("Llama").hf, extra={"blk.0.attn_rot_embd": np.ones(3, np.float32)}))


def test_a_wrong_shape_is_told_with_both_shapes(
    make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(make_checkpoint("Llama").hf, metadata={"llama.feed_forward_length": 81})
    with pytest.raises(
        WeightError, match=r"up_proj\.weight has shape \[80, 48\], the model needs \[81, 48\]"
    ):
        load(path)


def test_a_vocabulary_size_that_is_not_told_is_that_of_the_embeddings(
    make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    hf = make_checkpoint("Llama").hf
    assert load_model_config(write_gguf(hf, metadata={"llama.vocab_size": None})).vocab_size == 101
    path = write_gguf(hf, metadata={"llama.vocab_size": None}, drop={"token_embd.weight"})
    with pytest.raises(WeightError, match=r"missing token_embd\.weight"):
        load_model_config(path)


@pytest.mark.parametrize(
    ("changes", "head_dim"),
    [
        ({}, 32),
        ({"llama.attention.key_length": None, "llama.attention.value_length": None}, 32),
        (
            {
                "llama.attention.key_length": None,
                "llama.attention.value_length": None,
                "llama.rope.dimension_count": None,
            },
            12,
        ),
    ],
)
def test_the_head_size_comes_from_the_first_place_that_tells_it(
    changes: dict[str, Any],
    head_dim: int,
    make_checkpoint: Callable[..., Any],
    write_gguf: Callable[..., Path],
) -> None:
    assert load_model_config(write_gguf(make_checkpoint("Llama").hf, metadata=changes)).head_dim == head_dim


def test_the_end_of_turn_ends_a_generation_too(
    make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    metadata = {"tokenizer.ggml.eot_token_id": 9, "tokenizer.ggml.eom_token_id": 4}
    assert load_model_config(write_gguf(make_checkpoint("Llama").hf, metadata=metadata)).eos_token_ids == (
        2,
        4,
        9,
    )


def test_rope_freqs_become_frequency_divisors(
    make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    factors = np.linspace(1, 8, 16, dtype=np.float32)
    model = load(write_gguf(make_checkpoint("Llama").hf, extra={"rope_freqs.weight": factors}))
    expected = RopeConfig(kind="factors", theta=100.0, parameters=(("factors", tuple(factors.tolist())),))
    assert model.config.rope == expected
    # dimension 15 turns 8 times slower
    cos, _ = model.rope.cos_sin(torch.tensor([8]))
    assert cos[0, 15].item() == pytest.approx(np.cos(100.0 ** (-30 / 32)), abs=1e-6)


def test_linear_and_yarn_scaling_are_read(
    make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    hf = make_checkpoint("Llama").hf
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert load_model_config(write_gguf(hf, metadata=linear)).rope == RopeConfig(
        kind="linear", theta=100.0, parameters=(("factor", 4.0),)
    )
    yarn = {
        "llama.rope.scaling.type": "yarn",
        "llama.rope.scaling.factor": 4.0,
        "llama.rope.scaling.original_context_length": 64,
    }
    assert load_model_config(write_gguf(hf, metadata=yarn)).rope == RopeConfig(
        kind="yarn", theta=100.0, parameters=(("factor", 4.0), ("original_max_position_embeddings", 64))
    )


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.rope.scaling.type": "longrope"}, r"rope\.scaling\.type 'longrope'"),
        ({"llama.rope.scaling.attn_factor": 2.0}, r"attn_factor"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.rope.dimension_count": 16}, r"partial rotary embedding \(16 of 32 dimensions\)"),
        ({"llama.attention.value_length": 16}, "heads of V"),
        ({"llama.attention.sliding_window": 64}, r"sliding_window 64"),
        ({"llama.attention.head_count": [4, 4, 2]}, r"attention\.head_count differs by layer"),
        ({"general.architecture": "mamba"}, "'mamba' is not implemented; known: gemma3, llama, qwen2"),
        ({"split.count": 3}, "part of a split file of 3"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(
    metadata: dict[str, Any],
    message: str,
    make_checkpoint: Callable[..., Any],
    write_gguf: Callable[..., Path],
) -> None:
    hf = make_checkpoint("Llama").hf
    if "general.architecture" in metadata:
        path = write_gguf(hf)
        # the writer sets the architecture itself
        path.write_bytes(path.read_bytes().replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0mamba", 1))
    else:
        path = write_gguf(hf, metadata=metadata)
    with pytest.raises(UnsupportedError, match=message):
        load_model_config(path)


def test_rope_freqs_beside_a_rope_scaling_are_refused(
    make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(
        make_checkpoint("Llama").hf,
        metadata={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        extra={"rope_freqs.weight": np.ones(16, np.float32)},
    )
    with pytest.raises(UnsupportedError, match=r"both rope_freqs\.weight and"):
        load_model_config(path)


@pytest.mark.parametrize("key", ["block_count", "embedding_length", "attention.head_count", "context_length"])
def test_missing_metadata_is_named(
    key: str, make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(make_checkpoint("Llama").hf, metadata={f"llama.{key}": None})
    with pytest.raises(ConfigError, match=f"metadata lacks llama.{key}"):
        load_model_config(path)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("attention.head_count", 0, "num_attention_heads must be a positive integer, got 0"),
        ("attention.head_count", "four", "attention.head_count must be int, got 'four'"),
        ("block_count", 2.5, "block_count must be int, got 2.5"),
        ("rope.freq_base", "many", "rope.freq_base must be float, got 'many'"),
    ],
)
def test_metadata_of_the_wrong_kind_is_named(
    key: str,
    value: object,
    message: str,
    make_checkpoint: Callable[..., Any],
    write_gguf: Callable[..., Path],
) -> None:
    path = write_gguf(make_checkpoint("Llama").hf, metadata={f"llama.{key}": value})
    with pytest.raises(ConfigError, match=message):
        load_model_config(path)


def test_impossible_metadata_is_refused(
    make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(make_checkpoint("Llama").hf, metadata={"llama.attention.head_count_kv": 3})
    with pytest.raises(ConfigError, match=r"multiple of num_key_value_heads \(3\)"):
        load_model_config(path)


@pytest.mark.parametrize("data", [b"", b"GG", b"PK\3\4 and so on", b"FUGG"])
def test_a_file_that_is_no_gguf_is_refused(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(data)
    with pytest.raises(WeightError, match="is not a GGUF file: it starts with"):
        load_model_config(path)


def test_an_unknown_version_is_refused(
    make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(make_checkpoint("Llama").hf)
    data = bytearray(path.read_bytes())
    data[4] = 99
    path.write_bytes(data)
    with pytest.raises(WeightError, match="version 99"):
        load_model_config(path)


def test_a_file_cut_anywhere_is_refused(
    make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(make_checkpoint("Llama").hf)
    data = path.read_bytes()
    source = GGUFSource(path, MODELS)
    header = source._reader.data_offset
    last = max(t.data_offset + t.n_bytes for t in source._reader.tensors)
    cuts = [*range(4, header, 101), *range(header, last, (last - header) // 20), last - 1]
    for cut in cuts:
        path.write_bytes(data[:cut])
        with pytest.raises(WeightError, match="damaged or cut short"):
            GGUFSource(path, MODELS)


def test_text_that_is_no_utf8_is_refused(
    make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(make_checkpoint("Llama").hf)
    path.write_bytes(path.read_bytes().replace(b"\5\0\0\0\0\0\0\0llama", b"\5\0\0\0\0\0\0\0\x80lama", 1))
    with pytest.raises(WeightError, match=r"text of general\.architecture is not UTF-8"):
        load_model_config(path)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_header_loads_or_is_refused_but_never_crashes(
    data: st.DataObject, make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path], tmp_path: Path
) -> None:
    original = tmp_path / "original.gguf"
    if not original.exists():
        write_gguf(make_checkpoint("Llama", num_hidden_layers=1).hf, name="original.gguf")
    content = bytearray(original.read_bytes())
    header = GGUFSource(original, MODELS)._reader.data_offset
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(4, header - 1))] = data.draw(st.integers(0, 255))
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(content)
    try:
        config = load_model_config(damaged)
    except MiniVLLMError:
        return
    assert config.architecture in MODELS


def test_a_type_the_gguf_package_cannot_dequantise_is_named(
    make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf(make_checkpoint("Llama").hf)
    source = GGUFSource(path, MODELS)
    name = "model.norm.weight"
    source._tensors["output_norm.weight"] = source._tensors["output_norm.weight"]._replace(
        tensor_type=GGMLQuantizationType.I8
    )
    with pytest.raises(UnsupportedError, match=r"output_norm\.weight is stored as I8"):
        source.read(name)


def test_long_arrays_are_stepped_over_without_losing_the_place(
    make_checkpoint: Callable[..., Any], write_gguf: Callable[..., Path]
) -> None:
    metadata = {"a.words": ["", "ä", "x" * 300], "b.numbers": [1, 2, 3], "c.floats": [0.5], "d.after": 77}
    source = GGUFSource(write_gguf(make_checkpoint("Llama").hf, metadata=metadata), MODELS)
    assert source._metadata.count("d.after") == 77
    with pytest.raises(UnsupportedError, match=r"a\.words differs by layer"):
        source._metadata.text("a.words")
