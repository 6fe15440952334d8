"""Transformers' image processor behind errors by name."""

from __future__ import annotations

import re
from pathlib import Path

import PIL
import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor

from conformance.paths import data_root
from minivllm.errors import BadMedia, BadParameter, ConfigError
from minivllm.multimodal.image_processor import ImageProcessor

DIRECTORY = data_root() / "golden" / "checkpoints" / "tiny-qwen2-vl"


def picture(width: int = 112, height: int = 84) -> Image.Image:
    return Image.linear_gradient("L").resize((width, height)).convert("RGB")


def test_pixels_are_those_of_transformers_with_the_pillow_backend() -> None:
    processor = ImageProcessor(DIRECTORY, {})
    truth = AutoImageProcessor.from_pretrained(DIRECTORY, backend="pil")(picture(), return_tensors="pt")
    made = processor([picture()])
    assert made.keys() == truth.keys()
    assert all(torch.equal(made[name], truth[name]) for name in truth)
    assert processor.facts == {
        "image_processor": "Qwen2VLImageProcessorPil",
        "backend": "pil",
        "pillow": PIL.__version__,
    }


def test_a_request_s_settings_go_over_the_engine_s() -> None:
    processor = ImageProcessor(DIRECTORY, {"do_normalize": False, "do_rescale": False})
    assert processor.settings({"do_rescale": True}) == {"do_normalize": False, "do_rescale": True}
    assert processor([picture()], **processor.settings({}))["pixel_values"].max() > 200
    assert processor([picture()], **processor.settings({"do_rescale": True}))["pixel_values"].max() <= 1


@pytest.mark.parametrize("settings", [{"max_pixel": 1}, {"return_tensors": "np"}, {"device": "cuda"}])
def test_an_unknown_setting_is_refused_with_the_known_ones(settings: dict[str, object]) -> None:
    with pytest.raises(
        BadParameter, match=f"unknown image processor settings .*{next(iter(settings))}.*known: "
    ):
        ImageProcessor(DIRECTORY, settings)
    with pytest.raises(BadParameter, match=r"do_resize, .*max_pixels, .*size"):
        ImageProcessor(DIRECTORY, {}).settings(settings)


def test_a_setting_of_the_wrong_type_is_refused() -> None:
    with pytest.raises(BadParameter, match="'do_resize' with value 'no'"):
        ImageProcessor(DIRECTORY, {}).settings({"do_resize": "no"})


@pytest.mark.parametrize(
    "settings", [{"resample": 9}, {"image_std": [0.5, 0.0, 0.5]}, {"rescale_factor": -1.0}]
)
def test_a_number_that_no_processor_can_work_with_is_refused(settings: dict[str, object]) -> None:
    [(name, value)] = settings.items()
    with pytest.raises(BadParameter, match=rf"settings: {name} must be .*, got {re.escape(repr(value))}"):
        ImageProcessor(DIRECTORY, {}).settings(settings)


def test_a_setting_that_a_family_cannot_honour_is_refused_with_its_reason() -> None:
    refused = {"size": "the model has positions for 56 × 56 only"}
    processor = ImageProcessor(DIRECTORY, {}, refused=refused)
    assert "size" not in processor.setting_names
    with pytest.raises(BadParameter, match="'size' cannot be changed: the model has positions for 56"):
        processor.settings({"size": {"height": 4, "width": 4}})


def test_a_picture_that_cannot_be_processed_is_refused_with_its_size() -> None:
    with pytest.raises(BadMedia, match=r"a picture of 1 × 10000 pixels cannot be processed: .*aspect ratio"):
        ImageProcessor(DIRECTORY, {})([picture(1, 10_000)])


def test_a_picture_that_the_settings_do_not_suit_is_refused_with_them() -> None:
    processor = ImageProcessor(DIRECTORY, {})
    with pytest.raises(BadMedia, match=r"1000 × 1 pixels cannot be processed with \{'do_normalize': False"):
        processor([picture(1000, 1)], **processor.settings({"do_normalize": False}))


def test_a_directory_without_an_image_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no image processor"):
        ImageProcessor(tmp_path, {})


@pytest.mark.parametrize(
    "shortage", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_settings_that_need_more_memory_than_there_is_are_refused(
    shortage: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = ImageProcessor(DIRECTORY, {})

    def hungry(*_: object, **__: object) -> None:
        raise shortage

    monkeypatch.setattr(processor, "hf", hungry)
    with pytest.raises(BadMedia, match=r"112 × 84 pixels cannot be processed: .*memory"):
        processor([picture()])
