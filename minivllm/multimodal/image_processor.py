"""Transformers' image processor of a model, with one backend everywhere and errors by name.

Backends differ in the last bit of a resized pixel, so it is always the Pillow one, installed or not
what others need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import PIL
from PIL.Image import Image
from torch import Tensor

from minivllm.device import ran_out_of_memory
from minivllm.errors import BadMedia, BadParameter, ConfigError
from minivllm.multimodal.written_settings import setting_problems, written_settings

__all__ = ["ImageProcessor"]

#: Arguments that choose the form of the answer and not what is in it.
_NOT_SETTINGS = frozenset(
    {"data_format", "device", "disable_grouping", "input_data_format", "return_tensors"}
)

#: What Transformers raises over a picture that its steps cannot work with.
_UNFIT = (ArithmeticError, AttributeError, IndexError, TypeError, ValueError)


class ImageProcessor:
    """Made once per engine.

    Args:
        directory: of the model.
        settings: arguments of Transformers' image processor for every request, such as
            `{"max_pixels": 401408}`.
        refused: settings that this family cannot honour → why.

    Attributes:
        hf: Transformers' object, to read its fields.
        setting_names: the settings that a request may override.
        facts: class, backend and library version, for reports.

    Raises:
        ConfigError: the directory holds no image processor, or a value that `written_settings` refuses.
        BadParameter: an unknown, refused or malformed setting.
    """

    def __init__(
        self, directory: Path, settings: Mapping[str, Any], *, refused: Mapping[str, str] | None = None
    ) -> None:
        from transformers import AutoImageProcessor

        written_settings(directory, "image_processor")
        try:
            self.hf: Any = AutoImageProcessor.from_pretrained(
                str(directory), backend="pil", local_files_only=True, trust_remote_code=False
            )
        except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
            if ran_out_of_memory(error):
                raise
            raise ConfigError(f"{directory} holds no image processor that can be made: {error}") from error
        self._refused = dict(refused or {})
        names = set(self.hf.valid_kwargs.__annotations__) - _NOT_SETTINGS - set(self._refused)
        self.setting_names = tuple(sorted(names))
        self.facts: Mapping[str, Any] = {
            "image_processor": type(self.hf).__name__,
            "backend": "pil",
            "pillow": PIL.__version__,
        }
        self._settings = self._checked(settings)

    def settings(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's settings with those of one request over them.

        Raises:
            BadParameter: an unknown, refused or malformed setting.
        """
        return {**self._settings, **self._checked(settings)}

    def __call__(
        self, images: Sequence[Image] | Sequence[Sequence[Image]], **settings: Any
    ) -> dict[str, Tensor]:
        """What Transformers makes of the pictures of one prompt.

        Args:
            settings: as `settings` gave them.

        Raises:
            BadMedia: a picture that cannot be processed under these settings.
        """
        try:
            return dict(self.hf(images, return_tensors="pt", **settings))
        except Exception as error:  # sorted below; memory says so in many ways, and settings may ask for any
            if not isinstance(error, _UNFIT) and not ran_out_of_memory(error):
                raise
            first = images[0] if isinstance(images[0], Image) else images[0][0]
            raise BadMedia(
                f"a picture of {first.width} × {first.height} pixels cannot be processed"
                f"{f' with {settings}' if settings else ''}: {str(error) or 'not enough memory'}"
            ) from error

    def _checked(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        from huggingface_hub.dataclasses import validate_typed_dict
        from huggingface_hub.errors import StrictDataclassError

        for name, why in self._refused.items():
            if name in settings:
                raise BadParameter(f"image processor setting {name!r} cannot be changed: {why}")
        if unknown := sorted(set(map(str, settings)) - set(self.setting_names)):
            raise BadParameter(
                f"unknown image processor settings {unknown}; known: {', '.join(self.setting_names)}"
            )
        try:
            validate_typed_dict(self.hf.valid_kwargs, dict(settings))
        except (StrictDataclassError, ValueError, TypeError) as error:
            raise BadParameter(f"image processor settings {dict(settings)}: {error}") from error
        if problems := list(setting_problems(settings)):
            raise BadParameter(f"image processor settings: {'; '.join(problems)}")
        return dict(settings)
