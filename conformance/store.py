"""Golden records on disk: golden/records/<model>/<case>.json and .safetensors.

The JSON file holds what people read, the safetensors file the tables. Both are checked against
golden/MANIFEST.json whenever they are read, so a flipped byte is an error, never a verdict.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors import numpy as safetensors

from conformance import RECORD_SCHEMA
from conformance.canonical import CanonicalError, media_parts, request_key
from conformance.manifest import Manifest, ManifestError, sign
from conformance.paths import data_root
from conformance.records import (
    ArmError,
    GoldenRecord,
    LogitTable,
    MediaRecord,
    SpanRecord,
    Yardstick,
)

__all__ = [
    "CorruptedRecord",
    "NoGolden",
    "RecordError",
    "RecordSchemaError",
    "RecordStore",
    "Records",
    "WrongWeights",
    "check_weights",
]


class RecordError(ValueError):
    """Base class: a golden record cannot be used."""


class NoGolden(RecordError):
    """Nobody recorded this very request. A near match is never taken instead."""


class CorruptedRecord(RecordError):
    """The files are not those the manifest describes, or they contradict themselves."""


class WrongWeights(RecordError):
    """The record is about other weights than the model's."""


class RecordSchemaError(RecordError):
    """The record has another schema version, or fields this version does not know."""


# Fields of the JSON file; tables and stages lie in the safetensors file.
_FIELDS = frozenset(f.name for f in fields(GoldenRecord)) - {"output", "prompt", "media"}
_TABLE = {"top_ids": np.int64, "top_logits": np.float64, "logsumexp": np.float64}
_POSITIONS = "media.positions"
_CASE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Records(Protocol):
    """Where a run gets its golden records from."""

    def get(self, key: str, weights_sha256: str | None = None, /) -> GoldenRecord:
        """See `RecordStore.get`."""
        ...


class RecordStore:
    """The golden records below a data directory.

    Args:
        root: directory that holds golden/; the default is `paths.data_root()`.

    Raises:
        RecordError: the manifest cannot be read.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.golden = (root or data_root()) / "golden"
        self._load_manifest()

    def __contains__(self, key: object) -> bool:
        return key in self._names

    def __iter__(self) -> Iterator[str]:
        """Keys of all records, in the order of their file names."""
        return iter(list(self._names))

    def __len__(self) -> int:
        return len(self._names)

    def get(self, key: str, weights_sha256: str | None = None) -> GoldenRecord:
        """The record of the canonical request with this key.

        Args:
            weights_sha256: refuse a record made from other weights.

        Raises:
            NoGolden, CorruptedRecord, WrongWeights, RecordSchemaError.
        """
        name = self._names.get(key)
        if name is None:
            raise NoGolden(
                f"no golden for this request (key {key[:12]}…); record it with: conformance golden record"
            )
        record = self._read(name)
        if record.key != key:
            raise CorruptedRecord(f"corrupted: golden/{name} holds key {record.key[:12]}…, not {key[:12]}…")
        if weights_sha256 is not None:
            check_weights(record, weights_sha256)
        return record

    def all(self, model: str | None = None) -> Iterator[GoldenRecord]:
        """Every record, or those of one model, in the order of their file names."""
        for key in self:
            if model is None or self._names[key].split("/")[1] == model:
                yield self.get(key)

    def save(self, record: GoldenRecord, reason: str) -> Path:
        """Write a record, in place of any earlier one with its key, and sign both its files.

        Returns:
            Path of the .json file.

        Raises:
            RecordError: the record contradicts itself, or has a name no file may have.
        """
        _check(record)
        stem = f"records/{record.model}/{record.case}"
        old = self._names.get(record.key)
        if old is not None and old != f"{stem}.json":
            for name in (old, _tensors_name(old)):
                (self.golden / name).unlink(missing_ok=True)
            sign(self.golden, reason, under=old.removesuffix(".json") + ".")
        taken = {name: key for key, name in self._names.items()}.get(f"{stem}.json", record.key)
        if taken != record.key:
            raise RecordError(f"golden/{stem}.json already holds the record of request {taken[:12]}…")
        path = self.golden / f"{stem}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(_to_plain(record), indent=1, ensure_ascii=False, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8", newline="\n")
        path.with_name(f"{record.case}.safetensors").write_bytes(safetensors.save(_to_arrays(record)))
        sign(self.golden, reason, under=f"{stem}.")
        self._load_manifest()
        return path

    def _load_manifest(self) -> None:
        try:
            self.manifest = Manifest.load(self.golden)
        except ManifestError as error:
            raise RecordError(str(error)) from error
        self._names = {e.key: name for name, e in sorted(self.manifest.entries.items()) if e.key}

    def _read(self, name: str) -> GoldenRecord:
        for file in (name, _tensors_name(name)):
            fault = self.manifest.fault(self.golden, file)
            if fault is not None:
                raise CorruptedRecord(fault if fault.startswith("corrupted") else f"corrupted: {fault}")
        try:
            values = json.loads((self.golden / name).read_text(encoding="utf-8"))
            arrays = safetensors.load_file(self.golden / _tensors_name(name))
        except (ValueError, RecursionError, SafetensorError) as error:
            raise CorruptedRecord(f"corrupted: golden/{name} cannot be read: {error}") from error
        return _from_plain(name, values, arrays)


def check_weights(record: GoldenRecord, weights_sha256: str) -> None:
    """Raise WrongWeights unless the record was made from these weights."""
    recorded = str(record.provenance.get("weights_sha256"))
    if recorded != weights_sha256:
        raise WrongWeights(
            f"recorded for other weights ({recorded[:12]}… vs {weights_sha256[:12]}…): "
            f"{record.model}/{record.case}; use the recorded weights, or record again with: "
            f"conformance golden update --model {record.model} --reason '…'"
        )


def _tensors_name(name: str) -> str:
    return name.removesuffix(".json") + ".safetensors"


def _to_plain(record: GoldenRecord) -> dict[str, Any]:
    return {
        "schema": record.schema,
        "edition": record.edition,
        "key": record.key,
        "model": record.model,
        "case": record.case,
        "request": dict(record.request),
        "provenance": dict(record.provenance),
        "dtype": record.dtype,
        "prompt_token_ids": list(record.prompt_token_ids),
        "token_ids": list(record.token_ids),
        "text": record.text,
        "finish_reason": record.finish_reason,
        "stop_reason": record.stop_reason,
        "yardstick": _plain_errors(record.yardstick.arms),
        "stages": sorted(record.stages),
        "stage_bands": _plain_errors(record.stage_bands),
        # Only where there is any, so that records of texts stay as they were.
        **({} if record.media is None else {"media": _plain_media(record.media)}),
    }


def _plain_media(media: MediaRecord) -> dict[str, Any]:
    return {
        "items": [dict(item) for item in media.items],
        "spans": [asdict(span) for span in media.spans],
        "processor": media.processor,
        "image_processor": media.image_processor,
        "position_delta": media.position_delta,
    }


def _to_arrays(record: GoldenRecord) -> dict[str, NDArray[Any]]:
    tables = {"output": record.output} | ({"prompt": record.prompt} if record.prompt is not None else {})
    arrays: dict[str, NDArray[Any]] = {}
    for name, table in tables.items():
        arrays |= {f"{name}.{field}": getattr(table, field) for field in _TABLE}
    arrays |= {f"stage.{name}": array for name, array in record.stages.items()}
    if record.media is not None and record.media.positions is not None:
        arrays[_POSITIONS] = record.media.positions
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def _from_plain(name: str, values: Any, arrays: Mapping[str, NDArray[Any]]) -> GoldenRecord:
    schema = values.get("schema") if isinstance(values, dict) else None
    if schema != RECORD_SCHEMA:
        raise RecordSchemaError(f"golden/{name} has schema {schema!r}; this suite reads {RECORD_SCHEMA}")
    if set(values) - {"media"} != _FIELDS:
        odd = sorted(set(values) - {"media"} ^ _FIELDS)
        raise RecordSchemaError(f"golden/{name} has unknown or missing fields: {', '.join(odd)}")
    tables = {"output"} | ({"prompt"} if any(a.startswith("prompt.") for a in arrays) else set())
    try:
        expected = {f"{t}.{f}" for t in tables for f in _TABLE} | {f"stage.{s}" for s in values["stages"]}
        if "media" in values:
            expected |= {_POSITIONS} & set(arrays)
        if set(arrays) != expected:
            odd = sorted(set(arrays) ^ expected)
            raise RecordSchemaError(
                f"golden/{_tensors_name(name)} has unknown or missing arrays: {', '.join(odd)}"
            )
        record = GoldenRecord(
            **values
            | {
                "prompt_token_ids": tuple(values["prompt_token_ids"]),
                "token_ids": tuple(values["token_ids"]),
                "yardstick": Yardstick(_errors(values["yardstick"])),
                "output": _table(arrays, "output"),
                "prompt": _table(arrays, "prompt") if "prompt" in tables else None,
                "stages": {stage: arrays[f"stage.{stage}"] for stage in values["stages"]},
                "stage_bands": _errors(values["stage_bands"]),
                "media": _media(values["media"], arrays) if "media" in values else None,
            }
        )
    except (AttributeError, KeyError, TypeError) as error:
        raise RecordSchemaError(f"golden/{name} has a field of another form: {error}") from error
    try:
        _check(record)
    except RecordError as error:
        raise CorruptedRecord(f"corrupted: golden/{name}: {error}") from error
    return record


def _media(values: Mapping[str, Any], arrays: Mapping[str, NDArray[Any]]) -> MediaRecord:
    return MediaRecord(
        **dict(values)
        | {
            "items": tuple(values["items"]),
            "spans": tuple(SpanRecord(**span) for span in values["spans"]),
            "positions": arrays.get(_POSITIONS),
        }
    )


def _plain_errors(errors: Mapping[str, ArmError]) -> dict[str, dict[str, float]]:
    return {name: {"rms": error.rms, "max": error.max} for name, error in sorted(errors.items())}


def _errors(values: Mapping[str, Mapping[str, float]]) -> dict[str, ArmError]:
    return {name: ArmError(**error) for name, error in values.items()}


def _table(arrays: Mapping[str, NDArray[Any]], name: str) -> LogitTable:
    return LogitTable(**{field: arrays[f"{name}.{field}"] for field in _TABLE})


def _check(record: GoldenRecord) -> None:
    """Raise RecordError when the parts of a record contradict each other."""
    problems = []
    if record.schema != RECORD_SCHEMA:
        problems.append(f"schema is {record.schema}, this suite writes {RECORD_SCHEMA}")
    try:
        if request_key(record.request) != record.key:
            problems.append("key is not the key of its request")
    except CanonicalError as error:
        problems.append(f"request is not canonical: {error}")
    for what, value in (("model", record.model), ("case", record.case)):
        if not _CASE.fullmatch(value):
            problems.append(f"{what} {value!r} must be letters, digits, '.', '_', '-'")
    if record.model != record.request.get("model") or record.dtype != record.request.get("dtype"):
        problems.append("model or dtype is not that of its request")
    if not record.yardstick.arms:
        problems.append("yardstick has no arms")
    if not set(record.stage_bands) <= set(record.stages):
        problems.append("stage_bands name stages that are not recorded")
    if not record.provenance.get("weights_sha256"):
        problems.append("provenance names no weights_sha256")
    problems += _table_problems("output", record.output, len(record.token_ids))
    problems += _media_problems(record)
    asked = bool(record.request.get("prompt_logprobs"))
    if (record.prompt is not None) != asked:
        problems.append(f"prompt logits are {'missing' if asked else 'there though not asked for'}")
    if record.prompt is not None:
        problems += _table_problems("prompt", record.prompt, len(record.prompt_token_ids) - 1)
    if problems:
        raise RecordError(f"record {record.model}/{record.case}: " + "; ".join(problems))


def _media_problems(record: GoldenRecord) -> list[str]:
    media, length = record.media, len(record.prompt_token_ids)
    asked = len(media_parts(record.request["prompt"])) if "prompt" in record.request else 0
    if media is None:
        return [f"the request has {asked} pictures, the record tells of none"] if asked else []
    problems = []
    if len(media.items) != asked:
        problems.append(f"the request has {asked} pictures, the record tells of {len(media.items)}")
    for i, item in enumerate(media.items):
        if sum(span.length for span in media.spans if span.item == i) != item.get("rows"):
            problems.append(f"the spans of picture {i} do not hold its {item.get('rows')} embeddings")
    if any(span.start < 0 or span.length < 1 or span.start + span.length > length for span in media.spans):
        problems.append(f"a span lies outside of the prompt's {length} tokens")
    if media.positions is not None and media.positions.shape != (length, 3):
        problems.append(f"positions are {media.positions.shape} for {length} prompt tokens")
    return problems


def _table_problems(name: str, table: LogitTable, rows: int) -> list[str]:
    problems = []
    for field, kind in _TABLE.items():
        array = getattr(table, field)
        if array.dtype != kind:
            problems.append(f"{name}.{field} is {array.dtype}, must be {np.dtype(kind)}")
        elif not np.isfinite(array).all():
            problems.append(f"{name}.{field} holds NaN or infinity")
        if len(array) != rows:
            problems.append(f"{name}.{field} has {len(array)} rows for {rows} positions")
    if table.top_ids.shape != table.top_logits.shape or table.top_ids.ndim != 2:
        problems.append(f"{name} has {table.top_ids.shape} ids for {table.top_logits.shape} logits")
    elif (np.diff(table.top_logits, axis=1) > 0).any():
        problems.append(f"{name}.top_logits are not sorted, most likely first")
    return problems
