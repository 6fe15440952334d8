"""Pixels of a video for the Qwen towers, without torchvision.

Transformers' video processors exist only where torchvision does. What they do is done here with the
image processor of the Pillow backend: every frame is resized by Pillow to one size and normalised
like a picture, and a patch holds `temporal_patch_size` frames. Resized pixels can so differ from
torchvision's in the last bit, as those of pictures do.

All frames that are given are used unless the request says otherwise; those of a file are chosen as the
model's settings say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image
from torch import Tensor

from minivllm.errors import BadMedia, ConfigError, UnsupportedError
from minivllm.multimodal.frame_choice import FrameChoice
from minivllm.multimodal.image_processor import ImageProcessor
from minivllm.multimodal.load import Video
from minivllm.multimodal.video_file import MAX_VIDEO_PIXELS
from minivllm.multimodal.written_settings import written_settings

__all__ = ["FrameSize", "VideoPixels", "size_for_each_frame", "size_for_whole_video"]


class FrameSize(NamedTuple):
    height: int
    width: int


#: (frames, height, width, factor, fewest and most pixels) → the size every frame is resized to.
Sizing = Callable[[int, int, int, int, int, int], FrameSize]

#: What Transformers' video processors have where a model directory says nothing.
_DEFAULTS: Mapping[str, Any] = {
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "resample": 3,
    "rescale_factor": 1 / 255,
}


_CHOICE = ("do_sample_frames", "fps", "num_frames", "min_frames", "max_frames")


def size_for_each_frame(
    frames: int, height: int, width: int, factor: int, least: int, most: int
) -> FrameSize:
    """Multiples of `factor` with `least` to `most` pixels in a frame, as for a picture.

    Raises:
        BadMedia: more than 200 times as long as wide.
    """
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    try:
        return FrameSize(*smart_resize(height, width, factor, least, most))
    except ValueError as error:
        raise BadMedia(f"a video of {frames} frames of {width} × {height}: {error}") from None


def size_for_whole_video(
    frames: int, height: int, width: int, factor: int, least: int, most: int
) -> FrameSize:
    """Multiples of `factor` with `least` to `most` pixels in all frames together (Qwen3-VL).

    Raises:
        BadMedia: fewer than two frames, or more than 200 times as long as wide.
    """
    if frames < 2:
        raise BadMedia(f"a video of this model needs at least 2 frames, got {frames}; give a picture instead")
    if min(height, width) < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    if max(height, width) > 200 * min(height, width):
        raise BadMedia(f"a video must be at most 200 times as long as wide, got {width} × {height}")
    high, wide = round(height / factor) * factor, round(width / factor) * factor
    pixels = round(frames / 2) * 2 * high * wide
    if pixels > most:
        shrink = math.sqrt(frames * height * width / most)
        high = max(factor, math.floor(height / shrink / factor) * factor)
        wide = max(factor, math.floor(width / shrink / factor) * factor)
    elif pixels < least:
        grow = math.sqrt(least / (frames * height * width))
        high = math.ceil(height * grow / factor) * factor
        wide = math.ceil(width * grow / factor) * factor
    return FrameSize(high, wide)


class VideoPixels:
    """Made once per engine.

    Args:
        directory: of the model; its video settings come from processor_config.json,
            video_preprocessor_config.json or preprocessor_config.json, the first that has them.
        images: does the arithmetic on pixels.
        sizing: the family's.
        defaults: of the family, where the directory says nothing: "size", "image_mean", "image_std".
        choice: the same for the choice of frames; the directory's settings are over it.

    Attributes:
        choice: which frames of a file the model sees.

    Raises:
        ConfigError: patches of another shape than pictures', a value that `written_settings` refuses, or
            no fewest and most pixels.
        UnsupportedError: the option `cap_pixels_per_frame`.
    """

    def __init__(
        self,
        directory: Path,
        images: ImageProcessor,
        sizing: Sizing,
        defaults: Mapping[str, Any],
        choice: FrameChoice = FrameChoice(),  # noqa: B008 (frozen)
    ) -> None:
        self._images = images
        self._sizing = sizing
        hf = images.hf
        self._patch, self._merge, self._together = hf.patch_size, hf.merge_size, hf.temporal_patch_size
        values = {**_DEFAULTS, **defaults, **written_settings(directory, "video_processor")}
        for name in ("patch_size", "merge_size", "temporal_patch_size"):
            if values.get(name, getattr(hf, name)) != getattr(hf, name):
                raise ConfigError(
                    f"{directory}: {name} is {values[name]} for videos and {getattr(hf, name)} for pictures"
                )
        if values.get("cap_pixels_per_frame"):
            raise UnsupportedError(f"{directory}: cap_pixels_per_frame is not implemented for videos")
        own = {name: values[name] for name in _CHOICE if name in values}
        if own.get("do_sample_frames", True) is None:  # null, which Transformers takes for false
            own["do_sample_frames"] = False
        self.choice = replace(choice, **own, together=self._together)
        size = with_limits(values)
        if not size.get("shortest_edge", math.inf) <= size.get("longest_edge", 0):
            raise ConfigError(
                f"{directory}: size of videos must have shortest_edge (the fewest pixels) and longest_edge "
                f"(the most), which is not less; got {size}"
            )
        self._settings = {name: values[name] for name in (*_DEFAULTS, *defaults)} | {"size": size}

    def settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The model's settings with those of one request over them."""
        merged = {**self._settings, **{k: v for k, v in settings.items() if k in self._settings}}
        merged["size"] = with_limits({**settings, "size": {**self._settings["size"], **_size(settings)}})
        return merged

    def grid(self, frames: int, width: int, height: int, settings: Mapping[str, Any]) -> tuple[int, int, int]:
        """The grid that frames of this size get, before there is a pixel.

        Raises:
            BadMedia: frames of a size that cannot be processed.
        """
        size = self._frame_size(frames, width, height, settings)
        return -(-frames // self._together), size.height // self._patch, size.width // self._patch

    def _frame_size(self, count: int, width: int, height: int, settings: Mapping[str, Any]) -> FrameSize:
        size = FrameSize(height, width)
        if settings["do_resize"]:
            least, most = settings["size"]["shortest_edge"], settings["size"]["longest_edge"]
            size = self._sizing(count, height, width, self._patch * self._merge, least, most)
        if count * size.height * size.width > MAX_VIDEO_PIXELS:
            raise BadMedia(
                f"{count} frames of {width} × {height} would be processed as {size.width} × {size.height}, "
                f"which is more than {MAX_VIDEO_PIXELS} pixels together; choose fewer with do_sample_frames "
                "and fps or num_frames, or lower min_pixels"
            )
        return size

    def __call__(self, video: Video, settings: Mapping[str, Any]) -> tuple[Tensor, tuple[int, int, int]]:
        """Flat patches and their grid.

        Args:
            settings: as `settings` gave them.

        Returns:
            [patches, channels × temporal_patch_size × patch_size²], and frame groups, rows and
            columns of patches. The last frame is repeated to fill its group.

        Raises:
            BadMedia: frames that cannot be processed under these settings, or that are more than
                `MAX_VIDEO_PIXELS` in the size they are processed in.
        """
        from transformers.image_transforms import convert_to_rgb

        size = self._frame_size(len(video.frames), *video.frames[0].size, settings)
        frames = []
        for frame in video.frames:
            made = Image.fromarray(convert_to_rgb(frame, return_numpy=True))
            if settings["do_resize"]:
                made = made.resize((size.width, size.height), resample=settings["resample"])
            frames.append(made)
        frames += [frames[-1]] * (-len(frames) % self._together)
        pixel_settings = {k: v for k, v in settings.items() if k not in ("size", "resample", "do_resize")}
        processed = self._images(frames, do_resize=False, **pixel_settings)
        _, high, wide = (int(n) for n in processed["image_grid_thw"][0])
        # A picture fills its patches with copies of itself: one of them is the frame.
        single = processed["pixel_values"].view(
            len(frames), high * wide, -1, self._together, self._patch, self._patch
        )[:, :, :, 0]
        grouped = single.view(-1, self._together, *single.shape[1:]).permute(0, 2, 3, 1, 4, 5)
        return grouped.flatten(2).flatten(0, 1).contiguous(), (len(frames) // self._together, high, wide)


def with_limits(values: Mapping[str, Any]) -> dict[str, int]:
    """`size` as {"shortest_edge", "longest_edge"}, with min_pixels and max_pixels over it."""
    size = dict(_size(values))
    for edge, name in (("shortest_edge", "min_pixels"), ("longest_edge", "max_pixels")):
        if values.get(name) is not None:
            size[edge] = values[name]
    return size


def _size(values: Mapping[str, Any]) -> dict[str, int]:
    size = values.get("size")
    if not isinstance(size, Mapping):
        return {}
    return {edge: size[edge] for edge in ("shortest_edge", "longest_edge") if size.get(edge) is not None}
