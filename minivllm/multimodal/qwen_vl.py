"""Pictures and videos of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: pixels, placeholders, M-RoPE positions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.errors import BadMedia, BadParameter, ConfigError, InvariantError
from minivllm.models.qwen2_vl import QwenVLConfig
from minivllm.multimodal.frame_choice import (
    CHOICE_SETTINGS,
    ChosenFrames,
    FrameChoice,
    in_equal_steps,
    over,
    split_settings,
    spread_to_both_ends,
    timed,
)
from minivllm.multimodal.hashing import image_hash, tensors_hash, video_hash
from minivllm.multimodal.image_processor import ImageProcessor
from minivllm.multimodal.load import Video
from minivllm.multimodal.processor import Expansion, TextEncoder
from minivllm.multimodal.video_file import VideoFile
from minivllm.multimodal.video_pixels import (
    FrameSize,
    VideoPixels,
    size_for_each_frame,
    size_for_whole_video,
    with_limits,
)
from minivllm.request import MediaItem, MediaSpan, PatchRect

__all__ = ["Qwen2VLProcessor", "Qwen3VLProcessor", "Qwen25VLProcessor"]

#: Frames per second that Transformers assumes when nothing is said.
_DEFAULT_FPS = 24.0

#: The last position that a video may reach by the seconds it lasts: six days at two positions a second.
_MAX_POSITION = 2**20

_FIXED = "the vision tower is built for it"
_UNUSED = "the image processor of this family does nothing with it"
_REFUSED: Mapping[str, str] = {
    "merge_size": _FIXED,
    "patch_size": _FIXED,
    "temporal_patch_size": _FIXED,
    "crop_size": _UNUSED,
    "default_to_square": _UNUSED,
    "do_center_crop": _UNUSED,
    "do_pad": _UNUSED,
    "image_seq_length": _UNUSED,
    "pad_size": _UNUSED,
}


class Qwen2VLProcessor:
    """One placeholder per 2 × 2 patches of a picture, or of a pair of a video's frames."""

    modalities: tuple[str, ...] = ("image", "video")
    #: What Transformers' video processor of the family has where the directory says nothing.
    video_defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"shortest_edge": 128 * 28**2, "longest_edge": 768 * 28**2},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }
    frame_choice: ClassVar[FrameChoice] = FrameChoice()
    #: What a video that does not say its frames per second has, where they are chosen.
    assumed_fps: ClassVar[float | None] = None

    def __init__(
        self, directory: Path, config: ModelConfig, tokenizer: TextEncoder, settings: Mapping[str, Any]
    ) -> None:
        vision: QwenVLConfig = config.vision
        tower = vision.tower
        self._vision = vision
        self._hidden_size = config.hidden_size
        self._tokenizer = tokenizer
        self._merge = tower.spatial_merge_size
        choosing, others = split_settings(settings)
        self._images = ImageProcessor(directory, others, refused=_REFUSED)
        for name, wanted in (
            ("patch_size", tower.patch_size),
            ("merge_size", tower.spatial_merge_size),
            ("temporal_patch_size", tower.temporal_patch_size),
        ):
            if getattr(self._images.hf, name) != wanted:
                raise ConfigError(
                    f"{directory}: {name} is {getattr(self._images.hf, name)} in the image processor's "
                    f"configuration and {wanted} in the model's"
                )
        own = self._images.hf.size
        if not own.shortest_edge <= own.longest_edge:
            raise ConfigError(
                f"{directory}: size of pictures has shortest_edge (the fewest pixels) {own.shortest_edge}, "
                f"which is more than longest_edge (the most) {own.longest_edge}"
            )
        self._with_size(self._checked_settings({}))  # refused here, not with the first picture
        self._videos = VideoPixels(
            directory, self._images, self._frame_size, self.video_defaults, self.frame_choice
        )
        self._videos.choice.with_settings(choosing)  # refused here, not with the first video
        self._choosing = choosing
        self.setting_names = (*self._images.setting_names, *CHOICE_SETTINGS)
        self.placeholder_ids: Mapping[str, int] = {
            "image": vision.image_token_id,
            "video": vision.video_token_id,
        }

    def expand(self, modality: str, media: Sequence[Any], settings: Mapping[str, Any]) -> list[Expansion]:
        """See `MultiModalProcessor.expand`. Items do not depend on one another.

        Frames of a file are chosen as Transformers' video processor of the family does. Of frames that
        are given all are taken, unless the settings of the request or the engine say do_sample_frames.

        Supplied embeddings are {"image_embeds": [rows, hidden], "image_grid_thw": [3]}, and for
        Qwen3-VL "deepstack": [layers, rows, hidden].
        """
        choosing, others = split_settings(settings)
        merged = self._checked_settings(others)
        any_video = replace(self._videos.choice, do_sample_frames=True)
        any_video.with_settings(over(self._choosing, choosing))  # refused also where there is none
        items = []
        for source in media:
            if isinstance(source, Mapping | Tensor):
                item = self._supplied(modality, source)
            elif modality == "image":
                item = self._image(source, merged)
            else:
                video = _read(source, self._choose_frames(source, choosing))
                item = self._video(video, self._video_settings(merged))
            items.append(item)
        return [self._expansion(item) for item in items]

    def count_tokens(self, modality: str, media: Sequence[Any], settings: Mapping[str, Any]) -> int:
        """See `MultiModalProcessor.count_tokens`."""
        choosing, others = split_settings(settings)
        merged = self._checked_settings(others)
        count = 0
        for source in media:
            times: tuple[float, ...] = ()
            if isinstance(source, Mapping | Tensor):
                grid = self._supplied(modality, source).facts["grid"]
            elif modality == "image":
                grid = self._image_grid(source, merged)
            else:
                chosen = self._choose_frames(source, choosing)
                width, height = (
                    (source.width, source.height) if isinstance(source, VideoFile) else source.frames[0].size
                )
                frames = len(chosen.indices)
                grid = self._videos.grid(frames, width, height, self._video_settings(merged))
                times = self._times(frames, chosen.fps, chosen.timestamps)
            count += len(self._tokens(modality, grid, times)[0])
        return count

    def positions(
        self, token_ids: Sequence[int], spans: Sequence[MediaSpan], items: Mapping[str, MediaItem]
    ) -> tuple[NDArray[np.int64], int] | None:
        """See `MultiModalProcessor.positions`.

        Text counts on all three axes alike. A picture that begins at p has the positions
        (p, p + row, p + column), and what follows it begins at p + the longer side. Transformers'
        `get_rope_index` gives the same. The delta continues the text as that does for a longer
        prompt, which is what `generate` does after a prompt that ends with text; the
        `rope_deltas` of Transformers differ from it where a video lasts longer than it is wide
        and high.
        """
        visual = [span for span in spans if span.modality in self.modalities]
        if not visual:
            return None
        parts = []
        done = following = 0
        for span in visual:
            parts.append(_text_positions(following, span.start - done))
            following += span.start - done
            placed, length = self._span_positions(span, items[span.content_hash])
            parts.append(placed + following)
            following += length
            done = span.end
        parts.append(_text_positions(following, len(token_ids) - done))
        following += len(token_ids) - done
        return np.concatenate(parts, axis=1), following - len(token_ids)

    # --- what the families differ in ----------------------------------------------------------

    def _frame_size(
        self, frames: int, height: int, width: int, factor: int, least: int, most: int
    ) -> FrameSize:
        return size_for_each_frame(frames, height, width, factor, least, most)

    def _choose(self, choice: FrameChoice, total: int, fps: float | None) -> list[int]:
        return in_equal_steps(choice, total, fps)

    def _seconds_per_group(self, video: Video) -> float | None:  # noqa: ARG002 (for the families that tell time)
        """How long the frames of one patch last, where positions depend on it."""
        return None

    def _tokens(
        self,
        modality: str,
        grid: tuple[int, int, int],
        times: tuple[float, ...],  # noqa: ARG002 (for the families that tell time)
    ) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        """The tokens of an item, and which of them take rows; times as `_times` gives them, or none."""
        rows = self._rows(grid)
        return (self.placeholder_ids[modality],) * rows, (True,) * rows

    def _expansion(self, item: MediaItem) -> Expansion:
        times = item.facts.get("times", ())
        return Expansion(item, *self._tokens(item.modality, item.facts["grid"], times))

    # --- items --------------------------------------------------------------------------------

    def _checked_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        merged, edges = self._images.settings(settings), {"shortest_edge", "longest_edge"}
        size = merged.get("size") or {}
        if not isinstance(size, Mapping) or not set(size) <= edges:
            raise BadParameter(
                "size of this model has shortest_edge (the fewest pixels) and longest_edge (the most), "
                f"got {size}"
            )
        return merged

    def _image(self, image: Image, settings: Mapping[str, Any]) -> MediaItem:
        settings = self._with_size(settings)
        made = self._images([image], **settings)
        grid: tuple[int, int, int] = tuple(int(n) for n in made["image_grid_thw"][0])  # type: ignore[assignment]
        return MediaItem(
            content_hash=image_hash(image, settings),
            modality="image",
            num_embeddings=self._rows(grid),
            data={"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]},
            patches=self._patches(grid),
            facts={**self._images.facts, "size": image.size, "mode": image.mode, "grid": grid},
        )

    def _image_grid(self, image: Image, settings: Mapping[str, Any]) -> tuple[int, int, int]:
        """The grid of a picture before there is a pixel; zeros for one that cannot be processed."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        settings, patch = self._with_size(settings), self._vision.tower.patch_size
        height, width = image.height, image.width
        if settings.get("do_resize", self._images.hf.do_resize):
            size = settings["size"]
            try:
                height, width = smart_resize(
                    height, width, patch * self._merge, size["shortest_edge"], size["longest_edge"]
                )
            except ValueError:  # far longer than wide
                return 0, 0, 0
        return 1, height // patch, width // patch

    def _choose_frames(self, source: Video | VideoFile, choosing: Mapping[str, Any]) -> ChosenFrames:
        """The frames that the model is to see."""
        asked = over(self._choosing, choosing)
        if isinstance(source, VideoFile):
            choice, total = self._videos.choice.with_settings(asked), source.num_frames
            if not choice.do_sample_frames:
                return ChosenFrames(range(total), source.fps)
        else:
            choice = replace(self._videos.choice, do_sample_frames=False).with_settings(asked)
            total = len(source.frames)
            if not choice.do_sample_frames:
                return ChosenFrames(range(total), source.fps, source.timestamps)
            if source.timestamps is not None:
                raise BadMedia("frames with timestamps are chosen already; give fps for all frames instead")
        fps = source.fps or self.assumed_fps
        return timed(self._choose(choice, total, fps), total, fps)

    def _video_settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        settings = self._videos.settings(settings)
        _check_limits(settings["size"])
        return settings

    def _video(self, video: Video, settings: Mapping[str, Any]) -> MediaItem:
        times = self._times(len(video.frames), video.fps, video.timestamps)
        pixels, grid = self._videos(video, settings)
        data = {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([grid])}
        seconds = self._seconds_per_group(video)
        if seconds is not None:
            data["second_per_grid_ts"] = self._checked_seconds(seconds, grid[0])
        first = video.frames[0]
        return MediaItem(
            content_hash=video_hash(video, settings),
            modality="video",
            num_embeddings=self._rows(grid),
            data=data,
            patches=self._patches(grid),
            facts={
                **self._images.facts,
                "size": first.size,
                "mode": first.mode,
                "frames": len(video.frames),
                "fps": video.fps,
                "grid": grid,
                "times": times,
            },
        )

    def _supplied(self, modality: str, source: Mapping[str, Any] | Tensor) -> MediaItem:
        names = (f"{modality}_embeds", f"{modality}_grid_thw")
        tells_time = modality == "video" and self._vision.tokens_per_second > 0
        known = {*names, "deepstack", *(("second_per_grid_ts",) if tells_time else ())}
        given = dict(source) if isinstance(source, Mapping) else {names[0]: source}
        if not set(names) <= set(given) <= known:
            raise BadMedia(
                f"supplied embeddings of this model are {{{', '.join(map(repr, sorted(known)))}}}, of which "
                f"{names[0]} and {names[1]} must be there; got {sorted(map(str, given))}"
            )
        rows, grid = torch.as_tensor(given[names[0]]), _checked_grid(given[names[1]], names[1])
        if grid[1] % self._merge or grid[2] % self._merge:
            raise BadMedia(
                f"{names[1]} {list(grid)} is not one of whole {self._merge} × {self._merge} blocks"
            )
        wanted = (self._rows(grid), self._hidden_size)
        if tuple(rows.shape) != wanted or not rows.dtype.is_floating_point:
            raise BadMedia(
                f"{names[0]} must be floating point of the shape {list(wanted)} for the grid {list(grid)}, "
                f"got {rows.dtype} of {list(rows.shape)}"
            )
        features = len(getattr(self._vision.tower, "deepstack_blocks", ()))
        deepstack = given.get("deepstack", ())
        deepstack = tuple(torch.as_tensor(part) for part in deepstack)
        if len(deepstack) != features or any(tuple(part.shape) != wanted for part in deepstack):
            raise BadMedia(
                f"deepstack must be {features} tensors of the shape {list(wanted)}, "
                f"got {[list(part.shape) for part in deepstack]}"
            )
        data: dict[str, Any] = {"embeddings": rows, names[1]: torch.tensor([grid])}
        if deepstack:
            data["deepstack"] = deepstack
        if "second_per_grid_ts" in given:
            data["second_per_grid_ts"] = self._checked_seconds(given["second_per_grid_ts"], grid[0])
        tensors = {name: value for name, value in data.items() if isinstance(value, Tensor)}
        tensors |= {f"deepstack.{i}": part for i, part in enumerate(deepstack)}
        return MediaItem(
            content_hash=tensors_hash(f"{modality}_embeds", tensors, {}),
            modality=modality,
            num_embeddings=wanted[0],
            data=data,
            patches=self._patches(grid),
            facts={"grid": grid, "times": ()},
        )

    def _with_size(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """min_pixels and max_pixels as `size`: Transformers is to drop these arguments."""
        plain = {k: v for k, v in settings.items() if k not in ("min_pixels", "max_pixels", "size")}
        own = self._images.hf.size
        base = {"shortest_edge": own.shortest_edge, "longest_edge": own.longest_edge}
        size = with_limits({**settings, "size": {**base, **(settings.get("size") or {})}})
        _check_limits(size)
        return {**plain, "size": size}

    def _checked_seconds(self, value: Any, groups: int) -> Tensor:
        """Seconds that each group of frames lasts, [1]; the last group must have a position."""
        try:
            seconds = torch.as_tensor(value, dtype=torch.float32).flatten()
        except (RuntimeError, TypeError, ValueError):
            raise BadMedia(f"second_per_grid_ts must be one number of seconds, got {value!r}") from None
        last = seconds * (groups - 1) * self._vision.tokens_per_second
        if seconds.numel() != 1 or not bool((seconds >= 0) & (last <= _MAX_POSITION)):
            raise BadMedia(
                f"{groups} groups of frames, each of {seconds.tolist()} seconds, have no positions from 0 to "
                f"{_MAX_POSITION} at {self._vision.tokens_per_second} a second; is their fps or "
                "second_per_grid_ts right?"
            )
        return seconds

    def _rows(self, grid: tuple[int, int, int]) -> int:
        return grid[0] * (grid[1] // self._merge) * (grid[2] // self._merge)

    def _patches(self, grid: tuple[int, int, int]) -> tuple[PatchRect, ...]:
        """Row by row of each group of frames, by its first frame."""
        high, wide = grid[1] // self._merge, grid[2] // self._merge
        together = self._vision.tower.temporal_patch_size
        return tuple(
            PatchRect(group * together, column / wide, row / high, 1 / wide, 1 / high)
            for group in range(grid[0])
            for row in range(high)
            for column in range(wide)
        )

    def _times(
        self, count: int, fps: float | None, timestamps: tuple[float, ...] | None
    ) -> tuple[float, ...]:
        """The middle of each group of frames, in seconds.

        Raises:
            BadMedia: one that is no number, as with an fps of 1e-320.
        """
        times = list(timestamps or ())
        if not times:
            times = [index / (fps or _DEFAULT_FPS) for index in range(count)]
        together = self._vision.tower.temporal_patch_size
        times += [times[-1]] * (-len(times) % together)
        middles = tuple((times[i] + times[i + together - 1]) / 2 for i in range(0, len(times), together))
        if not math.isfinite(middles[-1]):
            raise BadMedia(
                f"{count} frames have no finite times in seconds: is their fps ({fps}) "
                f"right, or their last timestamp ({times[-1]})?"
            )
        return middles

    # --- positions ----------------------------------------------------------------------------

    def _span_positions(self, span: MediaSpan, item: MediaItem) -> tuple[NDArray[np.int64], int]:
        """Positions [3, span length] from 0 on, and how far on the next token begins."""
        grid = item.data[f"{item.modality}_grid_thw"].flatten()
        high, wide = int(grid[1]) // self._merge, int(grid[2]) // self._merge
        groups, rest = divmod(span.length, high * wide)
        if rest or span.first_row % (high * wide):
            raise InvariantError(f"{span} does not hold whole frames of {high} × {wide} rows")
        interval = np.float32(1)
        if "second_per_grid_ts" in item.data:
            seconds = np.float32(item.data["second_per_grid_ts"].flatten()[0].item())
            interval = np.float32(self._vision.tokens_per_second) * seconds
        # In float32 and cut off, as in Transformers.
        time = (np.arange(groups, dtype=np.float32) * interval).astype(np.int64)
        axes = np.meshgrid(time, np.arange(high), np.arange(wide), indexing="ij")
        return np.stack([axis.reshape(-1) for axis in axes]).astype(np.int64), max(high, wide)


class Qwen25VLProcessor(Qwen2VLProcessor):
    """Qwen2-VL's, and a video's positions on the axis of time go with the seconds."""

    def _seconds_per_group(self, video: Video) -> float:
        return self._vision.tower.temporal_patch_size / _even_fps(video)


class Qwen3VLProcessor(Qwen2VLProcessor):
    """Qwen2-VL's, but each pair of a video's frames has placeholders of its own behind a timestamp.

    As in Transformers 5, the placeholder of a video in the prompt is replaced where it is, and
    what a chat template puts around it stays.
    """

    video_defaults: ClassVar[Mapping[str, Any]] = {
        "size": {"shortest_edge": 128 * 32**2, "longest_edge": 768 * 32**2},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    frame_choice: ClassVar[FrameChoice] = FrameChoice(do_sample_frames=True, fps=2)
    assumed_fps: ClassVar[float | None] = _DEFAULT_FPS

    def _choose(self, choice: FrameChoice, total: int, fps: float | None) -> list[int]:
        return spread_to_both_ends(choice, total, fps or _DEFAULT_FPS)

    def _frame_size(
        self, frames: int, height: int, width: int, factor: int, least: int, most: int
    ) -> FrameSize:
        return size_for_whole_video(frames, height, width, factor, least, most)

    def _tokens(
        self, modality: str, grid: tuple[int, int, int], times: tuple[float, ...]
    ) -> tuple[tuple[int, ...], tuple[bool, ...]]:
        if modality == "image":
            return super()._tokens(modality, grid, times)
        groups = grid[0]
        times = times or tuple((2 * i + 0.5) / _DEFAULT_FPS for i in range(groups))
        per_group = self._rows(grid) // groups
        token_ids: list[int] = []
        is_embed: list[bool] = []
        for seconds in times:
            before = [*self._tokenizer.encode(f"<{seconds:.1f} seconds>"), self._vision.vision_start_token_id]
            token_ids += [*before, *[self._vision.video_token_id] * per_group]
            token_ids.append(self._vision.vision_end_token_id)
            is_embed += [*[False] * len(before), *[True] * per_group, False]
        return tuple(token_ids), tuple(is_embed)


def _read(source: Video | VideoFile, chosen: ChosenFrames) -> Video:
    if isinstance(source, VideoFile):
        frames = source.read(chosen.indices)
    else:
        frames = [source.frames[index] for index in chosen.indices]
    return Video(tuple(frames), chosen.fps, chosen.timestamps)


def _text_positions(start: int, length: int) -> NDArray[np.int64]:
    return np.broadcast_to(np.arange(start, start + length, dtype=np.int64), (3, length))


def _even_fps(video: Video) -> float:
    """Frames per second; of timestamps only if they are evenly spaced.

    Raises:
        BadMedia: timestamps that are not.
    """
    if video.fps is not None or video.timestamps is None or len(video.timestamps) < 2:
        return video.fps or _DEFAULT_FPS
    times = np.asarray(video.timestamps)
    steps = np.diff(times)
    if steps.min() <= 0 or steps.max() - steps.min() > 0.01 * steps.mean():
        raise BadMedia(
            "this model knows only evenly spaced frames; give fps, or frames whose timestamps are even, "
            f"got {list(video.timestamps)}"
        )
    return float(1 / steps.mean())


def _checked_grid(value: Any, name: str) -> tuple[int, int, int]:
    try:
        numbers = torch.as_tensor(value).flatten().tolist()
    except (OverflowError, RuntimeError, TypeError, ValueError):
        numbers = []
    if len(numbers) != 3 or not all(isinstance(number, int) and number > 0 for number in numbers):
        raise BadMedia(f"{name} must be three positive integers, got {value!r}")
    return numbers[0], numbers[1], numbers[2]


def _check_limits(size: Mapping[str, int]) -> None:
    least, most = size["shortest_edge"], size["longest_edge"]
    if not 0 < least <= most:
        raise BadParameter(
            f"shortest_edge (the fewest pixels) must be 1 … longest_edge (the most, {most}), got {least}"
        )
