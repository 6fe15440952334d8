"""Runs cases, in this process or by handing them to workers, and puts together what comes back."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from conformance.adapters.base import Capabilities
from conformance.catalogue import cost_of
from conformance.distribute.calls import (
    Call,
    Judged,
    Lost,
    Settings,
    Task,
    Workers,
    declare,
    judge_task,
    look_into,
)
from conformance.retrace import explain, noted
from conformance.runner import EngineFactory
from conformance.store import RecordStore
from conformance.suite import Case, Outcome, capabilities_of, run_case, unjudged
from conformance.verdicts import Verdict

__all__ = ["Declared", "Distributed", "Here", "Place", "Runner"]

#: (engine, device), as they were asked for.
Place = tuple[str, str]

#: What the engine of each place says of itself; None where it could not be asked.
Declared = Mapping[Place, Capabilities | None]


class Runner(Protocol):
    """Runs the cases of a run, somewhere."""

    def outcomes(
        self, cases: Sequence[Case], settings: Settings, *, triage: int = 0, histories: Path | None = None
    ) -> Iterator[tuple[int, Outcome]]:
        """(place in `cases`, outcome) of every case, as they come.

        Args:
            triage: look into the first so many failed ones, in the order of `cases`.
            histories: save them below this directory; those of twins in one for each engine.
        """
        ...

    def declared(self, cases: Sequence[Case], settings: Settings) -> Declared:
        """What the engines say of themselves, for the report."""
        ...


class Here:
    """In this process, one after another.

    Args:
        factories: by the engine's name.
    """

    def __init__(self, factories: Mapping[str, EngineFactory], store: RecordStore) -> None:
        self._factories, self._store = factories, store

    def outcomes(
        self, cases: Sequence[Case], settings: Settings, *, triage: int = 0, histories: Path | None = None
    ) -> Iterator[tuple[int, Outcome]]:
        looked = 0
        for index, case in enumerate(cases):
            factory = self._factories[case.engine]
            outcome = run_case(
                case,
                factory,
                self._store,
                strict=settings.strict,
                root=settings.root,
                histories=_place_for(histories, case),
            )
            if outcome.verdict is Verdict.FAIL and looked < triage:
                outcome, looked = explain(outcome, factory, self._store, root=settings.root), looked + 1
            yield index, outcome

    def declared(self, cases: Sequence[Case], settings: Settings) -> Declared:
        return {
            place: capabilities_of(self._factories[place[0]], group, settings.root)
            for place, group in _by_place(cases).items()
        }


class Distributed:
    """By workers. The costliest cases start first, so that none of them is alone at the end.

    A FAIL comes when it is clear whether it is one of those to be looked into: at the end.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def outcomes(
        self, cases: Sequence[Case], settings: Settings, *, triage: int = 0, histories: Path | None = None
    ) -> Iterator[tuple[int, Outcome]]:
        settings = replace(settings, keep_histories=histories is not None)
        order = sorted(range(len(cases)), key=lambda i: -cost_of(cases[i], settings.root))
        calls = [_call(judge_task, cases[i], settings, Task.of(cases[i])) for i in order]
        failed: dict[int, Outcome] = {}
        for place, answer in self._workers.map(calls):
            index = order[place]
            outcome = _outcome(answer, cases[index])
            _save(answer, _place_for(histories, cases[index]))
            if outcome.verdict is Verdict.FAIL and triage:
                failed[index] = outcome
            else:
                yield index, outcome
        chosen = sorted(failed)[:triage]
        for index in sorted(failed)[triage:]:
            yield index, failed[index]
        calls = [_call(look_into, cases[i], settings, Task.of(cases[i]), failed[i]) for i in chosen]
        for place, answer in self._workers.map(calls):
            index = chosen[place]
            if isinstance(answer, Lost):
                yield index, noted(failed[index], answer.reason)
            else:
                yield index, _outcome(answer, cases[index])

    def declared(self, cases: Sequence[Case], settings: Settings) -> Declared:
        groups = _by_place(cases)
        calls = []
        for (engine, _), group in groups.items():
            # One case of each model: the first whose model is there is asked about.
            tasks = list({case.point["model"]: Task.of(case) for case in reversed(group)}.values())[::-1]
            calls.append(_call(declare, group[0], settings, engine, tasks))
        found: dict[Place, Capabilities | None] = dict.fromkeys(groups)
        places = list(groups)
        for index, answer in self._workers.map(calls):
            found[places[index]] = None if isinstance(answer, Lost) else answer
        return found


def _by_place(cases: Sequence[Case]) -> dict[Place, list[Case]]:
    """One place, if no case has twins: a scenario may have chosen its device itself."""
    groups: dict[Place, list[Case]] = {}
    for case in cases:
        place = case if case.has_twins else cases[0]
        groups.setdefault((place.engine, place.device), []).append(case)
    return groups


def _place_for(histories: Path | None, case: Case) -> Path | None:
    """The directory for a case's history: twins on two engines have one name for theirs."""
    if histories is None or not case.has_twins:
        return histories
    return histories / re.sub(r"[^A-Za-z0-9_.-]", "_", case.engine)


def _save(answer: Any, directory: Path | None) -> None:
    if directory is not None and isinstance(answer, Judged):
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in answer.histories.items():
            (directory / name).write_text(text, encoding="utf-8")


def _call(function: Any, case: Case, settings: Settings, *arguments: Any) -> Call:
    model = str(case.point["model"])
    return Call(function, (settings, *arguments), case.engine, case.device, model, case.label, settings.limit)


def _outcome(answer: Any, case: Case) -> Outcome:
    if isinstance(answer, Lost):
        return Outcome(case, unjudged(case, Verdict.ERROR, answer.reason), answer.seconds)
    outcome: Outcome = replace(answer.outcome, case=case)
    return outcome
