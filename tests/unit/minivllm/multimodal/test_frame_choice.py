"""Frames are chosen as Transformers' video processors choose them; settings that do nothing are refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minivllm.errors import BadMedia, BadParameter
from minivllm.multimodal.frame_choice import (
    FrameChoice,
    in_equal_steps,
    over,
    split_settings,
    spread_to_both_ends,
    timed,
)

SETTINGS = st.one_of(
    st.builds(lambda n: {"num_frames": n}, st.integers(1, 40)),
    st.builds(lambda f: {"fps": f}, st.sampled_from([0.1, 0.5, 1, 2, 3.3, 24, 60])),
)


def theirs(module: Any, kind: str, total: int, fps: float | None, settings: dict[str, Any]) -> list[int]:
    """Indices of Transformers' own `sample_frames`."""
    processor = SimpleNamespace(num_frames=None, fps=None, temporal_patch_size=2, min_frames=4, max_frames=30)
    metadata = SimpleNamespace(total_num_frames=total, fps=fps)
    return [int(index) for index in getattr(module, kind).sample_frames(processor, metadata, **settings)]


@given(total=st.integers(1, 200), fps=st.sampled_from([1.0, 10.0, 23.976, 30.0, 59.94]), settings=SETTINGS)
def test_equal_steps_are_those_of_transformers(
    genuine: Callable[[str], Any], total: int, fps: float, settings: dict[str, Any]
) -> None:
    choice = FrameChoice(True, max_frames=30).with_settings(settings)
    try:
        expected = theirs(genuine("qwen2_vl"), "Qwen2VLVideoProcessor", total, fps, settings)
    except (ValueError, ZeroDivisionError, RuntimeError):
        with pytest.raises(BadMedia, match=r"cannot be chosen of a video of|without any"):
            in_equal_steps(choice, total, fps)
        return
    assert in_equal_steps(choice, total, fps) == expected


@given(total=st.integers(1, 200), fps=st.sampled_from([1.0, 10.0, 23.976, 30.0, 59.94]), settings=SETTINGS)
def test_the_spread_is_that_of_transformers(
    genuine: Callable[[str], Any], total: int, fps: float, settings: dict[str, Any]
) -> None:
    choice = FrameChoice(True, max_frames=30).with_settings(settings)
    expected = theirs(genuine("qwen3_vl"), "Qwen3VLVideoProcessor", total, fps, settings)
    assert spread_to_both_ends(choice, total, fps) == expected
    assert (expected[0], expected[-1]) == (0, total - 1 if len(expected) > 1 else 0)


def test_without_fps_and_number_the_spread_keeps_within_the_bounds() -> None:
    choice = FrameChoice(True, max_frames=6)
    assert spread_to_both_ends(choice, 9, 24) == [0, 2, 3, 5, 6, 8]
    assert spread_to_both_ends(choice, 2, 24) == [0, 0, 1, 1]


def test_frames_per_second_beyond_all_numbers_are_all_frames() -> None:
    assert spread_to_both_ends(FrameChoice(True, fps=1e308), 40, 10.0) == list(range(40))


def test_equal_steps_need_to_know_how_many() -> None:
    with pytest.raises(BadParameter, match="needs fps or num_frames with this model"):
        in_equal_steps(FrameChoice(True), 10, 24.0)
    with pytest.raises(BadMedia, match="only of a video that says its own"):
        in_equal_steps(FrameChoice(True, fps=2), 10, None)
    assert in_equal_steps(FrameChoice(True, num_frames=4), 8, None) == [0, 2, 4, 6]


def test_a_request_s_number_replaces_the_model_s_fps_and_the_other_way_round() -> None:
    model = FrameChoice(True, fps=2)
    assert model.with_settings({"num_frames": 8}) == FrameChoice(True, num_frames=8)
    assert model.with_settings({"fps": 1}) == FrameChoice(True, fps=1)
    assert model.with_settings({"do_sample_frames": False}) == FrameChoice(False, fps=2)
    engine = {"do_sample_frames": True, "fps": 2}
    assert over(engine, {"num_frames": 8}) == {"do_sample_frames": True, "num_frames": 8}
    assert over(engine, {"do_sample_frames": False}) == {"do_sample_frames": False, "fps": 2}
    assert split_settings({"fps": 2, "max_pixels": 9}) == ({"fps": 2}, {"max_pixels": 9})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_sample_frames": 1}, "must be true or false, got 1"),
        ({"do_sample_frames": True, "fps": 0}, "fps must be a positive number .* got 0"),
        ({"do_sample_frames": True, "fps": float("inf")}, "got inf"),
        ({"do_sample_frames": True, "num_frames": 2.5}, "num_frames must be a positive number .* got 2.5"),
        ({"do_sample_frames": True, "num_frames": True}, "got True"),
        ({"do_sample_frames": True, "num_frames": 10**9}, "at most 1048576, got 1000000000"),
        ({"do_sample_frames": True, "fps": 10**400}, "fps must be a positive number"),
        (
            {"do_sample_frames": True, "fps": 2, "num_frames": 8},
            r"give fps \(2\) or num_frames \(8\), not both",
        ),
        ({"fps": 2}, "only where do_sample_frames is true"),
        ({"num_frames": 2}, "only where do_sample_frames is true"),
    ],
)
def test_settings_that_are_wrong_or_would_do_nothing_are_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadParameter, match=message):
        FrameChoice().with_settings(settings)


def test_chosen_frames_keep_the_times_they_had() -> None:
    video = timed([0, 4, 8], 12, 8.0)
    assert (video.fps, video.timestamps) == (2.0, (0.0, 0.5, 1.0))
    assert timed([0, 1, 2], 3, 8.0).timestamps is None
    assert timed([0, 4, 8], 12, None).fps is None
