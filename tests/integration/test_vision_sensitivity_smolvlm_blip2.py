"""The SmolVLM and BLIP-2 checkpoints show the faults they are for.

Each fault is planted in our own model or processor, and measured by teacher forcing the tokens that
Transformers generates: how far it moves a logit, as a multiple of the distance between our healthy
model and Transformers, and how many of the greedy tokens it flips. `-s` prints the table. A fault of
the expansion shows in the prompt's ids too, before any logit.

Crops of zeros, which pad a shorter picture beside a longer one in Transformers, do not exist in our
engine; the fault that keeps them is planted all the same, as rows that begin too late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from conformance.hf_processors import load_processor
from conformance.paths import data_root
from conformance.recipes.build import MECHANICS, make_model
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import MediaEmbeddings, VisionLanguageModel, load_model, opt, smolvlm
from minivllm.models.modules import Activation
from minivllm.models.vision import blip2, qformer
from minivllm.models.vision.siglip import SiglipTower
from minivllm.multimodal import MULTIMODAL, MultiModalProcessor
from minivllm.multimodal import smolvlm as expansion
from minivllm.tokenizer import Tokenizer, load_tokenizer
from tests.unit.minivllm.media_prompts import Placed, picture, place, prompt_logits

CHECKPOINTS = data_root() / "golden" / "checkpoints"
SMOLVLM, IDEFICS3, BLIP2 = "tiny-smolvlm", "tiny-idefics3", "tiny-blip2"
#: tiny-smolvlm with positions for pictures of 84 × 84, over which the crops of 56 × 56 spread.
SPREAD = "tiny-smolvlm-spread"
MAX_TOKENS = 12

#: Pictures that no checkpoint's seed was chosen by; "*" is one. BLIP-2 has them before the text.
WIDE, FLAT = (140, 84, 11), (200, 60, 12)
PROMPTS: dict[str, tuple[str, list[tuple[int, int, int]]]] = {
    "wide": ("What does * show?", [WIDE]),
    "flat": ("What does * show?", [FLAT]),
    "two": ("Compare * with *, please.", [FLAT, WIDE]),
}


@dataclass(frozen=True)
class Case:
    """A prompt with the tokens that Transformers generates, and its logits for them."""

    prompt_ids: list[int]
    answer: list[int]
    logits: Tensor


@cache
def path_of(name: str) -> Path:
    return CHECKPOINTS / (SMOLVLM if name == SPREAD else name)


@pytest.fixture(scope="module", autouse=True)
def spread_out(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Builds SPREAD, which is not worth committing."""
    recipe = MECHANICS[SMOLVLM]
    assert recipe.vision is not None
    vision = replace(recipe.vision, vision_config={**recipe.vision.vision_config, "image_size": 84})
    directory = tmp_path_factory.mktemp(SPREAD)
    make_model(replace(recipe, vision=vision)).save_pretrained(directory)
    _WEIGHTS[SPREAD] = directory


_WEIGHTS: dict[str, Path] = {}


@cache
def parts(name: str) -> tuple[VisionLanguageModel, MultiModalProcessor, Tokenizer]:
    """Shared between tests: faults change them through monkeypatch only."""
    model = load_model(_WEIGHTS.get(name, path_of(name)), dtype=torch.float32, device="cpu", ops=TorchOps())
    assert isinstance(model, VisionLanguageModel)
    tokenizer = load_tokenizer(path_of(name))
    assert tokenizer is not None
    family = MULTIMODAL.get(model.config.architecture)
    return model, family(path_of(name), model.config, tokenizer, {}), tokenizer


def placed(name: str, what: str) -> Placed:
    """Our expansion of a prompt."""
    _, processor, tokenizer = parts(name)
    text, sizes = PROMPTS[what]
    made = processor.expand("image", [picture(*size) for size in sizes], {})
    if name == BLIP2:
        return place([*made, tokenizer.encode(text.replace("*", "it"))])
    token = processor.placeholder_ids["image"]
    expansions = iter(made)
    ids = tokenizer.encode(text.replace("*", "<image>"))
    return place([next(expansions) if i == token else [i] for i in ids])


@cache
def cases(name: str) -> dict[str, Case]:
    hf = AutoModelForImageTextToText.from_pretrained(
        _WEIGHTS.get(name, path_of(name)), attn_implementation="eager"
    ).eval()
    processor = load_processor(path_of(name))
    found = {}
    for what, (text, sizes) in PROMPTS.items():
        pictures = [picture(*size) for size in sizes]
        if name == BLIP2:
            inputs = processor(images=pictures, text=[text.replace("*", "it")], return_tensors="pt")
            more = inputs["input_ids"][:, :4].repeat(1, len(pictures) - 1)
            inputs["input_ids"] = torch.cat((more, inputs["input_ids"][:1]), dim=1)
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        else:
            inputs = processor(images=[pictures], text=[text.replace("*", "<image>")], return_tensors="pt")
        out = hf.generate(
            **inputs,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        prompt_ids = inputs["input_ids"][0].tolist()
        answer = out.sequences[0, len(prompt_ids) :].tolist()
        found[what] = Case(prompt_ids, answer, torch.cat(out.logits))
    return found


#: Faults of what happens between encoder and decoder replace this.
Encode = Callable[[Placed], dict[str, MediaEmbeddings]]


@torch.inference_mode()
def forced(name: str, prompt: Placed, answer: Sequence[int], encode: Encode | None = None) -> Tensor:
    """[answer, vocab] logits for the answer's tokens."""
    whole = prompt._replace(token_ids=[*prompt.token_ids, *answer])
    encoded = encode(prompt) if encode else None
    return prompt_logits(parts(name)[0], whole, None, encoded=encoded)[len(prompt.token_ids) - 1 : -1]


@cache
def rounding(name: str) -> float:
    """Largest distance of our healthy model from Transformers, which flips nothing."""
    largest = 0.0
    for what, case in cases(name).items():
        prompt = placed(name, what)
        assert prompt.token_ids == case.prompt_ids
        logits = forced(name, prompt, case.answer)
        assert logits.argmax(-1).tolist() == case.answer, what
        largest = max(largest, (logits - case.logits).abs().max().item())
    return largest


# --- faults: each returns an `Encode` if it needs one ------------------------------------------------

Fault = Callable[[str, pytest.MonkeyPatch], "Encode | None"]


def modules_of(module: Any) -> dict[str, Any]:
    """Its parts by name; as attributes, monkeypatch would not put them back."""
    found: dict[str, Any] = module._modules
    return found


def blocks_in_columns(name: str, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """What is put together comes out column by column (InternVL issues 927 and 962)."""
    healthy = smolvlm.pixel_shuffle
    patch.setattr(smolvlm, "pixel_shuffle", lambda x, factor: healthy(x, factor).transpose(1, 2))


def neighbours_in_columns(name: str, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Inside a row, the neighbours come column by column."""
    healthy = smolvlm.pixel_shuffle
    patch.setattr(
        smolvlm, "pixel_shuffle", lambda x, factor: healthy(x.transpose(1, 2), factor).transpose(1, 2)
    )


def four_patches_of_a_line(name: str, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """A flat reshape merges along a line."""
    patch.setattr(
        smolvlm, "pixel_shuffle", lambda x, factor: x.reshape(len(x), 2, 2, factor * factor * x.shape[-1])
    )


def positions_counted(name: str, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Patch i takes position i, as if the crop were as large as the table."""
    patch.setattr(smolvlm, "position_ids", lambda high, wide, grid: torch.arange(high * wide))  # noqa: ARG005


def positions_in_rows_of_the_crop(name: str, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Patches take the corner of the table instead of spreading over it."""

    def corner(high: int, wide: int, grid: int) -> Tensor:
        return (torch.arange(high)[:, None] * grid + torch.arange(wide)).flatten()

    patch.setattr(smolvlm, "position_ids", corner)


def no_last_norm(name: str, patch: pytest.MonkeyPatch) -> None:
    """As LLaVA-OneVision takes SigLIP: before its last norm."""
    patch.setitem(modules_of(parts(name)[0].vision), "post_layernorm", nn.Identity())


def another_activation(name: str, patch: pytest.MonkeyPatch) -> None:
    tower = parts(name)[0].vision
    assert isinstance(tower, SiglipTower | blip2.Blip2Tower)
    for layer in tower.encoder.layers:
        patch.setitem(modules_of(layer.mlp), "act", Activation("quick_gelu", ops=TorchOps()))


def whole_picture_first(name: str, patch: pytest.MonkeyPatch) -> Encode:  # noqa: ARG001
    """The whole picture's rows before its crops', where the prompt has them last."""

    def encode(prompt: Placed) -> dict[str, MediaEmbeddings]:
        return {
            key: MediaEmbeddings(parts(name)[0].encode(item).rows.roll(4, 0))
            for key, item in prompt.items.items()
        }

    return encode


def every_run_starts_at_row_0(name: str, patch: pytest.MonkeyPatch) -> Encode:  # noqa: ARG001
    """Each crop's tokens take the first crop's rows."""

    def encode(prompt: Placed) -> dict[str, MediaEmbeddings]:
        found = {}
        for key, item in prompt.items.items():
            rows = parts(name)[0].encode(item).rows
            found[key] = MediaEmbeddings(rows[:4].repeat(len(rows) // 4, 1))
        return found

    return encode


def crops_of_zeros_kept(name: str, patch: pytest.MonkeyPatch) -> Encode:  # noqa: ARG001
    """A picture with fewer crops is padded, and the rows of the padding are dealt out too."""

    def encode(prompt: Placed) -> dict[str, MediaEmbeddings]:
        longest = max(len(item.data["pixel_values"]) for item in prompt.items.values())
        dealt = []
        for item in prompt.items.values():
            pixels = item.data["pixel_values"]
            zeros = pixels.new_zeros(longest - len(pixels), *pixels.shape[1:])
            padded = replace(item, data={"pixel_values": torch.cat((pixels, zeros))})
            dealt.append(parts(name)[0].encode(padded).rows)
        rows, start, found = torch.cat(dealt), 0, {}
        for key, item in prompt.items.items():
            found[key] = MediaEmbeddings(rows[start : start + item.num_embeddings])
            start += item.num_embeddings
        return found

    return encode


def pictures_swapped(name: str, patch: pytest.MonkeyPatch) -> Encode:  # noqa: ARG001
    """Rows dealt out in the wrong order of pictures (mlx-vlm pull request 377)."""

    def encode(prompt: Placed) -> dict[str, MediaEmbeddings]:
        items = list(prompt.items.items())
        rows = torch.cat([parts(name)[0].encode(item).rows for _, item in reversed(items)])
        counts = [item.num_embeddings for _, item in items]
        return {key: MediaEmbeddings(part) for (key, _), part in zip(items, rows.split(counts), strict=True)}

    return encode


def resized_in_one_step(name: str, patch: pytest.MonkeyPatch) -> None:
    """To whole crops at once, without the step to the longest edge (llama.cpp issue 16776)."""
    images = parts(name)[1]._images  # type: ignore[attr-defined]

    def resize(image: Any, size: Any, resample: Any = None, **_: Any) -> Any:
        if size.longest_edge:
            return image
        return type(images.hf).resize(images.hf, image, size, resample)

    def no_longer_than(image: Any, side: int, resample: Any = None) -> Any:
        high, wide = image.shape[-2:]
        scale = 2 * side / max(high, wide)
        target = type(next_size())(
            height=-(-round(high * scale) // side) * side, width=-(-round(wide * scale) // side) * side
        )
        return resize(image, target, resample)

    def next_size() -> Any:
        from transformers.image_utils import SizeDict

        return SizeDict(height=1, width=1)

    patch.setattr(images.hf, "resize", resize)
    patch.setattr(images.hf, "resize_for_vision_encoder", no_longer_than)


def rows_and_columns_swapped(name: str, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """The names of crops: `<row_2_col_1>` for the one at the right."""
    healthy = expansion.placeholder_text

    def swapped(rows: int, columns: int, per_crop: int) -> str:
        text = healthy(rows, columns, per_crop).replace("<row_1_col_2>", "<there>")
        return text.replace("<row_2_col_1>", "<row_1_col_2>").replace("<there>", "<row_2_col_1>")

    patch.setattr(expansion, "placeholder_text", swapped)


def no_names_of_crops(name: str, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    healthy = expansion.placeholder_text

    def plain(rows: int, columns: int, per_crop: int) -> str:
        text = healthy(rows, columns, per_crop)
        for row in (1, 2):
            for column in (1, 2):
                text = text.replace(f"<row_{row}_col_{column}>", "")
        return text

    patch.setattr(expansion, "placeholder_text", plain)


def no_line_ends(name: str, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    healthy = expansion.placeholder_text
    patch.setattr(
        expansion, "placeholder_text", lambda rows, columns, n: healthy(rows, columns, n).replace("\n", "")
    )


def looks_in_the_first_layer_only(name: str, patch: pytest.MonkeyPatch) -> None:
    """Cross-attention in every third layer instead of every second."""
    patch.setitem(modules_of(parts(name)[0].qformer.encoder.layer[2]), "crossattention", None)


def looks_before_it_mixes(name: str, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Cross-attention before self-attention."""

    def forward(self: Any, x: Tensor, seen: Tensor) -> Tensor:
        if self.crossattention is not None:
            x = self.crossattention(x, seen)
        x = self.attention(x, x)
        mixed: Tensor = self.output_query(self.intermediate_query(x), x)
        return mixed

    patch.setattr(qformer.Layer, "forward", forward)


def norm_before_the_residual(name: str, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    patch.setattr(
        qformer.AddNorm, "forward", lambda self, x, residual: self.LayerNorm(self.dense(x)) + residual
    )


def queries_not_normed(name: str, patch: pytest.MonkeyPatch) -> None:
    patch.setitem(modules_of(parts(name)[0].qformer), "layernorm", nn.Identity())


def no_class_token(name: str, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """The Q-Former sees the patches only."""
    healthy = blip2.Blip2Tower.forward
    patch.setattr(blip2.Blip2Tower, "forward", lambda self, pixels: healthy(self, pixels)[:, 1:])


def keys_and_values_swapped(name: str, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """The thirds of the fused matrix taken in another order."""
    healthy = blip2.attend
    patch.setattr(blip2, "attend", lambda q, k, v, scale, **more: healthy(q, v, k, scale, **more))


def positions_without_offset(name: str, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Position p at row p of OPT's table, not p + 2."""
    patch.setattr(opt, "_POSITION_OFFSET", 0)


def text_counted_from_its_own_start(name: str, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """BOS at position 0, as if pictures had none."""
    healthy = opt.OPTForCausalLM.forward

    def forward(self: Any, hidden: Tensor, positions: Tensor, *more: Any) -> Tensor:
        return healthy(self, hidden, (positions - 4).clamp(min=0), *more)

    patch.setattr(opt.OPTForCausalLM, "forward", forward)


def gelu_in_the_decoder(name: str, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(parts(name)[0].ops, "relu", parts(name)[0].ops.gelu, raising=False)


#: Fault → models, prompts it touches, least change in multiples of rounding, least flips in those
#: prompts together, whether the prompt's ids change.
ONE_EACH, EVERY, TWO = ("wide", "flat"), tuple(PROMPTS), ("two",)
FAULTS: dict[Fault, tuple[tuple[str, ...], tuple[str, ...], int, int, bool]] = {
    blocks_in_columns: ((SMOLVLM, IDEFICS3), EVERY, 10_000, 10, False),
    neighbours_in_columns: ((SMOLVLM, IDEFICS3), EVERY, 10_000, 10, False),
    four_patches_of_a_line: ((SMOLVLM,), EVERY, 10_000, 10, False),
    positions_counted: ((SPREAD,), EVERY, 10_000, 10, False),
    positions_in_rows_of_the_crop: ((SPREAD,), EVERY, 10_000, 10, False),
    no_last_norm: ((SMOLVLM, IDEFICS3, BLIP2), EVERY, 10_000, 10, False),
    another_activation: ((SMOLVLM, IDEFICS3, BLIP2), EVERY, 1_000, 0, False),
    whole_picture_first: ((SMOLVLM,), EVERY, 10_000, 10, False),
    every_run_starts_at_row_0: ((SMOLVLM,), EVERY, 10_000, 10, False),
    crops_of_zeros_kept: ((SMOLVLM, IDEFICS3), TWO, 10_000, 5, False),
    pictures_swapped: ((SMOLVLM, IDEFICS3, BLIP2), TWO, 10_000, 1, False),
    resized_in_one_step: ((SMOLVLM,), EVERY, 10_000, 10, False),
    rows_and_columns_swapped: ((SMOLVLM, IDEFICS3), EVERY, 10_000, 10, True),
    no_names_of_crops: ((SMOLVLM, IDEFICS3), EVERY, 10_000, 10, True),
    no_line_ends: ((SMOLVLM, IDEFICS3), EVERY, 10_000, 10, True),
    looks_in_the_first_layer_only: ((BLIP2,), EVERY, 10_000, 10, False),
    looks_before_it_mixes: ((BLIP2,), EVERY, 10_000, 10, False),
    norm_before_the_residual: ((BLIP2,), EVERY, 10_000, 10, False),
    queries_not_normed: ((BLIP2,), EVERY, 10_000, 5, False),
    no_class_token: ((BLIP2,), EVERY, 10_000, 5, False),
    keys_and_values_swapped: ((BLIP2,), EVERY, 10_000, 10, False),
    positions_without_offset: ((BLIP2,), EVERY, 10_000, 10, False),
    text_counted_from_its_own_start: ((BLIP2,), ONE_EACH, 10_000, 10, False),
    gelu_in_the_decoder: ((BLIP2,), EVERY, 10_000, 5, False),
}


@pytest.mark.parametrize("name", [SMOLVLM, SPREAD, IDEFICS3, BLIP2])
def test_the_healthy_model_is_that_of_transformers(name: str) -> None:
    assert 0 < rounding(name) < 2e-3


@pytest.mark.parametrize(
    ("fault", "name"), [(fault, name) for fault, row in FAULTS.items() for name in row[0]]
)
def test_a_fault_moves_logits_and_tokens(fault: Fault, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, touched, least_change, least_flips, ids_change = FAULTS[fault]
    smallest, found = rounding(name), cases(name)
    encode = fault(name, monkeypatch)
    change, flips = 0.0, {}
    for what in touched:
        case, prompt = found[what], placed(name, what)
        assert (prompt.token_ids != case.prompt_ids) == ids_change
        logits = forced(name, prompt, case.answer, encode)
        change = max(change, (logits - case.logits).abs().max().item() / smallest)
        flips[what] = int((logits.argmax(-1) != torch.tensor(case.answer)).sum())
    seen_in = " (ids differ)" if ids_change else ""
    print(f"{fault.__name__:34} {name:20} logits {change:8.0f} × rounding, of {MAX_TOKENS}: {flips}{seen_in}")
    assert change >= least_change
    assert sum(flips.values()) >= least_flips
