"""Builds what the user sees from what the scheduler committed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from minivllm.errors import InvariantError
from minivllm.output.detokenizer import Detokenizer, TextDecoder
from minivllm.output.stops import StopStrings
from minivllm.request import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Request,
    RequestOutput,
    SampledToken,
    StepResult,
)

__all__ = ["OutputProcessor"]


class OutputProcessor:
    """Keeps each live request's text and log-probabilities, and finds stop strings.

    Args:
        tokenizer: None gives outputs without text.
        finish: called with (request id, FinishReason.STOP, stop string) when a stop string ended
            a request that the scheduler still runs.
    """

    def __init__(
        self,
        tokenizer: TextDecoder | None,
        finish: Callable[[str, FinishReason, str], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._finish = finish
        self._live: dict[str, _Generation] = {}
        self._token_texts: dict[int, str] = {}

    def add(self, request: Request, prompt_text: str | None = None) -> None:
        """Start following a request that the scheduler accepted."""
        detokenizer = None
        if self._tokenizer is not None and request.sampling.detokenize:
            detokenizer = Detokenizer(
                self._tokenizer,
                request.token_ids[: request.num_prompt_tokens],
                skip_special_tokens=request.sampling.skip_special_tokens,
            )
        self._live[request.request_id] = _Generation(request, prompt_text, detokenizer)

    def process(self, changed: Sequence[Request], result: StepResult) -> list[RequestOutput]:
        """Outputs of the requests that got a token, finished or failed in this step."""
        for request_id, entries in result.prompt_logprobs.items():
            generation = self._live.get(request_id)
            if generation is not None:  # else it was aborted since the step was planned
                generation.add_prompt_logprobs([self._with_text(e, generation) for e in entries])
        return [self._process_one(request, result.samples.get(request.request_id)) for request in changed]

    def abort(self, request: Request) -> RequestOutput:
        """The last output of a request that the scheduler gave up."""
        generation = self._get(request.request_id)
        generation.end(FinishReason.ABORT, None)
        del self._live[request.request_id]
        return generation.output()

    def _process_one(self, request: Request, sampled: SampledToken | None) -> RequestOutput:
        generation = self._get(request.request_id)
        if request.num_output_tokens > len(generation.choices):
            if sampled is None:
                raise InvariantError(f"request {request.request_id!r} grew by a token nobody sampled")
            stop = generation.add_token(sampled, self._with_text(sampled.logprobs, generation))
            if stop is not None:
                if not request.status.is_final:
                    self._finish(request.request_id, FinishReason.STOP, stop)
                generation.end(FinishReason.STOP, stop)
        if request.status.is_final:
            generation.end(request.finish_reason, request.stop_reason)
        if generation.finished:
            del self._live[request.request_id]
        return generation.output()

    def _get(self, request_id: str) -> _Generation:
        if request_id not in self._live:
            raise InvariantError(f"request {request_id!r} was never added here, or has ended")
        return self._live[request_id]

    def _with_text(
        self, logprobs: Mapping[int, Logprob] | None, generation: _Generation
    ) -> dict[int, Logprob]:
        """The same entries with `decoded_token`, when the request wants text."""
        if logprobs is None:
            return {}
        if generation.detokenizer is None:
            return dict(logprobs)
        return {t: Logprob(p.logprob, p.rank, self._token_text(t)) for t, p in logprobs.items()}

    def _token_text(self, token_id: int) -> str:
        assert self._tokenizer is not None  # there is a detokenizer
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text


class _Generation:
    """One request's output so far."""

    def __init__(self, request: Request, prompt_text: str | None, detokenizer: Detokenizer | None) -> None:
        self.request = request
        self.detokenizer = detokenizer
        self.choices: list[int] = []
        self.finished = False
        self._prompt_text = prompt_text
        self._prompt_token_ids = tuple(request.token_ids[: request.num_prompt_tokens])
        sampling = request.sampling
        self._stops = StopStrings(sampling.stop, include_in_output=sampling.include_stop_str_in_output)
        self._logprobs: list[Mapping[int, Logprob]] = []
        self._cumulative_logprob = 0.0
        self._prompt_logprobs: list[Mapping[int, Logprob] | None] = [None]
        self._finish_reason: FinishReason | None = None
        self._stop_reason: int | str | None = None

    def add_token(self, sampled: SampledToken, logprobs: dict[int, Logprob]) -> str | None:
        """Take a committed token; returns the stop string that its text completes."""
        request, sampling = self.request, self.request.sampling
        self.choices.append(sampled.choice_token_id)
        if sampling.logprobs is not None:
            self._logprobs.append(logprobs)
            self._cumulative_logprob += logprobs[sampled.token_id].logprob
        # A token that ended the request is not part of the text, unless stops are to be kept.
        ended_by_token = request.finish_reason is FinishReason.STOP
        if self.detokenizer is None or (ended_by_token and not sampling.include_stop_str_in_output):
            return None
        armed = not ended_by_token and len(self.choices) > sampling.min_tokens
        return self._stops.push(self.detokenizer.push(sampled.token_id), armed=armed)

    def add_prompt_logprobs(self, entries: Sequence[Mapping[int, Logprob]]) -> None:
        """Take entries that end where this step's computation ended.

        After a preemption, positions are computed again; what the user may have seen is kept.
        """
        end = min(self.request.num_computed_tokens, self.request.num_prompt_tokens - 1)
        first_new = len(self._prompt_logprobs) - 1 - (end - len(entries))
        if first_new < 0:
            raise InvariantError(
                f"request {self.request.request_id!r}: prompt logprobs up to position {end} came as "
                f"{len(entries)} entries, and only {len(self._prompt_logprobs) - 1} came before"
            )
        self._prompt_logprobs.extend(entries[first_new:])

    def end(self, reason: FinishReason | None, stop_reason: int | str | None) -> None:
        """Finish once; a second reason in the same step does not count."""
        if self.finished:
            return
        self.finished = True
        self._finish_reason, self._stop_reason = reason, stop_reason
        ended_by_string = isinstance(stop_reason, str)
        if self.detokenizer is not None and not ended_by_string:
            self._stops.push(self.detokenizer.flush(), armed=False)

    def output(self) -> RequestOutput:
        request = self.request
        completion = CompletionOutput(
            index=0,
            text=self._stops.text if self.finished else self._stops.visible(),
            token_ids=tuple(request.output_token_ids),
            choice_token_ids=tuple(self.choices),
            cumulative_logprob=None if request.sampling.logprobs is None else self._cumulative_logprob,
            logprobs=None if request.sampling.logprobs is None else tuple(self._logprobs),
            finish_reason=None if self._finish_reason is None else self._finish_reason.value,
            stop_reason=self._stop_reason,
        )
        complete = len(self._prompt_logprobs) == request.num_prompt_tokens
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt_text,
            prompt_token_ids=self._prompt_token_ids,
            outputs=(completion,),
            finished=self.finished,
            prompt_logprobs=(
                tuple(self._prompt_logprobs)
                if request.sampling.prompt_logprobs is not None and complete
                else None
            ),
            num_cached_tokens=max(0, request.num_cached_tokens),
            num_preemptions=request.num_preemptions,
            seed=request.seed,
            error=request.error,
        )
