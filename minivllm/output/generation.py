"""One generated sequence: its tokens, its text, its log-probabilities, and how it ended."""

from __future__ import annotations

from collections.abc import Mapping

from minivllm.output.detokenizer import Detokenizer
from minivllm.output.stops import StopStrings
from minivllm.request import CompletionOutput, FinishReason, Logprob, Request, SampledToken, SamplingParams

__all__ = ["Generation"]


class Generation:
    """What the user sees of one sequence so far.

    Attributes:
        request: the scheduler's request; None for a sequence that is not forked yet.
        choices: the model's own choice per position.
        finished: whether it ended.
    """

    def __init__(self, index: int, sampling: SamplingParams, detokenizer: Detokenizer | None) -> None:
        self.request: Request | None = None
        self.choices: list[int] = []
        self.finished = False
        self._index = index
        self._sampling = sampling
        self._detokenizer = detokenizer
        self._stops = StopStrings(sampling.stop, include_in_output=sampling.include_stop_str_in_output)
        self._logprobs: list[Mapping[int, Logprob]] = []
        self._cumulative_logprob = 0.0
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None

    def add_token(
        self, request: Request, sampled: SampledToken, logprobs: Mapping[int, Logprob]
    ) -> str | None:
        """Take the token that `request` has just got; returns the stop string its text completes."""
        self.choices.append(sampled.choice_token_id)
        if self._sampling.logprobs is not None:
            self._logprobs.append(logprobs)
            self._cumulative_logprob += logprobs[sampled.token_id].logprob
        # A token that ended the request is not part of the text, unless stops are to be kept.
        ended_by_token = request.finish_reason is FinishReason.STOP
        if self._detokenizer is None or (ended_by_token and not self._sampling.include_stop_str_in_output):
            return None
        armed = not ended_by_token and len(self.choices) > self._sampling.min_tokens
        return self._stops.push(self._detokenizer.push(sampled.token_id), armed=armed)

    def end(self, reason: FinishReason | None, stop_reason: int | str | None) -> None:
        """Finish once; a second reason in the same step does not count."""
        if self.finished:
            return
        self.finished = True
        self._finish_reason, self._stop_reason = reason, stop_reason
        ended_by_string = isinstance(stop_reason, str)
        if self._detokenizer is not None and not ended_by_string:
            self._stops.push(self._detokenizer.flush(), armed=False)

    def output(self) -> CompletionOutput:
        """The sequence so far."""
        wants_logprobs = self._sampling.logprobs is not None
        return CompletionOutput(
            index=self._index,
            text=self._stops.text if self.finished else self._stops.visible(),
            token_ids=() if self.request is None else tuple(self.request.output_token_ids),
            choice_token_ids=tuple(self.choices),
            cumulative_logprob=self._cumulative_logprob if wants_logprobs else None,
            logprobs=tuple(self._logprobs) if wants_logprobs else None,
            finish_reason=None if self._finish_reason is None else self._finish_reason.value,
            stop_reason=self._stop_reason,
        )
