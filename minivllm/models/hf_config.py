"""Reads `config.json` (through Transformers, so with its defaults) into a `ModelConfig`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from minivllm.config import ModelConfig, RopeConfig
from minivllm.device import ran_out_of_memory
from minivllm.errors import ConfigError, UnsupportedError
from minivllm.models.decoder import DecoderModel
from minivllm.models.vlm import VisionLanguageModel
from minivllm.registry import Registry

__all__ = ["Models", "as_ids", "check_config", "family_of", "read_config", "read_json"]

#: Transformers class name → our class; see `minivllm.models.MODELS`.
Models: TypeAlias = Registry[type[DecoderModel] | type[VisionLanguageModel]]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; ConfigError if it is missing or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; a model directory needs it") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, a number too long
        if ran_out_of_memory(error):
            raise
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def family_of(values: Mapping[str, Any], models: Models, where: Path) -> str:
    """The one registered class named in `architectures`; UnsupportedError that lists the known ones."""
    named = values.get("architectures") or []
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise ConfigError(f"{where}: architectures must name one model class, got {named!r}")
    if named[0] not in models:
        raise UnsupportedError(
            f"{where}: architecture {named[0]!r} is not implemented; known: {', '.join(models)}"
        )
    architecture: str = named[0]
    return architecture


def read_config(directory: Path, models: Models) -> ModelConfig:
    """Read config.json and generation_config.json of a model directory.

    `dtype` is "" when config.json does not name one.

    Raises:
        ConfigError: missing, malformed or contradictory config.
        UnsupportedError: unknown architecture, quantised weights, layers of another kind, an activation
            or option that the family does not compute, partial rotary embedding.
    """
    where = directory / "config.json"
    if not where.exists() and (files := sorted(p.name for p in directory.glob("*.gguf"))):
        raise ConfigError(f"{directory} has no config.json but GGUF files {files}: give the file itself")
    raw = read_json(where)
    architecture = family_of(raw, models, where)
    family = models.get(architecture)
    if raw.get("model_type") != family.model_type:
        raise ConfigError(
            f"{where}: model_type {raw.get('model_type')!r} does not belong to {architecture}, "
            f"which is {family.model_type!r}"
        )
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise UnsupportedError(f"{where}: quantised weights ({method!r}) are not implemented")
    whole = _with_defaults(directory)
    decoder, text = _decoder_of(family, whole, where)
    if (problem := decoder.unsupported(text)) is not None:
        raise UnsupportedError(f"{where}: {problem} is not implemented for {decoder.__name__}")
    values = decoder.standard_values(text)
    local_rope = values.get("local_rope_parameters")
    generation = directory / "generation_config.json"
    more_eos = read_json(generation).get("eos_token_id") if generation.exists() else None
    config = ModelConfig(
        architecture=architecture,
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        intermediate_size=values["intermediate_size"],
        num_hidden_layers=values["num_hidden_layers"],
        num_attention_heads=values["num_attention_heads"],
        num_key_value_heads=values["num_key_value_heads"],
        head_dim=values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"],
        rms_norm_eps=values["rms_norm_eps"],
        rope=_rope(values["rope_parameters"], where, family, decoder) if values["rope_parameters"] else None,
        max_position_embeddings=values["max_position_embeddings"],
        # Transformers ties by the outer configuration where that has a say.
        tie_word_embeddings=bool(whole.get("tie_word_embeddings", values.get("tie_word_embeddings"))),
        hidden_act=values["hidden_act"],
        dtype=str(whole.get("dtype") or values.get("dtype") or "").removeprefix("torch."),
        bos_token_id=values.get("bos_token_id"),
        eos_token_ids=as_ids((values.get("eos_token_id"), more_eos)),
        windows=_windows(values, decoder, where),
        local_rope=_rope(local_rope, where, family, decoder) if local_rope else None,
        details=decoder.read_details(values),
        text_model_type=text["model_type"] if text is not whole else "",
        vision=family.read_vision(whole) if issubclass(family, VisionLanguageModel) else None,
        **decoder.config_flags(values),
    )
    check_config(config, where, decoder.activations)
    return config


def check_config(config: ModelConfig, where: Path, activations: tuple[str, ...]) -> None:
    """Raise ConfigError naming every impossible shape, UnsupportedError for another activation."""
    problems = [
        f"{name} must be a positive integer, got {getattr(config, name)!r}"
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        )
        if not isinstance(getattr(config, name), int) or getattr(config, name) < 1
    ]
    if not problems and config.num_attention_heads % config.num_key_value_heads:
        problems.append(
            f"num_attention_heads ({config.num_attention_heads}) must be a multiple of "
            f"num_key_value_heads ({config.num_key_value_heads})"
        )
    eps: object = config.rms_norm_eps
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        problems.append(f"the norm's epsilon must be a finite number of at least 0, got {eps!r}")
    if problems:
        raise ConfigError(f"{where}: " + "; ".join(problems))
    if config.hidden_act not in activations:
        raise UnsupportedError(
            f"{where}: hidden_act {config.hidden_act!r} is not implemented for {config.architecture}; "
            f"known: {', '.join(activations)}"
        )


def as_ids(values: Iterable[object]) -> tuple[int, ...]:
    """Unite ids, lists of ids and None into sorted distinct ids; ConfigError for anything else."""
    ids: set[int] = set()
    for value in values:
        for one in value if isinstance(value, list | tuple) else [] if value is None else [value]:
            if not isinstance(one, int) or isinstance(one, bool):
                raise ConfigError(f"eos_token_id must be a token id or a list of them, got {value!r}")
            ids.add(one)
    return tuple(sorted(ids))


def _with_defaults(directory: Path) -> dict[str, Any]:
    """config.json with the defaults of its Transformers class filled in."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        values: dict[str, Any] = config.to_dict()
    except Exception as error:  # whatever Transformers' own code trips over, the file is at fault
        if ran_out_of_memory(error):
            raise
        said = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{directory / 'config.json'} is not a valid configuration: {said}") from error
    return values


def _decoder_of(
    family: type[DecoderModel] | type[VisionLanguageModel], values: dict[str, Any], where: Path
) -> tuple[type[DecoderModel], dict[str, Any]]:
    """The decoder's class, and its part of the configuration."""
    if not issubclass(family, VisionLanguageModel):
        return family, values
    text: dict[str, Any] = values["text_config"]
    decoder = family.text_models.get(text["model_type"])
    if decoder is None:
        raise UnsupportedError(
            f"{where}: a {family.model_type} model over the decoder {text['model_type']!r} is not "
            f"implemented; known: {', '.join(sorted(family.text_models))}"
        )
    return decoder, text


def _windows(values: Mapping[str, Any], decoder: type[DecoderModel], where: Path) -> tuple[int | None, ...]:
    """The window of each layer; () if none has one."""
    types: Sequence[str] = values.get("layer_types") or ()
    window = values.get("sliding_window")
    known = {"full_attention", *(["sliding_attention"] if decoder.sliding_windows else [])}
    if other := sorted(set(types) - known):
        raise UnsupportedError(
            f"{where}: layer_types {other} (sliding_window {window}) are not implemented for "
            f"{decoder.__name__}; known: {', '.join(sorted(known))}"
        )
    if "sliding_attention" not in types:
        return ()
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ConfigError(f"{where}: sliding_window must be a positive integer, got {window!r}")
    if len(types) != values["num_hidden_layers"]:
        raise ConfigError(
            f"{where}: layer_types must name {values['num_hidden_layers']} layers, got {len(types)}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _rope(
    parameters: Mapping[str, Any],
    where: Path,
    family: type[DecoderModel] | type[VisionLanguageModel],
    decoder: type[DecoderModel],
) -> RopeConfig:
    """Split `rope_parameters` into kind, theta and the rest."""
    rest = dict(parameters)
    section: tuple[int, ...] = ()
    if issubclass(family, VisionLanguageModel) and family.mrope_section:
        section = tuple(rest.pop("mrope_section", None) or family.mrope_section)
        rest.pop("mrope_interleaved", None)  # Transformers goes by the family, not by this
    kind = rest.pop("rope_type")
    rest.pop("type", None)  # the older spelling of rope_type, kept beside it by Transformers
    theta = rest.pop("rope_theta")
    partial = rest.pop("partial_rotary_factor", None)
    if partial is None:
        partial = 1.0
    if partial != 1 and not decoder.partial_rotary:
        raise UnsupportedError(
            f"{where}: partial_rotary_factor {partial} is not implemented for {decoder.__name__}; only 1 is"
        )
    if isinstance(partial, bool) or not isinstance(partial, int | float) or not 0 < partial <= 1:
        raise ConfigError(f"{where}: partial_rotary_factor must be above 0 and at most 1, got {partial!r}")
    return RopeConfig(
        kind=kind,
        theta=theta,
        parameters=tuple(
            (name, tuple(value) if isinstance(value, list) else value) for name, value in sorted(rest.items())
        ),
        rotary_fraction=float(partial),
        mrope_section=section,
        mrope_interleaved=bool(section)
        and issubclass(family, VisionLanguageModel)
        and family.mrope_interleaved,
    )
