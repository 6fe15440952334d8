"""The truth about prompts with pictures: recorded, stored, verified, for one family of each kind."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conformance.adapters.base import ModelSource
from conformance.assets import asset_directory, find_asset
from conformance.canonical import canonical_request
from conformance.hf_models import NoTruth, load_hf
from conformance.models import resolve_model
from conformance.records import GoldenRecord, media_embeddings, prompt_embeddings
from conformance.reference import Reference
from conformance.store import CorruptedRecord, RecordError, RecordStore

ROOT = Path(__file__).parents[3]


def digest(name: str) -> str:
    return find_asset(asset_directory(ROOT), name).digest


def ask(model: str, *parts: Any, **options: Any) -> dict[str, Any]:
    return canonical_request(
        model=model, prompt={"chat": list(parts)}, max_tokens=4, ignore_eos=True, **options
    )


def source(name: str) -> ModelSource:
    return resolve_model(name, ROOT)


def picture(name: str) -> dict[str, str]:
    return {"image": digest(name)}


SEVEN, FOUR = "shapes/yellow_seven.png", "shapes/square_four.png"


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(source("tiny-qwen3-vl"))


@pytest.fixture(scope="module")
def record(reference: Reference) -> GoldenRecord:
    request = ask("tiny-qwen3-vl", picture(SEVEN), {"text": "and"}, picture(FOUR))
    return reference.record(request, "case", traced=True)


def test_the_record_tells_of_pictures_spans_and_positions(record: GoldenRecord) -> None:
    media = record.media
    assert media is not None
    assert [item["names"] for item in media.items] == [[SEVEN], [FOUR]]
    assert [item["digests"] for item in media.items] == [[digest(SEVEN)], [digest(FOUR)]]
    assert [(s.length, s.item, s.first_row) for s in media.spans] == [
        (item["rows"], i, 0) for i, item in enumerate(media.items)
    ]
    assert (media.processor, media.image_processor) == ("Qwen3VLProcessor", "Qwen2VLImageProcessorPil")
    assert record.provenance["pillow"]


def test_positions_are_those_of_a_table_written_by_hand(record: GoldenRecord) -> None:
    media = record.media
    assert media is not None
    assert media.positions is not None
    wanted: list[tuple[int, int, int]] = []
    at, place = 0, 0
    for span, item in zip(media.spans, media.items, strict=True):
        while place < span.start:
            wanted.append((at, at, at))
            at, place = at + 1, place + 1
        _, rows, columns = (n // d for n, d in zip(item["grid_thw"], (1, 2, 2), strict=True))
        wanted += [(at, at + r, at + c) for r in range(rows) for c in range(columns)]
        at, place = at + max(rows, columns), place + rows * columns
    while place < len(record.prompt_token_ids):
        wanted.append((at, at, at))
        at, place = at + 1, place + 1
    assert media.positions.tolist() == [list(p) for p in wanted]
    assert media.position_delta == at - len(record.prompt_token_ids)


def test_stages_are_rows_of_the_whole_sequence(record: GoldenRecord) -> None:
    rows = len(record.prompt_token_ids) + 3
    for name, array in record.stages.items():
        if name not in ("logits", "pixels"):
            assert len(array) == rows, name
    assert record.stages["positions"].shape == (rows, 3)
    assert {"pixels", "embeddings", "deepstack.0", "deepstack.1", "hidden.2"} <= set(record.stages)
    assert record.stage_bands["pixels"].max == record.stage_bands["positions"].max == 0
    assert 0 < record.stage_bands["embeddings"].max < 1e-4


def test_embeddings_and_deepstack_rows_of_a_picture_are_what_its_tower_makes(record: GoldenRecord) -> None:
    model = load_hf(source("tiny-qwen3-vl").path, torch.float64).module
    assert record.media is not None
    grids = torch.tensor([item["grid_thw"] for item in record.media.items])
    pixels = torch.from_numpy(record.stages["pixels"]).double().reshape(-1, 1536)
    with torch.no_grad():
        made = model.model.get_image_features(pixels, grids)
    for i, tower in enumerate(made.pooler_output):
        tables = media_embeddings(record, i)
        assert len(tables[0]) == record.media.items[i]["rows"]
        wanted = [tower, *(level[i] for level in made.deepstack_features)]
        for rows, truth in zip(tables, wanted, strict=True):
            np.testing.assert_allclose(rows, truth.float().numpy(), rtol=0, atol=1e-6)
    with pytest.raises(ValueError, match="no embeddings of picture 2"):
        media_embeddings(record, 2)


def test_prompt_embeddings_are_the_first_rows(record: GoldenRecord) -> None:
    rows = prompt_embeddings(record)
    assert rows.shape == (len(record.prompt_token_ids), 64)
    with pytest.raises(ValueError, match="record it traced"):
        prompt_embeddings(replace(record, stages={}, stage_bands={}))


def test_every_arm_lies_near_the_truth(record: GoldenRecord) -> None:
    assert set(record.yardstick.arms) == {"eager_cached", "eager_full", "sdpa", "eager_rope64"}
    assert 0 < record.yardstick.R <= record.yardstick.M < 1e-3


def test_a_record_survives_the_store_and_is_verified(
    tmp_path: Path, record: GoldenRecord, reference: Reference
) -> None:
    RecordStore(tmp_path).save(record, "first")
    read = RecordStore(tmp_path).get(record.key)
    assert read.media is not None
    assert record.media is not None
    assert replace(read.media, positions=None) == replace(record.media, positions=None)
    np.testing.assert_array_equal(read.media.positions, record.media.positions)
    assert {v.stage: v.verdict for v in reference.verify(read) if v.verdict != "same"} == {}
    other = replace(read, media=replace(read.media, position_delta=7))
    assert ("media", "changed") in [(v.stage, v.verdict) for v in reference.verify(other)]


def test_a_record_whose_pictures_contradict_it_is_refused(tmp_path: Path, record: GoldenRecord) -> None:
    assert record.media is not None
    assert record.media.positions is not None
    media = record.media
    for wrong, message in (
        (None, "the request has 2 pictures, the record tells of none"),
        (replace(media, items=media.items[:1]), "2 pictures, the record tells of 1"),
        (replace(media, spans=media.spans[:1]), "the spans of picture 1 do not hold its"),
        (replace(media, positions=media.positions[:-1]), "prompt tokens"),
        (replace(media, spans=(replace(media.spans[0], start=10**6), media.spans[1])), "lies outside"),
    ):
        with pytest.raises(RecordError, match=message):
            RecordStore(tmp_path).save(replace(record, media=wrong), "wrong")


def test_a_damaged_media_section_is_corruption(tmp_path: Path, record: GoldenRecord) -> None:
    from conformance.manifest import sign

    path = RecordStore(tmp_path).save(record, "first")
    values = json.loads(path.read_text(encoding="utf-8"))
    values["media"]["spans"][0]["length"] += 1
    path.write_text(json.dumps(values), encoding="utf-8")
    sign(tmp_path / "golden", "tampered")
    with pytest.raises(CorruptedRecord, match="do not hold its"):
        RecordStore(tmp_path).get(record.key)


def test_one_reference_answers_case_after_case_as_a_fresh_one_does(reference: Reference) -> None:
    """The position delta of one prompt must not reach the next."""
    plain = ask("tiny-qwen3-vl", {"text": "What is this?"})
    pictured = ask("tiny-qwen3-vl", picture(FOUR), {"text": "What?"})
    used = [reference.record(request, "case") for request in (pictured, plain, pictured)]
    fresh = [Reference(source("tiny-qwen3-vl")).record(r, "case") for r in (pictured, plain)]
    assert used[0].token_ids == used[2].token_ids == fresh[0].token_ids
    assert used[1].token_ids == fresh[1].token_ids
    assert used[1].media is None


def test_crops_are_several_spans_of_one_picture_and_positions_are_plain() -> None:
    record = Reference(source("tiny-smolvlm")).record(
        ask("tiny-smolvlm", picture(FOUR), {"text": "What?"}), "case"
    )
    assert record.media is not None
    assert record.media.positions is None
    assert record.media.position_delta == 0
    first = [s.first_row for s in record.media.spans]
    assert first == [4 * i for i in range(len(first))]
    assert len(first) == 5
    assert {s.item for s in record.media.spans} == {0}


def test_a_model_without_rope_has_no_arm_for_it_and_answers_texts_too() -> None:
    reference = Reference(source("tiny-blip2"))
    text = {"prompt": {"text": "What is this?"}, "max_tokens": 3, "ignore_eos": True}
    plain = reference.record(canonical_request(model="tiny-blip2", **text), "case")
    text["prompt"] = {"text": "What is this?", "media": [picture(FOUR)]}
    seen = reference.record(canonical_request(model="tiny-blip2", **text), "case")
    assert set(plain.yardstick.arms) == set(seen.yardstick.arms) == {"eager_cached", "eager_full", "sdpa"}
    assert len(seen.prompt_token_ids) == len(plain.prompt_token_ids) + 4
    assert seen.media is not None
    assert seen.media.spans[0].start == 0


def test_a_generated_placeholder_is_a_token_like_any_other(reference: Reference) -> None:
    """One forward pass would look for its picture; two need not."""
    from conformance.yardstick import cached_logits, full_logits

    prompt = reference._prompt(ask("tiny-qwen3-vl", picture(FOUR), {"text": "What?"}))
    model = load_hf(source("tiny-qwen3-vl").path, torch.float64).module
    placeholder = min(prompt.placeholder_ids)
    tokens = [5, placeholder, 9]
    full = full_logits(model, prompt, tokens)
    model = load_hf(source("tiny-qwen3-vl").path, torch.float64).module
    torch.testing.assert_close(full, cached_logits(model, prompt, tokens), rtol=0, atol=1e-5)


def test_a_picture_that_is_not_there_has_no_truth(reference: Reference) -> None:
    request = ask("tiny-qwen3-vl", {"image": "sha256:" + "0" * 64}, {"text": "What?"})
    with pytest.raises(NoTruth, match="no asset has the content"):
        reference.record(request, "case")
