from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import conformance.reference
from conformance.adapters.base import ModelSource
from conformance.canonical import CanonicalError, canonical_request, request_key
from conformance.hf_models import HFModel, load_hf
from conformance.models import resolve_model
from conformance.records import ArmError, GoldenRecord, Yardstick
from conformance.reference import NoTruth, Reference, logit_table
from conformance.store import RecordStore, WrongWeights
from conformance.yardstick import full_logits

SaveTiny = Callable[..., Path]

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1000.0},
    "linear": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 2.0}


def source(path: Path) -> ModelSource:
    return resolve_model(str(path))


def ask(model: str = "tiny-random", **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"prompt": {"token_ids": [5, 9, 11, 30]}, "max_tokens": 6, "ignore_eos": True}
    return canonical_request(**{"model": model, **values, **changes})


@pytest.fixture(scope="module")
def reference(tiny_checkpoint: Path) -> Reference:
    return Reference(source(tiny_checkpoint))


@pytest.fixture(scope="module")
def record(reference: Reference) -> GoldenRecord:
    """A plain record with prompt logits and stages."""
    return reference.record(ask(prompt_logprobs=True), "case", traced=True)


def same(a: GoldenRecord, b: GoldenRecord) -> bool:
    tables = [(a.output, b.output)] + ([(a.prompt, b.prompt)] if a.prompt and b.prompt else [])
    arrays = [
        (getattr(x, f), getattr(y, f)) for x, y in tables for f in ("top_ids", "top_logits", "logsumexp")
    ] + [(a.stages[s], b.stages[s]) for s in a.stages]
    return (
        a.token_ids == b.token_ids
        and a.yardstick == b.yardstick
        and all(np.array_equal(x, y) for x, y in arrays)
    )


def test_ids_are_those_transformers_generates(tiny_checkpoint: Path, record: GoldenRecord) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float64)
    model.generation_config.eos_token_id = None
    ids = torch.tensor([record.prompt_token_ids])
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    assert list(record.token_ids) == wanted[0, 4:].tolist()
    assert record.token_ids == tuple(record.output.top_ids[:, 0].tolist())


def test_numbers_are_the_float64_forward_pass(tiny_checkpoint: Path, record: GoldenRecord) -> None:
    model = transformers.LlamaForCausalLM.from_pretrained(
        tiny_checkpoint, dtype=torch.float64, attn_implementation="eager"
    )
    ids = torch.tensor([[*record.prompt_token_ids, *record.token_ids[:-1]]])
    with torch.no_grad():
        rows = model(ids).logits[0]
    assert record.prompt is not None
    for table, wanted in ((record.output, rows[3:]), (record.prompt, rows[:3])):
        np.testing.assert_allclose(
            table.top_logits, wanted.gather(1, torch.from_numpy(table.top_ids)).numpy(), rtol=0, atol=1e-12
        )
        np.testing.assert_allclose(table.logsumexp, torch.logsumexp(wanted, 1).numpy(), rtol=0, atol=1e-12)
        np.testing.assert_array_equal(table.top_ids, wanted.topk(20).indices.numpy())


def test_a_record_names_its_request_and_where_it_came_from(
    tiny_checkpoint: Path, record: GoldenRecord
) -> None:
    request = ask(prompt_logprobs=True)
    assert (record.request, record.key) == (request, request_key(request))
    assert (record.model, record.case, record.dtype) == ("tiny-random", "case", "float32")
    provenance = record.provenance
    assert provenance["weights_sha256"] == source(tiny_checkpoint).sha256
    assert provenance["transformers"] == transformers.__version__
    assert provenance["torch"] == torch.__version__
    assert provenance["hf_class"] == "LlamaForCausalLM"
    assert not [v for v in provenance.values() if str(tiny_checkpoint.parent) in str(v)]


def test_a_record_can_be_stored_and_read(tmp_path: Path, record: GoldenRecord) -> None:
    RecordStore(tmp_path).save(record, "first")
    assert same(RecordStore(tmp_path).get(record.key), record)


def test_the_yardstick_is_measured_for_every_arm(record: GoldenRecord) -> None:
    assert set(record.yardstick.arms) == {"eager_cached", "eager_full", "sdpa", "eager_rope64"}
    assert 0 < record.yardstick.R <= record.yardstick.M < 1e-3


def test_every_stage_but_the_positions_has_a_band_above_zero(record: GoldenRecord) -> None:
    assert record.stage_bands.keys() == record.stages.keys()
    exact = {name for name, band in record.stage_bands.items() if band.max == 0}
    assert exact == {"positions", "embeddings"}


def test_stages_are_kept_only_when_asked_for(reference: Reference, record: GoldenRecord) -> None:
    plain = reference.record(ask(), "plain")
    assert (plain.stages, plain.stage_bands, plain.prompt) == ({}, {}, None)
    np.testing.assert_allclose(plain.output.top_logits, record.output.top_logits, rtol=0, atol=1e-12)


def count_loads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    loads: list[Any] = []

    def counting(*args: Any) -> HFModel:
        loads.append(args)
        return load_hf(*args)

    monkeypatch.setattr(conformance.reference, "load_hf", counting)
    return loads


@pytest.mark.parametrize("kind", ROPES)
def test_one_model_object_serves_many_cases_with_the_bits_of_a_fresh_one(
    save_tiny: SaveTiny, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny(tmp_path / "tiny", rope_parameters=ROPES[kind])
    first = ask("tiny")
    long = ask("tiny", prompt={"token_ids": [5 + i % 90 for i in range(60)]})  # beyond "original" length
    reused, loads = Reference(source(path)), count_loads(monkeypatch)
    records = [reused.record(r, "case", traced=True) for r in (first, long, first, long)]
    assert len(loads) == 3  # truth, eager, sdpa
    for i, request in enumerate((first, long)):
        fresh = Reference(source(path)).record(request, "case", traced=True)
        assert same(records[i], fresh)
        assert same(records[i + 2], fresh)


def test_a_model_whose_rope_keeps_state_is_loaded_afresh_for_each_use(
    save_tiny: SaveTiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_tiny(tmp_path / "tiny", rope_parameters=DYNAMIC, max_position_embeddings=64)
    loads = count_loads(monkeypatch)
    reference = Reference(source(path))
    record = reference.record(ask("tiny"), "case")
    assert len(loads) >= 6
    assert same(record, reference.record(ask("tiny"), "case"))


def test_dynamic_rope_beyond_its_original_length_has_no_truth(save_tiny: SaveTiny, tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "tiny", rope_parameters=DYNAMIC, max_position_embeddings=64)
    with pytest.raises(NoTruth, match="'dynamic', and 65 tokens exceed its original length 64"):
        Reference(source(path)).record(ask("tiny", max_tokens=61), "case")


def chosen(reference: Reference, position: int) -> int:
    return reference.record(ask(), "case").token_ids[position]


def with_eos(save_tiny: SaveTiny, path: Path, eos: int | list[int]) -> Reference:
    """The same weights, with another end-of-sequence id."""
    save_tiny(path, eos_token_id=eos)
    return Reference(source(path))


def test_the_end_of_sequence_stops_without_a_stop_reason(
    save_tiny: SaveTiny, tmp_path: Path, reference: Reference
) -> None:
    eos = chosen(reference, 2)
    changed = with_eos(save_tiny, tmp_path / "tiny", eos)
    record = changed.record(ask("tiny", ignore_eos=False), "case")
    assert record.token_ids[-1] == eos
    assert len(record.token_ids) == 1 + reference.record(ask(), "case").token_ids.index(eos)
    assert (record.finish_reason, record.stop_reason) == ("stop", None)
    assert f"w{eos - 5}" not in record.text.split()


def test_ignore_eos_goes_on_to_max_tokens(save_tiny: SaveTiny, tmp_path: Path, reference: Reference) -> None:
    changed = with_eos(save_tiny, tmp_path / "tiny", chosen(reference, 2))
    record = changed.record(ask("tiny"), "case")
    assert (len(record.token_ids), record.finish_reason, record.stop_reason) == (6, "length", None)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_stop_token_is_the_stop_reason_even_when_eos_is_ignored(
    reference: Reference, ignore_eos: bool
) -> None:
    stop = chosen(reference, 1)
    record = reference.record(ask(stop_token_ids=[stop], ignore_eos=ignore_eos), "case")
    assert record.token_ids[-1] == stop
    assert (record.finish_reason, record.stop_reason) == ("stop", stop)


def test_an_id_that_is_both_eos_and_stop_token_ends_as_eos(
    save_tiny: SaveTiny, tmp_path: Path, reference: Reference
) -> None:
    both = chosen(reference, 2)
    changed = with_eos(save_tiny, tmp_path / "tiny", [both, 2])
    record = changed.record(ask("tiny", ignore_eos=False, stop_token_ids=[both]), "case")
    assert (record.finish_reason, record.stop_reason) == ("stop", None)


def test_text_leaves_out_special_tokens_and_the_token_that_stopped(reference: Reference) -> None:
    record = reference.record(ask(), "case")
    words = [f"w{t - 5}" for t in record.token_ids if t > 2 and t >= 5]
    assert record.text.split() == words
    stopped = reference.record(ask(stop_token_ids=[record.token_ids[-1]]), "case")
    assert len(stopped.text.split()) < len(words) or stopped.token_ids[-1] < 5


def test_text_and_chat_prompts_become_ids(reference: Reference) -> None:
    text = reference.record(ask(prompt={"text": "w0 w3"}), "case")
    chat = reference.record(ask(prompt={"chat": [{"text": "w0 w3"}]}), "case")
    assert (text.prompt_token_ids, chat.prompt_token_ids) == ((1, 5, 8), (1, 3, 5, 8, 4))


def test_pad_ids_inside_a_prompt_are_tokens_like_any_other(
    tiny_checkpoint: Path, reference: Reference
) -> None:
    prompt = [5, 0, 0, 30]
    record = reference.record(ask(prompt={"token_ids": prompt}), "case")
    rows = full_logits(load_hf(tiny_checkpoint, torch.float64).module, prompt, record.token_ids)
    assert rows.argmax(dim=1).tolist() == list(record.token_ids)
    assert record.token_ids != reference.record(ask(prompt={"token_ids": [5, 30]}), "case").token_ids


def test_sampling_defaults_of_the_checkpoint_do_not_touch_the_truth(
    save_tiny: SaveTiny, tmp_path: Path, reference: Reference
) -> None:
    path = save_tiny(tmp_path / "tiny")
    transformers.GenerationConfig(repetition_penalty=9.0, bad_words_ids=[[40]]).save_pretrained(path)
    wanted = reference.record(ask(max_tokens=12), "case").token_ids
    assert Reference(source(path)).record(ask("tiny", max_tokens=12), "case").token_ids == wanted


def test_the_bfloat16_truth_is_float64_on_rounded_weights(
    tiny_checkpoint: Path, reference: Reference
) -> None:
    record = reference.record(ask(dtype="bfloat16"), "case")
    model = load_hf(tiny_checkpoint, torch.float64).module
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    rows = full_logits(model, record.prompt_token_ids, record.token_ids)
    wanted = rows.gather(1, torch.from_numpy(record.output.top_ids)).numpy()
    np.testing.assert_array_equal(record.output.top_logits, wanted)
    assert 1e-3 < record.yardstick.R < record.yardstick.M
    assert record.provenance["truth"] == "float64 on weights rounded to bfloat16"


def test_going_back_and_forth_between_dtypes_changes_nothing(reference: Reference) -> None:
    before = reference.record(ask(), "case")
    reference.record(ask(dtype="bfloat16"), "case")
    assert same(reference.record(ask(), "case"), before)


def test_a_generate_that_contradicts_the_forward_pass_is_refused(
    reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate = Reference._generate

    def wrong(self: Reference, *args: Any) -> Any:
        tokens, reason, stopped = generate(self, *args)
        return (*tokens[:-1], (tokens[-1] + 1) % 96), reason, stopped

    monkeypatch.setattr(Reference, "_generate", wrong)
    with pytest.raises(NoTruth, match="at generated position 5, one forced forward pass chooses"):
        reference.record(ask(), "case")


def test_a_request_for_another_model_is_refused(reference: Reference) -> None:
    with pytest.raises(CanonicalError, match="'other', this reference is about 'tiny-random'"):
        reference.record(ask("other"), "case")


def test_an_unknown_field_is_refused(reference: Reference) -> None:
    with pytest.raises(CanonicalError, match="unknown field 'temperature'"):
        reference.record({**ask(), "temperature": 0.0}, "case")


def verdicts(reference: Reference, record: GoldenRecord) -> dict[str, str]:
    return {s.stage: s.verdict for s in reference.verify(record)}


def test_verify_finds_an_unchanged_record_the_same_in_every_stage(
    reference: Reference, record: GoldenRecord
) -> None:
    found = verdicts(reference, record)
    assert set(found) == {"prompt_ids", "prompt_logits", "output_logits", "token_ids", *record.stages}
    assert set(found.values()) == {"same"}


def test_verify_tells_rounding_from_change(reference: Reference, record: GoldenRecord) -> None:
    def shifted(by: float) -> GoldenRecord:
        logits = record.output.top_logits.copy()
        logits[2, 1] += by
        return replace(record, output=replace(record.output, top_logits=logits))

    assert verdicts(reference, shifted(record.yardstick.R))["output_logits"] == "inside band"
    found = verdicts(reference, shifted(2 * record.yardstick.M))
    assert found.pop("output_logits") == "changed"
    assert set(found.values()) == {"same"}


def test_verify_judges_logsumexp_too(reference: Reference, record: GoldenRecord) -> None:
    odd = replace(record, output=replace(record.output, logsumexp=record.output.logsumexp + 0.01))
    assert verdicts(reference, odd)["output_logits"] == "changed"


def test_verify_names_the_stage_that_changed(reference: Reference, record: GoldenRecord) -> None:
    stages = dict(record.stages) | {"hidden.1": record.stages["hidden.1"] * np.float32(1.01)}
    found = verdicts(reference, replace(record, stages=stages))
    assert [stage for stage, verdict in found.items() if verdict == "changed"] == ["hidden.1"]


def test_verify_sees_token_ids_the_model_would_not_choose(reference: Reference, record: GoldenRecord) -> None:
    wrong = (*record.token_ids[:-1], int(record.output.top_ids[-1, 5]))
    assert verdicts(reference, replace(record, token_ids=wrong))["token_ids"] == "changed"


def test_verify_sees_a_tokenizer_that_changed(save_tiny: SaveTiny, tmp_path: Path) -> None:
    path = save_tiny(tmp_path / "tiny")
    record = Reference(source(path)).record(ask("tiny", prompt={"text": "w0 w3"}), "case")
    file = path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["post_processor"] = None
    file.write_text(json.dumps(content))
    found = verdicts(Reference(source(path)), record)
    assert found.pop("prompt_ids") == "changed"
    assert set(found.values()) == {"same"}


def test_verify_refuses_other_weights(save_tiny: SaveTiny, tmp_path: Path, record: GoldenRecord) -> None:
    other = Reference(source(save_tiny(tmp_path / "tiny-random", initializer_range=0.3)))
    with pytest.raises(WrongWeights, match="recorded for other weights"):
        other.verify(record)


def test_verify_uses_the_rounded_weights_of_a_bfloat16_record(reference: Reference) -> None:
    record = reference.record(ask(dtype="bfloat16"), "case")
    assert set(verdicts(reference, record).values()) == {"same"}
    wide = replace(record, dtype="float32", yardstick=Yardstick({"sdpa": ArmError(1e-6, 1e-6)}))
    assert verdicts(reference, wide)["output_logits"] == "changed"


def test_top_ids_come_in_order_and_equal_logits_by_id() -> None:
    rows = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]], dtype=torch.float64)
    table = logit_table(rows, top=4)
    assert table.top_ids.tolist() == [[1, 3, 2, 4]]
    assert table.top_logits.tolist() == [[3.0, 3.0, 2.0, 2.0]]
    assert table.logsumexp == pytest.approx(torch.logsumexp(rows, 1).numpy())


def test_a_vocabulary_smaller_than_the_table_is_kept_whole() -> None:
    assert logit_table(torch.zeros(2, 3, dtype=torch.float64)).top_ids.tolist() == [[0, 1, 2]] * 2
