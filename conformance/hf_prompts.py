"""What Hugging Face makes of a prompt: token ids, and the tensors of its pictures and videos."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps

from conformance.hf_models import NoTruth, load_tokenizer, prompt_token_ids
from conformance.hf_processors import has_processor, load_processor
from conformance.hf_videos import FrameProcessor
from conformance.records import MediaRecord, SpanRecord

__all__ = ["OpenedMedia", "Prompt", "PromptMaker", "open_picture"]

#: Inputs with one entry per token; generated tokens get zeros there.
PER_TOKEN = ("mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True, eq=False, slots=True)
class Prompt:
    """A prompt as a Transformers model takes it.

    Attributes:
        token_ids: with every placeholder expanded.
        inputs: model inputs beside the ids: pixel_values, image_grid_thw, …, each with its batch
            axis.
        placeholder_ids: ids that stand for embeddings of pictures.
        media: what there is to record, positions aside; None for a text.
    """

    token_ids: tuple[int, ...]
    inputs: Mapping[str, torch.Tensor] = field(default_factory=dict)
    placeholder_ids: frozenset[int] = frozenset()
    media: MediaRecord | None = None

    def inputs_for(self, length: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The inputs for `length` tokens, of which the first are the prompt's."""
        made = {}
        for name, value in self.inputs.items():
            if name in PER_TOKEN:
                more = torch.zeros((1, length - value.shape[1]), dtype=value.dtype)
                value = torch.cat([value, more], dim=1)
            made[name] = value.to(dtype) if value.is_floating_point() else value
        return made


@dataclass(frozen=True, eq=False, slots=True)
class OpenedMedia:
    """One picture, or the frames of a video, and what to record about it."""

    modality: str
    pictures: tuple[Image.Image, ...]
    fps: float | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


def open_picture(path: Path) -> Image.Image:
    """Read a picture file, turned the way its EXIF orientation says, in the mode it is stored in."""
    with Image.open(path) as image:
        image.load()
        return ImageOps.exif_transpose(image)


class PromptMaker:
    """Makes prompts for one checkpoint, by Hugging Face's own tokenizer, template and processor.

    Args:
        path: a directory or a .gguf file.
        config: its Transformers config.
    """

    def __init__(self, path: Path, config: Any) -> None:
        self.tokenizer: Any = load_tokenizer(path)  # None for a checkpoint without one
        self._path, self._config = path, config
        self._processor: Any = None

    def __call__(
        self,
        prompt: Mapping[str, Any],
        media: Sequence[OpenedMedia] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Make a prompt.

        Args:
            prompt: {"text" | "messages" | "token_ids": …}; a message's content is a text or parts,
                canonical ({"image": …}) or an engine's ({"type": "image"}).
            media: its pictures and videos, in its order.
            settings: of the image processor.

        Raises:
            NoTruth: the checkpoint cannot see, or its processor refuses what it is given.
        """
        spelled = has_processor(self._path) and self._spells_placeholder(prompt)
        if not media:
            return Prompt(self._sanitised(prompt) if spelled else prompt_token_ids(self.tokenizer, prompt))
        if not has_processor(self._path):
            raise NoTruth(f"{self._path.name} has no processor for pictures")
        if "token_ids" in prompt:
            raise NoTruth("the truth about pictures needs a text or a chat, not token ids")
        make = self._sanitised_call if spelled else self._call
        return self._processed(make(prompt, media, settings or {}), media)

    def _spells_placeholder(self, prompt: Mapping[str, Any]) -> bool:
        """Whether a message spells a placeholder in its text, where it is a text and no placeholder."""
        spellings = [self.tokenizer.convert_ids_to_tokens(token) for token in self._placeholders()]
        contents = [message["content"] for message in prompt.get("messages", ())]
        texts = [
            text
            for content in contents
            for text in (
                [content] if isinstance(content, str) else [part.get("text", "") for part in content]
            )
        ]
        return any(spelling in text for spelling in spellings for text in texts)

    def _sanitised(self, prompt: Mapping[str, Any]) -> tuple[int, ...]:
        ids: list[int] = self.tokenizer.apply_chat_template(
            [_typed_message(message) for message in prompt["messages"]],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=False,
            sanitize_control_tokens=True,
        )
        return tuple(ids)

    def _sanitised_call(
        self, prompt: Mapping[str, Any], media: Sequence[OpenedMedia], settings: Mapping[str, Any]
    ) -> Callable[[], Any]:
        """The processor's own chat, which alone keeps spelled placeholders apart."""
        if settings or any(item.modality != "image" for item in media):
            raise NoTruth("a spelled placeholder beside a video or settings is not written here")
        pictures = iter([item.pictures[0] for item in media])
        messages = [_typed_message(message, pictures) for message in prompt["messages"]]
        return lambda: self._load().apply_chat_template(
            messages,
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
            sanitize_control_tokens=True,
        )

    def _call(
        self, prompt: Mapping[str, Any], media: Sequence[OpenedMedia], settings: Mapping[str, Any]
    ) -> Callable[[], Any]:
        special = "text" in prompt
        text = prompt["text"] if special else self._rendered(prompt["messages"])
        images = [m.pictures[0] for m in media if m.modality == "image"]
        videos = [m for m in media if m.modality == "video"]
        options: dict[str, Any] = {"return_tensors": "pt", "add_special_tokens": special}
        if images:
            # Nested by prompt: some families treat the only picture of a prompt in another way.
            options |= {"images": [images], "images_kwargs": dict(settings)}
        if videos:
            self._frames().rates = [video.fps for video in videos]
            options["videos"] = [list(video.pictures) for video in videos]
        return lambda: self._load()(text=[text], **options)

    def _rendered(self, messages: Sequence[Mapping[str, Any]]) -> str:
        if self.tokenizer is None or self.tokenizer.chat_template is None:
            raise NoTruth("this tokenizer has no chat template: give the prompt as text")
        typed = [_typed_message(message) for message in messages]
        text: str = self.tokenizer.apply_chat_template(typed, tokenize=False, add_generation_prompt=True)
        return text

    def _processed(self, call: Callable[[], Any], media: Sequence[OpenedMedia]) -> Prompt:
        processor = self._load()
        expansions: list[str] = []
        try:
            with warnings.catch_warnings(), _noting(processor, expansions):
                # Transformers means to rename the processor settings that published models are used with.
                warnings.simplefilter("ignore", FutureWarning)
                made = call()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            name = type(processor).__name__
            raise NoTruth(f"{name} refuses the prompt: {type(error).__name__}: {error}") from error
        ids = tuple(made.pop("input_ids")[0].tolist())
        made.pop("attention_mask", None)
        inputs = {name: torch.as_tensor(value) for name, value in made.items()}
        record = self._record(ids, media, expansions, inputs)
        return Prompt(ids, inputs, frozenset(self._placeholders()), record)

    def _record(
        self,
        ids: Sequence[int],
        media: Sequence[OpenedMedia],
        expansions: Sequence[str],
        inputs: Mapping[str, torch.Tensor],
    ) -> MediaRecord:
        modality_of = self._placeholders()
        rows = _rows_per_item(ids, media, expansions, modality_of, self.tokenizer)
        spans = list(_spans(ids, media, rows, modality_of))
        items = []
        count = {"image": 0, "video": 0}
        for item, number in zip(media, rows, strict=True):
            facts: dict[str, Any] = {"modality": item.modality, **item.facts, "rows": number}
            facts["size"] = list(item.pictures[0].size)
            grid = inputs.get(f"{item.modality}_grid_thw")
            if grid is not None:
                facts["grid_thw"] = grid[count[item.modality]].tolist()
            if item.fps is not None:
                facts["fps"] = item.fps
            if item.modality == "image" and count["image"] < len(expansions):
                facts |= _crops(expansions[count["image"]])
            count[item.modality] += 1
            items.append(facts)
        processor = self._load()
        return MediaRecord(
            items=tuple(items),
            spans=tuple(spans),
            processor=type(processor).__name__,
            image_processor=type(processor.image_processor).__name__,
        )

    def _placeholders(self) -> dict[int, str]:
        """Placeholder id → modality."""
        found = {}
        for modality in ("image", "video"):
            for name in (f"{modality}_token_id", f"{modality}_token_index"):
                value = getattr(self._config, name, None)
                if value is not None:
                    found[int(value)] = modality
        return found

    def _load(self) -> Any:
        if self._processor is None:
            self._processor = load_processor(self._path)
        return self._processor

    def _frames(self) -> FrameProcessor:
        processor = self._load()
        if getattr(processor, "video_processor", None) is None:
            values = json.loads((self._path / "processor_config.json").read_text(encoding="utf-8"))
            if "video_processor" not in values:
                raise NoTruth(f"{self._path.name} has no settings for videos")
            processor.video_processor = FrameProcessor(processor.image_processor, values["video_processor"])
        frames: FrameProcessor = processor.video_processor
        return frames


class _noting:  # noqa: N801  (a context manager)
    """Within the block, `processor` notes what it writes for each picture and video, in prompt order.

    The processor expands all pictures before all videos; the notes keep the two apart by the token
    they are made of.
    """

    def __init__(self, processor: Any, notes: list[str]) -> None:
        self._processor, self._notes = processor, notes

    def __enter__(self) -> None:
        for name in ("replace_image_token", "replace_video_token"):
            method = getattr(self._processor, name, None)
            if method is not None:
                setattr(self._processor, name, self._noted(method))

    def _noted(self, method: Any) -> Any:
        def noted(*args: Any, **kwargs: Any) -> str:
            text: str = method(*args, **kwargs)
            self._notes.append(text)
            return text

        return noted

    def __exit__(self, *_: object) -> None:
        for name in ("replace_image_token", "replace_video_token"):
            self._processor.__dict__.pop(name, None)


def _crops(expansion: str) -> dict[str, list[int]]:
    """Rows and columns of crops, where an expansion numbers them."""
    found = [(int(row), int(column)) for row, column in re.findall(r"<row_(\d+)_col_(\d+)>", expansion)]
    return {"crops": list(max(found))} if found else {}


def _typed_message(message: Mapping[str, Any], pictures: Iterator[Any] | None = None) -> dict[str, Any]:
    """A message as templates take it; with `pictures`, each in its part."""
    if isinstance(message["content"], str):
        return dict(message)
    parts = [dict(_typed(part)) for part in message["content"]]
    if pictures is not None:
        parts = [part if part["type"] == "text" else {**part, "image": next(pictures)} for part in parts]
    return {**message, "content": parts}


def _typed(part: Mapping[str, Any]) -> Mapping[str, Any]:
    if "type" in part:
        return part
    [(kind, value)] = part.items()
    return {"type": "text", "text": value} if kind == "text" else {"type": kind}


def _rows_per_item(
    ids: Sequence[int],
    media: Sequence[OpenedMedia],
    expansions: Sequence[str],
    modality_of: Mapping[int, str],
    tokenizer: Any,
) -> list[int]:
    """How many embeddings each picture or video has, in prompt order."""
    total = sum(token in modality_of for token in ids)
    if not expansions:  # a processor that writes the same for every picture
        if total % len(media):
            raise NoTruth(f"{total} placeholders cannot belong to {len(media)} pictures of equal length")
        return [total // len(media)] * len(media)
    counts = [
        sum(token in modality_of for token in tokenizer(text, add_special_tokens=False)["input_ids"])
        for text in expansions
    ]
    # Pictures are expanded before videos, each kind in prompt order.
    queues = {"image": counts[: sum(m.modality == "image" for m in media)]}
    queues["video"] = counts[len(queues["image"]) :]
    rows = [queues[item.modality].pop(0) for item in media]
    if sum(rows) != total:
        raise NoTruth(f"the prompt holds {total} placeholders, its pictures need {sum(rows)}")
    return rows


def _spans(
    ids: Sequence[int], media: Sequence[OpenedMedia], rows: Sequence[int], modality_of: Mapping[int, str]
) -> Iterator[SpanRecord]:
    queues = {
        kind: [(i, rows[i]) for i, item in enumerate(media) if item.modality == kind]
        for kind in ("image", "video")
    }
    used: dict[int, int] = {}
    at = 0
    while at < len(ids):
        kind = modality_of.get(ids[at])
        if kind is None:
            at += 1
            continue
        item, count = queues[kind][0]
        first = used.get(item, 0)
        end = at
        while end < len(ids) and ids[end] == ids[at] and end - at < count - first:
            end += 1
        yield SpanRecord(at, end - at, item, first)
        used[item] = first + end - at
        if used[item] == count:
            queues[kind].pop(0)
        at = end
