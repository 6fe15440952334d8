"""The LLaVA, LLaVA-OneVision and InternVL checkpoints show the faults they are for.

Each fault is planted in our own model or processor, and measured by teacher forcing the tokens that
Transformers generates: how far it moves a logit, as a multiple of the distance between our healthy
model and Transformers, and how many of the 24 greedy tokens it flips. `-s` prints the table. Faults
that change how many placeholders a picture has are caught before any logit: by their number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from conformance.hf_processors import load_processor
from conformance.paths import data_root
from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import MediaEmbeddings, VisionLanguageModel, internvl, llava_onevision, load_model
from minivllm.models.vision import vit
from minivllm.models.vision.clip import CLIPTower
from minivllm.models.vision.internvit import InternViT
from minivllm.multimodal import MULTIMODAL, MultiModalProcessor
from minivllm.request import MediaItem, SamplingParams
from minivllm.tokenizer import Tokenizer, load_tokenizer
from tests.unit.minivllm.media_prompts import Placed, picture, place, prompt_logits

CHECKPOINTS = data_root() / "golden" / "checkpoints"
LLAVA, ONEVISION, INTERNVL = ALL = ("tiny-llava", "tiny-llava-onevision", "tiny-internvl")
MAX_TOKENS = 24

#: Pictures that no checkpoint's seed was chosen by; "*" is one.
WIDE, HIGH, LARGE = (140, 84, 11), (84, 168, 12), (200, 190, 13)
PROMPTS: dict[str, tuple[str, list[tuple[int, int, int]]]] = {
    "wide": ("What does * show?", [WIDE]),
    "high": ("What does * show?", [HIGH]),
    "large": ("What does * show?", [LARGE]),
    "two": ("Compare * with *, please.", [WIDE, HIGH]),
}
ONE, EVERY = ("wide", "high", "large"), tuple(PROMPTS)


@dataclass(frozen=True)
class Case:
    """A prompt with the 24 tokens that Transformers generates, and its logits for them."""

    placed: Placed
    num_prompt: int
    logits: Tensor


@cache
def parts(name: str) -> tuple[VisionLanguageModel, MultiModalProcessor, Tokenizer]:
    """Shared between tests: faults change them through monkeypatch only."""
    path = CHECKPOINTS / name
    model = load_model(path, dtype=torch.float32, device="cpu", ops=TorchOps())
    assert isinstance(model, VisionLanguageModel)
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    return model, MULTIMODAL.get(model.config.architecture)(path, model.config, tokenizer, {}), tokenizer


def placed(name: str, what: str) -> Placed:
    """Our expansion of a prompt."""
    _, processor, tokenizer = parts(name)
    text, sizes = PROMPTS[what]
    token = processor.placeholder_ids["image"]
    ids = tokenizer.encode(text.replace("*", tokenizer.token_text(token)))
    expansions = iter(processor.expand("image", [picture(*size) for size in sizes], {}))
    return place([next(expansions) if i == token else [i] for i in ids])


@cache
def cases(name: str) -> dict[str, Case]:
    path = CHECKPOINTS / name
    hf = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager").eval()
    processor = load_processor(path)
    _, ours, tokenizer = parts(name)
    found = {}
    for what, (text, sizes) in PROMPTS.items():
        spelt = text.replace("*", tokenizer.token_text(ours.placeholder_ids["image"]))
        pictures = [picture(*size) for size in sizes]
        inputs = processor(text=[spelt], images=[pictures], return_tensors="pt")
        prompt = placed(name, what)
        assert prompt.token_ids == inputs["input_ids"][0].tolist()
        out = hf.generate(
            **inputs,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
        )
        whole = prompt._replace(token_ids=out.sequences[0].tolist())
        found[what] = Case(whole, len(prompt.token_ids), torch.cat(out.logits))
    return found


@torch.inference_mode()
def forced(name: str, case: Case) -> Tensor:
    """[24, vocab] logits for the generated tokens."""
    return prompt_logits(parts(name)[0], case.placed, None)[case.num_prompt - 1 : -1]


@cache
def rounding(name: str) -> float:
    """Largest distance of our healthy model from Transformers, which flips nothing."""
    largest = 0.0
    for what, case in cases(name).items():
        logits = forced(name, case)
        assert logits.argmax(-1).tolist() == case.placed.token_ids[case.num_prompt :], what
        largest = max(largest, (logits - case.logits).abs().max().item())
    return largest


# --- faults ------------------------------------------------------------------------------------------

Fault = Callable[[VisionLanguageModel, pytest.MonkeyPatch], None]


def last_layer_read(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    """The tower's last layer for the one before it."""
    features: Any = model._features  # type: ignore[attr-defined]
    patch.setattr(model, "_features", replace(features, feature_layers=(features.tower.num_hidden_layers,)))


def first_layer_read(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    """One layer too early."""
    features: Any = model._features  # type: ignore[attr-defined]
    if isinstance(features, internvl.InternVLVision):
        patch.setattr(model, "_features", replace(features, feature_layer=-2))
    else:
        layers = tuple(layer - 1 for layer in features.feature_layers)
        patch.setattr(model, "_features", replace(features, feature_layers=layers))


def final_norm_applied(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    """The norm of the pooled output applied to the features."""
    tower: Any = model.vision
    healthy = type(tower).forward

    def forward(self: Any, *args: Any, **kw: Any) -> list[Tensor]:
        return [self.post_layernorm(state) for state in healthy(self, *args, **kw)]

    patch.setattr(type(tower), "forward", forward)


def norm_before_layers_dropped(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model.vision.pre_layrnorm, "forward", lambda x: x)  # type: ignore[union-attr]


def class_token_kept_for_the_last_patch(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """As many rows, one place off: the class token was not dropped, the last patch is."""
    for tower in (CLIPTower, InternViT):
        healthy = tower.forward

        def forward(self: Any, *args: Any, _healthy: Any = healthy, **kw: Any) -> list[Tensor]:
            # What follows drops the first row.
            return [state.roll(1, 1) for state in _healthy(self, *args, **kw)]

        patch.setattr(tower, "forward", forward)


def positions_of_patches_transposed(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    """Columns for rows."""
    embeddings: Any = model.vision.embeddings  # type: ignore[union-attr]
    table = (
        embeddings.position_embeddings
        if isinstance(model.vision, InternViT)
        else embeddings.position_embedding.weight
    )
    rows = table.data.view(-1, 64)
    head = len(rows) - 16
    turned = rows[head:].view(4, 4, 64).transpose(0, 1).reshape(16, 64)
    patch.setattr(table, "data", torch.cat((rows[:head], turned)).view(table.shape))


def channels_reversed(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Blue for red."""
    healthy = vit.PatchEmbedding.forward
    patch.setattr(vit.PatchEmbedding, "forward", lambda self, pixels: healthy(self, pixels.flip(1)))


def other_gelu_in_the_tower(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    """gelu for quick_gelu, the tanh approximation for gelu and the other way round."""
    other = {"quick_gelu": "gelu", "gelu": "gelu_tanh", "gelu_tanh": "gelu"}
    for module in model.vision.modules():  # type: ignore[union-attr]
        if isinstance(module, vit.MLP):
            patch.setattr(module.act, "_operation", other[module.act._operation])


def blank(parameter: Any, patch: pytest.MonkeyPatch, value: float = 0.0) -> None:
    patch.setattr(parameter, "data", torch.full_like(parameter.data, value))


def tower_biases_dropped(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    for module in model.vision.modules():  # type: ignore[union-attr]
        if isinstance(module, nn.Module) and hasattr(module, "q_proj"):
            for projection in (module.q_proj, module.k_proj, module.v_proj):
                blank(projection.bias, patch)


def projector_bias_dropped(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    blank(model.multi_modal_projector.linear_2.bias, patch)  # type: ignore[union-attr]


def layer_scale_ignored(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    for layer in model.vision.encoder.layer:  # type: ignore[union-attr]
        for name in ("lambda_1", "lambda_2"):
            blank(getattr(layer, name), patch, 1.0)


def projector_norm_dropped(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model.multi_modal_projector.layer_norm, "forward", lambda x: x)  # type: ignore[union-attr]


def shuffle_transposed(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Rows and columns of the shuffled features not swapped back (InternVL issue 927)."""
    patch.setattr(internvl, "pixel_shuffle", lambda x, n: vit.pixel_shuffle(x, n).transpose(1, 2))


def shuffle_along_a_line(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Four neighbours of one line for a square of four (InternVL issue 962)."""

    def along(features: Tensor, factor: int) -> Tensor:
        pictures, high, wide, hidden = features.shape
        return features.reshape(pictures, high // factor, wide // factor, factor**2 * hidden)

    patch.setattr(internvl, "pixel_shuffle", along)


def shuffle_by_columns(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Neighbours of a square side by side column by column."""

    def columns(features: Tensor, factor: int) -> Tensor:
        return vit.pixel_shuffle(features.transpose(1, 2), factor).transpose(1, 2)

    patch.setattr(internvl, "pixel_shuffle", columns)


def change_pixels(
    model: VisionLanguageModel, patch: pytest.MonkeyPatch, how: Callable[[Tensor], Tensor]
) -> None:
    healthy = type(model).encode

    def encode(self: Any, item: MediaItem) -> MediaEmbeddings:
        data = {**item.data, "pixel_values": how(item.data["pixel_values"])}
        return healthy(self, replace(item, data=data))

    patch.setattr(type(model), "encode", encode)


def overview_first(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    """The overview before the tiles."""
    change_pixels(model, patch, lambda tiles: tiles.roll(1, 0))


def tiles_of_columns(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    """Tiles numbered down the columns; seen where there are several of both."""

    def how(tiles: Tensor) -> Tensor:
        if len(tiles) != 5:
            return tiles
        return tiles[[0, 2, 1, 3, 4]]

    change_pixels(model, patch, how)


def onevision_tiles_of_columns(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    def how(pixels: Tensor) -> Tensor:
        return pixels if pixels.shape[1] < 5 else pixels[:, [0, *range(pixels.shape[1] - 1, 0, -1)]]

    change_pixels(model, patch, how)


def change_lines(
    model: VisionLanguageModel, patch: pytest.MonkeyPatch, how: Callable[[Any, Tensor, tuple[int, int]], Any]
) -> None:
    healthy = type(model)._lines  # type: ignore[attr-defined]
    patch.setattr(
        type(model), "_lines", lambda self, tiles, size: how(self, healthy(self, tiles, size), size)
    )


def line_ends_blank(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    """Nothing learned at the end of a line."""
    blank(model.image_newline, patch)


def line_ends_together(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    """All line ends after all lines: as many rows, other places."""

    def how(self: Any, rows: Tensor, size: tuple[int, int]) -> Tensor:  # noqa: ARG001
        ends = (rows == self.image_newline).all(-1)
        return torch.cat((rows[~ends], rows[ends]))

    change_lines(model, patch, how)


def overview_last(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    healthy = type(model).encode

    def encode(self: Any, item: MediaItem) -> MediaEmbeddings:
        rows = healthy(self, item).rows
        return MediaEmbeddings(torch.cat((rows[16:], rows[:16])) if len(rows) > 17 else rows)

    patch.setattr(type(model), "encode", encode)


def nearest_for_bilinear(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Large pictures shrunk by leaving rows out; only those are touched."""
    healthy = nn.functional.interpolate
    patch.setattr(
        nn.functional,
        "interpolate",
        lambda x, size, mode: healthy(x, size, mode="nearest"),  # noqa: ARG005
    )


def pictures_swapped(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    """Features of several pictures in the order of their sizes, not of their places."""
    healthy = type(model).encode
    first, second = cases_items(model)

    def encode(self: Any, item: MediaItem) -> MediaEmbeddings:
        other = {first.content_hash: second, second.content_hash: first}.get(item.content_hash, item)
        return healthy(self, other)

    patch.setattr(type(model), "encode", encode)


def cases_items(model: VisionLanguageModel) -> tuple[MediaItem, MediaItem]:
    """The two pictures of the prompt "two"; of equal length, or the swap would show by itself."""
    name = next(name for name in ALL if parts(name)[0] is model)
    first, second = cases(name)["two"].placed.items.values()
    assert first.num_embeddings == second.num_embeddings
    return first, second


#: Fault → models, prompts it touches, least change in multiples of rounding, least flips in those prompts
#: together.
FAULTS: dict[Fault, tuple[tuple[str, ...], tuple[str, ...], float, int]] = {
    last_layer_read: ((LLAVA,), EVERY, 10_000, 20),
    first_layer_read: (ALL, EVERY, 10_000, 20),
    final_norm_applied: ((LLAVA, ONEVISION), EVERY, 10_000, 20),
    norm_before_layers_dropped: ((LLAVA,), EVERY, 10_000, 20),
    class_token_kept_for_the_last_patch: ((LLAVA, INTERNVL), EVERY, 10_000, 20),
    positions_of_patches_transposed: (ALL, EVERY, 10_000, 20),
    channels_reversed: (ALL, EVERY, 10_000, 20),
    other_gelu_in_the_tower: (ALL, EVERY, 30, 0),
    tower_biases_dropped: (ALL, EVERY, 10_000, 20),
    projector_bias_dropped: (ALL, EVERY, 10_000, 2),
    layer_scale_ignored: ((INTERNVL,), EVERY, 10_000, 20),
    projector_norm_dropped: ((INTERNVL,), EVERY, 10_000, 20),
    shuffle_transposed: ((INTERNVL,), EVERY, 10_000, 20),
    shuffle_along_a_line: ((INTERNVL,), EVERY, 10_000, 20),
    shuffle_by_columns: ((INTERNVL,), EVERY, 10_000, 20),
    overview_first: ((INTERNVL,), EVERY, 10_000, 20),
    tiles_of_columns: ((INTERNVL,), ("large",), 10_000, 5),
    onevision_tiles_of_columns: ((ONEVISION,), ONE, 10_000, 20),
    line_ends_blank: ((ONEVISION,), EVERY, 10_000, 20),
    line_ends_together: ((ONEVISION,), ONE, 10_000, 20),
    overview_last: ((ONEVISION,), ONE, 10_000, 20),
    nearest_for_bilinear: ((ONEVISION,), ("large",), 10_000, 5),
    pictures_swapped: ((LLAVA, ONEVISION), ("two",), 10_000, 5),
}


@pytest.mark.parametrize("name", ALL)
def test_the_healthy_model_is_that_of_transformers(name: str) -> None:
    assert 0 < rounding(name) < 2e-3


@pytest.mark.parametrize(
    ("fault", "name"), [(fault, name) for fault, row in FAULTS.items() for name in row[0]]
)
def test_a_fault_moves_logits_and_tokens(fault: Fault, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, touched, least_change, least_flips = FAULTS[fault]
    smallest, found = rounding(name), cases(name)
    change, flips = 0.0, {}
    fault(parts(name)[0], monkeypatch)
    for what in touched:
        case = found[what]
        logits = forced(name, case)
        change = max(change, (logits - case.logits).abs().max().item() / smallest)
        wanted = torch.tensor(case.placed.token_ids[case.num_prompt :])
        flips[what] = int((logits.argmax(-1) != wanted).sum())
    print(f"{fault.__name__:36} {name:20} logits {change:9.0f} × rounding, tokens of {MAX_TOKENS}: {flips}")
    assert change >= least_change
    assert sum(flips.values()) >= least_flips


# --- faults in the number of rows: caught before any logit ---------------------------------------------


def class_token_kept(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    features: Any = model._features  # type: ignore[attr-defined]
    patch.setattr(model, "_features", replace(features, drop_first=False))


def line_ends_forgotten(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    def how(self: Any, rows: Tensor, size: tuple[int, int]) -> Tensor:  # noqa: ARG001
        return rows[~(rows == self.image_newline).all(-1)]

    change_lines(model, patch, how)


def overview_forgotten(model: VisionLanguageModel, patch: pytest.MonkeyPatch) -> None:
    change_pixels(model, patch, lambda tiles: tiles[:-1])


@pytest.mark.parametrize(
    ("fault", "name", "made"),
    [
        (class_token_kept, LLAVA, "17 rows"),
        (line_ends_forgotten, ONEVISION, "70 rows"),  # 16 and 6 × 9, not 6 × 10
        (overview_forgotten, INTERNVL, "8 rows"),
    ],
)
def test_the_engine_fails_a_request_whose_encoder_makes_another_number_of_rows(
    fault: Fault, name: str, made: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = parts(name)[0]
    prompt = cases(name)["wide"]
    fault(model, monkeypatch)
    engine = LLMEngine(EngineConfig(model=str(CHECKPOINTS / name), num_kv_blocks=40), model=model)
    engine.add_request(
        "a",
        {
            "prompt_token_ids": prompt.placed.token_ids[: prompt.num_prompt],
            "multi_modal_data": {"image": picture(*WIDE)},
        },
        SamplingParams(max_tokens=1),
    )
    outputs = [output for output in engine.step() if output.finished]
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"]
    assert f"the encoder made {made} of image" in (outputs[0].error or "")


def padding_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(llava_onevision, "unpadded_size", lambda size, grid: grid)  # noqa: ARG005


def cut_without_rounding(patch: pytest.MonkeyPatch) -> None:
    """47 × (12 / 188) is 2.9999999999999996, and 3 lines only if it is rounded first."""
    patch.setattr(llava_onevision, "round", lambda x, digits: x, raising=False)  # noqa: ARG005


def never_shrunk(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(llava_onevision, "_TOLERANCE", 1e9)


@pytest.mark.parametrize(
    ("fault", "size"),
    [(padding_kept, (112, 84, 1)), (cut_without_rounding, (188, 47, 1)), (never_shrunk, LARGE)],
)
def test_other_arithmetic_of_tiles_gives_another_number_of_placeholders(
    fault: Callable[[pytest.MonkeyPatch], None], size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = load_processor(CHECKPOINTS / ONEVISION)
    inputs = processor(text=["<image>"], images=[[picture(*size)]], return_tensors="pt")
    (healthy,) = parts(ONEVISION)[1].expand("image", [picture(*size)], {})
    assert inputs["input_ids"][0].tolist() == list(healthy.token_ids)
    fault(monkeypatch)
    (damaged,) = parts(ONEVISION)[1].expand("image", [picture(*size)], {})
    assert len(damaged.token_ids) != len(healthy.token_ids)


def test_pictures_of_one_prompt_tiled_one_by_one_give_another_number_of_placeholders() -> None:
    case = cases(ONEVISION)["two"]
    alone = [parts(ONEVISION)[1].expand("image", [picture(*size)], {})[0] for size in PROMPTS["two"][1]]
    together = [item.num_embeddings for item in case.placed.items.values()]
    assert together == [17, 17]
    assert [expansion.item.num_embeddings for expansion in alone] != together
