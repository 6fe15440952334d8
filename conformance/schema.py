"""The closed schema of a scenario file, version 1.

Every model forbids unknown keys, so a misspelt option is an error with file and line and never a
setting that silently does nothing. `conformance.scenario` turns what is validated here into value
objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)

from conformance import SCENARIO_SCHEMA
from conformance.adapters.base import FEATURES, request_of, sequence_names
from conformance.prompts import Piece

__all__ = [
    "PROMPT_FORMS",
    "SAMPLING_NAMES",
    "EngineOptions",
    "RequestModel",
    "ScenarioModel",
    "StepModel",
    "cross_check",
    "known_names",
]

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]*$")]
Count = Annotated[int, Field(ge=1)]
Index = Annotated[int, Field(ge=0)]
Text = Annotated[str, StringConstraints(min_length=1)]


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _bare(value: Any) -> Any:
    """`run` is short for `{run: null}`: a step or check without arguments."""
    return {value: None} if isinstance(value, str) else value


#: A request, or one of its sequences: "name/1".
SequenceName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_.-]*(/[1-9][0-9]*)?$")]
Sequences = Annotated[list[SequenceName], BeforeValidator(_listed), Field(min_length=1)]
Names = Annotated[list[Name], BeforeValidator(_listed), Field(min_length=1)]
#: {name: arguments}; the arguments are checked by `conformance.checks.lint`.
Check = Annotated[dict[str, Any], BeforeValidator(_bare), Field(min_length=1, max_length=1)]
Texts = Annotated[list[Text], BeforeValidator(_listed), Field(min_length=1)]


class _Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class _OneOf(_Closed):
    """Exactly one of the fields is given."""

    @model_validator(mode="after")
    def _exactly_one(self) -> _OneOf:
        if len(self.model_fields_set) != 1:
            raise ValueError(
                f"give exactly one of {', '.join(type(self).model_fields)}; "
                f"got {', '.join(sorted(self.model_fields_set)) or 'none'}"
            )
        return self

    @property
    def kind(self) -> str:
        return next(iter(self.model_fields_set))

    @property
    def argument(self) -> Any:
        return getattr(self, self.kind)


class EngineOptions(_Closed):
    """Options of the engine, by minivllm's names (which are vLLM's where it has the option).

    The harness's own, since they are no engine's options: `threads` is the number of CPU threads,
    `num_host_blocks` the size of `swap_space_bytes` in blocks.
    """

    block_size: Count | None = None
    num_kv_blocks: Count | None = None
    kv_cache_memory_bytes: Count | None = None
    swap_space_bytes: Index | None = None
    num_host_blocks: Index | None = None
    max_model_len: Count | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    preemption_mode: Text | None = None
    attention_backend: Text | None = None
    ops_backend: Text | None = None
    batch_invariant: bool | None = None
    seed: int | None = None
    prefix_cache_seed: int | None = None
    scheduling_policy: Text | None = None
    limit_mm_per_prompt: dict[Text, Index] | None = None
    encoder_cache_embeddings: Count | None = None
    threads: Count | None = None


class RequestModel(_Closed):
    """A prompt in one of five forms, sampling parameters (vLLM's names), salt and priority.

    `media` are pictures and videos beside a text or token ids; a chat holds them as parts.
    `media_as` and `prompt_as` hand over what the golden record says a model makes of them, instead
    of the pixels or the prompt; `traced` makes the record keep its stages, as those two need.
    """

    text: Text | None = None
    chat: list[dict[str, Any] | str] | None = None
    messages: list[dict[str, Any]] | None = None
    token_ids: list[Index] | None = None
    generate: Annotated[list[Piece], BeforeValidator(_listed), Field(min_length=1)] | None = None

    n: Count | None = None
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[list[str], BeforeValidator(_listed)] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool | None = None
    max_tokens: int = 16
    min_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[int, float] | None = None
    forced_token_ids: list[int] | None = None

    cache_salt: Text | None = None
    priority: int = 0
    media: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    mm_processor_kwargs: dict[Text, Any] = {}
    media_as: Literal["pixels", "embeddings"] = "pixels"
    prompt_as: Literal["tokens", "embeddings"] = "tokens"
    traced: bool = False

    @model_validator(mode="after")
    def _one_prompt(self) -> RequestModel:
        given = [name for name in PROMPT_FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(PROMPT_FORMS)}; got {given or 'none'}")
        if self.media is not None and given[0] in ("chat", "messages"):
            raise ValueError(f"a {given[0]} holds its pictures as parts, not under media")
        return self


PROMPT_FORMS = ("text", "chat", "messages", "token_ids", "generate")
#: Fields of a request that are neither its prompt nor a sampling parameter.
_OTHER_FIELDS = ("cache_salt", "priority", "media", "mm_processor_kwargs", "media_as", "prompt_as", "traced")
SAMPLING_NAMES = tuple(n for n in RequestModel.model_fields if n not in (*PROMPT_FORMS, *_OTHER_FIELDS))


class Run(_Closed):
    """Step until nothing is left; before every `period`-th step preempt, before every step poison."""

    preempt: Sequences | None = None
    period: Count = 1
    poison: bool = False


class StepModel(_OneOf):
    """One step. Without arguments its bare name will do."""

    submit: Names | None = None
    run: Run | None = None
    advance: Count | None = None
    abort: Sequences | None = None
    preempt: Sequences | None = None
    swap: Sequences | None = None
    reset_cache: None = None
    poison: None = None
    fragment: None = None
    swap_weights: Annotated[list[Text], Field(min_length=2, max_length=2)] | None = None
    expect_error: Annotated[dict[Name, Any], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _needs_argument(self) -> StepModel:
        if self.argument is None and self.kind not in ("run", "reset_cache", "poison", "fragment"):
            raise ValueError(f"step {self.kind} needs an argument")
        return self


class Damage(_OneOf):
    """How to damage a copy of the checkpoint before loading it; see `conformance.damage`."""

    remove_file: Text | None = None
    truncate: Text | None = None
    remove_tensor: Text | None = None
    extra_tensor: Text | None = None
    wrong_shape: Text | None = None
    set_config: Annotated[dict[str, Any], Field(min_length=1)] | None = None
    set_end_ids: Annotated[list[int], Field(min_length=1)] | None = None


class ScenarioModel(_Closed):
    """A whole scenario file."""

    schema_: Annotated[Literal[SCENARIO_SCHEMA], Field(alias="schema")]  # type: ignore[valid-type]  # a constant
    id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9_-]+(/[a-z0-9_-]+)+$")]
    requirement: Text
    level: Literal["must", "should"]
    source: Annotated[list[Text], Field(min_length=1)]
    needs: list[Literal[tuple(FEATURES)]] = []  # type: ignore[valid-type]  # the table is the one truth
    model: Texts
    dtype: Annotated[list[Literal["float32", "bfloat16"]], BeforeValidator(_listed)] = ["float32"]
    engine: EngineOptions = EngineOptions()
    matrix: dict[str, Any] = {}
    profile: Literal["smoke", "default", "full"]
    damage: Damage | None = None
    requests: dict[Name, RequestModel] = {}
    steps: list[Annotated[StepModel, BeforeValidator(_bare)]] = []
    checks: Annotated[list[Check], Field(min_length=1)]


def cross_check(model: ScenarioModel) -> list[tuple[tuple[str | int, ...], str]]:
    """What no single field can tell, as (location, message): names, matrix values, submissions."""
    return [*_unknown_names(model), *_matrix_problems(model), *_submission_problems(model)]


def known_names(model: ScenarioModel) -> set[str]:
    """Names of all requests and of their sequences."""
    return {s for name, request in model.requests.items() for s in sequence_names(name, {"n": request.n})}


def _unknown_names(model: ScenarioModel) -> Iterator[tuple[tuple[str | int, ...], str]]:
    known = known_names(model)
    for where, name in _used_names(model):
        if name not in known:
            yield where, f"unknown request {name!r}; requests are {sorted(known)}"
    if "every" in model.requests:
        yield ("requests", "every"), "a request must not be called 'every': preempt uses the word"


def _used_names(model: ScenarioModel) -> Iterator[tuple[tuple[str | int, ...], str]]:
    for i, step in enumerate(model.steps):
        names: list[str] = []
        if step.kind in ("submit", "abort", "preempt", "swap"):
            names = step.argument
        elif step.kind == "run" and step.argument is not None:
            names = step.argument.preempt or []
        elif step.kind == "expect_error":
            names = list(step.argument)
        yield from ((("steps", i), name) for name in names if name != "every" or step.kind == "submit")


def _matrix_problems(model: ScenarioModel) -> Iterator[tuple[tuple[str | int, ...], str]]:
    for option, values in model.matrix.items():
        where = ("matrix", option)
        if option != "device" and option not in EngineOptions.model_fields:
            yield where, f"unknown option {option!r}; known: device, {', '.join(EngineOptions.model_fields)}"
        elif option == "device" and values == "auto":
            continue
        elif not isinstance(values, list) or not values:
            yield where, f"must be a list of values, got {values!r}"
        elif option != "device":
            if getattr(model.engine, option) is not None:
                yield where, f"{option} is given in engine and in matrix: keep one"
            for i, value in enumerate(values):
                try:
                    EngineOptions.model_validate({option: value})
                except ValidationError as error:
                    yield (*where, i), f"{error.errors()[0]['msg']}, got {value!r}"


def _submission_problems(model: ScenarioModel) -> Iterator[tuple[tuple[str | int, ...], str]]:
    submitted: set[str] = set()
    for i, step in enumerate(model.steps):
        names: list[str] = []
        if step.kind == "submit":
            names = step.argument
        elif step.kind == "expect_error":
            names = list(step.argument)
        for name in names:
            if name in submitted:
                yield ("steps", i), f"request {name!r} is submitted twice: give the second its own name"
            submitted.add(name)
        if step.kind in ("abort", "preempt", "swap"):
            early = [n for n in step.argument if request_of(n) not in submitted and n != "every"]
            if early:
                yield ("steps", i), f"{step.kind} of {early} before they are submitted"
    for name in model.requests:
        if name not in submitted:
            yield ("requests", name), f"request {name!r} is never submitted"
