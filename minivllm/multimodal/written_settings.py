"""What a model directory says about pictures and videos, checked when the engine is built.

Transformers takes the numbers as they are written: a step of 0, NaN or "2" then breaks a request, or is
seen by nobody and changes every picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from minivllm.errors import ConfigError
from minivllm.models.hf_config import read_json
from minivllm.multimodal.frame_choice import MAX_NUM_FRAMES

__all__ = ["setting_problems", "written_settings"]

#: Section of processor_config.json → the files that hold the same in older directories.
_FILES = {
    "image_processor": ("preprocessor_config.json",),
    "video_processor": ("video_preprocessor_config.json", "preprocessor_config.json"),
}


def written_settings(
    directory: Path, section: Literal["image_processor", "video_processor"]
) -> dict[str, Any]:
    """Settings of the processor of pictures or of videos; {} where the directory has none.

    They come from processor_config.json or the older files, the first that has them, as in Transformers.

    Raises:
        ConfigError: a file that is no JSON object, or values that no processor can work with; names the
            file, every such field, and its value.
    """
    nested = directory / "processor_config.json"
    if nested.exists() and (found := read_json(nested).get(section)) is not None:
        if not isinstance(found, dict):
            raise ConfigError(f"{nested}: {section} must be a JSON object, got {found!r}")
        return _checked(found, nested, f"{section}.")
    for name in _FILES[section]:
        if (path := directory / name).exists():
            return _checked(read_json(path), path, "")
    return {}


#: Most tiles of a picture: every grid of so many is looked at, by Transformers too.
_MAX_PATCHES = 512


class _Rule(NamedTuple):
    holds: Callable[[Any], bool]
    wanted: str


def _checked(values: dict[str, Any], path: Path, prefix: str) -> dict[str, Any]:
    if problems := [f"{prefix}{problem}" for problem in setting_problems(values)]:
        raise ConfigError(f"{path}: {'; '.join(problems)}")
    return values


def setting_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with values that no processor can work with, one by one; a request's too."""
    for name, value in values.items():
        rule = _FLAG if name.startswith("do_") else _RULES.get(name)
        if rule and not rule.holds(value) and (value is not None or name in _NEVER_NULL):
            yield f"{name} must be {rule.wanted}, got {value!r}"


def _is_number(value: object) -> bool:
    """Whether it is finite and fits a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _is_count(value: object) -> bool:
    return isinstance(value, int) and _is_number(value) and value > 0


def _is_number_of_frames(value: Any) -> bool:
    return _is_count(value) and value <= MAX_NUM_FRAMES


def _is_number_of_patches(value: Any) -> bool:
    return _is_count(value) and value <= _MAX_PATCHES


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_size(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(edge is None or _is_count(edge) for edge in value.values())
    return _is_count(value) or _is_pair(value)


def _is_pair(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_count, value))


def _per_channel(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: (
        all(map(holds, value)) and len(value) == 3 if isinstance(value, list | tuple) else holds(value)
    )


_FLAG = _Rule(lambda value: isinstance(value, bool), "true or false")
_COUNT = _Rule(_is_count, "a positive whole number")
_FRAMES = _Rule(_is_number_of_frames, f"a whole number from 1 to {MAX_NUM_FRAMES}")
_PATCHES = _Rule(_is_number_of_patches, f"a whole number from 1 to {_MAX_PATCHES}")
_POSITIVE = _Rule(_is_positive, "a positive number")
_SIZE = _Rule(_is_size, "a positive whole number, two of them, or a mapping of edges to such numbers")

_RULES: Mapping[str, _Rule] = {
    "cap_pixels_per_frame": _FLAG,
    "crop_size": _SIZE,
    "crop_to_patches": _FLAG,
    "fps": _POSITIVE,
    "image_grid_pinpoints": _Rule(
        lambda value: isinstance(value, list | tuple) and bool(value) and all(map(_is_pair, value)),
        "a list of pairs of positive whole numbers",
    ),
    "image_mean": _Rule(_per_channel(_is_number), "a number, or three of them"),
    "image_std": _Rule(_per_channel(_is_positive), "a positive number, or three of them"),
    "max_frames": _COUNT,
    "max_image_size": _SIZE,
    "max_patches": _PATCHES,
    "max_pixels": _COUNT,
    "merge_size": _COUNT,
    "min_frames": _FRAMES,
    "min_patches": _PATCHES,
    "min_pixels": _COUNT,
    "num_frames": _FRAMES,
    "patch_size": _COUNT,
    "resample": _Rule(
        lambda value: _is_number(value) and isinstance(value, int) and 0 <= value <= 5,
        "one of Pillow's filters, 0 to 5",
    ),
    "rescale_factor": _POSITIVE,
    "size": _SIZE,
    "temporal_patch_size": _COUNT,
}

#: Elsewhere null means that the class's own value holds, or that there is no such step.
_NEVER_NULL = frozenset({"max_frames", "merge_size", "min_frames", "patch_size", "temporal_patch_size"})
