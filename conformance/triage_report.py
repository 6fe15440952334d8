"""What `conformance triage` prints: per request the first stage that is wrong, and the table of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from conformance.causes import usual_causes
from conformance.checks.case import BAND
from conformance.retrace import Examined, Subject, TriageError, examine, subjects_of
from conformance.runner import EngineFactory
from conformance.store import RecordStore
from conformance.suite import Case, Outcome

__all__ = ["look_into", "plain", "print_examined"]


def look_into(
    outcome: Outcome,
    factory: EngineFactory,
    store: RecordStore,
    *,
    requests: Sequence[str] = (),
    **options: Any,
) -> list[Examined]:
    """Look into a case that ran: into what failed, else into every request that has a golden.

    Args:
        requests: into these instead, in the free pass.
        options: of `examine`.

    Raises:
        TriageError: there is nothing to look into, or no way to.
    """
    failed = subjects_of(outcome.judgement.findings)
    subjects = [Subject(name) for name in requests] or failed or _all_subjects(outcome.case)
    if not subjects:
        raise TriageError("no request of this scenario is compared with a golden record")
    known = outcome.case.scenario.requests
    for subject in subjects:
        if subject.request.partition("/")[0] not in known:
            raise TriageError(f"no request {subject.request!r}; the scenario has {', '.join(known)}")
    return examine(outcome.case, subjects, factory, store, failed=failed, **options)


def print_examined(console: Console, found: Sequence[Examined]) -> None:
    """One block per request."""
    for one in found:
        arm = "" if one.subject.arm == "free" else f", arm {one.subject.arm}"
        console.print(f"  {escape(one.subject.request + arm)}: {escape(one.sentence)}", soft_wrap=True)
        console.print(f"    truth of the stages: {escape(one.truth)}", soft_wrap=True)
        if one.stages:
            console.print(_table(one))
        causes = usual_causes(one.suspect.stage) if one.suspect and one.suspect.exact else ()
        if causes:
            console.print(f"    usual causes of a wrong {escape(one.suspect.stage if one.suspect else '')}:")
        for cause in causes:
            console.print(f"      - {escape(str(cause))}", soft_wrap=True)


def plain(
    outcome: Outcome, found: Sequence[Examined], error: str | None, command: str | None
) -> dict[str, Any]:
    """The same for programs."""
    return {
        "scenario": outcome.case.scenario.id,
        "point": dict(outcome.case.point),
        "verdict": outcome.verdict.value,
        "requests": {one.subject.request: one.as_dict() for one in found},
        "error": error,
        "reproduce": command,
    }


def _all_subjects(case: Case) -> list[Subject]:
    return [Subject(spec.name) for spec in case.scenario.judged_by_golden()]


def _table(one: Examined) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2), show_edge=False)
    table.add_column("    stage")
    table.add_column("largest error / yardstick", justify="right")
    table.add_column(f"(the band is {BAND:g})")
    for line in one.stages:
        size = ("equal" if line.inside else "differs") if line.size is None else f"{line.size:.3g}"
        table.add_row(f"    {line.stage}", size, "" if line.inside else "outside")
    return table
