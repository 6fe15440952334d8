"""Which requests can be served at all. Whoever passes finishes one day, however full the pool is."""

from __future__ import annotations

from minivllm.cache import BlockManager
from minivllm.errors import CapacityError, PromptTooLong, RequestError
from minivllm.request import Request, RequestStatus

__all__ = ["check_capacity", "check_prompt", "most_tokens"]


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


def check_capacity(request: Request, max_model_len: int, block_manager: BlockManager) -> None:
    """Refuse a request that could outgrow the whole pool (vLLM issue 39734).

    With T = `most_tokens`, the KV of T - 1 tokens must fit: the last token generated is never
    computed.

    Raises:
        CapacityError: with the numbers, and the largest max_tokens that fits.
    """
    most = most_tokens(request, max_model_len)
    needed, total = block_manager.num_blocks_for(most - 1), block_manager.counts().total
    if needed <= total:
        return
    prompt = request.num_prompt_tokens
    room = total * block_manager.block_size + 1 - prompt
    lower = f"lower max_tokens to at most {room} or " if room >= 1 else ""
    raise CapacityError(
        f"request {request.request_id!r} can need {needed} KV blocks ({prompt} prompt tokens and up to"
        f" {most - prompt} generated ones, block size {block_manager.block_size}), but the whole pool has"
        f" {total}; {lower}raise num_kv_blocks to at least {needed + 1}"
    )
