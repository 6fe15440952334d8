"""A video file is answered as the same frames in an array are, and a bad one leaves the engine alive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minivllm import LLM, SamplingParams
from minivllm.engine import LLMEngine
from minivllm.errors import BadMedia, BadParameter, PromptTooLong
from minivllm.multimodal.video_file import VideoFile
from tests.unit.minivllm.video_files import FRAMES, encoded

pytest.importorskip("av", reason="the extra minivllm[video] is not installed")

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
MODELS = ("tiny-qwen2-vl", "tiny-qwen2-5-vl", "tiny-qwen3-vl")
#: Longer than what is asked to be seen of it.
LONG = np.random.default_rng(1).integers(0, 256, (12, 56, 84, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def engine(checkpoints: Path) -> Callable[[str], LLMEngine]:
    made: dict[str, LLMEngine] = {}

    def engine(model: str) -> LLMEngine:
        if model not in made:
            made[model] = LLM(str(checkpoints / model), dtype="float32", num_kv_blocks=200).engine
        return made[model]

    return engine


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("video") / "clip.mp4"
    path.write_bytes(encoded("mp4"))
    return path


def ask(engine: LLMEngine, video: Any, **settings: Any) -> tuple[Any, Any, tuple[int, ...], int]:
    """Its processed item, the positions, the answer, and how many tokens were found in the cache."""
    content = [{"type": "video", "video": video}, {"type": "text", "text": "What moves?"}]
    prompt = engine.chat_prompt([{"role": "user", "content": content}])
    assert isinstance(prompt, dict)
    engine.add_request("a", {**prompt, "mm_processor_kwargs": settings}, GREEDY)
    media = engine.media("a")
    while engine.has_unfinished_requests():
        outputs = engine.step()
    [item] = media.media_items.values()
    answer = outputs[-1].outputs[0].token_ids
    return item, media.positions, answer, outputs[-1].num_cached_tokens


@pytest.mark.parametrize("model", MODELS)
def test_a_file_is_answered_as_its_frames_are(
    engine: Callable[[str], LLMEngine], clip: Path, model: str
) -> None:
    item, positions, answer, _ = ask(engine(model), {"frames": FRAMES, "fps": 2})
    of_file, file_positions, file_answer, cached = ask(engine(model), clip)
    assert torch.equal(of_file.data["pixel_values_videos"], item.data["pixel_values_videos"])
    assert np.array_equal(file_positions, positions)
    assert file_answer == answer
    assert of_file.content_hash == item.content_hash
    assert cached > item.num_embeddings


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("settings", [{"fps": 3}, {"num_frames": 4}], ids=lambda s: next(iter(s)))
def test_chosen_frames_are_those_of_an_array(
    engine: Callable[[str], LLMEngine], model: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """6 or 4 of 12 frames at 6 a second, by the choice of each family."""
    (tmp_path / "long.mp4").write_bytes(encoded("mp4", LONG, fps=6))
    settings = {"do_sample_frames": True, **settings}
    item, _, answer, _ = ask(engine(model), tmp_path / "long.mp4", **settings)
    given, _, same_answer, _ = ask(engine(model), {"frames": LONG, "fps": 6}, **settings)
    assert (item.content_hash, answer) == (given.content_hash, same_answer)
    count = settings.get("num_frames", 6)
    spread = np.linspace(0, 11, count).round() if model == "tiny-qwen3-vl" else np.arange(0, 12, 12 / count)
    times = [int(index) / 6 for index in spread]
    by_hand, _, hand_answer, _ = ask(
        engine(model),
        {"frames": LONG[[int(i) for i in spread]], "timestamps": times}
        if model == "tiny-qwen3-vl"
        else {"frames": LONG[[int(i) for i in spread]], "fps": count / 2},
    )
    assert torch.equal(by_hand.data["pixel_values_videos"], item.data["pixel_values_videos"])
    assert answer == hand_answer


def test_bad_files_and_settings_leave_the_engine_alive(
    engine: Callable[[str], LLMEngine], clip: Path, tmp_path: Path
) -> None:
    chosen = engine("tiny-qwen3-vl")
    _, _, answer, _ = ask(chosen, clip)
    (tmp_path / "cut.mp4").write_bytes(clip.read_bytes()[:2000])
    (tmp_path / "note.mp4").write_text("Dear reader, this is not a video.")
    for bad in (tmp_path / "cut.mp4", tmp_path / "note.mp4", tmp_path / "nothing.mp4", tmp_path, b""):
        with pytest.raises(BadMedia):
            ask(chosen, bad)
    with pytest.raises(BadParameter, match="only where do_sample_frames is true"):
        ask(chosen, clip, fps=1)
    with pytest.raises(BadParameter, match="unknown image processor settings"):
        ask(chosen, clip, frames_per_second=1)
    assert not chosen.has_unfinished_requests()
    assert ask(chosen, clip)[2] == answer


def test_a_file_too_long_for_the_prompt_is_not_decoded(
    checkpoints: Path, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = LLM(str(checkpoints / "tiny-qwen3-vl"), num_kv_blocks=200, max_model_len=30).engine
    prompt = engine.chat_prompt([{"role": "user", "content": [{"type": "video", "video": clip}]}])
    monkeypatch.setattr(VideoFile, "read", lambda *_: pytest.fail("frames were decoded"))
    with pytest.raises(PromptTooLong, match="max_model_len is 30"):
        engine.add_request("long", prompt, GREEDY)
