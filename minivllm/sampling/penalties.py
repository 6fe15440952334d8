"""Changes to one row of logits that come before any choice: bias, masks and penalties."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minivllm.request import ScheduledRequest

__all__ = ["adjust", "needs_adjusting"]


def needs_adjusting(row: ScheduledRequest) -> bool:
    """Whether `adjust` could change this row's logits."""
    sampling = row.sampling
    return bool(
        sampling.logit_bias
        or row.request.bad_words_token_ids
        or _within_min_tokens(row)
        or sampling.repetition_penalty != 1
        or sampling.frequency_penalty
        or sampling.presence_penalty
    )


def adjust(logits: NDArray[np.float64], row: ScheduledRequest) -> None:
    """Apply, in place: logit_bias; masks of min_tokens and bad_words; penalties.

    Args:
        logits: [vocab] raw logits.
        row: whose history and parameters count. Repetition looks at prompt and output, frequency
            and presence at the output only.
    """
    sampling = row.sampling
    if sampling.logit_bias:
        logits[list(sampling.logit_bias)] += [float(bias) for bias in sampling.logit_bias.values()]
    if _within_min_tokens(row):
        # EOS too when ignore_eos is set: min_tokens keeps it out of the text (vLLM does the same).
        stops = np.array([*row.request.eos_token_ids, *sampling.stop_token_ids], dtype=np.intp)
        logits[stops[stops < len(logits)]] = -np.inf  # a tokenizer may name an EOS beyond the logits
    output = row.tokens[row.num_prompt_tokens :]
    for *prefix, last in row.request.bad_words_token_ids:
        if len(prefix) <= len(output) and output[len(output) - len(prefix) :] == prefix:
            logits[last] = -np.inf
    if sampling.repetition_penalty != 1:
        seen = np.unique(np.array(row.tokens[:], dtype=np.intp))
        values = logits[seen]
        penalty = sampling.repetition_penalty
        with np.errstate(over="ignore"):  # an infinite logit is refused by the sampler, by name
            logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if output and (sampling.frequency_penalty or sampling.presence_penalty):
        generated, counts = np.unique(np.array(output, dtype=np.intp), return_counts=True)
        logits[generated] -= sampling.frequency_penalty * counts + sampling.presence_penalty


def _within_min_tokens(row: ScheduledRequest) -> bool:
    return len(row.tokens) - row.num_prompt_tokens < row.sampling.min_tokens
