from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from minivllm.layers import make_ops
from minivllm.request import Request, SamplingParams, ScheduledRequest, TokenView
from minivllm.sampling import Sampler

MakeRow = Callable[..., ScheduledRequest]


@pytest.fixture
def make_row() -> MakeRow:
    """A scheduled request that samples next: prompt ids, output ids, and sampling parameters."""

    def make(
        prompt: Sequence[int] = (1,),
        output: Sequence[int] = (),
        *,
        seed: int = 0,
        eos: tuple[int, ...] = (),
        bad_words: tuple[tuple[int, ...], ...] = (),
        **params: Any,
    ) -> ScheduledRequest:
        params.setdefault("temperature", 0.0)
        params.setdefault("max_tokens", 100)
        request = Request(
            "r",
            [*prompt, *output],
            len(prompt),
            SamplingParams(**params),
            eos_token_ids=eos,
            bad_words_token_ids=bad_words,
            seed=seed,
        )
        tokens = TokenView(request.token_ids)
        return ScheduledRequest("r", 0, len(tokens), tokens, len(prompt), (1,), True, request)

    return make


@pytest.fixture
def make_sampler() -> Callable[[int], Sampler]:
    return lambda vocab_size: Sampler(make_ops("torch", torch.device("cpu")), vocab_size)
