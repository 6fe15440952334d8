"""tiny-gemma3-vision shows the faults it is for.

Each is planted in our own model or attention, and measured by teacher forcing the tokens that
Transformers generates: how far it moves a logit, as a multiple of the distance between our healthy
model and Transformers, and how many of the greedy tokens it flips. `-s` prints the table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForImageTextToText

from conformance.hf_processors import load_processor
from minivllm.attention import base
from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine
from minivllm.models import gemma3_vision
from minivllm.models.gemma3_vision import Gemma3ForConditionalGeneration, Projector
from minivllm.models.vlm import MediaEmbeddings
from minivllm.request import SamplingParams
from tests.integration.test_sensitivity import CHECKPOINTS
from tests.unit.minivllm.media_prompts import picture

DIRECTORY = CHECKPOINTS / "tiny-gemma3-vision"
PICTURES = (picture(112, 84, 1), picture(84, 120, 2))
PROMPTS = ("one", "two")
MAX_TOKENS = 20


@cache
def truth(name: str) -> tuple[list[int], NDArray[np.float64]]:
    """Ids of prompt and answer, and the float64 logits [20, vocab] that chose the answer."""
    model = AutoModelForImageTextToText.from_pretrained(
        DIRECTORY, attn_implementation="eager", dtype=torch.float64
    ).eval()
    pictures = list(PICTURES[: 1 + (name == "two")])
    text = "<bos>" + " and ".join(["<start_of_image>"] * len(pictures)) + "What is this?"
    inputs = load_processor(DIRECTORY)(
        images=[pictures], text=[text], return_tensors="pt", add_special_tokens=False
    )
    with torch.no_grad():
        out = model.generate(
            **inputs,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
    return out.sequences[0].tolist(), torch.cat(out.logits).double().numpy()


def forced_logits(name: str) -> NDArray[np.float64]:
    """The same logits of our engine, which is given prompt and answer as one prompt."""
    engine = LLMEngine(EngineConfig(model=str(DIRECTORY), num_kv_blocks=64))
    ids, _ = truth(name)
    prompt = {
        "prompt_token_ids": ids,
        "multi_modal_data": {"image": list(PICTURES[: 1 + (name == "two")])},
    }
    engine.add_request("r", prompt, SamplingParams(temperature=0, max_tokens=1), capture=("prompt_logits",))
    while engine.has_unfinished_requests():
        engine.step()
    rows: NDArray[np.float64] = engine.stages("r")["prompt_logits"][len(ids) - MAX_TOKENS - 1 :]
    return rows[:MAX_TOKENS].astype(np.float64)


@cache
def rounding() -> float:
    return max(float(np.abs(forced_logits(name) - truth(name)[1]).max()) for name in PROMPTS)


def measure() -> tuple[float, list[int]]:
    """(largest change of a logit / rounding, flipped tokens per prompt)."""
    change, flips = 0.0, []
    for name in PROMPTS:
        logits, (ids, expected) = forced_logits(name), truth(name)
        change = max(change, float(np.abs(logits - expected).max()))
        flips.append(int((logits.argmax(-1) != np.array(ids[-MAX_TOKENS:])).sum()))
    return change / rounding(), flips


Patch = pytest.MonkeyPatch
ENCODE = Gemma3ForConditionalGeneration.encode
FORWARD = Projector.forward


def causal_among_image_tokens(patch: Patch) -> None:
    patch.setattr(base, "_last_seen", lambda _request: None)


def pictures_see_those_behind_them(patch: Patch) -> None:
    genuine = base._last_seen

    def last_seen(r: Any) -> Any:
        seen = genuine(r)
        return None if seen is None else np.where(seen > np.arange(r.start, r.end), seen.max(), seen)

    patch.setattr(base, "_last_seen", last_seen)


def image_tokens_have_no_window(patch: Patch) -> None:
    """Rows of a picture see all of it on layers with a window, too."""
    genuine = base._Group.mask

    def mask(self: Any, window: int | None) -> Any:
        if window is None or self._last_seen is self._positions:
            return genuine(self, window)
        hidden = self._keys > self._last_seen
        hidden |= (self._keys <= self._positions - window) & (self._last_seen == self._positions)
        return self._backend.mask(hidden, causal=False)

    patch.setattr(base._Group, "mask", mask)


def rows(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Patch], None]:
    def fault(patch: Patch) -> None:
        patch.setattr(
            Gemma3ForConditionalGeneration,
            "encode",
            lambda self, item: MediaEmbeddings(change(ENCODE(self, item).rows)),
        )

    return fault


def scaled_as_words(patch: Patch) -> None:
    rows(lambda r: r * 8)(patch)


def columns_for_rows(patch: Patch) -> None:
    rows(lambda r: r.view(4, 4, -1).transpose(0, 1).reshape(16, -1))(patch)


def last_row_first(patch: Patch) -> None:
    rows(lambda r: r.flip(0))(patch)


def one_row_late(patch: Patch) -> None:
    rows(lambda r: r.roll(1, 0))(patch)


def rows_in_bfloat16(patch: Patch) -> None:
    rows(lambda r: r.bfloat16().float())(patch)


def norm_by_its_weight_alone(patch: Patch) -> None:
    def forward(self: Any, patches: torch.Tensor) -> torch.Tensor:
        weight = self.mm_soft_emb_norm.weight
        weight -= 1
        try:
            return FORWARD(self, patches)
        finally:
            weight += 1

    patch.setattr(Projector, "forward", forward)


def largest_instead_of_mean(patch: Patch) -> None:
    patch.setattr(gemma3_vision.F, "avg_pool2d", torch.nn.functional.max_pool2d)


def no_norm_after_the_tower(patch: Patch) -> None:
    def encode(self: Any, item: Any) -> MediaEmbeddings:
        (patches,) = self.vision(item.data["pixel_values"])
        return MediaEmbeddings(self.multi_modal_projector(patches))

    patch.setattr(Gemma3ForConditionalGeneration, "encode", encode)


def the_layer_before_the_last(patch: Patch) -> None:
    def encode(self: Any, item: Any) -> MediaEmbeddings:
        (patches,) = self.vision(item.data["pixel_values"], (-2,))
        return MediaEmbeddings(self.multi_modal_projector(self.vision.post_layernorm(patches)))

    patch.setattr(Gemma3ForConditionalGeneration, "encode", encode)


def the_first_picture_everywhere(patch: Patch) -> None:
    first: list[MediaEmbeddings] = []

    def encode(self: Any, item: Any) -> MediaEmbeddings:
        first.append(ENCODE(self, item))
        return first[0]

    patch.setattr(Gemma3ForConditionalGeneration, "encode", encode)


#: fault → (least change in roundings, least flipped tokens of 20 on the prompt that shows it)
FAULTS: dict[Callable[[Patch], None], tuple[float, int]] = {
    causal_among_image_tokens: (20_000, 4),
    pictures_see_those_behind_them: (20_000, 4),
    image_tokens_have_no_window: (20_000, 4),
    scaled_as_words: (20_000, 4),
    columns_for_rows: (20_000, 4),
    last_row_first: (20_000, 4),
    one_row_late: (20_000, 4),
    rows_in_bfloat16: (200, 0),
    norm_by_its_weight_alone: (20_000, 4),
    largest_instead_of_mean: (20_000, 4),
    no_norm_after_the_tower: (20_000, 4),
    the_layer_before_the_last: (20_000, 4),
    the_first_picture_everywhere: (20_000, 4),
}


def test_the_healthy_model_is_within_rounding_and_flips_nothing() -> None:
    assert rounding() < 2e-3
    assert measure() == (pytest.approx(1.0), [0, 0])


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_fault_is_told_from_rounding(fault: Callable[[Patch], None], monkeypatch: Patch) -> None:
    rounding()  # measured before anything is damaged
    fault(monkeypatch)
    change, flips = measure()
    print(f"{fault.__name__}: {change:.0f} × rounding, flips {flips}")
    least, flipped = FAULTS[fault]
    assert change >= least
    assert max(flips) >= flipped
