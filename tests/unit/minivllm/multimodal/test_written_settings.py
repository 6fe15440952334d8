"""Numbers of a model directory's processor files: each that no processor can work with is named."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine
from minivllm.errors import ConfigError
from minivllm.multimodal.written_settings import setting_problems, written_settings

NAN, INFINITE = float("nan"), float("inf")

NO_COUNT = [0, -1, NAN, INFINITE, "2", True, 1.5, [2], 10**400]
NO_NUMBER = [NAN, INFINITE, "2", True, [0.5], [0.5, 0.5, NAN], [0.5, 0.5, True]]
NO_SIZE = [0, -1, NAN, "56", True, {}, [56], {"height": 0}, {"height": 56, "width": "56"}]

WRONG: dict[str, list[Any]] = {
    **dict.fromkeys(("max_pixels", "min_pixels"), NO_COUNT),
    **dict.fromkeys(("max_patches", "min_patches"), (*NO_COUNT, 513)),
    **{name: [*NO_COUNT, None] for name in ("max_frames", "merge_size", "patch_size", "temporal_patch_size")},
    "min_frames": [*NO_COUNT, None, 2**20 + 1],
    "num_frames": [*NO_COUNT, 2**20 + 1],
    "fps": [0, -1, *NO_NUMBER],
    "rescale_factor": [0, -1, *NO_NUMBER],
    "image_mean": NO_NUMBER,
    "image_std": [0, -1, *NO_NUMBER, [0.5, 0, 0.5]],
    **dict.fromkeys(("crop_size", "max_image_size", "size"), NO_SIZE),
    "image_grid_pinpoints": [[], 5, [5], [[56]], [[56, 0]], [[56, True]]],
    "resample": [-1, 6, 3.0, False, "bicubic"],
    **{
        name: [1, "false"]
        for name in ("cap_pixels_per_frame", "crop_to_patches", "do_resize", "do_sample_frames")
    },
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in WRONG for value in WRONG[name]])
def test_a_value_that_no_processor_can_work_with_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({name: value}), encoding="utf-8")
    for section in ("image_processor", "video_processor"):
        with pytest.raises(ConfigError, match=rf"^{re.escape(str(path))}: {name} must be .*, got ") as caught:
            written_settings(tmp_path, section)  # type: ignore[arg-type]
        assert str(caught.value).endswith(f"got {value!r}")


def test_all_wrong_values_are_named_with_their_section(tmp_path: Path) -> None:
    nested = {"video_processor": {"fps": 0, "max_frames": "many", "do_resize": True}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested), encoding="utf-8")
    message = "video_processor.fps must be a positive number, got 0; video_processor.max_frames must be"
    with pytest.raises(ConfigError, match=message):
        written_settings(tmp_path, "video_processor")
    assert written_settings(tmp_path, "image_processor") == {}


def test_a_section_of_another_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "processor_config.json").write_text('{"image_processor": 5}', encoding="utf-8")
    with pytest.raises(ConfigError, match="image_processor must be a JSON object, got 5"):
        written_settings(tmp_path, "image_processor")


def test_a_request_may_give_tuples_where_a_file_has_lists() -> None:
    given = {"image_mean": (0.5, 0.5, 0.5), "size": (56, 56), "image_grid_pinpoints": [(56, 56), (56, 112)]}
    assert not list(setting_problems(given))
    assert len(list(setting_problems({"image_std": (0.5, 0.5), "size": (56, 0)}))) == 2


def test_what_published_models_write_is_taken(tmp_path: Path, checkpoints: Path) -> None:
    values = {
        "size": 224,
        "crop_size": {"height": 224, "width": None},
        "fps": None,
        "do_pad": None,
        "resample": 0,
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(values), encoding="utf-8")
    assert written_settings(tmp_path, "image_processor") == values
    for name in ("tiny-qwen3-vl", "tiny-smolvlm", "tiny-llava-onevision", "tiny-internvl"):
        assert written_settings(checkpoints / name, "image_processor")["image_std"]


@pytest.mark.parametrize(
    ("name", "section", "change", "message"),
    [
        ("tiny-qwen3-vl", "video_processor", {"fps": NAN}, "video_processor.fps must be .*, got nan"),
        ("tiny-qwen2-vl", "image_processor", {"image_std": [0, 1, 1]}, "image_processor.image_std must be"),
        (
            "tiny-qwen2-vl",
            "image_processor",
            {"size": {"shortest_edge": 9, "longest_edge": 8}},
            "size of pictures has shortest_edge .* 9, which is more than longest_edge .* 8",
        ),
        ("tiny-internvl", "image_processor", {"max_patches": True}, "max_patches must be .*, got True"),
    ],
)
def test_an_engine_is_not_built_on_them(
    checkpoints: Path, tmp_path: Path, name: str, section: str, change: dict[str, Any], message: str
) -> None:
    model = tmp_path / name
    shutil.copytree(checkpoints / name, model)
    path = model / "processor_config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    values[section].update(change)
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        LLMEngine(EngineConfig(model=str(model), num_kv_blocks=16, device="cpu"))
