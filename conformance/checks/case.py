"""What all checks share: the evidence of one scenario, and which pass speaks for which position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from conformance.adapters.base import EngineOutput, request_of
from conformance.history import History, Pass, RequestRun
from conformance.records import GoldenRecord
from conformance.verdicts import Finding, Verdict

__all__ = [
    "Aligned",
    "Case",
    "CheckFailed",
    "CheckInputError",
    "CheckSpec",
    "align",
    "expected_text",
    "first_difference",
    "how_texts_differ",
    "is_plain_greedy",
    "names_in",
    "same_text",
    "wrong_text",
]

#: Multiples of the yardstick that every check allows: 4 R for an rms, 4 M for a single value.
BAND = 4.0

#: Sampling parameters that change greedy decoding in ways a golden record does not know.
_ALTERING: Mapping[str, Any] = {
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "bad_words": (),
    "min_tokens": 0,
}


#: What stands for bytes that are no character.
_UNFINISHED = "\ufffd"

#: Characters of a long text that a message shows around a difference.
_AROUND = 40


class CheckSpec(Protocol):
    """One entry of a scenario's `checks:` (a `conformance.scenario.CheckSpec`, or alike)."""

    @property
    def name(self) -> str: ...

    @property
    def args(self) -> Any: ...

    @property
    def line(self) -> int: ...


class CheckInputError(Exception):
    """The evidence a check needs is missing, through no fault of the engine: verdict ERROR."""


class CheckFailed(Exception):
    """Carries the finding that ends the judging of one request."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


@dataclass(frozen=True)
class Case:
    """The evidence: a history, the records it refers to, and what else the scenario checks.

    Attributes:
        records: key → golden record; raises for an unknown or damaged one.
        specs: all checks of the scenario (requests named in `error` are expected to fail).
        strict: hold the engine to 2 × the eager cached arm (minivllm's own bar).
    """

    history: History
    records: Callable[[str], GoldenRecord]
    specs: Sequence[CheckSpec] = field(default_factory=tuple)
    strict: bool = False

    @property
    def free(self) -> Pass:
        found = self.history.find("free")
        if found is None:
            raise CheckInputError('the history has no pass "free"')
        return found

    def has(self, feature: str) -> bool:
        return feature in self.history.capabilities.features

    def why_missing(self, feature: str) -> str:
        """The reason to print when a feature is not there."""
        reason = self.history.capabilities.missing.get(feature)
        return f"{self.history.capabilities.engine} does not declare {feature!r}" + (
            f": {reason}" if reason else ""
        )

    def run_of(self, request: str, of: Pass | None = None) -> RequestRun:
        """The request's run in a pass (the free one by default)."""
        chosen = of or self.free
        if request not in chosen.requests:
            raise CheckInputError(f"pass {chosen.name!r} has no request {request!r}")
        return chosen.requests[request]

    def golden(self, run: RequestRun) -> GoldenRecord:
        """The truth about this run."""
        if run.golden_key is None:
            reason = run.golden_error or "no golden for this request"
            raise CheckInputError(f"request {run.request_id!r}: {reason}")
        record = self.records(run.golden_key)
        if record.dtype != self.history.dtype:
            raise CheckInputError(
                f"request {run.request_id!r}: the record is {record.dtype}, "
                f"the engine ran {self.history.dtype}; record it for that dtype"
            )
        weights = record.provenance.get("weights_sha256", self.history.weights_sha256)
        if weights != self.history.weights_sha256:
            raise CheckInputError(
                f"request {run.request_id!r}: recorded for weights {weights}, "
                f"the engine ran {self.history.weights_sha256}"
            )
        return record

    def error_expected(self) -> frozenset[str]:
        """Requests that the scenario expects to fail; "engine" stands for the engine as a whole."""
        return frozenset(
            str(name)
            for spec in self.specs
            if spec.name == "error" and isinstance(spec.args, Mapping)
            for name in spec.args
        )

    def aborted(self) -> frozenset[str]:
        """Requests the scenario cancelled: what they generated is a prefix of the truth."""
        named = {n for o in self.free.operations if o.kind == "abort" for n in names_in(o.argument)}
        return frozenset(n for n in {*self.free.requests, *named} if n in named or request_of(n) in named)

    def may_end_early(self, run: RequestRun, record: GoldenRecord) -> bool:
        """Whether this run may rightly have fewer tokens than its golden."""
        return run.request_id in self.aborted() or expected_text(run, record)[1] is not None

    def golden_requests(self, args: Any) -> list[str]:
        """Requests a golden check is about: those named, else every plain greedy one.

        Raises CheckInputError when there are none: a check about nothing would always pass.
        """
        if isinstance(args, Mapping) and "requests" in args:
            args = args["requests"]
        if isinstance(args, str):
            return [args]
        if isinstance(args, Sequence):
            return [str(a) for a in args]
        expected = self.error_expected()
        chosen = [n for n, r in self.free.requests.items() if n not in expected and is_plain_greedy(r)]
        if not chosen:
            raise CheckInputError("no plain greedy request in this scenario to compare with a golden")
        return chosen

    def output(self, check: str, run: RequestRun) -> EngineOutput:
        """The answer to a request that was to be served; raises CheckFailed if it was not."""
        error = run.refused or (run.output.error if run.output else None)
        if error is not None:
            how = "refused" if run.refused else "failed"
            raise CheckFailed(
                self.fail(check, run.request_id, f"the engine {how} it: {error.type}: {error.message}")
            )
        if run.output is None:
            raise CheckFailed(self.fail(check, run.request_id, "the engine never answered"))
        return run.output

    def same_prompt(self, check: str, run: RequestRun, record: GoldenRecord) -> bool:
        """Whether the prompt ids are known to be the golden's.

        Raises CheckFailed if they differ; returns False if the engine took text and tells no ids.
        """
        output = self.output(check, run)
        for whose, ids in (("engine", output.prompt_token_ids), ("runner", run.prompt_token_ids)):
            if ids is None or tuple(ids) == record.prompt_token_ids:
                continue
            at = first_difference(ids, record.prompt_token_ids)
            raise CheckFailed(
                self.fail(
                    check,
                    run.request_id,
                    f"stage prompt ids: the {whose}'s differ from the golden's at {at} "
                    f"({list(ids[at : at + 3])} for {list(record.prompt_token_ids[at : at + 3])}; "
                    f"{len(ids)} for {len(record.prompt_token_ids)} tokens); nothing later is judged",
                    detail={"stage": "prompt ids", "at": at},
                )
            )
        return output.prompt_token_ids is not None or run.prompt_token_ids is not None

    def full_power(self) -> bool:
        """Whether agreement in this dtype means much: float32, or a recall checkpoint.

        In bfloat16 a real model decides under half of its positions. A meaning checkpoint decides nearly
        all, but of ten damaged KV entries about one changes what it says (docs/oracle.md).
        """
        return self.history.dtype == "float32" or self.history.model.startswith("recall-")

    def soften(self, verdict: Verdict) -> Verdict:
        """PASS and NOISE become WEAK where they could not have been anything else."""
        return verdict if self.full_power() else Verdict.worst((verdict, Verdict.WEAK))

    def fail(
        self,
        check: str,
        request: str | None,
        message: str,
        *,
        position: int | None = None,
        size: float | None = None,
        saw: str = "",
        detail: Mapping[str, Any] | None = None,
    ) -> Finding:
        """A FAIL with the command that shows it again."""
        return Finding(
            Verdict.FAIL, check, request, message, position, size, saw, detail or {}, self.reproduce()
        )

    def reproduce(self) -> str:
        """One command that runs this scenario at this point again."""
        h = self.history
        axes = {k: v for k, v in h.point.items() if k not in ("model", "dtype", "device")}
        point = "".join(f" --point {k}={v}" for k, v in sorted(axes.items()))
        return (
            f"conformance run {h.scenario} --engine {h.capabilities.engine} --model {h.model} "
            f"--device {h.device} --dtype {h.dtype}{point}"
        )


@dataclass(frozen=True)
class Aligned:
    """Which run speaks for which generated position.

    The free run speaks up to and including its first divergence from the golden, where its context
    is still the golden's; the forced run, always in the golden's context, speaks after that.

    Attributes:
        divergence: first position at which the free run's id differs, None if there is none.
    """

    record: GoldenRecord
    free: RequestRun
    forced: RequestRun | None
    divergence: int | None

    def __iter__(self) -> Iterator[tuple[int, RequestRun]]:
        """(position, run that speaks for it) for every position either can speak for."""
        ids = self.free.output.token_ids if self.free.output else None
        last = len(ids or ()) if self.divergence is None else self.divergence + 1
        for position in range(min(last, len(self.record.token_ids))):
            yield position, self.free
        if self.divergence is not None and self.forced is not None:
            for position in range(self.divergence + 1, len(self.record.token_ids)):
                yield position, self.forced


def align(case: Case, run: RequestRun, record: GoldenRecord) -> Aligned:
    """Find the first divergence and the forced run, if there is one."""
    ids = (run.output.token_ids if run.output else None) or ()
    # Zip on purpose: a run that merely stops early or late diverges in length, not in an id.
    pairs = enumerate(zip(ids, record.token_ids, strict=False))
    divergence = next((i for i, (mine, truth) in pairs if mine != truth), None)
    forced_pass = case.history.find("forced")
    forced = forced_pass.requests.get(run.request_id) if forced_pass else None
    if forced is not None and not forced.forced:
        raise CheckInputError(f'request {run.request_id!r} in pass "forced" was not forced')
    if forced is not None and forced.golden_key != run.golden_key:
        raise CheckInputError(f'request {run.request_id!r} has another golden in pass "forced"')
    if forced is not None and forced.output is None:
        forced = None  # refused, which the history's own check tells: nobody speaks for what follows
    return Aligned(record, run, forced, divergence)


def is_plain_greedy(run: RequestRun) -> bool:
    """Whether the golden's greedy truth is what this request must answer.

    Keeping one candidate only (top_k 1) is greedy too, at any temperature: so n sequences can be.
    """
    s = run.sampling
    return (s.get("temperature", 1.0) == 0 or s.get("top_k") == 1) and all(
        (s.get(name) or default or None) == (default or None) for name, default in _ALTERING.items()
    )


def expected_text(run: RequestRun, record: GoldenRecord) -> tuple[str, str | None]:
    """The text the truth ends with under this request's stop strings, and the one that ends it.

    Stop strings are no part of a golden record: they only cut its text, at the earliest match.
    """
    stops = run.sampling.get("stop") or ()
    stops = (stops,) if isinstance(stops, str) else tuple(stops)
    found = [(record.text.find(s), s) for s in stops if s in record.text]
    if not found:
        return record.text, None
    # The stop string completed first wins, as it would while streaming.
    at, stop = min(found, key=lambda f: (f[0] + len(f[1]), f[0]))
    end = at + len(stop) if run.sampling.get("include_stop_str_in_output") else at
    return record.text[:end], stop


def same_text(shown: str, expected: str) -> bool:
    """Whether two texts are the same answer.

    A tokenizer that marks word starts with a space gives the first answer token one. Decoding the
    answer alone drops it (Transformers); decoding it as the continuation of the prompt keeps it
    (vLLM). Both are right, so one leading space does not count.

    An answer cut inside a character ends in bytes that are no text yet: Transformers shows them as
    U+FFFD, engines that stream hold them back. Both are right, at the very end only.
    """
    shown, expected = shown.removeprefix(" "), expected.removeprefix(" ")
    return shown in (expected, expected.rstrip(_UNFINISHED))


def wrong_text(case: Case, run: RequestRun, record: GoldenRecord) -> str | None:
    """How the text of an answer whose ids are the truth's differs from what they spell; None: it does not."""
    output, sampling = run.output, run.sampling
    shown = sampling.get("detokenize", True) and sampling.get("skip_special_tokens", True)
    text, _stop = expected_text(run, record)
    if output is None or output.token_ids is None or not shown or same_text(output.text, text):
        return None
    if run.request_id in case.aborted() and text.removeprefix(" ").startswith(output.text.removeprefix(" ")):
        return None  # an aborted request shows a part of the text
    return how_texts_differ(output.text, text)


def how_texts_differ(shown: str, expected: str) -> str:
    """Both texts, the shown one first; of long ones what stands around the first character that differs."""
    at = first_difference(shown, expected)
    if max(len(shown), len(expected)) <= 3 * _AROUND:
        return f"{shown!r} for {expected!r}"
    begin, end = max(0, at - _AROUND // 2), at + _AROUND
    dots = "…" if begin else ""
    parts = [f"{dots}{text[begin:end]!r}{'…' if text[end:] else ''}" for text in (shown, expected)]
    lengths = f"{len(shown)} characters for {len(expected)}"
    return f"{parts[0]} for {parts[1]} from character {at} on ({lengths})"


def names_in(argument: Any) -> list[str]:
    """Request names in an operation's argument: a name, a list of them, or a mapping's keys."""
    if isinstance(argument, str):
        return [argument]
    if isinstance(argument, Mapping):
        return [str(argument["request"])] if "request" in argument else [str(k) for k in argument]
    if isinstance(argument, Sequence):
        return [str(a) for a in argument]
    return []


def first_difference(a: Sequence[object], b: Sequence[object]) -> int:
    """The first index at which two sequences differ; the length of the shorter one if there is none."""
    shared = min(len(a), len(b))
    return next((i for i in range(shared) if a[i] != b[i]), shared)
