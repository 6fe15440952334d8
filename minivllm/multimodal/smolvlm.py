"""SmolVLM and Idefics3: a picture is cut into rows and columns of crops, and shown whole once more."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.errors import BadMedia, ConfigError
from minivllm.models.smolvlm import SmolVLMConfig
from minivllm.multimodal.hashing import image_hash, tensors_hash
from minivllm.multimodal.image_processor import ImageProcessor
from minivllm.multimodal.processor import Expansion, TextEncoder
from minivllm.multimodal.rects import grid_rects
from minivllm.request import MediaItem, PatchRect

__all__ = ["SmolVLMProcessor", "crop_grid", "placeholder_text"]

_IMAGE = "<image>"
_AROUND = "<fake_token_around_image>"
_WHOLE = "<global-img>"

_REFUSED: Mapping[str, str] = {
    "do_pad": "every picture is processed by itself, so nothing is padded",
    "max_image_size": "the checkpoint fixes how many tokens a crop becomes",
    "return_row_col_info": "it is always asked for",
}


def placeholder_text(rows: int, columns: int, per_crop: int) -> str:
    """What Transformers' processor writes in place of `<image>`; its tokenization is the expansion.

    Args:
        rows, columns: of the crops; 0 for a picture that is not cut.
        per_crop: tokens of one crop.
    """
    images = _IMAGE * per_crop
    lines = (
        "".join(f"{_AROUND}<row_{row}_col_{column}>{images}" for column in range(1, columns + 1)) + "\n"
        for row in range(1, rows + 1)
    )
    return "".join(lines) + ("\n" if rows else "") + f"{_AROUND}{_WHOLE}{images}{_AROUND}"


def crop_grid(height: int, width: int, side: int) -> tuple[int, int]:
    """Rows and columns of the square crops of a picture, or zeros for one that is not cut.

    As Transformers' `resize_for_vision_encoder`: the longer edge is made a multiple of `side`, the other
    follows it, and is then made one too. Its `get_number_of_image_patches` leaves out that it follows.
    """
    if width >= height:
        columns = math.ceil(width / side)
        rows = math.ceil(int(columns * side / (width / height)) / side)
    else:
        rows = math.ceil(height / side)
        columns = math.ceil(int(rows * side * (width / height)) / side)
    return (rows, columns) if max(rows, columns) > 1 else (0, 0)


def _resized(height: int, width: int, longest: int) -> tuple[int, int]:
    from transformers.models.smolvlm.image_processing_pil_smolvlm import get_resize_output_image_size

    unseen = np.broadcast_to(np.uint8(0), (1, height, width))  # takes no memory
    resized: tuple[int, int] = get_resize_output_image_size(unseen, longest)
    return resized


class SmolVLMProcessor:
    """See `minivllm.multimodal.MultiModalProcessor`.

    Supplied embeddings are {"image_embeds": [rows, hidden], "rows": …, "cols": …}; a tensor alone
    is a picture that is not cut.
    """

    modalities: tuple[str, ...] = ("image",)

    def __init__(
        self, directory: Path, config: ModelConfig, tokenizer: TextEncoder, settings: Mapping[str, Any]
    ) -> None:
        self._vision: SmolVLMConfig = config.vision
        self._hidden = config.hidden_size
        self._tokenizer = tokenizer
        self._images = ImageProcessor(directory, settings, refused=_REFUSED)
        self.setting_names = self._images.setting_names
        self.placeholder_ids: Mapping[str, int] = {"image": self._vision.image_token_id}
        if tokenizer.token_id(_IMAGE) != self._vision.image_token_id:
            raise ConfigError(
                f"{directory}: {_IMAGE!r} is token {tokenizer.token_id(_IMAGE)} of the tokenizer, but "
                f"image_token_id is {self._vision.image_token_id}"
            )
        crop = self._images.hf.max_image_size["longest_edge"]
        self._per_crop = self._vision.rows_per_crop(crop)

    def expand(self, modality: str, media: Sequence[Any], settings: Mapping[str, Any]) -> list[Expansion]:  # noqa: ARG002 - part of the protocol
        """Several runs of placeholders per picture, one per crop."""
        settings = self._images.settings(settings)
        return [
            self._supplied(source)
            if isinstance(source, Mapping | Tensor)
            else self._picture(source, settings)
            for source in media
        ]

    def count_tokens(self, modality: str, media: Sequence[Any], settings: Mapping[str, Any]) -> int:  # noqa: ARG002 - part of the protocol
        """See `MultiModalProcessor.count_tokens`."""
        settings = self._images.settings(settings)
        count = 0
        for source in media:
            if isinstance(source, Mapping | Tensor):
                count += len(self._supplied(source).token_ids)
            elif (crops := self._crops(source, settings)) is not None:
                count += len(self._token_ids(*crops))
        return count

    def positions(self, token_ids: object, spans: object, items: object) -> None:
        """Tokens are counted."""

    def _picture(self, picture: Image, settings: Mapping[str, Any]) -> Expansion:
        made = self._images([[picture]], **settings, return_row_col_info=True)
        pixels = made["pixel_values"][0]
        rows, columns = int(made["rows"][0][0]), int(made["cols"][0][0])
        mask = made.get("pixel_attention_mask")
        if mask is not None and not bool(mask.all()):
            raise BadMedia(
                f"a picture of {picture.width} × {picture.height} pixels leaves crops in part empty with "
                f"{dict(settings)}; that is not implemented"
            )
        return self._expansion(
            rows,
            columns,
            content_hash=image_hash(picture, settings),
            data={"pixel_values": pixels},
            facts={
                **self._images.facts,
                "size": picture.size,
                "mode": picture.mode,
                "grid": (rows, columns),
            },
        )

    def _crops(self, picture: Image, settings: Mapping[str, Any]) -> tuple[int, int] | None:
        """Rows and columns of a picture's crops, before any pixel; None for a size of another form."""
        hf = self._images.hf
        if not settings.get("do_image_splitting", hf.do_image_splitting):
            return 0, 0
        height, width = picture.height, picture.width
        if settings.get("do_resize", hf.do_resize):
            size = settings.get("size", hf.size)
            if not isinstance(size, Mapping | type(hf.size)) or not size.get("longest_edge"):
                return None
            height, width = _resized(height, width, size["longest_edge"])
        return crop_grid(height, width, hf.max_image_size["longest_edge"])

    def _supplied(self, source: Mapping[str, Any] | Tensor) -> Expansion:
        given = {"image_embeds": source} if isinstance(source, Tensor) else dict(source)
        if "image_embeds" not in given or not set(given) <= {"image_embeds", "rows", "cols"}:
            raise BadMedia(
                "supplied embeddings of this model are {'image_embeds', 'rows', 'cols'}, the last two for a "
                f"picture that is cut into crops; got {sorted(map(str, given))}"
            )
        embeddings = torch.as_tensor(given["image_embeds"])
        rows: Any = given.get("rows", 0)
        columns: Any = given.get("cols", 0)
        if not (rows == columns == 0 or (_is_positive(rows) and _is_positive(columns))):
            raise BadMedia(f"rows and cols must be positive numbers, or both 0; got {rows!r} and {columns!r}")
        wanted = (rows * columns + 1) * self._per_crop
        if embeddings.shape != (wanted, self._hidden):
            raise BadMedia(
                f"{rows} × {columns} crops and the whole need embeddings [{wanted}, {self._hidden}], got "
                f"{list(embeddings.shape)}"
            )
        return self._expansion(
            rows,
            columns,
            content_hash=tensors_hash(
                "image_embeds", {"image_embeds": embeddings, "grid": torch.tensor([rows, columns])}, {}
            ),
            data={"embeddings": embeddings},
            facts={"grid": (rows, columns)},
        )

    def _expansion(
        self, rows: int, columns: int, *, content_hash: str, data: Mapping[str, Any], facts: Mapping[str, Any]
    ) -> Expansion:
        ids = self._token_ids(rows, columns)
        is_embed = tuple(token == self._vision.image_token_id for token in ids)
        rects = tuple(self._rects(rows, columns))
        if sum(is_embed) != len(rects):
            raise ConfigError(
                f"the tokenizer makes {sum(is_embed)} placeholder tokens of {len(rects)}: {_IMAGE!r} must be "
                "one token wherever it stands"
            )
        item = MediaItem(
            content_hash=content_hash,
            modality="image",
            num_embeddings=len(rects),
            data=data,
            patches=rects,
            facts=facts,
        )
        return Expansion(item, ids, is_embed)

    def _token_ids(self, rows: int, columns: int) -> tuple[int, ...]:
        text = placeholder_text(rows, columns, self._per_crop)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    def _rects(self, rows: int, columns: int) -> Iterator[PatchRect]:
        side = round(self._per_crop**0.5)
        for row in range(rows):
            for column in range(columns):
                yield from grid_rects(
                    side, side, left=column / columns, top=row / rows, width=1 / columns, height=1 / rows
                )
        yield from grid_rects(side, side)


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
