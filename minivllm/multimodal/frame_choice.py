"""Which frames of a video a model sees: what Transformers' video processors choose, without torchvision."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from minivllm.errors import BadMedia, BadParameter

__all__ = [
    "CHOICE_SETTINGS",
    "MAX_NUM_FRAMES",
    "ChosenFrames",
    "FrameChoice",
    "in_equal_steps",
    "over",
    "split_settings",
    "spread_to_both_ends",
    "timed",
]

CHOICE_SETTINGS = ("do_sample_frames", "fps", "num_frames")
"""Settings of a request that choose frames."""

MAX_NUM_FRAMES = 2**20
"""Most frames that `num_frames` may ask for: where there are fewer, Qwen3-VL shows some several times."""


@dataclass(frozen=True, slots=True)
class FrameChoice:
    """Settings of Transformers' video processors.

    Attributes:
        do_sample_frames: whether to choose at all; otherwise all frames are taken.
        fps: frames per second to choose.
        num_frames: how many frames to choose; then fps does not count.
        min_frames, max_frames: bounds of what fps comes to.
        together: frames in one patch.
    """

    do_sample_frames: bool = False
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    together: int = 2

    def with_settings(self, settings: Mapping[str, Any]) -> FrameChoice:
        """The model's choice with the settings of one request over it.

        Raises:
            BadParameter: settings of another type, more than `MAX_NUM_FRAMES`, fps with num_frames, or
                either without do_sample_frames, where it would do nothing.
        """
        sample = settings.get("do_sample_frames", self.do_sample_frames)
        fps, count = settings.get("fps"), settings.get("num_frames")
        if not isinstance(sample, bool):
            raise BadParameter(f"do_sample_frames must be true or false, got {sample!r}")
        if fps is not None and not (_is_number(fps) and 0 < fps <= sys.float_info.max):
            raise BadParameter(f"fps must be a positive number of frames per second to choose, got {fps!r}")
        if count is not None and not (_is_number(count) and isinstance(count, int) and count > 0):
            raise BadParameter(f"num_frames must be a positive number of frames to choose, got {count!r}")
        if count is not None and count > MAX_NUM_FRAMES:
            raise BadParameter(f"num_frames must be at most {MAX_NUM_FRAMES}, got {count}")
        if fps is not None and count is not None:
            raise BadParameter(f"give fps ({fps}) or num_frames ({count}), not both")
        if not sample and (fps is not None or count is not None):
            raise BadParameter(
                "fps and num_frames choose frames only where do_sample_frames is true, which it is not here; "
                "give it too"
            )
        if fps is None and count is None:
            return replace(self, do_sample_frames=sample)
        return replace(self, do_sample_frames=sample, fps=fps, num_frames=count)


@dataclass(frozen=True, slots=True)
class ChosenFrames:
    """Which frames of a video the model sees, and when they were taken.

    Attributes:
        indices: of the frames, in order.
        fps, timestamps: of these frames, as in `Video`.
    """

    indices: Sequence[int]
    fps: float | None = None
    timestamps: tuple[float, ...] | None = None


def in_equal_steps(choice: FrameChoice, total: int, fps: float | None) -> list[int]:
    """Whole groups of frames in equal steps from the first on (Qwen2-VL, Qwen2.5-VL).

    Where the step is rounded down, one frame more comes out, as in Transformers.

    Raises:
        BadMedia: a video too short for one group, or for `num_frames`, or of unknown fps.
        BadParameter: neither fps nor num_frames is known.
    """
    group = choice.together
    if choice.num_frames is not None:
        count = round(choice.num_frames / group) * group
    elif choice.fps is None:
        raise BadParameter("do_sample_frames needs fps or num_frames with this model, which has no default")
    elif fps is None:
        raise BadMedia("frames can be chosen by fps only of a video that says its own; give num_frames")
    else:
        most = math.floor(min(choice.max_frames, total) / group) * group
        wanted = min(max(total / fps * choice.fps, choice.min_frames), most, total)
        count = math.floor(wanted / group) * group
    if not 0 < count <= total:
        raise BadMedia(
            f"{count} frames, in groups of {group}, cannot be chosen of a video of {total}; change fps or "
            "num_frames"
        )
    return [int(index) for index in torch.arange(0, total, total / count).int()]


def spread_to_both_ends(choice: FrameChoice, total: int, fps: float) -> list[int]:
    """From the first frame to the last, as evenly as whole numbers allow (Qwen3-VL).

    Where more frames are asked for than there are, some come twice.
    """
    if choice.num_frames is not None:
        count = choice.num_frames
    elif choice.fps is not None:
        wanted = max(total / fps * choice.fps, choice.min_frames)  # infinite, where fps is 1e308
        count = int(min(wanted, choice.max_frames, total))
    else:
        count = min(max(total, choice.min_frames), choice.max_frames)
    return [int(index) for index in np.linspace(0, total - 1, count).round()]


def split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings that choose frames, and the others."""
    choosing = {name: value for name, value in settings.items() if name in CHOICE_SETTINGS}
    return choosing, {name: value for name, value in settings.items() if name not in CHOICE_SETTINGS}


def over(engine: Mapping[str, Any], request: Mapping[str, Any]) -> dict[str, Any]:
    """A request's settings over the engine's: its fps or num_frames replaces whichever was there."""
    if "fps" in request or "num_frames" in request:
        engine = {name: value for name, value in engine.items() if name == "do_sample_frames"}
    return {**engine, **request}


def timed(indices: Sequence[int], total: int, fps: float | None) -> ChosenFrames:
    """The chosen frames with their times: frame i of the original is shown at i / fps, as in Transformers.

    Args:
        total: frames of the original.
        fps: of the original.
    """
    if fps is None or list(indices) == list(range(total)):
        return ChosenFrames(indices, fps)  # the same as all frames in an array
    return ChosenFrames(indices, len(indices) / total * fps, tuple(index / fps for index in indices))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
