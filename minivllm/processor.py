"""Turns what a user submits into a `Request`, or refuses it by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any

from minivllm.config import ResolvedConfig
from minivllm.errors import BadParameter, PromptTooLong, UnsupportedError
from minivllm.request import Request, SamplingParams
from minivllm.runner import CAPTURES
from minivllm.sampling import bad_word_token_ids, check_sampling
from minivllm.tokenizer import Tokenizer

__all__ = ["Processor", "Prompt"]

Prompt = str | Mapping[str, Any]


class Processor:
    """Encodes prompts and checks everything that can be known before scheduling."""

    def __init__(self, resolved: ResolvedConfig, tokenizer: Tokenizer | None) -> None:
        self._resolved = resolved
        self._tokenizer = tokenizer

    def process(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        arrival: int,
        priority: int,
        cache_salt: str | None,
        capture: frozenset[str],
    ) -> tuple[Request, str | None]:
        """The request, and the prompt's text if it was given as text.

        Raises:
            BadParameter, PromptTooLong, UnsupportedError: before anything is queued.
        """
        _check_types(request_id, sampling, priority, cache_salt)
        text, token_ids = self._encode(prompt)
        self._check(token_ids, sampling, capture)
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
            capture=capture,
        )
        return request, text

    def _encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            prompt = {"prompt": prompt}
        if not isinstance(prompt, Mapping) or set(prompt) not in ({"prompt"}, {"prompt_token_ids"}):
            raise BadParameter(
                "a prompt is text, {'prompt': text} or {'prompt_token_ids': ids}; "
                f"got {sorted(map(str, prompt)) if isinstance(prompt, Mapping) else type(prompt).__name__}"
            )
        if "prompt_token_ids" in prompt:
            ids = prompt["prompt_token_ids"]
            if not isinstance(ids, Iterable):
                raise BadParameter(f"prompt_token_ids must be a list of token ids, got {ids!r}")
            return None, list(ids)
        if not isinstance(prompt["prompt"], str):
            raise BadParameter(f"the prompt must be text, got {type(prompt['prompt']).__name__}")
        if self._tokenizer is None:
            raise UnsupportedError("this model has no tokenizer: give prompt_token_ids")
        return prompt["prompt"], self._tokenizer.encode(prompt["prompt"])

    def _check(self, token_ids: list[int], sampling: SamplingParams, capture: frozenset[str]) -> None:
        vocab = self._resolved.model.vocab_size
        if not token_ids:
            raise BadParameter("the prompt is empty: give at least one token")
        bad = [t for t in token_ids if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < vocab]
        if bad:
            raise BadParameter(f"prompt token ids must be integers in [0, {vocab}), got {bad[:5]}")
        limit = self._resolved.max_model_len
        if len(token_ids) >= limit:
            raise PromptTooLong(
                f"the prompt has {len(token_ids)} tokens and max_model_len is {limit}: "
                f"at most {limit - 1} leave room for one generated token"
            )
        if sampling.stop and self._tokenizer is None:
            raise UnsupportedError("stop strings need a tokenizer, and this model has none")
        check_sampling(sampling, vocab)
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


def _derived_seed(engine_seed: int, arrival: int) -> int:
    return int.from_bytes(sha256(f"{engine_seed}:{arrival}".encode()).digest()[:8], "big") >> 1
