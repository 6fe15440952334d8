"""The Qwen vision checkpoints show the faults they are for.

Each fault is planted in our own model or processor, and measured by teacher forcing the tokens that
Transformers generates: how far it moves a logit, as a multiple of the distance between our healthy
model and Transformers, and how many of the 24 greedy tokens it flips. `-s` prints the table.

Pictures cannot see one another in our towers, since each is encoded alone; the fault that lets them
is planted all the same, as keys kept from one call to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForImageTextToText

from conformance.paths import data_root
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import MediaEmbeddings, VisionLanguageModel, load_model
from minivllm.models.vision import qwen, qwen2_5_vl, qwen2_vl, qwen3_vl
from minivllm.models.vision.vit import attend
from minivllm.multimodal import MULTIMODAL, MultiModalProcessor, Video
from minivllm.tokenizer import load_tokenizer
from tests.unit.minivllm.media_prompts import Placed, hf_media, picture, place, prompt_logits

CHECKPOINTS = data_root() / "golden" / "checkpoints"
ALL = ("tiny-qwen2-vl", "tiny-qwen2-5-vl", "tiny-qwen3-vl")
IMAGE, VIDEO = 445, 446
MAX_TOKENS = 24
Positions = NDArray[np.int64] | None


@dataclass(eq=False)
class Subject:
    """A model with all that belongs to it; faults change its parts."""

    model: VisionLanguageModel
    processor: MultiModalProcessor

    def positions(self, placed: Placed, num_prompt: int) -> Positions:
        """Of the prompt and of what was generated after it, which goes on by the delta."""
        prompt = placed._replace(token_ids=placed.token_ids[:num_prompt])
        found = self.processor.positions(*prompt)
        if found is None:
            return None
        after = np.arange(num_prompt, len(placed.token_ids)) + found[1]
        return np.concatenate((found[0], np.broadcast_to(after, (3, len(after)))), axis=1)

    def encode(self, placed: Placed) -> dict[str, MediaEmbeddings]:
        return {name: self.model.encode(item) for name, item in placed.items.items()}


@dataclass(frozen=True)
class Case:
    """A prompt with the 24 tokens that Transformers generates, and its logits for them."""

    placed: Placed
    num_prompt: int
    logits: Tensor


def subject(name: str) -> Subject:
    """Parts are shared between tests: faults change them through monkeypatch only."""
    return Subject(*parts(name))


@cache
def parts(name: str) -> tuple[VisionLanguageModel, MultiModalProcessor]:
    path = CHECKPOINTS / name
    model = load_model(path, dtype=torch.float32, device="cpu", ops=TorchOps())
    assert isinstance(model, VisionLanguageModel)
    tokenizer = load_tokenizer(path)
    assert tokenizer is not None
    return model, MULTIMODAL.get(model.config.architecture)(path, model.config, tokenizer, {})


def prompts(processor: MultiModalProcessor) -> dict[str, Placed]:
    """Pictures that no checkpoint's seed was chosen by."""
    wide, high = processor.expand("image", [picture(140, 84, 11), picture(84, 168, 12)], {})
    (video,) = processor.expand(
        "video", [Video(tuple(picture(112, 84, 13 + i) for i in range(6)), fps=1.0)], {}
    )
    return {
        "image": place([[441, 72, 81, 443], wide, [444, 71, 75, 442]]),
        "two": place([[441, 72, 443], wide, [444, 71, 443], high, [444, 90, 91, 442]]),
        "video": place([[441, 72, 443], video, [444, 71, 75, 442]]),
    }


@cache
def cases(name: str) -> dict[str, Case]:
    hf = AutoModelForImageTextToText.from_pretrained(CHECKPOINTS / name, attn_implementation="eager").eval()
    found = {}
    for what, placed in prompts(subject(name).processor).items():
        ids = torch.tensor([placed.token_ids])
        kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
        hf.model.rope_deltas = None
        out = hf.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=kinds,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=None,
            output_logits=True,
            return_dict_in_generate=True,
            **hf_media(placed),
        )
        whole = placed._replace(token_ids=out.sequences[0].tolist())
        found[what] = Case(whole, ids.shape[1], torch.cat(out.logits))
    return found


@torch.inference_mode()
def forced(ours: Subject, case: Case) -> Tensor:
    """[24, vocab] logits for the generated tokens."""
    positions = ours.positions(case.placed, case.num_prompt)
    logits = prompt_logits(ours.model, case.placed, positions, encoded=ours.encode(case.placed))
    return logits[case.num_prompt - 1 : -1]


@cache
def rounding(name: str) -> float:
    """Largest distance of our healthy model from Transformers, which flips nothing."""
    healthy, largest = subject(name), 0.0
    for what, case in cases(name).items():
        logits = forced(healthy, case)
        assert logits.argmax(-1).tolist() == case.placed.token_ids[case.num_prompt :], what
        largest = max(largest, (logits - case.logits).abs().max().item())
    return largest


# --- faults: what each does to a subject; some last only within the context --------------------------

Fault = Callable[[Subject, pytest.MonkeyPatch], None]


def change_positions(ours: Subject, how: Callable[[NDArray[np.int64], Placed, int], Any]) -> None:
    healthy = ours.positions

    def changed(placed: Placed, num_prompt: int) -> Positions:
        positions = healthy(placed, num_prompt)
        assert positions is not None
        return np.asarray(how(positions.copy(), placed, num_prompt), dtype=np.int64)

    ours.positions = changed  # type: ignore[method-assign]


def one_axis(ours: Subject, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Every token at its index, as in a model of text."""
    change_positions(ours, lambda p, placed, n: np.tile(np.arange(p.shape[1]), (3, 1)))  # noqa: ARG005


def decode_at_the_index(ours: Subject, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Generated tokens at their index: the delta forgotten."""

    def how(positions: NDArray[np.int64], placed: Placed, num_prompt: int) -> NDArray[np.int64]:  # noqa: ARG001
        positions[:, num_prompt:] = np.arange(num_prompt, positions.shape[1])
        return positions

    change_positions(ours, how)


def rows_and_columns_swapped(ours: Subject, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    change_positions(ours, lambda p, placed, n: p[[0, 2, 1]])  # noqa: ARG005


def tokens_counted_as_positions(ours: Subject, patch: pytest.MonkeyPatch) -> None:
    """Text goes on behind a picture by its tokens, not by its longer side (llama.cpp pull request 22439)."""
    healthy = type(ours.processor)._span_positions  # type: ignore[attr-defined]

    def counted(self: Any, span: Any, item: Any) -> tuple[NDArray[np.int64], int]:
        placed, _ = healthy(self, span, item)
        return placed, span.length

    patch.setattr(type(ours.processor), "_span_positions", counted)


def time_of_video_dropped(ours: Subject, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """All frames at the time of the first."""

    def how(positions: NDArray[np.int64], placed: Placed, num_prompt: int) -> NDArray[np.int64]:  # noqa: ARG001
        for span in placed.spans:
            positions[0, span.start : span.end] = positions[0, span.start]
        return positions

    change_positions(ours, how)


def seconds_of_video_dropped(ours: Subject, patch: pytest.MonkeyPatch) -> None:
    """A pair of frames takes one position however long it lasts (vLLM pull request 47736)."""
    patch.setattr(ours.processor, "_vision", replace(ours.processor._vision, tokens_per_second=1))  # type: ignore[attr-defined]
    assert ours.processor._vision.tokens_per_second == 1  # type: ignore[attr-defined]


def keys_of_the_picture_before(ours: Subject, patch: pytest.MonkeyPatch) -> None:
    """The second picture of a prompt sees the first one too."""
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self: Any, x: Tensor, cos: Tensor, sin: Tensor, lengths: list[int]) -> Tensor:  # noqa: ARG001
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).unbind(1)
        q, k = qwen._rotate(q, cos, sin), qwen._rotate(k, cos, sin)
        q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
        before = kept.get(id(self))
        kept[id(self)] = (k, v)
        if before is not None:
            k, v = torch.cat((before[0], k), dim=2), torch.cat((before[1], v), dim=2)
        output: Tensor = self.proj(attend(q, k, v, self.head_dim**-0.5)[0])
        return output

    healthy_encode = ours.encode
    healthy_forward = qwen.FrameAttention.forward

    def encode(placed: Placed) -> dict[str, MediaEmbeddings]:
        kept.clear()
        if len(placed.items) < 2:
            return healthy_encode(placed)
        first, second = placed.items
        found = {first: ours.model.encode(placed.items[first])}
        patch.setattr(qwen.FrameAttention, "forward", forward)
        ours.model.encode(placed.items[first])
        found[second] = ours.model.encode(placed.items[second])
        patch.setattr(qwen.FrameAttention, "forward", healthy_forward)
        return found

    ours.encode = encode  # type: ignore[method-assign]


def frames_see_each_other(ours: Subject, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    for module in (qwen2_vl, qwen2_5_vl, qwen3_vl):
        patch.setattr(module, "frame_lengths", lambda grid: [grid[0] * grid[1] * grid[2]])


def no_rope_in_the_tower(ours: Subject, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    def still(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:  # noqa: ARG001
        return torch.ones(len(positions), head_dim), torch.zeros(len(positions), head_dim)

    for module in (qwen2_vl, qwen2_5_vl, qwen3_vl):
        patch.setattr(module, "axial_rope", still)


def rope_of_the_tower_by_rows_only(ours: Subject, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    def rows_only(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
        return qwen.axial_rope(positions[:, [0, 0]], head_dim, theta)

    for module in (qwen2_vl, qwen2_5_vl, qwen3_vl):
        patch.setattr(module, "axial_rope", rows_only)


def other_sections(ours: Subject, patch: pytest.MonkeyPatch) -> None:
    rope = ours.model.language_model.rope
    assert rope is not None
    config = ours.model.config.rope
    assert config is not None
    section = config.mrope_section
    rolled = replace(config, mrope_section=(section[1], section[2], section[0]))
    if config.mrope_interleaved:
        # (4, 6, 6) would be an equivalent of (6, 5, 5): interleaved, both give the same frequencies.
        rolled = replace(config, mrope_section=(14, 1, 1))
    patch.setattr(rope, "_axes", axes_of(rolled))


def sections_in_chunks(ours: Subject, patch: pytest.MonkeyPatch) -> None:
    """Qwen2-VL's order of the frequencies for Qwen3-VL."""
    rope = ours.model.language_model.rope
    config = ours.model.config.rope
    assert rope is not None
    assert config is not None
    patch.setattr(rope, "_axes", axes_of(replace(config, mrope_interleaved=False)))


def axes_of(config: Any) -> Tensor:
    from minivllm.layers.rope import RopeTable

    table = RopeTable(config, head_dim=32, max_position_embeddings=8, max_model_len=8)
    assert table._axes is not None
    return table._axes


def windows_ignored(ours: Subject, patch: pytest.MonkeyPatch) -> None:
    tower = ours.model.vision
    patch.setattr(tower, "config", replace(tower.config, full_attention_blocks=(0, 1, 2)))  # type: ignore[arg-type]


def windows_everywhere(ours: Subject, patch: pytest.MonkeyPatch) -> None:
    tower = ours.model.vision
    patch.setattr(tower, "config", replace(tower.config, full_attention_blocks=()))  # type: ignore[arg-type]


def rows_left_in_the_order_of_windows(ours: Subject, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    patch.setattr(Tensor, "argsort", lambda self: torch.arange(len(self)))


def change_deepstack(ours: Subject, how: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]) -> None:
    healthy = ours.encode

    def encode(placed: Placed) -> dict[str, MediaEmbeddings]:
        return {
            name: MediaEmbeddings(found.rows, how(found.deepstack)) for name, found in healthy(placed).items()
        }

    ours.encode = encode  # type: ignore[method-assign]


def deepstack_missing(ours: Subject, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    change_deepstack(ours, lambda features: ())  # noqa: ARG005


def deepstack_rolled(ours: Subject, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Each feature one layer off."""
    change_deepstack(ours, lambda features: (features[-1], *features[:-1]))


def deepstack_rows_rolled(ours: Subject, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Each feature at its neighbour's place (mlx-vlm pull request 1332 has them start at row 0 again)."""
    change_deepstack(ours, lambda features: tuple(part.roll(1, 0) for part in features))


def learned_positions_by_pixel_centres(ours: Subject, patch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Stretched with `align_corners` off."""

    def taps(places: Tensor, size: int, side: int) -> tuple[Tensor, Tensor]:
        exact = (places.float() + 0.5) * side / size - 0.5
        lower = exact.floor()
        step = torch.arange(2)
        weights = 1 - (exact[:, None] - lower[:, None] - step).abs()
        return (lower.long()[:, None] + step).clamp(0, side - 1), weights

    patch.setattr(qwen3_vl, "bilinear_taps", taps)


def learned_positions_missing(ours: Subject, patch: pytest.MonkeyPatch) -> None:
    tower: Any = ours.model.vision
    patch.setattr(tower, "learned_positions", lambda *_: torch.zeros(1))


#: Fault → models, prompts it touches, least change in multiples of rounding, least flips in those prompts
#: together.
FAULTS: dict[Fault, tuple[tuple[str, ...], tuple[str, ...], float, int]] = {
    one_axis: (ALL, ("image", "two", "video"), 10_000, 20),
    decode_at_the_index: (ALL, ("image", "two", "video"), 10_000, 20),
    rows_and_columns_swapped: (ALL, ("image", "two", "video"), 10_000, 20),
    tokens_counted_as_positions: (ALL, ("image", "two", "video"), 10_000, 20),
    time_of_video_dropped: (("tiny-qwen2-vl", "tiny-qwen2-5-vl"), ("video",), 10_000, 10),
    seconds_of_video_dropped: (("tiny-qwen2-5-vl",), ("video",), 10_000, 10),
    keys_of_the_picture_before: (ALL, ("two",), 10_000, 10),
    frames_see_each_other: (ALL, ("video",), 10_000, 10),
    no_rope_in_the_tower: (ALL, ("image", "two", "video"), 10_000, 20),
    rope_of_the_tower_by_rows_only: (ALL, ("image", "two", "video"), 10_000, 20),
    other_sections: (ALL, ("image", "two", "video"), 10_000, 10),
    windows_ignored: (("tiny-qwen2-5-vl",), ("image", "two", "video"), 10_000, 20),
    windows_everywhere: (("tiny-qwen2-5-vl",), ("image", "two", "video"), 10_000, 20),
    rows_left_in_the_order_of_windows: (("tiny-qwen2-5-vl",), ("image", "two", "video"), 10_000, 20),
    sections_in_chunks: (("tiny-qwen3-vl",), ("image", "two", "video"), 10_000, 20),
    deepstack_missing: (("tiny-qwen3-vl",), ("image", "two", "video"), 10_000, 20),
    deepstack_rolled: (("tiny-qwen3-vl",), ("image", "two", "video"), 10_000, 20),
    deepstack_rows_rolled: (("tiny-qwen3-vl",), ("image", "two", "video"), 10_000, 20),
    learned_positions_by_pixel_centres: (("tiny-qwen3-vl",), ("image", "two", "video"), 10_000, 20),
    learned_positions_missing: (("tiny-qwen3-vl",), ("image", "two", "video"), 10_000, 20),
}


@pytest.mark.parametrize("name", ALL)
def test_the_healthy_model_is_that_of_transformers(name: str) -> None:
    assert 0 < rounding(name) < 2e-3


@pytest.mark.parametrize(
    ("fault", "name"), [(fault, name) for fault, row in FAULTS.items() for name in row[0]]
)
def test_a_fault_moves_logits_and_tokens(fault: Fault, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, touched, least_change, least_flips = FAULTS[fault]
    smallest, found, damaged = rounding(name), cases(name), subject(name)
    change, flips = 0.0, {}
    fault(damaged, monkeypatch)
    for what in touched:
        case = found[what]
        logits = forced(damaged, case)
        change = max(change, (logits - case.logits).abs().max().item() / smallest)
        wanted = torch.tensor(case.placed.token_ids[case.num_prompt :])
        flips[what] = int((logits.argmax(-1) != wanted).sum())
    print(f"{fault.__name__:36} {name:16} logits {change:9.0f} × rounding, tokens of {MAX_TOKENS}: {flips}")
    assert change >= least_change
    assert sum(flips.values()) >= least_flips
