"""Makes Hugging Face processors for pictures without torchvision, num2words and the network.

Image processors use the Pillow backend: its pixels differ from torchvision's by up to two steps
of 255, so goldens are made with one of them, always.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import transformers

__all__ = ["has_processor", "load_image_processor", "load_processor"]

_FILE = "processor_config.json"
_NOT_OPTIONS = ("processor_class", "image_processor", "video_processor")


def has_processor(directory: Path) -> bool:
    """Whether a checkpoint says how to process pictures."""
    return (directory / _FILE).is_file()


def load_image_processor(directory: Path) -> Any:
    """The Pillow image processor of a checkpoint directory."""
    return transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")


def load_processor(directory: Path) -> Any:
    """The processor of a checkpoint directory with tokenizer, image processor and no video processor.

    `AutoProcessor` cannot do this for families that have a video processor: those need torchvision.
    Placeholders are expanded by the family's own class, unchanged; chats are the tokenizer's affair.

    Raises:
        FileNotFoundError: the directory has no processor_config.json.
        ValueError: it names a class that Transformers does not have.
    """
    values = json.loads((directory / _FILE).read_text(encoding="utf-8"))
    name = values.get("processor_class")
    genuine = getattr(transformers, name or "", None)
    if genuine is None:
        raise ValueError(f"{directory / _FILE}: Transformers has no processor class {name!r}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    options: Mapping[str, Any] = {k: v for k, v in values.items() if k not in _NOT_OPTIONS}
    return _without_video(genuine)(
        image_processor=load_image_processor(directory),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        **options,
    )


def _without_video(genuine: Any) -> Any:
    """A subclass that asks for no video processor; num2words, which only videos need, may be absent."""

    class WithoutVideo(genuine):  # type: ignore[misc]  # a class chosen at run time
        videos_kwargs: ClassVar[dict[str, Any]] = {}

        def __init__(self, **options: Any) -> None:
            module = sys.modules[genuine.__module__]
            if getattr(module, "num2words", ...) is None:
                vars(module)["num2words"] = _no_num2words
            if "video_processor" in inspect.signature(genuine.__init__).parameters:
                options["video_processor"] = None
            super().__init__(**options)

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in genuine.get_attributes() if name != "video_processor"]

    WithoutVideo.__name__ = genuine.__name__
    return WithoutVideo


def _no_num2words(number: int) -> str:
    raise ModuleNotFoundError(f"writing {number} as a word, in a prompt with a video, needs num2words")
