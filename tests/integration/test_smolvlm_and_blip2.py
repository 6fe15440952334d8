"""SmolVLM and BLIP-2 through the whole engine, against `generate` and a full forward of Transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL.Image import Image
from transformers import AutoModelForImageTextToText

from conformance.hf_processors import load_processor
from minivllm import LLM, SamplingParams
from minivllm.errors import BadMedia
from tests.unit.minivllm.media_prompts import picture

SMOLVLM, BLIP2 = "tiny-smolvlm", "tiny-blip2"
WIDE, FLAT = "wide", "flat"
PICTURES: Mapping[str, Image] = {WIDE: picture(112, 84), FLAT: picture(200, 40, 1)}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


class Case(NamedTuple):
    """A prompt; for BLIP-2 the pictures go before it by themselves."""

    text: str
    names: tuple[str, ...] = ()

    @property
    def pictures(self) -> list[Image]:
        return [PICTURES[name] for name in self.names]


CASES: Mapping[str, tuple[Case, ...]] = {
    SMOLVLM: (
        Case("The engine reads"),
        Case("<image>What is this?", (WIDE,)),
        Case("See <image> and <image>.", (WIDE, FLAT)),
        Case("See <image> and <image>.", (FLAT, WIDE)),
        Case("<image><image>", (FLAT, FLAT)),
    ),
    BLIP2: (
        Case("The engine reads"),
        Case("Question: what is this? Answer:", (WIDE,)),
        Case("They are", (WIDE, FLAT)),
        Case("They are", (FLAT, WIDE)),
        Case("", (FLAT,)),
    ),
}
NAMES = tuple(CASES)

ENGINES: Mapping[str, dict[str, Any]] = {
    "whole": {},
    "chunks that cut crops": {"max_num_batched_tokens": 5, "block_size": 3},
    "bitwise": {"batch_invariant": True, "max_num_batched_tokens": 11, "block_size": 4},
}


class Truth(NamedTuple):
    """What Transformers makes of a case: prompt ids, greedy ids, log-probabilities of every position."""

    prompt_ids: list[int]
    ids: list[int]
    logprobs: torch.Tensor


@cache
def reference(path: Path) -> tuple[Any, Any]:
    hf = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager").eval()
    return hf, load_processor(path)


@cache
def truth(path: Path, case: Case) -> Truth:
    hf, processor = reference(path)
    model, pictures = hf, case.pictures
    if path.name == SMOLVLM:
        inputs = processor(images=[pictures] if pictures else None, text=[case.text], return_tensors="pt")
    elif not pictures:
        inputs, model = processor.tokenizer([case.text], return_tensors="pt"), hf.language_model
    else:
        inputs = processor(images=pictures, text=[case.text], return_tensors="pt")
        # Its processor is for one picture per text, its model is not.
        more = inputs["input_ids"][:, :4].repeat(1, len(pictures) - 1)
        inputs["input_ids"] = torch.cat((more, inputs["input_ids"][:1]), dim=1)
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.inference_mode():
        sequence = model.generate(
            **inputs, max_new_tokens=GREEDY.max_tokens, do_sample=False, eos_token_id=None
        )
        logprobs = torch.log_softmax(model(**inputs).logits[0], dim=-1)
    length = inputs["input_ids"].shape[1]
    return Truth(inputs["input_ids"][0].tolist(), sequence[0, length:].tolist(), logprobs)


def make_llm(path: Path, **options: Any) -> LLM:
    return LLM(str(path), **{"dtype": "float32", "device": "cpu", "num_kv_blocks": 300, **options})


def prompt(case: Case) -> Any:
    return {"prompt": case.text, "multi_modal_data": {"image": case.pictures}}


def ids_of(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_texts_and_pictures_answers_as_transformers(
    checkpoints: Path, name: str, engine: str
) -> None:
    path = checkpoints / name
    outputs = make_llm(path, **ENGINES[engine]).generate([prompt(case) for case in CASES[name]], GREEDY)
    for case, output in zip(CASES[name], outputs, strict=True):
        expected = truth(path, case)
        assert list(output.prompt_token_ids) == expected.prompt_ids
        assert list(output.outputs[0].token_ids) == expected.ids, case.text


@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_of_every_prompt_position_are_those_of_a_full_forward(
    checkpoints: Path, name: str
) -> None:
    path = checkpoints / name
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1)
    llm = make_llm(path, max_num_batched_tokens=9)
    for case, output in zip(
        CASES[name], llm.generate([prompt(case) for case in CASES[name]], sampling), strict=True
    ):
        found = output.prompt_logprobs
        assert found is not None
        expected = truth(path, case).logprobs
        for position in range(1, len(found)):
            entry = found[position]
            assert entry is not None
            row = torch.tensor([entry[token].logprob for token in range(expected.shape[1])])
            torch.testing.assert_close(row, expected[position - 1], rtol=0, atol=2e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_prefix_hit_before_inside_and_after_a_picture_changes_nothing(checkpoints: Path, name: str) -> None:
    path = checkpoints / name
    both, one = CASES[name][2], CASES[name][2]._replace(text=CASES[name][2].text + " Then")
    llm = make_llm(path, block_size=2)
    first = llm.generate([prompt(both)], GREEDY)
    hit = llm.generate([prompt(both), prompt(one)], GREEDY)
    assert ids_of(first) == ids_of(hit[:1]) == [truth(path, both).ids]
    assert ids_of(hit[1:]) == [truth(path, one).ids]
    assert all(output.num_cached_tokens >= 8 for output in hit)
    # The same text around other pictures shares no more than what stands before them.
    (other,) = llm.generate([prompt(CASES[name][3])], GREEDY)
    assert ids_of([other]) == [truth(path, CASES[name][3]).ids]
    assert other.num_cached_tokens < 8


@pytest.mark.parametrize("name", NAMES)
def test_embeddings_supplied_answer_as_the_picture_does(checkpoints: Path, name: str) -> None:
    path = checkpoints / name
    hf, processor = reference(path)
    case = CASES[name][1]
    pixels = processor.image_processor([case.pictures], return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        features = hf.get_image_features(pixels).pooler_output
    rows = torch.cat(list(features)) if name == SMOLVLM else features[0]
    supplied: Any = {"image_embeds": rows, "rows": 2, "cols": 2} if name == SMOLVLM else rows
    given = {"prompt": case.text, "multi_modal_data": {"image_embeds": supplied}}
    assert ids_of(make_llm(path).generate([given], GREEDY)) == [truth(path, case).ids]


@pytest.mark.parametrize("name", NAMES)
def test_ids_that_hold_the_whole_expansion_already_are_taken_as_they_are(
    checkpoints: Path, name: str
) -> None:
    path = checkpoints / name
    case = CASES[name][2]
    given = {
        "prompt_token_ids": truth(path, case).prompt_ids,
        "multi_modal_data": {"image": case.pictures},
    }
    (output,) = make_llm(path).generate([given], GREEDY)
    assert list(output.prompt_token_ids) == truth(path, case).prompt_ids
    assert ids_of([output]) == [truth(path, case).ids]


def test_a_conversation_of_smolvlm_is_its_template_s_prompt(checkpoints: Path) -> None:
    path = checkpoints / SMOLVLM
    content = [
        {"type": "image", "image": PICTURES[WIDE]},
        {"type": "text", "text": "Is <image> a word? "},
        {"type": "image", "image": PICTURES[FLAT]},
    ]
    llm = make_llm(path)
    (output,) = llm.chat([{"role": "user", "content": content}], GREEDY)
    spans = [id_ for id_ in output.prompt_token_ids if id_ == 444]
    assert len(spans) == 20 + 12  # what the user spelt is text
    text = llm.engine.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)  # type: ignore[union-attr]
    assert text.startswith("<|im_start|>User:<fake_token_around_image><row_1_col_1>")
    assert "Is <image> a word? <fake_token_around_image><row_1_col_1>" in text
    assert text.endswith("<end_of_utterance>\nAssistant:")


@pytest.mark.parametrize(
    ("name", "text", "pictures", "message"),
    [
        (SMOLVLM, "No picture here", 1, r"0 image placeholders \(token 444\) for 1 images"),
        (SMOLVLM, "<image><image>", 1, r"2 image placeholders \(token 444\) for 1 images"),
        (SMOLVLM, "<image>", 0, "extra placeholders"),
        (BLIP2, "<image> too many", 2, r"1 image placeholders \(token 444\) for 2 images"),
    ],
)
def test_placeholders_and_pictures_must_be_equally_many(
    checkpoints: Path, name: str, text: str, pictures: int, message: str
) -> None:
    llm = make_llm(checkpoints / name)
    with pytest.raises(BadMedia, match=message):
        llm.generate([prompt(Case(text, (WIDE,) * pictures))], GREEDY)
    assert ids_of(llm.generate([prompt(CASES[name][1])], GREEDY)) == [
        truth(checkpoints / name, CASES[name][1]).ids
    ]
