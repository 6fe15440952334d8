"""How much room requests need: to be served at all, to be admitted now, to run to their end.

Whoever passes `check_prompt` and `check_capacity` finishes one day, however full the pool is.
"""

from __future__ import annotations

from collections.abc import Sequence

from minivllm.cache import BlockManager, PrefixMatch
from minivllm.errors import CapacityError, PromptTooLong, RequestError
from minivllm.groups import forks_when_it_samples
from minivllm.request import Request, RequestStatus

__all__ = [
    "Room",
    "blocks_needed",
    "check_capacity",
    "check_prompt",
    "check_spans",
    "most_tokens",
    "seats",
    "uncut",
]


def most_tokens(request: Request, max_model_len: int) -> int:
    """Prompt plus the most tokens the request may generate."""
    most = min(request.max_total_tokens, max_model_len)
    if request.sampling.max_tokens is not None:
        most = min(most, request.num_prompt_tokens + request.sampling.max_tokens)
    return most


def check_prompt(request: Request, max_model_len: int, max_chunk: int | None) -> None:
    """Refuse what no pool could serve.

    Args:
        max_chunk: most tokens of a prompt, if it must be computed in one step.

    Raises:
        PromptTooLong: no room for one generated token (a prompt of exactly max_model_len has
            none, vLLM pull request 23683), or longer than max_chunk.
        RequestError: the prompt is empty, or the object has been served already.
    """
    name, prompt = request.request_id, request.num_prompt_tokens
    if request.status is not RequestStatus.WAITING or request.num_tokens != prompt:
        raise RequestError(f"request {name!r} has been served already; make a new Request")
    if prompt < 1:
        raise RequestError(f"request {name!r} has an empty prompt; give at least one token")
    limit = min(max_model_len, request.max_total_tokens)
    if prompt >= limit:
        raise PromptTooLong(
            f"the prompt of request {name!r} has {prompt} tokens, but at most {limit - 1} leave room for one"
            f" generated token (max_model_len {limit}); shorten it or raise max_model_len"
        )
    if max_chunk is not None and prompt > max_chunk:
        raise PromptTooLong(
            f"the prompt of request {name!r} has {prompt} tokens, more than max_num_batched_tokens"
            f" {max_chunk}, and enable_chunked_prefill is off; turn it on or raise max_num_batched_tokens"
        )


def check_spans(request: Request, max_num_batched_tokens: int) -> None:
    """Refuse media that no step could take whole.

    Raises:
        CapacityError: a span that must be computed in one step is longer than a step.
    """
    for span in request.media:
        if span.whole and span.length > max_num_batched_tokens:
            raise CapacityError(
                f"request {request.request_id!r}: the {span.length} tokens of an {span.modality} see one "
                f"another, so they are computed in one step, and max_num_batched_tokens is "
                f"{max_num_batched_tokens}; raise it to at least {span.length}"
            )


def uncut(request: Request, start: int, num_tokens: int) -> int:
    """At most `num_tokens` tokens from `start` on, so that none of the spans that are whole is cut.

    0 if the first one does not fit. A start within a span, after a cache hit, is none of its cuts:
    the cached part was computed with all of it.
    """
    end = start + num_tokens
    for span in request.media:
        if span.whole and span.start < end < span.end:
            return max(0, span.start - start)
    return num_tokens


def seats(request: Request, max_num_seqs: int) -> int:
    """How many of the running requests this one counts as: those it is about to become."""
    return min(request.sampling.n, max_num_seqs) if forks_when_it_samples(request) else 1


def _blocks_for(request: Request, num_tokens: int, block_manager: BlockManager) -> int:
    """Blocks of all sequences the request stands for, when each has `num_tokens` tokens.

    Sequences still to be forked will share the full blocks of the prompt, and nothing else once
    they write.
    """
    num_blocks = block_manager.num_blocks_for(num_tokens)
    prompt = request.num_prompt_tokens
    if not forks_when_it_samples(request) or num_tokens <= prompt:
        return num_blocks
    shared = prompt // block_manager.block_size
    return shared + request.sampling.n * (num_blocks - shared)


def blocks_needed(
    request: Request, max_model_len: int, block_manager: BlockManager, *, to_the_end: bool
) -> int:
    """Blocks the request needs for its known tokens and in the step after, or to its very end.

    "The step after" keeps it from being thrown out as soon as it has sampled (vLLM pull request
    8824: tokens sampled but not stored yet were forgotten).
    """
    # The last token generated is never computed.
    most = most_tokens(request, max_model_len) - 1
    num_tokens = most if to_the_end else min(request.num_tokens + 1, most)
    return _blocks_for(request, num_tokens, block_manager)


class Room:
    """Whether the pool has room for one more request beside the running ones, in one step.

    Normally that is room for the known tokens of all, and for the step after. As soon as a request
    that was preempted `max_preemptions` times runs or is to run, it is room for all to reach their
    ends, so that nobody will have to be thrown out again.

    Takes time in proportion to the number of running requests once, not per question.
    """

    def __init__(
        self,
        running: Sequence[Request],
        max_model_len: int,
        block_manager: BlockManager,
        max_preemptions: int,
    ) -> None:
        self._running = list(running)
        self._max_model_len = max_model_len
        self._manager = block_manager
        self._max_preemptions = max_preemptions
        self._guarded = any(map(self._is_guarded, running))
        self._claims: dict[bool, int] = {}  # blocks the running ones will take, by `to_the_end`

    def has(self, request: Request, prefix: PrefixMatch) -> bool:
        """Whether a waiting request fits; `prefix` is what it would find in the cache."""
        to_the_end = self._guarded or self._is_guarded(request)
        available = self._manager.pool.num_available - self._claim(request, to_the_end, prefix)
        if available < 0:
            return False
        if to_the_end not in self._claims:
            self._claims[to_the_end] = sum(self._claim(one, to_the_end) for one in self._running)
        return self._claims[to_the_end] <= available

    def admitted(self, request: Request) -> None:
        """The request has its blocks for this step and runs."""
        self._running.append(request)
        self._guarded = self._guarded or self._is_guarded(request)
        for to_the_end in self._claims:
            self._claims[to_the_end] += self._claim(request, to_the_end)

    def _claim(self, request: Request, to_the_end: bool, prefix: PrefixMatch | None = None) -> int:
        needed = blocks_needed(request, self._max_model_len, self._manager, to_the_end=to_the_end)
        return self._manager.num_missing(request, needed, prefix)

    def _is_guarded(self, request: Request) -> bool:
        return request.num_preemptions >= self._max_preemptions


def check_capacity(request: Request, max_model_len: int, block_manager: BlockManager) -> None:
    """Refuse a request that could outgrow the whole pool (vLLM issue 39734).

    With T = `most_tokens`, the KV of T - 1 tokens must fit, for each of its n sequences.

    Raises:
        CapacityError: with the numbers, and the largest max_tokens that fits.
    """
    total = block_manager.counts().total
    needed = blocks_needed(request, max_model_len, block_manager, to_the_end=True)
    if needed <= total:
        return
    prompt, n, size = request.num_prompt_tokens, request.sampling.n, block_manager.block_size
    shared = prompt // size
    room = (shared + (total - shared) // n) * size + 1 - prompt
    if block_manager.num_blocks_for(prompt) <= total:
        room = max(room, 1)  # one token per sequence needs nothing but the prompt
    lower = f"lower max_tokens to at most {room} or " if room >= 1 else ""
    sequences = f" in each of n={n} sequences" if n > 1 else ""
    raise CapacityError(
        f"request {request.request_id!r} can need {needed} KV blocks ({prompt} prompt tokens and up to"
        f" {most_tokens(request, max_model_len) - prompt} generated ones{sequences}, block size {size}), but"
        f" the whole pool has {total}; {lower}raise num_kv_blocks to at least {needed + 1}"
    )
