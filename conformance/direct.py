"""Compares two engines on one prompt, without a scenario or a golden record.

What decides is the reference's own rounding, measured for this very prompt: where the reference can
be computed here, both engines are judged by it as in any scenario. Where it cannot, the two are only
compared with one another, and the result says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from conformance.adapters.base import EngineAdapter, EngineOutput, EngineRequest, Media, ModelSource
from conformance.adapters.received import declared, received
from conformance.assets import DIGEST, Asset
from conformance.checks import judge
from conformance.checks.case import Case, first_difference
from conformance.checks.tokens import band, gap
from conformance.history import History, RequestRun
from conformance.media import MediaRef
from conformance.outside import FROM_OUTSIDE
from conformance.records import GoldenRecord
from conformance.runner import EngineFactory, Retrace, retrace_scenario
from conformance.scenario import CheckSpec, RequestSpec, Scenario, Step
from conformance.store import NoGolden
from conformance.triage import triage
from conformance.verdicts import Verdict

__all__ = ["Agreement", "Comparison", "Question", "Side", "compare"]

#: How an engine was led along an answer that it only read.
_PREFILL = "prompt logprobs (judges prefill)"

ASKED = "asked"


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt for both engines.

    Attributes:
        chat: whether it is a user's message, through the checkpoint's template; else plain text.
        images: picture files, before the text in a chat, at the text's own placeholders otherwise.
    """

    prompt: str
    chat: bool = False
    images: tuple[Path, ...] = ()
    max_tokens: int = 32
    dtype: str = "float32"
    device: str = "auto"

    @property
    def form(self) -> str:
        """The feature an engine needs to make the token ids itself."""
        return "chat" if self.chat else "text"


@dataclass(frozen=True, slots=True)
class Side:
    """One engine's part: its answer, and what the reference says about it.

    Attributes:
        verdict: None where there is no reference.
        findings: what is wrong, in words.
        stage: the first stage outside of its band, in words.
    """

    engine: str
    version: str
    prompt_token_ids: tuple[int, ...] | None
    token_ids: tuple[int, ...] | None
    text: str
    error: str | None = None
    verdict: Verdict | None = None
    findings: tuple[str, ...] = ()
    stage: str | None = None


@dataclass(frozen=True, slots=True)
class Agreement:
    """At how many positions of a's answer b, led along it, would have chosen the same token."""

    agreed: int
    positions: int
    how: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result.

    Attributes:
        verdict: PASS, NOISE, WEAK or FAIL, as in a run.
        divergence: first generated position with another token, None if there is none.
        lines: what was found, in the order in which it matters.
        margin: at the divergence, how far below the truth's best logit the other choice lies, in logits.
        band: how far apart two correct engines' choices may lie there: twice 4 M.
    """

    verdict: Verdict
    a: Side
    b: Side
    divergence: int | None
    lines: tuple[str, ...]
    reference: str
    margin: float | None = None
    band: float | None = None
    agreement: Agreement | None = None

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        plain = asdict(self)
        plain["verdict"] = self.verdict.value
        for side in ("a", "b"):
            verdict = plain[side]["verdict"]
            plain[side]["verdict"] = verdict.value if isinstance(verdict, Verdict) else None
        return plain


@dataclass
class _Truth:
    """A store of one record, or of the reason why there is none."""

    record: GoldenRecord | None = None
    reason: str = ""

    def get(self, _key: str, _weights: str | None = None, /) -> GoldenRecord:
        if self.record is None:
            raise NoGolden(self.reason)
        return self.record


def compare(
    question: Question, a: EngineFactory, b: EngineFactory, source: ModelSource, root: Path | None = None
) -> Comparison:
    """Ask both, and judge.

    Raises:
        Skipped: an engine cannot be asked this.
        AdapterError: an engine cannot tell its capabilities.
        OSError: a picture cannot be read.
    """
    scenario = _scenario(question, source.name)
    truth = _truth(scenario, question, source, root)
    one, ran_a = _ask(scenario, question, a, source, truth)
    two, ran_b = _ask(scenario, question, b, source, truth)
    lines = _before_the_answer(one, two)
    divergence = _first_difference(one.token_ids or (), two.token_ids or ())
    agreement = None
    if not lines and ran_a is not None and ran_b is not None and one.token_ids and two.token_ids:
        try:
            agreement = _led_along(b, source, question, scenario, one)
        except FROM_OUTSIDE:
            raise
        except BaseException as error:  # code of others
            lines.append(
                f"{two.engine} failed, led along the other's answer: {type(error).__name__}: {error}"
            )
    verdict, margin, limit = _verdict(one, two, divergence, truth.record, lines)
    told = "computed from the reference" if truth.record else f"none: {truth.reason}"
    return Comparison(verdict, one, two, divergence, tuple(lines), told, margin, limit, agreement)


# ---- asking -------------------------------------------------------------------------------------


def _scenario(question: Question, model: str) -> Scenario:
    """The question as a scenario of one request, which is on no disk."""
    assets = [_asset(path) for path in question.images]
    parts = [{"image": asset.name} for asset in assets]
    if question.chat:
        prompt: dict[str, Any] = {"chat": [*parts, {"text": question.prompt}]}
    else:
        prompt = {"text": question.prompt, **({"media": parts} if parts else {})}
    request = RequestSpec(
        name=ASKED,
        prompt=prompt,
        sampling={"temperature": 0.0, "max_tokens": question.max_tokens},
        cache_salt=None,
        priority=0,
        line=0,
        media=tuple(MediaRef("image", (asset,)) for asset in assets),
    )
    return Scenario(
        id="diff",
        path=Path("diff"),
        requirement="",
        level="must",
        source=(),
        needs=(),
        models=(model,),
        dtypes=(question.dtype,),
        engine={},
        matrix={},
        profile="full",
        damage=None,
        requests={ASKED: request},
        steps=(Step("submit", [ASKED], 0), Step("run", {"preempt": None, "period": 1, "poison": False}, 0)),
        checks=(CheckSpec("tokens_match_golden", ASKED, 0), CheckSpec("logits_within_yardstick", ASKED, 0)),
    )


def _asset(path: Path) -> Asset:
    return Asset(path.name, path, DIGEST + hashlib.sha256(path.read_bytes()).hexdigest())


def _truth(scenario: Scenario, question: Question, source: ModelSource, root: Path | None) -> _Truth:
    """The reference's answer to the question, with stages."""
    try:
        # Imported when needed: it brings torch and Transformers, and a third party may have neither.
        from transformers.utils.logging import disable_progress_bar

        from conformance.reference import Reference

        disable_progress_bar()
        pictures = {asset.digest: asset for ref in scenario.requests[ASKED].media for asset in ref.assets}
        request = scenario.requests[ASKED].canonical(source.name, question.dtype)
        record = Reference(source, root, pictures).record(request, "diff", traced=True)
    except Exception as reason:  # whatever keeps the reference away, the two can still be compared
        return _Truth(None, f"the reference cannot be computed here: {type(reason).__name__}: {reason}")
    return _Truth(record)


def _ask(
    scenario: Scenario, question: Question, factory: EngineFactory, source: ModelSource, truth: _Truth
) -> tuple[Side, RequestRun | None]:
    point = {"model": source.name, "dtype": question.dtype, "device": question.device}
    features = declared(factory, source, point).features
    if question.form in features:  # then its own ids are part of what is compared
        scenario = replace(scenario, needs=(question.form,))
    history = retrace_scenario(scenario, point, factory, source, truth, Retrace(frozenset({ASKED})))
    engine, version = history.capabilities.engine, history.capabilities.version
    free = history.passes[0]
    run = free.requests.get(ASKED)
    output = run.output if run else None
    error = free.error or (run.refused if run else None) or (output.error if output else None)
    if error is not None or run is None or output is None:
        why = f"{error.type}: {error.message}" if error else "it never answered"
        return Side(engine, version, None, None, "", why), None
    side = Side(engine, version, output.prompt_token_ids, output.token_ids, output.text)
    return _judged(side, history, scenario, truth), run


def _judged(side: Side, history: History, scenario: Scenario, truth: _Truth) -> Side:
    if truth.record is None:
        return side
    checks = scenario.checks if "stages" in history.capabilities.features else scenario.checks[:1]
    judgement = judge(history, checks, truth.get)
    wrong = tuple(f.message for f in judgement.findings if f.verdict in (Verdict.FAIL, Verdict.ERROR))
    suspect = triage(Case(history, truth.get, checks), ASKED) if wrong else None
    return replace(
        side, verdict=judgement.verdict, findings=wrong, stage=suspect.text if suspect is not None else None
    )


# ---- judging ------------------------------------------------------------------------------------


def _before_the_answer(a: Side, b: Side) -> list[str]:
    """Differences of template, BOS, tokenizer and expansion: everything later follows from them."""
    lines = [f"{side.engine} failed: {side.error}" for side in (a, b) if side.error]
    mine, theirs = a.prompt_token_ids, b.prompt_token_ids
    if lines or mine is None or theirs is None or mine == theirs:
        return lines
    at = _first_difference(mine, theirs)
    assert at is not None
    what = "BOS" if at == 0 and abs(len(mine) - len(theirs)) == 1 else "template, tokenizer or expansion"
    text = (
        f"the prompt ids differ at {at} ({what}): {list(mine[at : at + 4])} and {list(theirs[at : at + 4])}, "
        f"{len(mine)} and {len(theirs)} tokens; nothing later is compared"
    )
    return [text]


def _verdict(
    a: Side, b: Side, divergence: int | None, record: GoldenRecord | None, lines: Sequence[str]
) -> tuple[Verdict, float | None, float | None]:
    if lines:
        return Verdict.FAIL, None, None
    judged = [side.verdict for side in (a, b) if side.verdict is not None]
    if record is None or not judged:
        if a.token_ids is None or b.token_ids is None:
            return (Verdict.WEAK if a.text == b.text else Verdict.FAIL), None, None
        return (Verdict.WEAK if divergence is None else Verdict.FAIL), None, None
    margin = None
    if divergence is not None and divergence < len(record.token_ids):
        gaps = [
            gap(record, divergence, side.token_ids[divergence])[0]
            for side in (a, b)
            if side.token_ids is not None and divergence < len(side.token_ids)
        ]
        margin = max(gaps, default=None)
    return Verdict.worst(judged), margin, 2 * band(record)


def _first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    return None if a == b else first_difference(a, b)


def _led_along(
    factory: EngineFactory, source: ModelSource, question: Question, scenario: Scenario, a: Side
) -> Agreement | None:
    """Teacher forcing of b along a's answer, by the best way b offers."""
    prompt, answer = a.prompt_token_ids, a.token_ids
    options: Mapping[str, Any] = {"dtype": question.dtype, "device": question.device}
    with factory(source, options) as engine:
        features = declared(factory, source, options).features
        if prompt is None or not answer or "token_ids" not in features or "output_ids" not in features:
            return None
        chat = (
            {
                "role": "user",
                "content": [
                    *[{"type": "image"}] * len(question.images),
                    {"type": "text", "text": question.prompt},
                ],
            },
        )
        base = EngineRequest(
            ASKED,
            {"temperature": 0.0, "max_tokens": len(answer), "ignore_eos": True},
            prompt_token_ids=prompt,
            chat=chat if question.chat else None,
            text=None if question.chat else question.prompt,
            media=tuple(
                Media("image", (asset.path,))
                for ref in scenario.requests[ASKED].media
                for asset in ref.assets
            ),
        )
        for feature, how in (("forced_decode", "forced decode"), ("forced_prompt", _PREFILL)):
            if feature in features:
                [output] = _answers(engine, [replace(base, forced_token_ids=answer)])
                return _counted(output.choice_token_ids, answer, how)
        if question.images:
            return None  # ids that go on after a picture are no prompt of its own
        if "prompt_logprobs" in features:
            sampling = {**base.sampling, "max_tokens": 1, "prompt_logprobs": 1}
            [output] = _answers(
                engine, [replace(base, sampling=sampling, prompt_token_ids=(*prompt, *answer))]
            )
            return _counted(_prompt_choices(output, len(answer)), answer, _PREFILL)
        one = {**base.sampling, "max_tokens": 1}
        requests = [
            replace(base, request_id=f"{ASKED}-{i}", sampling=one, prompt_token_ids=(*prompt, *answer[:i]))
            for i in range(len(answer))
        ]
        outputs = _answers(engine, requests)
        choices = [output.token_ids[0] if output.token_ids else -1 for output in outputs]
        return _counted(choices, answer, "one request per position")


def _answers(engine: EngineAdapter, requests: Sequence[EngineRequest]) -> list[EngineOutput]:
    """One answer to each request, in order."""
    answers = received(engine.generate(requests), {one.request_id for one in requests}, "generate()")
    return [answers[one.request_id] for one in requests]


def _prompt_choices(output: EngineOutput, count: int) -> list[int] | None:
    rows = (output.prompt_logprobs or ())[-count:]
    if len(rows) != count:
        return None
    return [max(row, key=lambda entry: entry.logprob).token_id if row else -1 for row in rows]


def _counted(choices: Sequence[int] | None, answer: Sequence[int], how: str) -> Agreement | None:
    if choices is None or len(choices) != len(answer):
        return None
    return Agreement(sum(x == y for x, y in zip(choices, answer, strict=True)), len(answer), how)
