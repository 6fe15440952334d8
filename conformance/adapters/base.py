"""What an engine must offer to be judged: two methods, and optional protocols for more.

The whole of a minimal adapter::

    class MyEngine:
        def __init__(self, model: ModelSource, options: Mapping[str, Any]) -> None: ...
        def __enter__(self): ...            # load the model here
        def __exit__(self, *exc): ...       # free it here
        def capabilities(self) -> Capabilities: ...
        def generate(self, requests: Sequence[EngineRequest]) -> list[EngineOutput]: ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "FEATURES",
    "Capabilities",
    "Controlled",
    "EngineAdapter",
    "EngineError",
    "EngineOutput",
    "EngineRequest",
    "KVAccess",
    "Media",
    "ModelSource",
    "PoolState",
    "STAGES",
    "Snapshots",
    "Stages",
    "Stepped",
    "Swapping",
    "TokenLogprob",
    "Traced",
    "Weights",
    "request_of",
    "sequence_names",
]

#: Every capability a scenario may need. Declared by an adapter, verified by `conformance doctor`.
FEATURES: Mapping[str, str] = {
    "token_ids": "takes prompts as token ids",
    "text": "takes prompts as text and returns their token ids",
    "chat": "takes chat messages and returns their token ids",
    "output_ids": "returns generated token ids",
    "logprobs": "returns log-probabilities of generated tokens and of their likeliest rivals",
    "chosen_logprobs": "returns the log-probability of each generated token, if of no other",
    "prompt_logprobs": "returns log-probabilities of prompt tokens",
    "forced_decode": "decodes along given token ids (teacher forcing)",
    "forced_prompt": "tells its own choices along given token ids, if only as those of a longer prompt",
    "sampling": "temperature, top-k, top-p, min-p with seeds",
    "penalties": "presence, frequency and repetition penalties",
    "parallel_sampling": "generates n sequences from one prompt",
    "logit_control": "logit bias, bad words and a minimum number of tokens",
    "stop_strings": "stop strings, with a stop reason",
    "streaming": "tells the text so far after each step",
    "stepped": "runs one step at a time, with submit and abort in between",
    "preempt": "can be told to preempt a request",
    "swap": "can be told to move a request's KV to host memory, and brings it back",
    "prefix_cache": "reuses common prefixes and tells how many tokens it reused",
    "chunked_prefill": "splits prompts over steps by a token budget, the option max_num_batched_tokens",
    "block_size": "block size can be chosen",
    "pool_size": "number of KV blocks can be chosen",
    "poison": "can fill unused KV memory with NaN",
    "traced": "tells what it did as events",
    "stages": "captures intermediate results",
    "kv": "shows the KV cache of a request",
    "pool": "tells how its block pool stands",
    "snapshot": "shows every block of its KV cache, and who holds it",
    "bitwise": "promises bitwise equal results under any batch, chunk, hit or preemption",
    "update_weights": "can exchange weights while loaded",
    "image": "takes pictures: in chats, beside text, and beside token ids",
    "video": "takes videos as frames and frames per second",
    "media_settings": "takes settings of the image processor with a request",
    "image_embeds": "takes the embeddings of pictures instead of pixels",
    "prompt_embeds": "takes a prompt as embeddings",
    "strict_loading": "refuses a checkpoint that is incomplete or does not fit the model",
    "strict_rope": "refuses rope kinds whose own reference depends on call history, past their length",
    "sliding_windows": "computes layers that see a sliding window",
    "strict_windows": "has no sliding windows, and refuses a model that needs them",
}

#: What an engine with the feature "stages" may be asked to capture → the arrays it then shows, rows
#: being positions of the sequence from 0 unless said otherwise. In order of computation. An engine
#: leaves out what it does not capture; rows taken from a prefix cache are NaN, or -1 in integers, but
#: for those of "kv": they stand in the cache, and are shown.
STAGES: Mapping[str, str] = {
    "pixels": '"pixels": what the image processor made, all pictures in order, flat',
    "spans": '"spans": [spans, 4] start, length, item, first row of the item, in order of start',
    "vision": '"vision.j": [rows, hidden] embeddings of picture or video j',
    "deepstack": '"deepstack.i": [positions, hidden] added to the output of layer i; 0 at text',
    "embeddings": '"embeddings": [positions, hidden], those of pictures in their places',
    "positions": '"positions": [positions], or [positions, 3] (time, height, width) under M-RoPE',
    "kv": '"k.i", "v.i": [positions, kv heads, head_dim] of layer i, keys after rope',
    "hidden": '"hidden.i": [positions, hidden] after layer i',
    "final": '"final": [positions, hidden] after the last norm',
    "logits": '"logits": [generated, vocab]',
    "prompt_logits": '"prompt_logits": [prompt tokens - 1, vocab]',
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A checkpoint on this machine.

    Attributes:
        name: as in `conformance models list`.
        path: a directory with config.json and safetensors, or a .gguf file.
        sha256: over weights and configuration, see `conformance.models.weights_sha256`.
    """

    name: str
    path: Path
    sha256: str


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine says it can do.

    Attributes:
        engine: name, for reports.
        version: version, for reports.
        dtypes: compute dtypes it offers ("float32", "bfloat16").
        features: subset of `FEATURES`.
        options: the engine options of a scenario's `engine:` section that it honours.
        missing: feature → why it is missing here (for example a failed probe).
    """

    engine: str
    version: str
    dtypes: tuple[str, ...]
    features: frozenset[str]
    options: frozenset[str] = frozenset()
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False, slots=True)
class Media:
    """One picture or video of a request.

    Attributes:
        modality: "image" or "video".
        paths: the file of a picture, or one per frame of a video.
        fps: frames per second of a video, None if nobody knows.
        embeddings: [rows, hidden] float32, what the vision side of the model makes of it; then the
            engine must not look at the pixels (feature "image_embeds").
        deepstack: entry i, [rows, hidden], is added to the output of decoder layer i.
        facts: what else a record says about it: its grid of patches ("grid_thw"), its rows and
            columns of crops ("crops").
    """

    modality: str
    paths: tuple[Path, ...]
    fps: float | None = None
    embeddings: NDArray[np.float32] | None = None
    deepstack: tuple[NDArray[np.float32], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request, as handed to an adapter.

    Exactly one of `text`, `chat` is set when the scenario gave the prompt so; `prompt_token_ids`
    is then set too whenever the golden ids are known, unless the engine's own tokenizer or template is
    judged. An engine that takes ids uses the ids.

    Pictures and videos are in `media`, in the order of the prompt. In a chat, a content part
    {"type": "image"} or {"type": "video"} stands for the next of them; in a text or in ids given by
    the scenario, a placeholder of the model does. Golden ids hold the whole expansion of each.

    A request for n sequences (`sampling["n"]`) is answered by n outputs, see `sequence_names`.

    Attributes:
        sampling: names and meaning of `minivllm.SamplingParams` (which are vLLM's); only what
            the scenario set. `temperature` is always there.
        forced_token_ids: teacher forcing: the answer is these ids, all of them, whatever ends an answer
            or limits its length otherwise; for engines with "forced_decode" or, where no scenario
            asks for it, "forced_prompt". One that cannot be forced is refused with a
            NotImplementedError.
        capture: keys of `STAGES` to capture, for engines with "stages".
        mm_processor_kwargs: settings of the image processor for this request, for engines with
            "media_settings".
        prompt_embeds: [tokens, hidden] float32 instead of ids, for engines with "prompt_embeds".
    """

    request_id: str
    sampling: Mapping[str, Any]
    prompt_token_ids: tuple[int, ...] | None = None
    text: str | None = None
    chat: tuple[Mapping[str, Any], ...] | None = None
    forced_token_ids: tuple[int, ...] | None = None
    cache_salt: str | None = None
    priority: int = 0
    capture: frozenset[str] = frozenset()
    media: tuple[Media, ...] = ()
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompt_embeds: NDArray[np.float32] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One entry of a logprobs list; rank 1 is the most likely."""

    token_id: int
    logprob: float
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class EngineError:
    """A named error an engine raised for one request, or while loading."""

    type: str
    message: str


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What an engine answered to one request, so far.

    Attributes:
        token_ids: generated ids, stop token included; None if the engine gives text only.
        choice_token_ids: the engine's own choice at each position under forced decoding.
        logprobs: per generated position, the top entries, most likely first (the sampled
            token's entry may come after them).
        prompt_logprobs: per prompt position, None for the first.
        finished: whether it ended.
        error: why it ended, if it failed.
    """

    request_id: str
    text: str
    finished: bool
    prompt_token_ids: tuple[int, ...] | None = None
    token_ids: tuple[int, ...] | None = None
    choice_token_ids: tuple[int, ...] | None = None
    logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    prompt_logprobs: tuple[tuple[TokenLogprob, ...] | None, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int | None = None
    num_preemptions: int | None = None
    error: EngineError | None = None


def sequence_names(request_id: str, sampling: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of a request's sequences: its own for the first, then "name/1", "name/2", …

    Each has an output of its own; `preempt`, `abort` and the other hooks take these names too.
    """
    return (request_id, *(f"{request_id}/{i}" for i in range(1, sampling.get("n") or 1)))


def request_of(name: str) -> str:
    """The request a sequence belongs to; names of requests have no "/"."""
    return name.partition("/")[0]


@dataclass(frozen=True, slots=True)
class PoolState:
    """How a block pool stands. free + cached + in_use = total; cached blocks are unreferenced."""

    total: int
    free: int
    cached: int
    in_use: int


class EngineAdapter(Protocol):
    """The whole of a minimal adapter. Loading happens on enter, freeing on exit."""

    def __enter__(self) -> EngineAdapter: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def capabilities(self) -> Capabilities:
        """What the engine can do; callable before and after entering."""
        ...

    def generate(self, requests: Sequence[EngineRequest]) -> list[EngineOutput]:
        """Serve all requests at once, to the end. A refused one is an output with `error`."""
        ...


@runtime_checkable
class Stepped(Protocol):
    """The engine can be driven one step at a time."""

    def submit(self, request: EngineRequest) -> EngineError | None:
        """Queue a request; a refusal is returned, never raised."""
        ...

    def advance(self) -> bool:
        """Run one step. Returns whether unfinished requests remain."""
        ...

    def abort(self, request_id: str) -> None:
        """Cancel a request."""
        ...

    def outputs(self) -> list[EngineOutput]:
        """The latest output of every request submitted so far, in order of submission."""
        ...


@runtime_checkable
class Controlled(Protocol):
    """Test hooks of a stepped engine; each is offered only if its feature is declared."""

    def preempt(self, request_id: str) -> bool:
        """Take the request's blocks away before the next step; False if it holds none."""
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; False if refused."""
        ...

    def poison(self) -> int:
        """Fill block 0, free blocks and unused slots with NaN. Returns the slots filled."""
        ...

    def pool(self) -> PoolState:
        """How the block pool stands."""
        ...


@runtime_checkable
class Traced(Protocol):
    """The engine tells what it did."""

    def drain_events(self) -> list[Mapping[str, Any]]:
        """Events since the last call: {"event": snake_case name, …fields}; see minivllm.trace."""
        ...


@runtime_checkable
class Stages(Protocol):
    """The engine captures intermediate results of requests submitted with `capture`."""

    def stages(self, request_id: str) -> Mapping[str, NDArray[np.generic]]:
        """Array name → array over all positions computed so far, see `STAGES`."""
        ...


@runtime_checkable
class KVAccess(Protocol):
    """The engine shows a live request's KV cache."""

    def read_kv(self, request_id: str) -> list[tuple[NDArray[np.generic], NDArray[np.generic]]]:
        """Per layer (k, v), each [positions, kv heads, head_dim], in logical order."""
        ...


@runtime_checkable
class Swapping(Protocol):
    """The engine moves KV to host memory when told to (feature "swap")."""

    def swap(self, request_id: str) -> bool:
        """As `Controlled.preempt`, but the KV goes to host memory if there is room."""
        ...


@runtime_checkable
class Snapshots(Protocol):
    """The engine shows all of its KV cache (feature "snapshot")."""

    def kv_snapshot(self) -> Mapping[str, Any]:
        """Plain data, see `conformance.kv_drawing.parse_snapshot`."""
        ...


@runtime_checkable
class Weights(Protocol):
    """The engine's weights can be exchanged while it is loaded (feature "update_weights")."""

    def swap_weights(self, first: str, second: str) -> None:
        """Exchange two parameters of equal shape, by their names in the checkpoint."""
        ...
