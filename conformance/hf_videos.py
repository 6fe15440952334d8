"""Frames to patches for the Qwen-VL line, without torchvision.

Transformers' own video processors need torchvision. They do to every frame what the family's image
processor does to a picture, and then put the frames of a temporal patch side by side; so does this,
with the image processor itself. Only the target size is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import SizeDict
from transformers.video_utils import VideoMetadata

__all__ = ["FrameProcessor"]

#: Temporal budgets count frames too, in this family.
_BUDGET_OVER_TIME = ("Qwen3VLVideoProcessor",)


class FrameProcessor:
    """Stands where a Transformers processor expects a video processor.

    Args:
        image_processor: of the same checkpoint, with the Pillow backend.
        settings: the section "video_processor" of processor_config.json.
    """

    def __init__(self, image_processor: Any, settings: Mapping[str, Any]) -> None:
        self._image_processor = image_processor
        self._settings = settings
        self.merge_size = int(settings["merge_size"])
        self.temporal_patch_size = int(settings["temporal_patch_size"])
        #: Frames per second of each video of the next call; None where nobody knows.
        self.rates: Sequence[float | None] = ()

    def __call__(self, videos: Sequence[Sequence[Image.Image]], **_: Any) -> dict[str, Any]:
        """Every video as patches: pixel_values_videos [patches, …], video_grid_thw [videos, 3]."""
        patches, grids, metadata = [], [], []
        for frames, rate in zip(videos, self.rates, strict=True):
            one, grid = self._video(frames)
            patches.append(one)
            grids.append(grid)
            count = len(frames)
            metadata.append(VideoMetadata(count, fps=rate, frames_indices=list(range(count))))
        return {
            "pixel_values_videos": torch.from_numpy(np.concatenate(patches)),
            "video_grid_thw": torch.tensor(grids),
            "video_metadata": metadata,
        }

    def _video(self, frames: Sequence[Image.Image]) -> tuple[NDArray[np.float32], list[int]]:
        """[time × rows × columns, channels × frames × patch × patch], and (time, rows, columns)."""
        processor, time = self._image_processor, self.temporal_patch_size
        height, width = self._size(len(frames), frames[0].height, frames[0].width)
        arrays = [np.asarray(frame.convert("RGB")).transpose(2, 0, 1) for frame in frames]
        size = SizeDict(height=height, width=width)
        resized = [PilBackend.resize(processor, array, size, processor.resample) for array in arrays]
        made = processor(resized, do_resize=False, input_data_format="channels_first", return_tensors="np")
        rows, columns = (int(n) for n in made["image_grid_thw"][0][1:])
        # A picture is a temporal patch of twice itself; of each frame only one copy is wanted.
        side = processor.patch_size
        one = made["pixel_values"].reshape(len(frames), rows * columns, 3, time, side, side)[:, :, :, 0]
        one = np.concatenate([one, *([one[-1:]] * (-len(frames) % time))])
        patches = one.reshape(-1, time, rows * columns, 3, side, side).transpose(0, 2, 3, 1, 4, 5)
        grid = [len(one) // time, rows, columns]
        return np.ascontiguousarray(patches).reshape(math.prod(grid), -1), grid

    def _size(self, count: int, height: int, width: int) -> tuple[int, int]:
        """Height and width to resize to: multiples of a merged patch, within the budget of pixels."""
        factor = self._image_processor.patch_size * self.merge_size
        least, most = self._settings["size"]["shortest_edge"], self._settings["size"]["longest_edge"]
        frames = 1
        if self._settings["video_processor_type"] in _BUDGET_OVER_TIME:
            if min(height, width) < factor:
                scale = max(factor / height, factor / width)
                height, width = int(height * scale), int(width * scale)
            frames = count
        time = round(frames / self.temporal_patch_size) * self.temporal_patch_size if frames > 1 else 1
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        if time * rows * columns > most:
            beta = math.sqrt(frames * height * width / most)
            rows = max(factor, math.floor(height / beta / factor) * factor)
            columns = max(factor, math.floor(width / beta / factor) * factor)
        elif time * rows * columns < least:
            beta = math.sqrt(least / (frames * height * width))
            rows = math.ceil(height * beta / factor) * factor
            columns = math.ceil(width * beta / factor) * factor
        return rows, columns
