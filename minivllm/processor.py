"""Turns what a user submits into a `Request`, or refuses it by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minivllm.config import ResolvedConfig
from minivllm.errors import BadParameter, InvariantError, PromptTooLong, UnsupportedError
from minivllm.multimodal import (
    MultiModalProcessor,
    place,
    prompt_item,
    read_media,
    split_conversation,
)
from minivllm.request import MediaItem, MediaSpan, Request, SamplingParams
from minivllm.runner import CAPTURES
from minivllm.sampling import bad_word_token_ids, check_sampling
from minivllm.tokenizer import Message, Tokenizer

__all__ = ["Processor", "Prompt"]

Prompt = str | Mapping[str, Any]

_FORMS = ("prompt", "prompt_token_ids", "prompt_embeds")
_WITH_MEDIA = ("multi_modal_data", "mm_processor_kwargs")


@dataclass(slots=True)
class _Encoded:
    """A prompt as token ids, with its media."""

    text: str | None
    token_ids: list[int]
    media: tuple[MediaSpan, ...] = ()
    items: Mapping[str, MediaItem] = field(default_factory=dict)
    positions: NDArray[np.int64] | None = None
    delta: int = 0


class Processor:
    """Encodes prompts and checks everything that can be known before scheduling.

    Args:
        multimodal: what the model's family does with media; None for a text-only model.
    """

    def __init__(
        self,
        resolved: ResolvedConfig,
        tokenizer: Tokenizer | None,
        multimodal: MultiModalProcessor | None = None,
    ) -> None:
        self._resolved = resolved
        self._tokenizer = tokenizer
        self._multimodal = multimodal

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        arrival: int,
        priority: int,
        cache_salt: str | None,
        capture: Iterable[str],
    ) -> tuple[Request, str | None]:
        """The request, and the prompt's text if it was given as text.

        Raises:
            BadParameter, BadMedia, PromptTooLong, UnsupportedError: before anything is queued.
        """
        _check_types(request_id, sampling, priority, cache_salt)
        stages = _stage_names(capture)
        encoded = self._encode(prompt, sampling)
        token_ids = encoded.token_ids
        self._check(token_ids, sampling, stages)
        max_len = self._resolved.max_model_len
        seed = sampling.seed
        if seed is None:
            seed = _derived_seed(self._resolved.engine.seed, arrival)
        request = Request(
            request_id=request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            sampling=sampling,
            eos_token_ids=self._resolved.model.eos_token_ids,
            bad_words_token_ids=bad_word_token_ids(sampling.bad_words, self._tokenizer),
            seed=seed,
            max_total_tokens=min(max_len, len(token_ids) + (sampling.max_tokens or max_len)),
            arrival=arrival,
            priority=priority,
            cache_salt=cache_salt,
            media=encoded.media,
            media_items=encoded.items,
            positions=encoded.positions,
            position_delta=encoded.delta,
            capture=stages,
        )
        return request, encoded.text

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """A conversation as a prompt of token ids with its media; see `split_conversation`.

        A placeholder is only where the template puts one for a part with media: a text that spells
        one stays text.

        Raises:
            BadParameter, UnsupportedError: as `Tokenizer.render_chat`; media for a text-only model.
        """
        if self._tokenizer is None:
            raise UnsupportedError("this model has no tokenizer, so it has no chat template")
        plain, media = split_conversation(messages, text_only=self._multimodal is None)
        if media:
            self._family()
        placeholders = set(self._multimodal.placeholder_ids.values()) if self._multimodal else set()
        token_ids = self._tokenizer.encode_chat(
            plain,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            only_from_template=sorted(placeholders),
            around=self._margins()[1],
        )
        prompt: dict[str, Any] = {"prompt_token_ids": token_ids}
        if media:
            prompt["multi_modal_data"] = media
        if mm_processor_kwargs is not None:
            prompt["mm_processor_kwargs"] = mm_processor_kwargs
        return prompt

    def _encode(self, prompt: Prompt, sampling: SamplingParams) -> _Encoded:
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        if (
            not isinstance(prompt, Mapping)
            or sum(form in prompt for form in _FORMS) != 1
            or not set(prompt) <= {*_FORMS, *_WITH_MEDIA}
        ):
            raise BadParameter(
                "a prompt is text, or has one of prompt, prompt_token_ids and prompt_embeds, and may have "
                "multi_modal_data and mm_processor_kwargs; "
                f"got {sorted(map(str, prompt)) if isinstance(prompt, Mapping) else type(prompt).__name__}"
            )
        if "prompt_embeds" in prompt:
            return self._encode_embeds(prompt, sampling)
        if "prompt_token_ids" in prompt:
            ids = prompt["prompt_token_ids"]
            if not isinstance(ids, Iterable) or isinstance(ids, str | bytes | Mapping | Set):
                raise BadParameter(f"prompt_token_ids must be a list of token ids, got {ids!r}")
            encoded = _Encoded(None, list(ids))
        else:
            if not isinstance(prompt["prompt"], str):
                raise BadParameter(f"the prompt must be text, got {type(prompt['prompt']).__name__}")
            if self._tokenizer is None:
                raise UnsupportedError("this model has no tokenizer: give prompt_token_ids")
            text = self._tokenizer.surround(prompt["prompt"], *self._margins())
            encoded = _Encoded(prompt["prompt"], self._tokenizer.encode(text))
        vocab = self._resolved.model.vocab_size
        ids = encoded.token_ids
        if bad := [t for t in ids if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < vocab]:
            raise BadParameter(f"prompt token ids must be integers in [0, {vocab}), got {bad[:5]}")
        data, settings = (_mapping(prompt, name) for name in _WITH_MEDIA)
        if self._multimodal is not None or data or settings:
            self._place_media(encoded, data, settings)
        return encoded

    def _encode_embeds(self, prompt: Mapping[str, Any], sampling: SamplingParams) -> _Encoded:
        """A prompt of embeddings; its token ids are unknown and stand as 0."""
        if more := sorted(set(prompt) - {"prompt_embeds"}):
            raise BadParameter(f"prompt_embeds come alone: media are part of them, got also {more}")
        needs_ids = {
            "repetition_penalty": sampling.repetition_penalty != 1.0,
            "prompt_logprobs": sampling.prompt_logprobs is not None,
        }
        if asked := [name for name, given in needs_ids.items() if given]:
            raise BadParameter(f"{' and '.join(asked)} need token ids, which prompt_embeds do not have")
        item = prompt_item(prompt["prompt_embeds"], self._resolved.model.hidden_size)
        length = item.num_embeddings
        span = MediaSpan(0, length, item.modality, item.content_hash)
        return _Encoded(None, [0] * length, (span,), {item.content_hash: item})

    def _place_media(self, encoded: _Encoded, data: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """Load, process and expand the media of a prompt, in place."""
        family = self._family()
        limits = self._resolved.engine.limit_mm_per_prompt or {}
        media = read_media(data, self._resolved.model.hidden_size, limits)
        for modality in media:
            if modality not in family.modalities:
                known = " and ".join(family.modalities)
                raise UnsupportedError(f"{self._resolved.model.architecture} takes {known}, got {modality}")
        if not media:
            family.expand(family.modalities[0], (), settings)  # unknown ones are refused all the same
        self._check_room(encoded.token_ids, family, media, settings)
        expansions = {modality: family.expand(modality, items, settings) for modality, items in media.items()}
        for modality, found in expansions.items():
            if len(found) != len(media[modality]):
                raise InvariantError(f"{len(media[modality])} {modality}s became {len(found)} expansions")
        placeholders = family.placeholder_ids
        if media and _is_implicit(family) and not set(placeholders.values()) & set(encoded.token_ids):
            first = [placeholders[modality] for modality, items in media.items() for _ in items]
            encoded.token_ids = [*first, *encoded.token_ids]
        placement = place(encoded.token_ids, expansions, placeholders)
        encoded.token_ids = placement.token_ids
        encoded.media, encoded.items = placement.spans, placement.items
        positions = family.positions(placement.token_ids, placement.spans, placement.items) if media else None
        if positions is not None:
            encoded.positions, encoded.delta = positions
            if encoded.positions.shape != (3, len(encoded.token_ids)):
                raise InvariantError(f"positions of shape {encoded.positions.shape}")

    def _check_room(
        self,
        token_ids: list[int],
        family: MultiModalProcessor,
        media: Mapping[str, list[Any]],
        settings: Mapping[str, Any],
    ) -> None:
        """Refuse media that make the prompt too long, before the work on their pixels.

        A prompt that holds whole expansions already is no shorter than they are; it is checked later.
        """
        tokens = sum(family.count_tokens(modality, items, settings) for modality, items in media.items())
        found = sum(token_ids.count(token) for token in set(family.placeholder_ids.values()))
        wanted = sum(map(len, media.values()))
        if tokens > len(token_ids) and (found == wanted or (not found and _is_implicit(family))):
            self._check_length(len(token_ids) - found + tokens)

    def _check_length(self, num_tokens: int) -> None:
        limit = self._resolved.max_model_len
        if num_tokens >= limit:
            raise PromptTooLong(
                f"the prompt has {num_tokens} tokens and max_model_len is {limit}: "
                f"at most {limit - 1} leave room for one generated token"
            )

    def _margins(self) -> tuple[list[int], tuple[str, str]]:
        """Placeholders, and what belongs around each of them in a text."""
        around: tuple[str, str] = getattr(self._multimodal, "around_placeholders", ("", ""))
        return (sorted(set(self._multimodal.placeholder_ids.values())) if self._multimodal else []), around

    def _family(self) -> MultiModalProcessor:
        if self._multimodal is None:
            raise UnsupportedError(
                f"{self._resolved.model.architecture} is a text-only model: it takes no images or videos"
            )
        return self._multimodal

    def _check(self, token_ids: list[int], sampling: SamplingParams, capture: frozenset[str]) -> None:
        if not token_ids:
            raise BadParameter("the prompt is empty: give at least one token")
        self._check_length(len(token_ids))
        if sampling.stop and self._tokenizer is None:
            raise UnsupportedError("stop strings need a tokenizer, and this model has none")
        check_sampling(sampling, self._resolved.model.vocab_size)
        unknown = capture - set(CAPTURES)
        if unknown:
            raise BadParameter(f"unknown stages {sorted(unknown)}; known: {sorted(CAPTURES)}")


def _check_types(request_id: object, sampling: object, priority: object, cache_salt: object) -> None:
    """Refuse what would only break later, in the scheduler, for every other request too."""
    if not isinstance(request_id, str):
        raise BadParameter(f"a request id is text, got {request_id!r}")
    if not isinstance(sampling, SamplingParams):
        raise BadParameter(f"sampling_params must be SamplingParams, got {sampling!r}")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise BadParameter(f"priority must be an integer, got {priority!r}")
    if cache_salt is not None and not isinstance(cache_salt, str):
        raise BadParameter(f"cache_salt must be text or None, got {cache_salt!r}")


def _is_implicit(family: MultiModalProcessor) -> bool:
    return bool(getattr(family, "implicit_placeholders", False))


def _mapping(prompt: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = prompt.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadParameter(f"{name} is a mapping, got {value!r}")
    return value


def _stage_names(capture: object) -> frozenset[str]:
    if isinstance(capture, Iterable) and not isinstance(capture, str | bytes | Mapping):
        names = list(capture)
        if all(isinstance(name, str) for name in names):
            return frozenset(names)
    raise BadParameter(f"capture must be a list of stage names, got {capture!r}")


def _derived_seed(engine_seed: int, arrival: int) -> int:
    return int.from_bytes(sha256(f"{engine_seed}:{arrival}".encode()).digest()[:8], "big") >> 1
