"""Builds what the user sees from what the scheduler committed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from minivllm.errors import InvariantError
from minivllm.output.detokenizer import Detokenizer, TextDecoder
from minivllm.output.generation import Generation
from minivllm.request import (
    FinishReason,
    Logprob,
    Request,
    RequestOutput,
    SampledToken,
    StepResult,
    sequence_ids,
)

__all__ = ["OutputProcessor"]


class OutputProcessor:
    """Keeps each live request's text and log-probabilities, and finds stop strings.

    The n sequences of a request make one output. A stop string ends the sequence whose text it
    completes, and no other.

    Args:
        tokenizer: None gives outputs without text.
        finish: called with (request id, FinishReason.STOP, stop string) when a stop string ended
            a sequence that the scheduler still runs; sequences have ids of their own.
    """

    def __init__(
        self,
        tokenizer: TextDecoder | None,
        finish: Callable[[str, FinishReason, str], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._finish = finish
        self._live: dict[str, _Answer] = {}
        self._sequences: dict[str, tuple[_Answer, Generation]] = {}
        self._token_texts: dict[int, str] = {}

    def add(self, request: Request, prompt_text: str | None = None) -> None:
        """Start following a request that the scheduler accepted, with all its sequences."""
        ids = sequence_ids(request.request_id, request.sampling.n)
        generations = [
            Generation(index, request.sampling, self._detokenizer(request)) for index in range(len(ids))
        ]
        generations[0].request = request
        answer = _Answer(request, prompt_text, generations)
        self._live[request.request_id] = answer
        for request_id, generation in zip(ids, generations, strict=True):
            self._sequences[request_id] = (answer, generation)

    def process(self, changed: Sequence[Request], result: StepResult) -> list[RequestOutput]:
        """One output per request of which some sequence got a token, finished or failed in this step."""
        for request_id, entries in result.prompt_logprobs.items():
            answer = self._live.get(request_id)
            # None: it was aborted since the step was planned, or it is a fork computed anew.
            if answer is not None:
                texts = answer.request.sampling.detokenize
                answer.add_prompt_logprobs([self._with_text(entry, texts) for entry in entries])
        touched: dict[str, _Answer] = {}
        for request in changed:
            answer, generation = self._get(request.request_id)
            self._advance(request, generation, result.samples.get(request.request_id))
            touched[answer.request.request_id] = answer
        for answer in touched.values():
            answer.end_unforked()
            self._forget_if_finished(answer)
        return [answer.output() for answer in touched.values()]

    def abort(self, request_id: str) -> RequestOutput:
        """The output after the scheduler gave up a request, or one of its sequences other than the first."""
        answer, generation = self._get(request_id)
        for ended in answer.generations if request_id in self._live else [generation]:
            ended.end(FinishReason.ABORT, None)
        self._forget_if_finished(answer)
        return answer.output()

    def _advance(self, request: Request, generation: Generation, sampled: SampledToken | None) -> None:
        generation.request = request
        if request.num_output_tokens > len(generation.choices):
            if sampled is None:
                raise InvariantError(f"request {request.request_id!r} grew by a token nobody sampled")
            logprobs = self._with_text(sampled.logprobs or {}, request.sampling.detokenize)
            stop = generation.add_token(request, sampled, logprobs)
            if stop is not None:
                if not request.status.is_final:
                    self._finish(request.request_id, FinishReason.STOP, stop)
                generation.end(FinishReason.STOP, stop)
        if request.status.is_final:
            generation.end(request.finish_reason, request.stop_reason)

    def _get(self, request_id: str) -> tuple[_Answer, Generation]:
        if request_id not in self._sequences:
            raise InvariantError(f"request {request_id!r} was never added here, or has ended")
        return self._sequences[request_id]

    def _forget_if_finished(self, answer: _Answer) -> None:
        if answer.finished:
            name = answer.request.request_id
            del self._live[name]
            for request_id in sequence_ids(name, len(answer.generations)):
                del self._sequences[request_id]

    def _detokenizer(self, request: Request) -> Detokenizer | None:
        if self._tokenizer is None or not request.sampling.detokenize:
            return None
        return Detokenizer(
            self._tokenizer,
            request.token_ids[: request.num_prompt_tokens],
            skip_special_tokens=request.sampling.skip_special_tokens,
        )

    def _with_text(self, logprobs: Mapping[int, Logprob], wanted: bool) -> dict[int, Logprob]:
        """The same entries, with `decoded_token` if the request wants text and there is a tokenizer."""
        if self._tokenizer is None or not wanted:
            return dict(logprobs)
        return {t: Logprob(p.logprob, p.rank, self._token_text(t)) for t, p in logprobs.items()}

    def _token_text(self, token_id: int) -> str:
        assert self._tokenizer is not None  # asked for text
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._token_texts[token_id] = text
        return text


class _Answer:
    """What one RequestOutput is made of: the prompt's part, and one generation per sequence."""

    def __init__(self, request: Request, prompt_text: str | None, generations: list[Generation]) -> None:
        self.request = request
        self.generations = generations
        self._prompt_text = prompt_text
        self._prompt_token_ids = tuple(request.token_ids[: request.num_prompt_tokens])
        self._prompt_logprobs: list[Mapping[int, Logprob] | None] = [None]

    @property
    def finished(self) -> bool:
        return all(generation.finished for generation in self.generations)

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

    def end_unforked(self) -> None:
        """If the request ended before its sequences parted, they end as it did."""
        for generation in self.generations:
            if generation.request is not None or not self.request.status.is_final:
                continue
            if self.request.num_output_tokens:
                raise InvariantError(f"request {self.request.request_id!r} got a token but was not forked")
            generation.end(self.request.finish_reason, self.request.stop_reason)

    def output(self) -> RequestOutput:
        request = self.request
        forked = [g.request for g in self.generations if g.request is not None]
        complete = len(self._prompt_logprobs) == request.num_prompt_tokens
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt_text,
            prompt_token_ids=self._prompt_token_ids,
            outputs=tuple(generation.output() for generation in self.generations),
            finished=self.finished,
            prompt_logprobs=(
                tuple(self._prompt_logprobs)
                if request.sampling.prompt_logprobs is not None and complete
                else None
            ),
            num_cached_tokens=max(0, request.num_cached_tokens),
            num_preemptions=sum(r.num_preemptions for r in forked),
            seed=request.seed,
            error=next((r.error for r in forked if r.error is not None), None),
        )
