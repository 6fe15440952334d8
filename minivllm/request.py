"""The value objects that travel through the engine, in the order they are made.

``SamplingParams`` and ``Request`` come in; ``StepPlan`` goes to the runner; ``StepResult`` comes
back; ``RequestOutput`` leaves. All but ``Request`` are frozen. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from numbers import Real
from typing import Any, overload

from minivllm.errors import BadParameter

__all__ = [
    "MAX_SEQUENCES",
    "BlockCopy",
    "CompletionOutput",
    "FinishReason",
    "Logprob",
    "MediaItem",
    "MediaSpan",
    "PatchRect",
    "Request",
    "RequestMedia",
    "RequestOutput",
    "RequestStatus",
    "SampledToken",
    "SamplingParams",
    "ScheduledRequest",
    "StepPlan",
    "StepResult",
    "TokenView",
    "sequence_ids",
]


MAX_SEQUENCES = 65_536
"""Most sequences of one request: the name of each is kept as long as any of them is live."""


class RequestStatus(Enum):
    """Where a request stands. FINISHED and FAILED are final."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"
    FAILED = "failed"

    @property
    def is_final(self) -> bool:
        return self in (RequestStatus.FINISHED, RequestStatus.FAILED)


class FinishReason(Enum):
    """Why a request ended; the values are vLLM's and OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """One run of placeholder tokens of one image, video or supplied embedding.

    An item may have several spans, such as the crops of a picture or the frames of a video with
    text between them; together they take each of its rows once.

    Attributes:
        start: index of the first placeholder token in the prompt.
        length: number of placeholder tokens.
        modality: "image", "video" or "embeds".
        content_hash: hash over kind, mode, size, pixels and processor settings.
        first_row: row of the item's embeddings that the first token takes; the next token takes
            the next row.
        whole: whether its tokens see one another, those behind them too. Such a span is computed in
            one step.
    """

    start: int
    length: int
    modality: str
    content_hash: str
    first_row: int = 0
    whole: bool = False

    @property
    def end(self) -> int:
        """One past the last placeholder token."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class PatchRect:
    """The part of a picture that one embedding row stands for, in fractions 0 … 1 of its size.

    Attributes:
        frame: which frame of a video; 0 for an image.
    """

    frame: int
    left: float
    top: float
    width: float
    height: float


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """One image, video or supplied embedding, ready for the encoder.

    Scheduler and cache read the first three attributes only.

    Attributes:
        content_hash: what identifies it; equal hashes mean equal embeddings.
        modality: "image", "video" or "embeds" (embeddings for a whole prompt).
        num_embeddings: rows that the encoder makes of it; what the encoder budget counts.
        data: arguments of the model's `encode` under Transformers' names, such as pixel_values;
            or {"embeddings": [rows, hidden]} if they were supplied and there is nothing to encode,
            with {"deepstack": [layers, rows, hidden]} where the model has that.
        patches: which part of the picture each row stands for, one per row; () if unknown.
        facts: for reports: original size and mode, processor class and backend, grid.
    """

    content_hash: str
    modality: str
    num_embeddings: int
    data: Mapping[str, Any]
    patches: tuple[PatchRect, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_supplied(self) -> bool:
        """Whether its embeddings were given, so that nothing is to be encoded."""
        return "embeddings" in self.data


@dataclass(frozen=True, slots=True, eq=False)
class RequestMedia:
    """The media side of one request: what `Request` says under the same names."""

    media: tuple[MediaSpan, ...]
    media_items: Mapping[str, MediaItem]
    positions: Any
    position_delta: int


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and defaults are vLLM's.

    Attributes:
        n: number of sequences to generate from one prompt, at most `MAX_SEQUENCES`.
        temperature: 0 is greedy (the lowest id wins a tie).
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p.
        min_p: keep tokens at least min_p times as likely as the most likely one.
        presence_penalty: subtracted once from the logit of each token generated so far.
        frequency_penalty: subtracted per occurrence among the tokens generated so far.
        repetition_penalty: divides positive (multiplies negative) logits of tokens in the prompt
            or the output, as in CTRL (arXiv:1909.05858).
        seed: seed of this request's random numbers; None derives one from the engine's.
        stop: strings that end generation. The one completed first wins.
        stop_token_ids: token ids that end generation.
        bad_words: words that must not be generated.
        ignore_eos: go on after an end-of-sequence token.
        max_tokens: most tokens to generate; None means up to max_model_len.
        min_tokens: EOS, stop tokens and stop strings do not act before this many tokens.
        logprobs: how many top log-probabilities to return per generated token (0: only the
            sampled one's; -1: the whole vocabulary); None returns none.
        prompt_logprobs: the same for each prompt token.
        detokenize: produce text.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the stop string in the text.
        logit_bias: added to the logits of these token ids.
        forced_token_ids: teacher forcing. At generated position i the model's own choice and its
            logprobs are recorded (`CompletionOutput.choice_token_ids`), then forced_token_ids[i]
            is appended instead. Past the end of the list the model's choice is used.
        output_kind is not offered: every output is cumulative.

    Raises:
        BadParameter: naming every parameter that is out of range, all at once.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None
    forced_token_ids: Sequence[int] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids", "bad_words", "forced_token_ids"):
            value = getattr(self, name)
            if value is None and name != "forced_token_ids":
                object.__setattr__(self, name, ())
            elif isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
                object.__setattr__(self, name, tuple(value))  # anything else is refused below
        problems = list(self._problems())
        if problems:
            raise BadParameter("; ".join(problems))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from plain data; unknown names raise BadParameter with the closest known name."""
        given: object = values
        if not isinstance(given, Mapping):
            raise BadParameter(f"sampling parameters are a mapping from name to value, got {given!r}")
        known = {f.name for f in fields(cls)}
        unknown = [name for name in values if name not in known]
        if unknown:
            hints = []
            for name in unknown:
                close = difflib.get_close_matches(str(name), known, n=1)
                hints.append(f"{name!r}" + (f" (did you mean {close[0]!r}?)" if close else ""))
            raise BadParameter(f"unknown sampling parameter {', '.join(hints)}; known: {sorted(known)}")
        return cls(**values)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def _problems(self) -> list[str]:
        def number(name: str) -> float:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
                problems.append(f"{name} must be a finite number, got {value!r}")
                return math.nan  # fails no comparison below
            return float(value)

        def integer(name: str, low: int, none_ok: bool = False) -> int | None:
            value = getattr(self, name)
            if value is None and none_ok:
                return None
            if isinstance(value, bool) or not isinstance(value, int) or value < low:
                problems.append(f"{name} must be an integer of at least {low}, got {value!r}")
                return None
            return value

        def listed(name: str) -> tuple[Any, ...]:
            value = getattr(self, name)
            if value is not None and not isinstance(value, tuple):
                problems.append(f"{name} must be a list, got {value!r}")
                return ()
            return value or ()

        problems: list[str] = []
        if number("temperature") < 0:
            problems.append(f"temperature must be 0 (greedy) or positive, got {self.temperature}")
        if (top_p := number("top_p")) <= 0 or top_p > 1:
            problems.append(f"top_p must be in (0, 1], got {self.top_p}")
        if (min_p := number("min_p")) < 0 or min_p > 1:
            problems.append(f"min_p must be in [0, 1], got {self.min_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            if abs(number(name)) > 2:
                problems.append(f"{name} must be in [-2, 2], got {getattr(self, name)}")
        if number("repetition_penalty") <= 0:
            problems.append(f"repetition_penalty must be positive, got {self.repetition_penalty}")
        n = integer("n", 1)
        if n is not None and n > MAX_SEQUENCES:
            problems.append(f"n must be at most {MAX_SEQUENCES}, got {n}")
        integer("top_k", -1)
        max_tokens = integer("max_tokens", 1, none_ok=True)
        min_tokens = integer("min_tokens", 0)
        integer("seed", -(2**63), none_ok=True)
        integer("logprobs", -1, none_ok=True)
        integer("prompt_logprobs", -1, none_ok=True)
        if max_tokens is not None and min_tokens is not None and min_tokens > max_tokens:
            problems.append(f"min_tokens {min_tokens} exceeds max_tokens {max_tokens}")
        for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(value := getattr(self, name), bool):
                problems.append(f"{name} must be True or False, got {value!r}")
        stop = listed("stop")
        if any(not isinstance(s, str) or not s for s in stop):
            problems.append(f"stop must hold non-empty strings, got {list(stop)!r}")
        if stop and not self.detokenize:
            problems.append("stop strings need detokenize=True")
        bad_words = listed("bad_words")
        if any(not isinstance(w, str) or not w.strip() for w in bad_words):
            problems.append(f"bad_words must hold non-empty strings, got {list(bad_words)!r}")
        for name in ("stop_token_ids", "forced_token_ids"):
            ids = listed(name)
            if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
                problems.append(f"{name} must hold token ids, got {list(ids)!r}")
        problems += self._bias_problems()
        if n is not None and n > 1 and self.temperature == 0:
            problems.append(f"n must be 1 with temperature 0 (all would be equal), got {n}")
        return problems

    def _bias_problems(self) -> list[str]:
        given: object = self.logit_bias or {}
        if not isinstance(given, Mapping):
            return [f"logit_bias maps token ids to finite numbers, got {given!r}"]
        return [
            f"logit_bias maps token ids to finite numbers, got {key!r}: {bias!r}"
            for key, bias in given.items()
            if isinstance(key, bool) or not isinstance(key, int) or key < 0 or not _is_finite(bias)
        ]


def _is_finite(value: object) -> bool:
    """Whether a value is a number that a float can hold."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # an int beyond the floats
        return False


class TokenView(Sequence[int]):
    """A read-only view of the first `length` tokens of an append-only list.

    Making one is O(1): the scheduler hands out a request's whole history every step without
    copying it, and tokens appended later do not show.
    """

    __slots__ = ("_length", "_tokens")

    def __init__(self, tokens: list[int], length: int | None = None) -> None:
        self._tokens = tokens
        self._length = len(tokens) if length is None else length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return self._tokens[start:stop:step] if stop >= 0 else list(self)[index]
        if not -self._length <= index < self._length:
            raise IndexError(index)
        return self._tokens[index if index >= 0 else self._length + index]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # equal to lists, so unhashable like them

    def __repr__(self) -> str:
        return f"TokenView({list(self)!r})"


@dataclass(slots=True, eq=False)
class Request:
    """One generation, and the only mutable object on the control plane.

    Owned by the scheduler: `token_ids` only grows, `num_computed_tokens` is how far the KV cache
    is written and the only notion of progress (there is no prefill or decode flag).

    Attributes:
        request_id: unique among live requests.
        token_ids: prompt, then generated tokens.
        num_prompt_tokens: length of the prompt.
        sampling: how to choose tokens and when to stop.
        eos_token_ids: ids that end the sequence unless `sampling.ignore_eos`.
        bad_words_token_ids: `sampling.bad_words` as token id sequences.
        seed: key of this request's random numbers (`sampling.seed`, or derived).
        max_total_tokens: prompt + generated may not exceed this.
        arrival: number of the request in order of arrival.
        priority: lower runs first under the priority policy.
        cache_salt: requests with different salts share no cached block.
        media: spans of visual tokens in the prompt, in order; they do not overlap.
        media_items: content hash → item, for every span.
        positions: numpy int64 [3, num_prompt_tokens], the (time, height, width) position of each
            prompt token, for models with multimodal rope; None: token i has position i.
        position_delta: generated token i has position i + position_delta on all three axes.
        capture: names of the stages to capture, see `minivllm.runner`.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission;
            -1 before admission.
        num_preemptions: how often it lost its blocks.
        parent_id: of sequences 1 … n - 1 of a request with `sampling.n` above 1: the id it was
            submitted with, which is also the id of sequence 0.
        sequence_index: which of the n sequences this is.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    max_total_tokens: int = 2**31
    arrival: int = 0
    priority: int = 0
    cache_salt: str | None = None
    media: tuple[MediaSpan, ...] = ()
    media_items: Mapping[str, MediaItem] = field(default_factory=dict)
    positions: Any = None
    position_delta: int = 0
    capture: frozenset[str] = frozenset()
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = -1
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    parent_id: str | None = None
    sequence_index: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]


def sequence_ids(request_id: str, n: int) -> tuple[str, ...]:
    """Ids of the n sequences of a request: its own is the first sequence's, then id/1, id/2, …"""
    return (request_id, *(f"{request_id}/{i}" for i in range(1, n)))


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """What one request does in one step.

    Attributes:
        request_id: whose tokens these are.
        start: position of the first token to compute (its `num_computed_tokens`).
        num_tokens: how many tokens to compute, at least 1.
        tokens: the request's whole history so far (prompt and output), read-only.
        num_prompt_tokens: how many of `tokens` are prompt.
        block_table: ids of the blocks that hold positions 0 … start + num_tokens - 1, in order.
        sample: whether this step computes the last known token, so that a new one is sampled.
        request: fixed facts of the request (sampling, seed, eos, capture, media). Its mutable
            fields must not be read by the runner or the sampler.
        fork_ids: ids of sequences 1 … n - 1, in the step that samples a request's first token:
            each gets a token of its own from the same row of logits, drawn with its sequence
            index (its place in `fork_ids`, from 1).
    """

    request_id: str
    start: int
    num_tokens: int
    tokens: TokenView
    num_prompt_tokens: int
    block_table: tuple[int, ...]
    sample: bool
    request: Request
    fork_ids: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        """One past the last position computed in this step."""
        return self.start + self.num_tokens

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy the whole block `source` to `target`, in every layer, K and V, before the step.

    Which pool each is in depends on the list that holds the copy, see `StepPlan`. Host blocks are
    numbered from 0 and have no null block.
    """

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything one forward pass needs. One plan is one pass; plans carry no state.

    Attributes:
        step: number of the step, from 0.
        requests: what to compute, running requests first.
        copies: device block → device block (copy on write), done after swap_in.
        swap_out: device block → host block, done before anything else.
        swap_in: host block → device block, done after swap_out.
        evict_media: content hashes whose embeddings are dropped, before anything is encoded.
        encode: items to encode, whose embeddings are kept until a plan evicts them.

    Within one list, no block is target of two copies, and no copy's target is the source of
    another. A given-up plan must not have been run: its copies are in the next plan again.
    """

    step: int
    requests: tuple[ScheduledRequest, ...]
    copies: tuple[BlockCopy, ...] = ()
    swap_out: tuple[BlockCopy, ...] = ()
    swap_in: tuple[BlockCopy, ...] = ()
    encode: tuple[MediaItem, ...] = ()
    evict_media: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(r.num_tokens for r in self.requests)


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability, its rank (1 = most likely) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What the sampler decided for one request.

    Attributes:
        token_id: the token to append (the forced one under teacher forcing).
        choice_token_id: the model's own choice (equal to token_id unless forced).
        logprobs: token id → Logprob, when asked: the chosen token and the top ones, taken from
            the raw logits before penalties and temperature (vLLM's `raw_logprobs`).
    """

    token_id: int
    choice_token_id: int
    logprobs: Mapping[int, Logprob] | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one forward pass produced.

    Attributes:
        samples: request id → token, for each scheduled request with `sample` and for each of its
            `fork_ids`, unless it failed.
        prompt_logprobs: request id → one entry per prompt position covered by this step whose
            next token is in the prompt: the logprobs that predict position start + 1 + i.
        stages: request id → stage name → array (numpy) for the rows of this step.
        failures: request id → message, for requests whose computation is unusable (NaN logits).
    """

    samples: Mapping[str, SampledToken]
    prompt_logprobs: Mapping[str, Sequence[Mapping[int, Logprob]]] = field(default_factory=dict)
    stages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated sequence so far; cumulative, as vLLM shapes it.

    Attributes:
        index: which of the n sequences.
        text: detokenised text, without the held-back end that could still become a stop string.
        token_ids: generated ids, stop token included.
        choice_token_ids: the model's own choice per position (differs only under forcing).
        cumulative_logprob: sum of the sampled tokens' logprobs, when logprobs were asked.
        logprobs: per generated token: token id → Logprob.
        finish_reason: "stop", "length", "abort", "error" or None while it runs.
        stop_reason: the stop string or stop token id that ended it; None for EOS and the rest.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    choice_token_ids: tuple[int, ...] = ()
    cumulative_logprob: float | None = None
    logprobs: tuple[Mapping[int, Logprob], ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state of one request after a step; cumulative, as vLLM shapes it.

    Attributes:
        prompt: the prompt's text, if it was given as text.
        prompt_logprobs: one entry per prompt token; the first is None.
        num_cached_tokens: prompt tokens found in the prefix cache at first admission.
        seed: the seed its random numbers used (given or derived).
        stages: captured stage name → array, when asked and finished.
        error: message of the error that ended it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    prompt_logprobs: tuple[Mapping[int, Logprob] | None, ...] | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    seed: int = 0
    stages: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
