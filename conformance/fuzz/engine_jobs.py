"""What an engine example is made of: its sizes, its sequences, and which requests can never be served."""

from __future__ import annotations

from typing import Literal, NamedTuple

from conformance.contracts.base import EngineShape
from conformance.fuzz.kv import Story
from conformance.fuzz.operations import Add

__all__ = ["EOS", "EngineSetup", "Job", "why_rejected"]

#: The token id that ends a request.
EOS = 0


class EngineSetup(NamedTuple):
    """One example's sizes and switches. `oversized`: requests that never fit may arrive.

    `encoder_budget` 0: nothing is asked of the engine's encoder cache.
    """

    num_blocks: int
    block_size: int
    vocabulary: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    prefix_caching: bool = True
    chunked_prefill: bool = True
    policy: Literal["fcfs", "priority"] = "fcfs"
    preemption: Literal["recompute", "swap", "auto"] = "recompute"
    num_host_blocks: int = 0
    oversized: bool = False
    encoder_budget: int = 0

    def shape(self) -> EngineShape:
        fields = self._asdict()
        del fields["vocabulary"], fields["oversized"]
        return EngineShape(**fields, eos=EOS)


class Job:
    """One sequence of the model.

    `computed` is how far the engine says its KV reaches; `private` how many tokens came back from
    the host, whose blocks the engine need not publish.
    """

    __slots__ = (
        "add", "arrival", "computed", "family", "limit", "name", "num_prompt",
        "preempted", "private", "reason", "rid", "started", "story", "table",
    )  # fmt: skip

    def __init__(self, name: str, rid: str, add: Add, story: Story, limit: int, arrival: int) -> None:
        self.name = name
        self.rid = rid
        self.add = add
        self.story = story
        self.num_prompt = len(add.tokens)
        self.limit = limit
        self.arrival = arrival
        self.family = [self]  # all sequences of one request, the first one first
        self.reason: str | None = None
        self.computed = 0
        self.private = 0
        self.started = False
        self.preempted = False
        self.table: tuple[int, ...] = ()

    @property
    def generated(self) -> list[int]:
        return self.story.tokens[self.num_prompt :]

    def append(self, token: int) -> None:
        """Take in a sampled token, and end where a request must end."""
        self.story.append(token)
        count = len(self.story) - self.num_prompt
        stops = (token == EOS and not self.add.ignore_eos) or token in self.add.stop_ids
        if stops and count >= self.add.min_tokens:
            self.reason = "stop"
        elif len(self.story) == self.limit:
            self.reason = "length"


def why_rejected(op: Add, setup: EngineSetup, *, whole_prompts: bool) -> str | None:
    """Why a request can never be served: "too long", "never fits", or None.

    All n sequences must fit the pool together; they share the full blocks of the prompt. Each image
    must fit the encoder's budget, or all of them if the prompt is computed in one step.
    """
    prompt, size = len(op.tokens), setup.block_size
    if prompt >= setup.max_model_len or (whole_prompts and prompt > setup.max_num_batched_tokens):
        return "too long"
    # The last token of each is never computed.
    longest = min(setup.max_model_len, prompt + op.max_tokens) - 1
    needed = -(-longest // size)
    if longest > prompt:
        shared = prompt // size if op.n > 1 else 0
        needed = shared + op.n * (needed - shared)
    if needed > setup.num_blocks:
        return "never fits"
    if setup.encoder_budget:
        images = {content: length for _, length, content in op.spans}
        together = sum(images.values()) if whole_prompts else max(images.values(), default=0)
        if together > setup.encoder_budget:
            return "never fits"
    return None
