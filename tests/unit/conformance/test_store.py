from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import numpy as safetensors

from conformance import EDITION
from conformance.canonical import canonical_request, request_key
from conformance.manifest import MANIFEST_NAME, Manifest, sign
from conformance.records import ArmError, GoldenRecord, LogitTable, Yardstick
from conformance.store import (
    CorruptedRecord,
    NoGolden,
    RecordError,
    RecordSchemaError,
    RecordStore,
    WrongWeights,
)


def table(rows: int, seed: int = 0) -> LogitTable:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(50)[:5] for _ in range(rows)]).reshape(rows, 5)
    logits = -np.sort(-rng.normal(size=(rows, 5)), axis=1)
    return LogitTable(ids.astype(np.int64), logits, rng.normal(size=rows) + 5)


def make_record(case: str = "case-1", model: str = "tiny", **request: Any) -> GoldenRecord:
    canonical = canonical_request(
        **{"model": model, "prompt": {"token_ids": [5, 6, 7]}, "max_tokens": 4, **request}
    )
    return GoldenRecord(
        schema=1,
        edition=EDITION,
        key=request_key(canonical),
        model=model,
        case=case,
        request=canonical,
        provenance={"weights_sha256": "aa" * 32, "torch": "x"},
        dtype=canonical["dtype"],
        prompt_token_ids=(5, 6, 7),
        token_ids=(1, 2, 3, 4),
        text="Grüße 🙂",
        finish_reason="length",
        stop_reason=None,
        output=table(4),
        yardstick=Yardstick({"eager_cached": ArmError(1e-6, 4e-6), "sdpa": ArmError(2e-6, 3e-6)}),
        prompt=table(2, seed=1) if canonical["prompt_logprobs"] else None,
        stages={"hidden.0": np.arange(6, dtype=np.float32).reshape(2, 3)},
        stage_bands={"hidden.0": ArmError(1e-7, 2e-7)},
    )


def assert_equal(a: GoldenRecord, b: GoldenRecord) -> None:
    def arrays(record: GoldenRecord) -> list[Any]:
        tables = [t for t in (record.output, record.prompt) if t is not None]
        return [x for t in tables for x in (t.top_ids, t.top_logits, t.logsumexp)] + list(
            record.stages.values()
        )

    for x, y in zip(arrays(a), arrays(b), strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.dtype == y.dtype
    assert list(a.stages) == list(b.stages)
    assert rest(a) == rest(b)


def rest(record: GoldenRecord) -> dict[str, Any]:
    """All but the arrays, which do not compare with ==."""
    return {
        f.name: getattr(record, f.name)
        for f in fields(record)
        if f.name not in ("output", "prompt", "stages")
    }


@pytest.fixture
def store(tmp_path: Path) -> RecordStore:
    store = RecordStore(tmp_path)
    store.save(make_record(), "first")
    return store


@pytest.fixture
def json_path(store: RecordStore) -> Path:
    return store.golden / "records" / "tiny" / "case-1.json"


KEY = make_record().key


@pytest.mark.parametrize("request_fields", [{}, {"prompt_logprobs": True}, {"dtype": "bfloat16"}])
def test_a_saved_record_reads_back_bit_for_bit(tmp_path: Path, request_fields: dict[str, Any]) -> None:
    record = make_record(**request_fields)
    RecordStore(tmp_path).save(record, "first")
    assert_equal(RecordStore(tmp_path).get(record.key), record)


def test_saving_twice_writes_the_same_bytes(store: RecordStore, json_path: Path) -> None:
    files = [json_path, json_path.with_suffix(".safetensors"), store.golden / MANIFEST_NAME]
    before = [f.read_bytes() for f in files]
    store.save(make_record(), "again")
    assert [f.read_bytes() for f in files] == before


def test_saving_signs_both_files_with_the_reason(store: RecordStore) -> None:
    entries = Manifest.load(store.golden).entries
    assert {name: e.reason for name, e in entries.items()} == {
        "records/tiny/case-1.json": "first",
        "records/tiny/case-1.safetensors": "first",
    }
    assert store.manifest.faults(store.golden) == []


def test_a_request_nobody_recorded_has_no_golden(store: RecordStore) -> None:
    near = make_record(max_tokens=5).key
    assert near not in store
    with pytest.raises(NoGolden, match="no golden for this request"):
        store.get(near)


def test_an_empty_directory_is_a_store_without_records(tmp_path: Path) -> None:
    store = RecordStore(tmp_path)
    assert len(store) == 0
    assert list(store.all()) == []


def test_all_gives_every_record_or_one_models(store: RecordStore) -> None:
    store.save(make_record(case="case-0", model="other"), "second")
    store.save(make_record(case="case-0", max_tokens=9), "second")
    assert [(r.model, r.case) for r in store.all()] == [
        ("other", "case-0"),
        ("tiny", "case-0"),
        ("tiny", "case-1"),
    ]
    assert [r.case for r in store.all("other")] == ["case-0"]


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
@pytest.mark.parametrize("where", [0.0, 0.5, 0.999])
def test_a_flipped_byte_is_corruption(store: RecordStore, json_path: Path, suffix: str, where: float) -> None:
    path = json_path.with_suffix(suffix)
    data = bytearray(path.read_bytes())
    data[int(where * len(data))] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptedRecord, match=r"^corrupted: "):
        store.get(KEY)


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_missing_file_is_corruption(store: RecordStore, json_path: Path, suffix: str) -> None:
    json_path.with_suffix(suffix).unlink()
    with pytest.raises(CorruptedRecord, match=r"^corrupted: missing file"):
        store.get(KEY)


def test_other_weights_are_refused_with_both_digests(store: RecordStore) -> None:
    assert store.get(KEY, "aa" * 32).key == KEY
    with pytest.raises(WrongWeights, match="recorded for other weights \\(aaaaaaaaaaaa… vs bbbbbbbbbbbb…\\)"):
        store.get(KEY, "bb" * 32)


def edit_and_sign(store: RecordStore, path: Path, **changes: Any) -> RecordStore:
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}, default=str))
    sign(store.golden, "edited")
    return RecordStore(store.golden.parent)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "has schema 2; this suite reads 1"),
        ({"schema": None}, "has schema None"),
        ({"colour": "red"}, "unknown or missing fields: colour"),
        ({"yardstick": {"a": {"rms": 1.0}}}, "field of another form"),
        ({"yardstick": 3}, "field of another form"),
        ({"token_ids": 3}, "field of another form"),
        ({"stages": []}, "unknown or missing arrays: stage.hidden.0"),
    ],
)
def test_a_signed_file_of_another_form_is_refused(
    store: RecordStore, json_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecordSchemaError, match=message):
        edit_and_sign(store, json_path, **changes).get(KEY)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"request": canonical_request(model="tiny", prompt={"text": "x"}, max_tokens=1)}, "not the key"),
        ({"request": {"model": "tiny"}}, "not canonical"),
        ({"model": "other"}, "not that of its request"),
        ({"case": "../x"}, "must be letters"),
        ({"yardstick": {}}, "no arms"),
        ({"provenance": {}}, "weights_sha256"),
        ({"token_ids": [1, 2]}, "4 rows for 2 positions"),
        ({"stage_bands": {"final": {"rms": 0.1, "max": 0.1}}}, "not recorded"),
    ],
)
def test_a_signed_record_that_contradicts_itself_is_corrupted(
    store: RecordStore, json_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(CorruptedRecord, match=message):
        edit_and_sign(store, json_path, **changes).get(KEY)


def test_a_signed_record_with_another_key_is_not_found_by_the_old_one(
    store: RecordStore, json_path: Path
) -> None:
    with pytest.raises(NoGolden):
        edit_and_sign(store, json_path, key="0" * 64).get(KEY)


def test_a_manifest_that_points_a_key_at_another_record_is_corruption(store: RecordStore) -> None:
    other = make_record(case="case-2", max_tokens=9)
    store.save(other, "second")
    path = store.golden / MANIFEST_NAME
    text = path.read_text().replace(KEY, "x").replace(other.key, KEY)
    path.write_text(text)
    with pytest.raises(CorruptedRecord, match="holds key"):
        RecordStore(store.golden.parent).get(KEY)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("top_logits", np.array([[1.0, 2.0]] * 4), "ids for|not sorted"),
        ("top_logits", np.full((4, 5), np.nan), "NaN"),
        ("top_ids", np.zeros((4, 5), np.int32), "is int32, must be int64"),
        ("logsumexp", np.zeros(3), "3 rows for 4 positions"),
    ],
)
def test_a_wrong_table_cannot_be_saved(tmp_path: Path, field: str, value: Any, message: str) -> None:
    record = make_record()
    with pytest.raises(RecordError, match=message):
        RecordStore(tmp_path).save(replace(record, output=replace(record.output, **{field: value})), "first")
    assert not (tmp_path / "golden").exists()


def test_prompt_logits_must_be_there_exactly_when_asked_for(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="prompt logits are missing"):
        RecordStore(tmp_path).save(replace(make_record(prompt_logprobs=True), prompt=None), "first")
    with pytest.raises(RecordError, match="though not asked for"):
        RecordStore(tmp_path).save(replace(make_record(), prompt=table(2)), "first")


def test_a_record_with_a_new_case_name_replaces_the_old_files(store: RecordStore) -> None:
    store.save(make_record(case="renamed"), "second")
    assert sorted(p.name for p in (store.golden / "records" / "tiny").iterdir()) == [
        "renamed.json",
        "renamed.safetensors",
    ]
    assert store.get(KEY).case == "renamed"
    assert store.manifest.faults(store.golden) == []


def test_two_requests_cannot_share_a_case_name(store: RecordStore) -> None:
    with pytest.raises(RecordError, match="already holds the record of request"):
        store.save(make_record(max_tokens=9), "second")
    assert_equal(store.get(KEY), make_record())


def test_an_unreadable_manifest_is_a_record_error(store: RecordStore) -> None:
    (store.golden / MANIFEST_NAME).write_text("{}")
    with pytest.raises(RecordError, match="schema None"):
        RecordStore(store.golden.parent)


def test_signed_files_that_cannot_be_parsed_are_corruption(store: RecordStore, json_path: Path) -> None:
    json_path.with_suffix(".safetensors").write_bytes(b"no tensors here")
    sign(store.golden, "edited")
    with pytest.raises(CorruptedRecord, match="cannot be read"):
        RecordStore(store.golden.parent).get(KEY)


def test_an_extra_array_is_refused(store: RecordStore, json_path: Path) -> None:
    path = json_path.with_suffix(".safetensors")
    arrays = safetensors.load_file(path)
    path.write_bytes(safetensors.save(arrays | {"output.extra": np.zeros(1)}))
    sign(store.golden, "edited")
    with pytest.raises(RecordSchemaError, match=r"arrays: output\.extra"):
        RecordStore(store.golden.parent).get(KEY)
