"""Verdicts and what carries them. Every verdict of the suite is one of eight words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

__all__ = ["Finding", "Judgement", "Power", "Verdict"]


class Verdict(Enum):
    """How a check ended, from best to worst; of several, the worst counts.

    PASS    agrees with the truth, and a fault would have shown.
    NOISE   agrees within rounding: another choice that the truth itself cannot tell apart.
    WEAK    nothing wrong was seen, but too little could be seen to call it a pass.
    SKIP    not judged: the engine lacks a capability, which the message names.
    WAIVED  failed, and the engine's owner has said why.
    STALE   a waiver that waives nothing.
    FAIL    disagrees with the truth.
    ERROR   the judge could not judge: a checker crashed, or its evidence is missing.
    """

    PASS = "PASS"
    NOISE = "NOISE"
    WEAK = "WEAK"
    SKIP = "SKIP"
    WAIVED = "WAIVED"
    STALE = "STALE"
    FAIL = "FAIL"
    ERROR = "ERROR"

    @property
    def severity(self) -> int:
        """0 for PASS up to 7 for ERROR."""
        return _ORDER.index(self)

    @property
    def fails_run(self) -> bool:
        """Whether one such verdict makes the whole run fail."""
        return self in (Verdict.STALE, Verdict.FAIL, Verdict.ERROR)

    @property
    def is_agreement(self) -> bool:
        """PASS, NOISE and WEAK: one class when two runs are compared."""
        return self in (Verdict.PASS, Verdict.NOISE, Verdict.WEAK)

    @classmethod
    def worst(cls, verdicts: Iterable[Verdict]) -> Verdict:
        """The worst of at least one verdict."""
        return max(verdicts, key=lambda v: v.severity)


_ORDER = tuple(Verdict)


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement of one check, good or bad.

    Attributes:
        check: name of the check.
        request: the request it is about, or None for the whole scenario.
        position: generated position (from 0) where it first went wrong.
        size: how far off, in multiples of the case's yardstick (M for single values, R for rms).
        saw: what kind of evidence was compared ("tokens", "logprobs", "logits", "bits",
            "behaviour"); "" when nothing was.
        detail: numbers for the report; plain data.
        reproduce: one command that shows it again; only on FAIL and ERROR.
    """

    verdict: Verdict
    check: str
    request: str | None
    message: str
    position: int | None = None
    size: float | None = None
    saw: str = ""
    detail: Mapping[str, Any] = field(default_factory=dict)
    reproduce: str | None = None


@dataclass(frozen=True, slots=True)
class Power:
    """What a judgement could have seen.

    Attributes:
        kinds: kinds of fault that would have shown, out of `conformance.power.KINDS`.
        blind: the other kinds → why they would not have shown.
        judged: generated positions compared with the truth by token.
        decided: of those, how many had only one right answer.
        unjudged: generated positions nothing could be said about.
    """

    kinds: tuple[str, ...]
    blind: Mapping[str, str]
    judged: int = 0
    decided: int = 0
    unjudged: int = 0

    @property
    def is_known(self) -> bool:
        """Whether anything was judged: a case that ended before its checks could have seen nothing."""
        return bool(self.kinds or self.blind)


@dataclass(frozen=True, slots=True)
class Judgement:
    """The verdict on one scenario at one matrix point.

    `level` is the scenario's: a failed "should" fails a run only when asked to.
    """

    verdict: Verdict
    findings: tuple[Finding, ...]
    power: Power
    level: str = "must"

    def fails_run(self, strict_should: bool = False) -> bool:
        """Whether this judgement makes the run fail."""
        if self.verdict is Verdict.FAIL and self.level == "should":
            return strict_should
        return self.verdict.fails_run
