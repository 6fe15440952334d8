"""What a model family does with media: pixels for the encoder, placeholder tokens, positions.

One `MultiModalProcessor` per family, behind the registry `MULTIMODAL`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from minivllm.config import ModelConfig
from minivllm.registry import Registry
from minivllm.request import MediaItem, MediaSpan

__all__ = ["MULTIMODAL", "Expansion", "MultiModalProcessor", "TextEncoder"]


@dataclass(frozen=True, eq=False, slots=True)
class Expansion:
    """What one item becomes in the prompt.

    Attributes:
        item: the item.
        token_ids: what replaces the item's placeholder token.
        is_embed: which of `token_ids` take a row of the item's embeddings, in order.
        whole: whether the tokens of a run of rows see one another, see `MediaSpan.whole`.
    """

    item: MediaItem
    token_ids: tuple[int, ...]
    is_embed: tuple[bool, ...]
    whole: bool = False


class TextEncoder(Protocol):
    """What a family needs of the tokenizer; see `minivllm.tokenizer.Tokenizer`."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def token_id(self, token: str) -> int | None: ...


class MultiModalProcessor(Protocol):
    """One family's way with media. Made once per engine.

    Attributes:
        modalities: what it takes: "image", and "video" for some.
        placeholder_ids: modality → the token id that stands for one item in a prompt.
        setting_names: settings that `expand` knows, for messages.

    A class may have `implicit_placeholders = True`: then a prompt with media and without any
    placeholder begins with one per item, before everything else (BLIP-2). A class may have
    `around_placeholders = (before, after)`: texts that belong on both sides of every placeholder in a
    text or a conversation, put there before the text is tokenised, since they may become one token with
    what stands beside them (Gemma 3). Prompts of token ids are taken as they are.
    """

    modalities: tuple[str, ...]
    placeholder_ids: Mapping[str, int]
    setting_names: tuple[str, ...]

    def __init__(
        self,
        directory: Path,
        config: ModelConfig,
        tokenizer: TextEncoder,
        settings: Mapping[str, Any],
    ) -> None:
        """Read the image processor's configuration.

        Args:
            directory: of the model.
            settings: of every request that does not override them, as for Transformers' image
                processor.

        Raises:
            BadParameter: an unknown setting; names the known ones.
            ConfigError: the directory lacks what the image processor needs.
        """
        ...

    def expand(self, modality: str, media: Sequence[Any], settings: Mapping[str, Any]) -> list[Expansion]:
        """Process all items of one modality of one prompt, in order of their placeholders.

        Args:
            media: Pillow images for "image", `Video` or `VideoFile` objects for "video"; in either place
                also supplied embeddings as `minivllm.multimodal.checked_embeddings` leaves them: a
                tensor [rows, hidden], or a mapping that holds it under "image_embeds" (or
                "video_embeds") beside other facts.
            settings: what this request overrides; the engine's are known from the constructor.

        Raises:
            BadMedia: an item cannot be processed.
            BadParameter: an unknown setting; names the known ones.
        """
        ...

    def count_tokens(self, modality: str, media: Sequence[Any], settings: Mapping[str, Any]) -> int:
        """How many tokens `expand` makes of all these items, told by their sizes before any pixel is made.

        So a prompt that is too long is refused before the work. An item that only `expand` can tell, or
        that it will refuse, may count 0.

        Args:
            media, settings: as for `expand`.

        Raises:
            BadMedia, BadParameter: as `expand`.
        """
        ...

    def positions(
        self, token_ids: Sequence[int], spans: Sequence[MediaSpan], items: Mapping[str, MediaItem]
    ) -> tuple[NDArray[np.int64], int] | None:
        """Positions [3, tokens] of an expanded prompt and the delta of what follows; None: 1-D.

        An item that occurs twice has two runs of spans, each beginning at row 0.
        """
        ...


#: Transformers class name → its family's processor. Others may add theirs in the entry point group.
MULTIMODAL: Registry[type[MultiModalProcessor]] = Registry(
    "multimodal processor", entry_point_group="minivllm.multimodal"
)
