"""A .gguf file as a model: configuration from its metadata, tensors dequantised under our names.

The `gguf` package reads and dequantises. Source of the format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Names and the row order of q and k are
those of llama.cpp's converter (https://github.com/ggml-org/llama.cpp, convert_hf_to_gguf.py).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from gguf import GGUFReader, GGUFValueType, dequantize
from torch import Tensor

from minivllm.config import ModelConfig, RopeConfig
from minivllm.errors import ConfigError, UnsupportedError, WeightError
from minivllm.models.decoder import DecoderModel
from minivllm.models.hf_config import Models, as_ids, check_config

__all__ = ["GGUFSource"]

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

#: Frequency divisors that stand for a rope scaling; part of the configuration, not a weight.
_ROPE_FREQS = "rope_freqs.weight"
_IGNORABLE = re.compile(r"blk\.\d+\.attn_rot_embd")


class GGUFSource:
    """An open .gguf file, memory-mapped.

    Args:
        path: the file.
        models: where to look up the architecture.

    Raises:
        WeightError: not a GGUF file, or cut short.
        UnsupportedError: one part of a split file, an architecture or option not implemented.
        ConfigError: metadata missing or impossible.
    """

    def __init__(self, path: Path, models: Models) -> None:
        self.where = str(path)
        self._reader = _open(path)
        self._metadata = _Metadata(path, self._reader)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._arch, self._architecture, self._family = self._recognise(models)
        self._gguf_names = {
            _hf_name(name, self._family): name
            for name in self._tensors
            if name != _ROPE_FREQS and not _IGNORABLE.fullmatch(name)
        }
        self.config = self._configure()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor by Transformers name; GGUF stores dimensions innermost first."""
        return {
            name: tuple(int(n) for n in reversed(self._tensors[gguf_name].shape))
            for name, gguf_name in self._gguf_names.items()
        }

    def read(self, name: str) -> Tensor:
        """One tensor, dequantised to float32."""
        gguf_name = self._gguf_names[name]
        values = self._dequantised(gguf_name)
        if self._family.gguf_permutes_qk and (m := re.search(r"\.attn_([qk])\.", gguf_name)):
            heads = self.config.num_attention_heads if m[1] == "q" else self.config.num_key_value_heads
            values = _unpermute(values, heads)
        if self._family.gguf_norms_are_plus_one and name.endswith("norm.weight"):
            values = values - np.float32(1)
        return torch.from_numpy(np.ascontiguousarray(values))

    def _dequantised(self, gguf_name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        tensor = self._tensors[gguf_name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedError(
                f"{self.where}: {gguf_name} is stored as {tensor.tensor_type.name}, which the gguf package "
                f"cannot dequantise: {error}"
            ) from error
        # unquantised data comes back as a view of the read-only file
        return np.array(values, dtype=np.float32, copy=not values.flags.writeable or None)

    def _recognise(self, models: Models) -> tuple[str, str, type[DecoderModel]]:
        """The file's architecture, the name of our class for it, and the class."""
        meta = self._metadata
        if meta.count("split.count", 1) > 1:
            raise UnsupportedError(
                f"{self.where} is part of a split file of {meta.count('split.count')}; merge the parts first "
                "(llama-gguf-split --merge)"
            )
        arch = meta.text("general.architecture")
        found = {name: models.get(name) for name in models}
        decoders = {name: family for name, family in found.items() if issubclass(family, DecoderModel)}
        families = {family.gguf_architecture: name for name, family in decoders.items()}
        if arch not in families:
            raise UnsupportedError(
                f"{self.where}: GGUF architecture {arch!r} is not implemented; "
                f"known: {', '.join(sorted(filter(None, families)))}"
            )
        return arch, families[arch], decoders[families[arch]]

    def _configure(self) -> ModelConfig:
        meta, arch, family = self._metadata, self._arch, self._family
        heads = meta.count(f"{arch}.attention.head_count")
        hidden = meta.count(f"{arch}.embedding_length")
        rotary = meta.count(f"{arch}.rope.dimension_count", hidden // max(heads, 1))
        head_dim = meta.count(f"{arch}.attention.key_length", rotary)
        if f"{arch}.rope.dimension_count" not in meta:
            rotary = head_dim
        self._refuse_unsupported(arch, head_dim, rotary)
        flags: dict[str, Any] = family.config_flags(
            {"attention_bias": self._has("q_proj.bias"), "mlp_bias": self._has("gate_proj.bias")}
        )
        special = "tokenizer.ggml.{}_token_id"
        config = ModelConfig(
            architecture=self._architecture,
            vocab_size=meta.count(f"{arch}.vocab_size", self._embedding_rows()),
            hidden_size=hidden,
            intermediate_size=meta.count(f"{arch}.feed_forward_length"),
            num_hidden_layers=meta.count(f"{arch}.block_count"),
            num_attention_heads=heads,
            num_key_value_heads=meta.count(f"{arch}.attention.head_count_kv", heads),
            head_dim=head_dim,
            rms_norm_eps=meta.number(f"{arch}.attention.layer_norm_rms_epsilon"),
            rope=self._rope(arch),
            max_position_embeddings=meta.count(f"{arch}.context_length"),
            tie_word_embeddings="output.weight" not in self._tensors,
            hidden_act=family.activations[0],
            dtype="float32",
            bos_token_id=meta.count(special.format("bos")) if special.format("bos") in meta else None,
            # a chat model's turn ends with "eot", where it has one
            eos_token_ids=as_ids(
                meta.count(name) for name in map(special.format, ("eos", "eot", "eom")) if name in meta
            ),
            **flags,
        )
        config = family.finish_gguf(config, lambda name, default: meta.number(f"{arch}.{name}", default))
        check_config(config, Path(self.where), family.activations)
        return config

    def _refuse_unsupported(self, arch: str, head_dim: int, rotary: int) -> None:
        meta = self._metadata
        if meta.count(f"{arch}.expert_count", 0):
            raise UnsupportedError(f"{self.where}: mixtures of experts are not implemented")
        if rotary != head_dim:
            raise UnsupportedError(
                f"{self.where}: partial rotary embedding ({rotary} of {head_dim} dimensions) is not "
                "implemented"
            )
        if meta.count(f"{arch}.attention.value_length", head_dim) != head_dim:
            raise UnsupportedError(f"{self.where}: heads of V that differ in size from K are not implemented")
        window = meta.count(f"{arch}.attention.sliding_window", 0)
        if window and not self._family.sliding_windows:
            raise UnsupportedError(f"{self.where}: attention.sliding_window {window} is not implemented")

    def _rope(self, arch: str) -> RopeConfig:
        meta = self._metadata
        theta = meta.number(f"{arch}.rope.freq_base", 10000.0)
        prefix = f"{arch}.rope.scaling."
        kind = meta.text(f"{prefix}type", "none")
        known = {"type", "factor", "original_context_length", "finetuned"}
        given = {name.removeprefix(prefix) for name in meta.names() if name.startswith(prefix)}
        if kind not in ("none", "linear", "yarn") or given - known:
            raise UnsupportedError(
                f"{self.where}: rope.scaling.type {kind!r} with {sorted(given)} is not implemented; "
                f"known: none, linear, yarn, with {sorted(known)}"
            )
        if _ROPE_FREQS in self._tensors:
            if kind != "none":
                raise UnsupportedError(f"{self.where}: both {_ROPE_FREQS} and rope.scaling.type {kind!r}")
            factors = tuple(self._dequantised(_ROPE_FREQS).tolist())
            return RopeConfig(kind="factors", theta=theta, parameters=(("factors", factors),))
        if kind == "none":
            return RopeConfig(theta=theta)
        parameters = [("factor", meta.number(f"{prefix}factor"))]
        if kind == "yarn":
            original = meta.count(f"{prefix}original_context_length")
            parameters.append(("original_max_position_embeddings", original))
        return RopeConfig(kind=kind, theta=theta, parameters=tuple(parameters))

    def _has(self, suffix: str) -> bool:
        return any(name.endswith(suffix) for name in self._gguf_names)

    def _embedding_rows(self) -> int:
        if "token_embd.weight" not in self._tensors:
            raise WeightError(f"{self.where}: missing token_embd.weight")
        return int(self._tensors["token_embd.weight"].shape[-1])


class _Metadata:
    """Scalar and text metadata by key, checked for its type."""

    def __init__(self, path: Path, reader: Any) -> None:
        self._path = path
        self._fields = reader.fields

    def names(self) -> list[str]:
        return list(self._fields)

    def number(self, name: str, default: float | None = None) -> float:
        """A number; ConfigError if there is neither one nor a default."""
        return cast("float", self._value(name, (int, float), default))

    def count(self, name: str, default: int | None = None) -> int:
        """A number of things, at least 0."""
        value = cast("int", self._value(name, (int,), default))
        if value < 0:
            raise ConfigError(f"{self._path}: {name} must not be negative, got {value}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """Text."""
        return cast("str", self._value(name, (str,), default))

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def _value(self, name: str, types: tuple[type, ...], default: object) -> object:
        field = self._fields.get(name)
        if field is None:
            if default is None:
                raise ConfigError(f"{self._path}: GGUF metadata lacks {name}")
            return default
        if field.types[0] == GGUFValueType.ARRAY:
            raise UnsupportedError(f"{self._path}: {name} differs by layer, which is not implemented")
        try:
            value = field.contents()
        except UnicodeDecodeError as error:
            raise WeightError(f"{self._path} is damaged: the text of {name} is not UTF-8: {error}") from error
        if not isinstance(value, types) or isinstance(value, bool):
            raise ConfigError(f"{self._path}: {name} must be {types[-1].__name__}, got {value!r}")
        return value


class _Reader(GGUFReader):  # type: ignore[misc]  # gguf is not type-checked here
    """Steps over arrays without keeping them: the vocabulary takes seconds and nothing here reads it."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order == "S":
            parts: tuple[int, list[Any], list[int], list[Any]] = super()._get_field_parts(orig_offs, raw_type)
            return parts
        view = memoryview(self.data)
        item, length = struct.unpack_from("=IQ", view, orig_offs)
        end = orig_offs + 12
        if item == GGUFValueType.STRING:
            for _ in range(length):
                end += 8 + struct.unpack_from("=Q", view, end)[0]
        else:
            end += length * np.dtype(self.gguf_scalar_to_np[GGUFValueType(item)]).itemsize
        return end - orig_offs, [], [], [GGUFValueType.ARRAY, GGUFValueType(item)]


def _open(path: Path) -> _Reader:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise WeightError(f"{path} is not a GGUF file: it starts with {magic!r} instead of b'GGUF'")
    try:
        return _Reader(path)
    # a file that is cut short shows up as whatever the parser trips over
    except (ValueError, IndexError, KeyError, OverflowError, struct.error, UnicodeDecodeError) as error:
        raise WeightError(
            f"{path} is damaged or cut short: {type(error).__name__}: {error}; download it again"
        ) from error


def _hf_name(name: str, family: type[DecoderModel]) -> str:
    """Transformers' name of a tensor; an unknown name is returned as it is, and refused later."""
    base, dot, suffix = name.rpartition(".")
    if m := re.fullmatch(r"blk\.(\d+)\.(\w+)", base):
        names = {**_LAYER, **family.gguf_names}
        return f"model.layers.{m[1]}.{names[m[2]]}{dot}{suffix}" if m[2] in names else name
    return f"{_OUTSIDE[base]}{dot}{suffix}" if base in _OUTSIDE else name


def _unpermute(values: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Undo the converter's row order: it interleaves the two halves of each head."""
    pairs = values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
