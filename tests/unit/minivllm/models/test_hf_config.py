"""What config.json may say, and what is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minivllm.config import RopeConfig
from minivllm.errors import ConfigError, UnsupportedError
from minivllm.models import MODELS, load_model_config
from minivllm.models.hf_config import as_ids, read_json

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "dtype": "bfloat16",
}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Any]:
    """Read CONFIG with changes (None removes a key); there are no weights beside it."""

    def reading(changes: dict[str, Any] | None = None, generation: dict[str, Any] | None = None) -> Any:
        directory = tmp_path / "model"
        directory.mkdir(exist_ok=True)
        values = {**CONFIG, **(changes or {})}
        (directory / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
        if generation is not None:
            (directory / "generation_config.json").write_text(json.dumps(generation))
        return load_model_config(directory)

    return reading


def test_fields_come_from_the_file_and_defaults_from_transformers(read: Callable[..., Any]) -> None:
    config = read()
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (32, 64, 2)
    assert config.head_dim == 16
    assert config.rms_norm_eps == 1e-6
    assert config.rope == RopeConfig(kind="default", theta=10_000.0)
    assert config.dtype == "bfloat16"
    assert not config.tie_word_embeddings
    assert config.bos_token_id == 1


def test_the_older_spelling_of_rope_and_dtype_is_understood(read: Callable[..., Any]) -> None:
    scaling = {"type": "linear", "factor": 4.0}
    config = read({"rope_theta": 5e5, "rope_scaling": scaling, "dtype": None, "torch_dtype": "float16"})
    assert config.rope == RopeConfig(kind="linear", theta=5e5, parameters=(("factor", 4.0),))
    assert config.dtype == "float16"


def test_lists_in_rope_parameters_become_tuples(read: Callable[..., Any]) -> None:
    factors = [1.0] * 8
    rope = {
        "rope_type": "longrope",
        "rope_theta": 100.0,
        "short_factor": factors,
        "long_factor": factors,
        "factor": 2.0,
        "original_max_position_embeddings": 256,
    }
    parameters = dict(read({"rope_parameters": rope}).rope.parameters)
    assert parameters["short_factor"] == (1.0,) * 8
    assert parameters["original_max_position_embeddings"] == 256


def test_a_file_without_dtype_takes_the_one_of_its_weights(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Llama").path
    values = read_json(path / "config.json")
    del values["dtype"]
    (path / "config.json").write_text(json.dumps(values))
    assert load_model_config(path).dtype == "float32"


@pytest.mark.parametrize(
    ("config_eos", "generation", "expected"),
    [
        (7, None, (7,)),
        ([9, 7], None, (7, 9)),
        (7, {"eos_token_id": [7, 3]}, (3, 7)),
        (7, {"eos_token_id": 5}, (5, 7)),
        (7, {"eos_token_id": None}, (7,)),
        (7, {}, (7,)),
    ],
)
def test_eos_ids_unite_both_files(
    read: Callable[..., Any],
    config_eos: int | list[int],
    generation: dict[str, Any] | None,
    expected: tuple[int, ...],
) -> None:
    assert read({"eos_token_id": config_eos}, generation).eos_token_ids == expected


def test_no_eos_at_all_is_an_empty_tuple(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Qwen2", eos_token_id=None).path
    (path / "generation_config.json").unlink()
    assert load_model_config(path).eos_token_ids == ()


def test_an_unknown_architecture_is_refused_with_the_list_of_known_ones(read: Callable[..., Any]) -> None:
    with pytest.raises(
        UnsupportedError, match=r"'MambaForCausalLM' is not implemented; known: .*LlamaForCausalLM, .*Qwen3"
    ):
        read({"architectures": ["MambaForCausalLM"], "model_type": "mamba"})


@pytest.mark.parametrize("named", [None, [], "LlamaForCausalLM", ["LlamaForCausalLM", "Other"], [3]])
def test_architectures_must_name_one_class(read: Callable[..., Any], named: object) -> None:
    with pytest.raises(ConfigError, match="architectures must name one model class"):
        read({"architectures": named})


def test_a_model_type_of_another_family_is_refused(read: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="model_type 'qwen2' does not belong to LlamaForCausalLM"):
        read({"model_type": "qwen2"})


def test_quantised_weights_are_refused(read: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"quantised weights \('gptq'\)"):
        read({"quantization_config": {"quant_method": "gptq", "bits": 4}})


@pytest.mark.parametrize("activation", ["gelu", "relu", "gelu_pytorch_tanh"])
def test_other_activations_than_silu_are_refused(read: Callable[..., Any], activation: str) -> None:
    with pytest.raises(UnsupportedError, match=f"hidden_act '{activation}' is not implemented .*known: silu"):
        read({"hidden_act": activation})


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_each_layer_has_its_window(family: str, make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint(family, use_sliding_window=True, sliding_window=16, max_window_layers=1).path
    assert load_model_config(path).windows == (None, 16, 16)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"layer_types": ["full_attention", "chunked_attention"]},
            UnsupportedError,
            (
                r"layer_types \['chunked_attention'\] \(sliding_window 16\) are not implemented for Qwen2.*; "
                "known: full_attention, sliding_attention"
            ),
        ),
        ({"sliding_window": 0}, ConfigError, "sliding_window must be a positive integer, got 0"),
        ({"layer_types": ["sliding_attention"]}, ConfigError, "layer_types"),
    ],
)
def test_windows_that_make_no_sense_are_refused(
    read: Callable[..., Any], changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": True}
    with pytest.raises(error, match=message):
        read({**qwen, "sliding_window": 16, "max_window_layers": 1, **changes})


def test_windows_of_a_family_without_them_are_refused(read: Callable[..., Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"layer_types \['sliding_attention'\] .* LlamaForCausalLM"):
        read({"layer_types": ["sliding_attention"] * 2, "sliding_window": 16})


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_a_sliding_window_that_no_layer_uses_is_accepted(
    family: str, make_checkpoint: Callable[..., Any]
) -> None:
    unused = make_checkpoint(family, use_sliding_window=True, sliding_window=16, max_window_layers=3).path
    switched_off = make_checkpoint(
        family, use_sliding_window=False, sliding_window=16, max_window_layers=1
    ).path
    assert load_model_config(unused).windows == load_model_config(switched_off).windows == ()


def test_partial_rotary_embedding_is_refused(read: Callable[..., Any]) -> None:
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    with pytest.raises(UnsupportedError, match=r"partial_rotary_factor 0\.5"):
        read({"rope_parameters": rope})
    assert read({"rope_parameters": {**rope, "partial_rotary_factor": 1.0}}).rope.parameters == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"vocab_size": -1}, "vocab_size must be a positive integer, got -1"),
        (
            {"num_key_value_heads": 3},
            r"num_attention_heads \(4\) must be a multiple of num_key_value_heads \(3\)",
        ),
        ({"hidden_size": 66}, "not a valid configuration"),
        ({"hidden_size": "wide"}, "not a valid configuration"),
        ({"rope_parameters": {"rope_type": "linear"}}, "not a valid configuration"),
        ({"num_attention_heads": 0}, "not a valid configuration: ZeroDivisionError"),
        ({"rms_norm_eps": float("nan")}, "epsilon must be a finite number of at least 0, got nan"),
        ({"rms_norm_eps": -1.0}, r"epsilon must be a finite number of at least 0, got -1\.0"),
    ],
)
def test_impossible_values_are_refused_by_name(
    read: Callable[..., Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read(changes)


def test_several_problems_are_told_at_once(read: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"vocab_size.*intermediate_size"):
        read({"vocab_size": 0, "intermediate_size": 0})


def test_a_missing_config_is_told_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        load_model_config(tmp_path)


def test_a_directory_of_gguf_files_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ConfigError, match=r"GGUF files \['a.gguf'\]: give the file itself"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "\xff", "[" * 100_000, "1" * 5000], ids=lambda text: text[:2])
def test_a_config_that_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_model_config(tmp_path)


def test_json_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match="must hold a JSON object, got list"):
        read_json(tmp_path / "config.json")


def test_as_ids_unites_ids_lists_and_none() -> None:
    assert as_ids([3, None, [5, 3], [], 1]) == (1, 3, 5)
    assert as_ids([]) == ()


@pytest.mark.parametrize("wrong", ["x", [None], [True], {"a": 1}, 2.0])
def test_an_eos_that_is_no_token_id_is_refused(read: Callable[..., Any], wrong: object) -> None:
    with pytest.raises(ConfigError, match="eos_token_id must be a token id or a list of them"):
        read(generation={"eos_token_id": wrong})


def test_the_registry_knows_the_three_families() -> None:
    assert set(MODELS) >= {"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
    assert all(MODELS.get(name).__name__ == name for name in MODELS)


def test_importing_models_does_not_import_transformers() -> None:
    code = "import sys, minivllm.models, minivllm.tokenizer; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
