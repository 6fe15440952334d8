"""Turns rows of logits into tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from minivllm.layers import Ops
from minivllm.request import Logprob, SampledToken, ScheduledRequest
from minivllm.sampling.filters import draw, filter_tokens
from minivllm.sampling.logprobs import describe
from minivllm.sampling.penalties import adjust, needs_adjusting
from minivllm.sampling.random import uniform

__all__ = ["Sampler"]


class Sampler:
    """Chooses one token per row; see `SamplingParams` for what each parameter does.

    The order is vLLM's: raw log-probabilities; logit_bias, min_tokens, bad_words, penalties; then
    greedy (lowest id among equals), or temperature, min_p, top_k, top_p and a draw. Whatever
    follows the raw logits is computed row by row in float64 on the CPU, so that a row's result
    does not depend on the rows beside it.

    Args:
        ops: computes log_softmax.
        vocab_size: width of the logits.
    """

    def __init__(self, ops: Ops, vocab_size: int) -> None:
        self._ops = ops
        self._vocab_size = vocab_size

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[ScheduledRequest],
        sequence_indices: Sequence[int] | None = None,
    ) -> list[SampledToken | str]:
        """One SampledToken per row, or the reason why the row's logits are unusable.

        Args:
            logits: [len(rows), vocab] float32.
            rows: the requests, each with its history before the new token.
            sequence_indices: which sequence of its request each row draws for; None: each
                request's own. Several rows of one request fork it.
        """
        if sequence_indices is None:
            sequence_indices = [row.request.sequence_index for row in rows]
        largest, greedy = self._largest(logits)
        wanted = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
        logprobs = dict(zip(wanted, self._log_softmax(logits, wanted), strict=True))
        return [
            self._unusable(logits[i], largest[i], row)
            or self._sample_row(logits[i], greedy[i], logprobs.get(i), row, sequence_index)
            for i, (row, sequence_index) in enumerate(zip(rows, sequence_indices, strict=True))
        ]

    def prompt_logprobs(
        self, logits: torch.Tensor, next_ids: Sequence[int], top: int
    ) -> list[dict[int, Logprob]]:
        """Log-probabilities of prompt tokens.

        Args:
            logits: [len(next_ids), vocab] float32, finite; row i predicts next_ids[i].
            next_ids: the prompt tokens that follow.
            top: how many of the most likely to add (-1: the whole vocabulary).
        """
        logprobs = self._log_softmax(logits, range(len(next_ids)))
        return [
            describe(_numpy(row), logprob, [token_id], top)
            for row, logprob, token_id in zip(logits, logprobs, next_ids, strict=True)
        ]

    def _largest(self, logits: torch.Tensor) -> tuple[list[float], list[int]]:
        """Per row the largest logit (NaN if any is) and the lowest id that has it.

        Not argmax: which of several equal maxima it returns differs between devices.
        """
        largest = logits.amax(dim=1)
        ids = torch.arange(self._vocab_size, device=logits.device)
        lowest = torch.where(logits == largest[:, None], ids, self._vocab_size).amin(dim=1)
        return largest.tolist(), lowest.tolist()

    def _log_softmax(self, logits: torch.Tensor, rows: Sequence[int]) -> list[NDArray[np.float32]]:
        if not rows:
            return []
        return list(_numpy(self._ops.log_softmax(logits[list(rows)])))

    def _unusable(self, logits: torch.Tensor, largest: float, row: ScheduledRequest) -> str | None:
        if np.isfinite(largest):
            return None
        position = len(row.tokens) - row.num_prompt_tokens
        return f"logits at generated position {position} are unusable: {_describe_bad(logits)}"

    def _sample_row(
        self,
        logits: torch.Tensor,
        greedy: int,
        logprobs: NDArray[np.float32] | None,
        row: ScheduledRequest,
        sequence_index: int,
    ) -> SampledToken | str:
        sampling = row.sampling
        position = len(row.tokens) - row.num_prompt_tokens
        choice = greedy
        if needs_adjusting(row) or not sampling.is_greedy:
            values = _numpy(logits).astype(np.float64)
            adjust(values, row)
            if not np.isfinite(values.max()):
                return (
                    f"no token can be chosen at generated position {position}: after logit_bias, "
                    f"min_tokens, bad_words and penalties the largest logit is {values.max()}"
                )
            if sampling.is_greedy:
                choice = int(values.argmax())
            else:
                number = uniform(row.request.seed, position, sequence_index)
                choice = draw(*filter_tokens(values, sampling), number)
        forced = sampling.forced_token_ids or ()
        token_id = forced[position] if position < len(forced) else choice
        found: Mapping[int, Logprob] | None = None
        if logprobs is not None and sampling.logprobs is not None:
            found = describe(_numpy(logits), logprobs, (token_id, choice), sampling.logprobs)
        return SampledToken(token_id, choice, found)


def _numpy(tensor: torch.Tensor) -> NDArray[np.float32]:
    array: NDArray[np.float32] = tensor.detach().cpu().numpy()
    return array


def _describe_bad(logits: torch.Tensor) -> str:
    nan = int(torch.isnan(logits).sum())
    infinite = int((logits == torch.inf).sum())
    if nan or infinite:
        return f"{nan} NaN and {infinite} infinite of {len(logits)}"
    return f"all {len(logits)} are -inf"
