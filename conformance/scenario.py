"""Scenarios: what a YAML file under scenarios/ asks for, as value objects."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from conformance.adapters.base import request_of
from conformance.assets import ASSETS
from conformance.canonical import CanonicalError, canonical_request
from conformance.checks import CHECKS, lint
from conformance.media import MediaError, MediaRef, find_media, with_digests
from conformance.pairwise import pairwise
from conformance.prompts import generate_prompt
from conformance.schema import (
    PROMPT_FORMS,
    SAMPLING_NAMES,
    RequestModel,
    ScenarioModel,
    cross_check,
    known_names,
)
from conformance.yaml_lines import Document, Location, YamlError, read_yaml

__all__ = [
    "PROFILES",
    "CheckSpec",
    "RequestSpec",
    "Scenario",
    "ScenarioError",
    "Step",
    "load_scenario",
    "load_scenarios",
]

#: From the quickest to the longest; each runs what the ones before it run, and more.
PROFILES = ("smoke", "default", "full")

#: Parameters that change the greedy answer and are no part of a golden record.
_CHANGES_TRUTH = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "bad_words",
    "min_tokens",
    "logit_bias",
    "forced_token_ids",
)


class ScenarioError(ValueError):
    """One or more scenario files are wrong; each line of the message has file, line and reason."""


@dataclass(frozen=True, slots=True)
class CheckSpec:
    """One check of a scenario: its name, its arguments as plain data, its line in the file."""

    name: str
    args: Any
    line: int


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a scenario; `argument` is plain data, names always as a list."""

    kind: str
    argument: Any
    line: int


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request of a scenario.

    Attributes:
        prompt: one of {"text": str}, {"chat": [...]}, {"messages": [...]}, {"token_ids": [...]};
            generated prompts are token ids here. Pictures are named as in the file.
        media: the files of its pictures and videos, in the order of the prompt.
        media_as, prompt_as: "embeddings" when the engine gets those of the golden record.
        traced: whether its golden record keeps stages.
        sampling: the parameters the scenario set; temperature and max_tokens are always there.
        line: line of its name in the file.
    """

    name: str
    prompt: Mapping[str, Any]
    sampling: Mapping[str, Any]
    cache_salt: str | None
    priority: int
    line: int
    media: tuple[MediaRef, ...] = ()
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    media_as: str = "pixels"
    prompt_as: str = "tokens"
    traced: bool = False

    @property
    def has_golden(self) -> bool:
        """Whether the greedy truth of Hugging Face is the expected answer."""
        return self.is_greedy and not any(n in self.sampling for n in _CHANGES_TRUTH)

    @property
    def is_greedy(self) -> bool:
        """Whether nothing is drawn at random; one candidate (top_k 1) leaves no choice either."""
        return self.sampling["temperature"] == 0.0 or self.sampling.get("top_k") == 1

    @property
    def max_tokens(self) -> int:
        return int(self.sampling["max_tokens"])

    def canonical(self, model: str, dtype: str) -> dict[str, Any]:
        """The canonical request that its golden record is looked up by."""
        return canonical_request(
            model=model,
            dtype=dtype,
            prompt=with_digests(self.prompt, self.media),
            max_tokens=self.max_tokens,
            ignore_eos=self.sampling.get("ignore_eos", False),
            stop_token_ids=self.sampling.get("stop_token_ids", ()),
            prompt_logprobs=self.sampling.get("prompt_logprobs") is not None,
            mm_processor_kwargs=self.mm_processor_kwargs,
        )


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario file; field meanings are in the documentation of the format."""

    id: str
    path: Path
    requirement: str
    level: str
    source: tuple[str, ...]
    needs: tuple[str, ...]
    models: tuple[str, ...]
    dtypes: tuple[str, ...]
    engine: Mapping[str, Any]
    matrix: Mapping[str, tuple[Any, ...]]
    profile: str
    damage: Mapping[str, Any] | None
    requests: Mapping[str, RequestSpec]
    steps: tuple[Step, ...]
    checks: tuple[CheckSpec, ...]

    @property
    def area(self) -> str:
        return self.id.partition("/")[0]

    def in_profile(self, profile: str) -> bool:
        """Whether a run of `profile` includes this scenario."""
        return PROFILES.index(self.profile) <= PROFILES.index(profile)

    def points(self) -> list[dict[str, Any]]:
        """The matrix as points: {"model", "dtype", option…}.

        Two axes with several values are multiplied out; with more, every pair of values of two
        axes occurs in some point.
        """
        axes = {"model": self.models, "dtype": self.dtypes, **self.matrix}
        if sum(len(values) > 1 for values in axes.values()) <= 2:
            return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
        return pairwise(axes)

    @property
    def must_fail(self) -> frozenset[str]:
        """Requests that an error check or an expect_error step is about."""
        return frozenset(name for check in self.checks if check.name == "error" for name in check.args)

    def judged_by_golden(self) -> list[RequestSpec]:
        """Requests that some check compares with a golden record, in order of the file."""
        names: set[str] = set()
        for check in self.checks:
            if CHECKS[check.name].golden:
                names |= set(
                    _names(check.args) or [n for n, r in self.requests.items() if self._may_have_golden(r)]
                )
            elif check.name == "text_equals":
                names |= {
                    n
                    for n, wanted in check.args.items()
                    if isinstance(wanted, Mapping) and "golden" in wanted
                }
        judged = {request_of(name) for name in names}
        return [request for name, request in self.requests.items() if name in judged]

    def _may_have_golden(self, request: RequestSpec) -> bool:
        return request.has_golden and request.name not in self.must_fail

    def golden_requests(self) -> list[tuple[str, dict[str, Any]]]:
        """(label, canonical request) for each request, model and dtype judged by a golden check."""
        return [
            (f"{self.id}:{request.name}", request.canonical(model, dtype))
            for model in self.models
            for dtype in self.dtypes
            for request in self.judged_by_golden()
        ]

    def check(self, name: str) -> list[CheckSpec]:
        """The checks of that name."""
        return [check for check in self.checks if check.name == name]


def load_scenarios(root: Path) -> list[Scenario]:
    """Every scenario below `root` (a directory such as scenarios/), in order of id.

    Raises:
        ScenarioError: listing every problem of every file.
    """
    paths = sorted(path for path in root.rglob("*") if path.suffix in (".yaml", ".yml"))
    if not paths:
        raise ScenarioError(f"{root}: no scenario here")
    scenarios, problems = [], []
    for path in paths:
        try:
            scenarios.append(load_scenario(path, root))
        except ScenarioError as error:
            problems.append(str(error))
    if problems:
        raise ScenarioError("\n".join(problems))
    return sorted(scenarios, key=lambda s: s.id)


def load_scenario(path: Path, root: Path) -> Scenario:
    """One file. Its id must be its path below `root`, without the suffix."""
    try:
        document = read_yaml(path)
    except YamlError as error:
        raise ScenarioError(str(error)) from error
    if not isinstance(document.data, dict):
        raise ScenarioError(f"{path}:1: a scenario is a mapping, got {type(document.data).__name__}")
    try:
        model = ScenarioModel.model_validate(document.data)
    except ValidationError as error:
        lines = [_message(document, e["loc"], e["msg"], e["type"], e["input"]) for e in error.errors()]
        raise ScenarioError("\n".join(dict.fromkeys(lines))) from error
    problems = [*cross_check(model), *_check_problems(model)]
    expected = path.relative_to(root).with_suffix("").as_posix()
    if model.id != expected:
        problems.append((("id",), f"id {model.id!r} must be the path {expected!r}"))
    media, media_problems = _media(model, root / ASSETS)
    problems += media_problems
    if not problems:
        scenario = _scenario(model, document, media)
        problems += _golden_problems(scenario)
    if problems:
        raise ScenarioError(
            "\n".join(f"{path}:{document.line(where)}: {_dotted(where)}: {text}" for where, text in problems)
        )
    return scenario


def _message(document: Document, loc: Sequence[str | int], text: str, kind: str, value: Any) -> str:
    where = [part for part in loc if isinstance(part, int) or not part.startswith(("function-", "list["))]
    detail = "unknown key" if kind == "extra_forbidden" else text.removeprefix("Value error, ")
    if kind not in ("extra_forbidden", "missing", "value_error"):
        detail += f", got {value!r}"
    return f"{document.path}:{document.line(where)}: {_dotted(where)}: {detail}"


def _dotted(where: Sequence[str | int]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in where)
    return text.removeprefix(".")


def _media(
    model: ScenarioModel, directory: Path
) -> tuple[dict[str, tuple[MediaRef, ...]], list[tuple[Location, str]]]:
    """The files of each request's pictures, and what is wrong with them."""
    found: dict[str, tuple[MediaRef, ...]] = {}
    problems: list[tuple[Location, str]] = []
    for name, request in model.requests.items():
        try:
            found[name] = find_media(_prompt(request), directory)
        except MediaError as error:
            problems.append((("requests", name, *error.where), str(error)))
            continue
        if request.media_as == "embeddings" and not found[name]:
            problems.append((("requests", name, "media_as"), "the request has no picture"))
    return found, problems


def _scenario(
    model: ScenarioModel, document: Document, media: Mapping[str, tuple[MediaRef, ...]]
) -> Scenario:
    requests = {
        name: _request(name, request, document.line(("requests", name)), media[name])
        for name, request in model.requests.items()
    }
    steps: list[Step] = []
    checks: list[CheckSpec] = []
    for i, step in enumerate(model.steps):
        line = document.line(("steps", i))
        argument = step.model_dump(exclude_unset=True)[step.kind]
        if step.kind == "run":
            argument = (
                step.argument.model_dump()
                if step.argument
                else {"preempt": None, "period": 1, "poison": False}
            )
        if step.kind == "expect_error":
            checks.append(CheckSpec("error", argument, line))
            argument = list(argument)
        steps.append(Step(step.kind, argument, line))
    for i, check in enumerate(model.checks):
        [(name, args)] = check.items()
        checks.append(CheckSpec(name, args, document.line(("checks", i))))
    return Scenario(
        id=model.id,
        path=document.path,
        requirement=model.requirement,
        level=model.level,
        source=tuple(model.source),
        needs=tuple(model.needs),
        models=tuple(model.model),
        dtypes=tuple(model.dtype),
        engine=model.engine.model_dump(exclude_none=True),
        matrix={option: tuple(_values(values)) for option, values in model.matrix.items()},
        profile=model.profile,
        damage=model.damage.model_dump(exclude_unset=True) if model.damage else None,
        requests=requests,
        steps=tuple(steps),
        checks=tuple(checks),
    )


def _values(values: Any) -> list[Any]:
    return values if isinstance(values, list) else [values]


def _prompt(model: RequestModel) -> dict[str, Any]:
    form = next(form for form in PROMPT_FORMS if getattr(model, form) is not None)
    value = getattr(model, form)
    prompt = {"token_ids": list(generate_prompt(value))} if form == "generate" else {form: value}
    return prompt | ({"media": model.media} if model.media is not None else {})


def _request(name: str, model: RequestModel, line: int, media: tuple[MediaRef, ...]) -> RequestSpec:
    given = {n: getattr(model, n) for n in SAMPLING_NAMES if getattr(model, n) is not None}
    return RequestSpec(
        name,
        _prompt(model),
        given,
        model.cache_salt,
        model.priority,
        line,
        media=media,
        mm_processor_kwargs=model.mm_processor_kwargs,
        media_as=model.media_as,
        prompt_as=model.prompt_as,
        traced=model.traced or "embeddings" in (model.media_as, model.prompt_as),
    )


def _names(args: Any) -> list[str]:
    """Requests named in the arguments of a check: none, one, several, or under "requests"."""
    if isinstance(args, Mapping):
        args = args.get("requests")
    if isinstance(args, str):
        return [args]
    return list(args) if isinstance(args, list) else []


def _check_problems(model: ScenarioModel) -> Iterator[tuple[Location, str]]:
    steps = [
        ("steps", i, "error", step.argument)
        for i, step in enumerate(model.steps)
        if step.kind == "expect_error"
    ]
    checks = [("checks", i, *next(iter(check.items()))) for i, check in enumerate(model.checks)]
    known = known_names(model)
    for section, i, name, args in [*steps, *checks]:
        problems = lint(name, args)
        yield from (((section, i), f"{name}: {problem}") for problem in problems)
        if problems:
            continue
        keyed = name in ("cached_tokens", "finish_reason", "text_equals", "error")
        for request in args if keyed else _names(args):
            if request not in known and not (name == "error" and request == "engine"):
                yield (section, i), f"{name}: unknown request {request!r}; requests are {sorted(known)}"


def _golden_problems(scenario: Scenario) -> Iterator[tuple[Location, str]]:
    for request in scenario.judged_by_golden():
        if not request.has_golden:
            yield (
                ("requests", request.name),
                (
                    f"a golden check judges {request.name!r}, but no golden exists for a temperature above 0 "
                    f"or for {', '.join(_CHANGES_TRUTH)}"
                ),
            )
            continue
        try:
            request.canonical(scenario.models[0], scenario.dtypes[0])
        except CanonicalError as error:
            yield ("requests", request.name), str(error)
    if scenario.check("same_under"):
        for name, request in scenario.requests.items():
            if not request.is_greedy and "seed" not in request.sampling:
                yield ("requests", name), "same_under needs a seed at a temperature above 0"
    golden_checks = [check.name for check in scenario.checks if CHECKS[check.name].golden]
    if golden_checks and not scenario.judged_by_golden():
        yield ("checks",), f"{golden_checks} judge no request: none is greedy without penalties"
