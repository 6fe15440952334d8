"""From logits to tokens: adjust, filter, draw, and report log-probabilities.

Everything is derived from the scheduled request's own token history and keyed random numbers.
Nothing is remembered between steps, so preemption, batch order and batch size cannot change a
result.
"""

from __future__ import annotations

from minivllm.sampling.checks import bad_word_token_ids, check_sampling
from minivllm.sampling.sampler import Sampler

__all__ = ["Sampler", "bad_word_token_ids", "check_sampling"]
