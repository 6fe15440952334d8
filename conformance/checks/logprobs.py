"""logprobs_by_value: reported log-probabilities are complete, well-formed and true."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from conformance.adapters.base import EngineOutput, TokenLogprob
from conformance.checks.case import Case, CheckFailed, CheckInputError, align, is_plain_greedy
from conformance.checks.logits import logprob_band
from conformance.history import RequestRun
from conformance.records import GoldenRecord, LogitTable
from conformance.verdicts import Finding, Verdict

__all__ = ["logprobs_by_value", "structure_problems", "value_problems"]

CHECK = "logprobs_by_value"

#: A float32 log_softmax of a certain token may come out this far above zero, not farther.
POSITIVE_ROUNDING = 1e-5

Entries = Sequence[TokenLogprob]


def logprobs_by_value(case: Case, args: Any) -> list[Finding]:
    """Judge the logprobs and prompt logprobs of every request that asked for some (or those named).

    Form, at every position: the asked number of entries, sorted, no id twice, no NaN, none
    positive, ranks that fit the values, the token itself among them. Value, at every position
    whose context is the golden's: within 4 M (and 4 R for logsumexp) of the truth, no likelier id
    left out, ranks the truth allows.
    """
    asking = [
        name
        for name, run in case.free.requests.items()
        if run.sampling.get("logprobs") is not None or run.sampling.get("prompt_logprobs") is not None
    ]
    if args not in (None, True):
        named = case.golden_requests(args)
        if set(named) - set(asking):
            raise CheckInputError(f"requests {sorted(set(named) - set(asking))} ask for no logprobs")
        asking = named
    asking = [name for name in asking if name not in case.error_expected()]
    if not asking:
        raise CheckInputError("no request asks for logprobs or prompt_logprobs")
    findings: list[Finding] = []
    for name in asking:
        try:
            findings += _judge(case, case.run_of(name))
        except CheckFailed as failed:
            findings.append(failed.finding)
    return findings


def _judge(case: Case, run: RequestRun) -> list[Finding]:
    output = case.output(CHECK, run)
    record = case.golden(run) if is_plain_greedy(run) else None
    if record is not None:
        case.same_prompt(CHECK, run, record)
    findings: list[Finding] = []
    for feature, judge in (("logprobs", _judge_output), ("prompt_logprobs", _judge_prompt)):
        if run.sampling.get(feature) is None:
            continue
        if not case.has(feature):
            findings.append(Finding(Verdict.SKIP, CHECK, run.request_id, case.why_missing(feature)))
        else:
            findings.append(judge(case, run, output, record))
    return findings


def _finding(
    case: Case, run: RequestRun, what: str, problems: list[tuple[int, str]], judged: int, total: int
) -> Finding:
    """One finding from all problems of one list; `judged` counts positions compared by value."""
    if problems:
        position, first = min(problems, key=lambda p: p[0])
        more = f"; {len(problems) - 1} more problems" if len(problems) > 1 else ""
        return case.fail(
            CHECK,
            run.request_id,
            f"{what}, position {position}: {first}{more}",
            position=position,
            saw="logprobs",
            detail={"problems": [f"{p}: {text}" for p, text in problems[:20]]},
        )
    message = f"{what}: {judged} of {total} positions agree by value"
    verdict = case.soften(Verdict.PASS)
    if judged < total:
        verdict = Verdict.worst((verdict, Verdict.WEAK))
        message += "; the others by form only"
    # Form alone is behaviour: it would not have shown a wrong value.
    return Finding(verdict, CHECK, run.request_id, message, saw="logprobs" if judged else "behaviour")


def _judge_output(case: Case, run: RequestRun, output: EngineOutput, record: GoldenRecord | None) -> Finding:
    asked, lists, ids = int(run.sampling["logprobs"]), output.logprobs, output.token_ids
    if lists is None:
        return case.fail(CHECK, run.request_id, "logprobs were asked, none came", saw="logprobs")
    if ids is not None and len(lists) != len(ids):
        return case.fail(
            CHECK,
            run.request_id,
            f"{len(lists)} lists of logprobs for {len(ids)} tokens",
            position=min(len(lists), len(ids)),
            saw="logprobs",
        )
    if not lists and run.request_id not in case.aborted():
        return case.fail(CHECK, run.request_id, "the list of logprobs is empty", position=0, saw="logprobs")
    problems: list[tuple[int, str]] = []
    for position, entries in enumerate(lists):
        chosen: tuple[int, ...] = (ids[position],) if ids is not None else ()
        problems += [(position, text) for text in structure_problems(entries, asked, chosen)]
    if record is None or ids is None:
        return _finding(case, run, "logprobs", problems, 0, len(lists))
    judged = 0
    for position, speaker in align(case, run, record):
        told = speaker.output
        listed = (told.logprobs if told else None) or ()
        if position >= len(listed):
            problems.append((position, "the forced pass has no logprobs here"))
            continue
        if speaker is not run:
            assert told is not None
            chosen = tuple(
                t[position] for t in (told.token_ids, told.choice_token_ids) if t and position < len(t)
            )
            problems += [(position, t) for t in structure_problems(listed[position], asked, chosen)]
        problems += [
            (position, t) for t in value_problems(record, record.output, position, listed[position], asked)
        ]
        judged += 1
    return _finding(case, run, "logprobs", problems, judged, len(record.token_ids))


def _judge_prompt(case: Case, run: RequestRun, output: EngineOutput, record: GoldenRecord | None) -> Finding:
    asked, lists = int(run.sampling["prompt_logprobs"]), output.prompt_logprobs
    prompt = output.prompt_token_ids or run.prompt_token_ids
    if lists is None:
        return case.fail(CHECK, run.request_id, "prompt logprobs were asked, none came", saw="logprobs")
    if prompt is not None and len(lists) != len(prompt):
        return case.fail(
            CHECK,
            run.request_id,
            f"{len(lists)} prompt logprobs for {len(prompt)} prompt tokens",
            saw="logprobs",
        )
    problems: list[tuple[int, str]] = []
    if not lists or lists[0] is not None:
        problems.append((0, "the first prompt token has nothing before it: its entry must be None"))
    table = record.prompt if record is not None else None
    judged = 0
    for position, entries in enumerate(lists[1:], start=1):
        if entries is None:
            problems.append((position, "None, though only the first entry may be"))
            continue
        chosen = (prompt[position],) if prompt is not None else ()
        problems += [(position, t) for t in structure_problems(entries, asked, chosen)]
        # Row i of the table predicts prompt token i + 1.
        if record is not None and table is not None and position - 1 < len(table):
            problems += [(position, t) for t in value_problems(record, table, position - 1, entries, asked)]
            judged += 1
    return _finding(case, run, "prompt logprobs", problems, judged, max(len(lists) - 1, judged))


def structure_problems(entries: Entries, asked: int, chosen: Sequence[int]) -> Iterator[str]:
    """What is wrong with one list, whatever the truth.

    Args:
        asked: how many top entries were asked for; -1 for the whole vocabulary.
        chosen: the token that was appended (and, under forcing, the engine's own choice); at least
            one of them must be listed, and one of them may stand after the asked entries.
    """
    values = [e.logprob for e in entries]
    ids = [e.token_id for e in entries]
    if not entries:
        yield "no entry"
        return
    if any(math.isnan(v) for v in values):
        yield f"NaN among the logprobs {values[:5]}"
        return
    if max(values) > POSITIVE_ROUNDING:
        yield f"a positive logprob: {max(values)}"
    if len(set(ids)) != len(ids):
        yield f"an id twice: {sorted({i for i in ids if ids.count(i) > 1})}"
    if chosen and not set(chosen) & set(ids):
        yield f"the token {chosen[0]} itself is missing"
    count = len(entries)
    extra_allowed = asked >= 0 and count == asked + 1
    if asked >= 0 and count != asked and not extra_allowed:
        yield f"{count} entries, asked for {asked} (and the token itself)"
    top = values[:asked] if asked >= 0 else values
    if any(later > earlier for earlier, later in pairwise(top)):
        yield f"not sorted by likelihood: {top[:6]}"
    if extra_allowed and asked > 0:
        if chosen and ids[-1] not in chosen:
            yield f"an entry more than asked, {ids[-1]}, which is not the token itself"
        if values[-1] > min(top):
            yield f"the token's own entry {values[-1]} belongs among the top {asked}"
    yield from _rank_problems(entries, asked)


def _rank_problems(entries: Entries, asked: int) -> Iterator[str]:
    ranks = [e.rank for e in entries if e.rank is not None]
    if not ranks:
        return
    if len(ranks) != len(entries):
        yield f"only {len(ranks)} of {len(entries)} entries have a rank"
        return
    complete = len(entries) if asked < 0 else min(asked, len(entries))
    for index, entry in enumerate(entries):
        assert entry.rank is not None
        better = sum(e.logprob > entry.logprob for e in entries)
        equal = sum(e.logprob == entry.logprob for e in entries)
        # Of the listed top all rivals are known, save for ties with the last one.
        known = index < complete and entry.logprob > entries[complete - 1].logprob
        if index >= complete:
            better = max(better, complete if entry.logprob < entries[complete - 1].logprob else 0)
        if entry.rank < better + 1 or (known and entry.rank > better + equal):
            yield (
                f"rank {entry.rank} of id {entry.token_id} (logprob {entry.logprob:.6g}), "
                f"{better} entries are likelier"
            )
            return


def value_problems(
    record: GoldenRecord, table: LogitTable, position: int, entries: Entries, asked: int
) -> Iterator[str]:
    """What is wrong with one list, given the truth at this row of the table."""
    ids = table.top_ids[position].tolist()
    truth = (table.top_logits[position] - table.logsumexp[position]).tolist()
    known = dict(zip(ids, truth, strict=True))
    for entry in entries:
        expected = known.get(entry.token_id)
        if expected is None:
            limit = truth[-1] + logprob_band(record, truth[-1])
            if entry.logprob > limit:
                yield (
                    f"logprob {entry.logprob:.6g} of id {entry.token_id}, "
                    f"which the truth ranks below {len(ids)} with at most {truth[-1]:.6g}"
                )
            continue
        band = logprob_band(record, expected)
        # Written so that NaN fails too.
        if not abs(entry.logprob - expected) <= band:
            yield (
                f"logprob {entry.logprob:.6g} of id {entry.token_id}, the truth is {expected:.6g} "
                f"(off by {abs(entry.logprob - expected) / max(record.yardstick.M, 1e-300):.3g} M, "
                f"a correct engine by at most {band:.3g})"
            )
        elif entry.rank is not None:
            yield from _true_rank(entry, expected, truth, band)
    listed = {e.token_id for e in entries}
    top = entries[:asked] if asked >= 0 else entries
    if not top:
        return
    lowest = min(e.logprob for e in top)
    for candidate, expected in known.items():
        band = logprob_band(record, expected)
        if candidate not in listed and expected - band > lowest:
            yield f"id {candidate} with logprob {expected:.6g} is missing, one with {lowest:.6g} is listed"


def _true_rank(entry: TokenLogprob, expected: float, truth: Sequence[float], band: float) -> Iterator[str]:
    assert entry.rank is not None
    lowest = 1 + sum(t > expected + 2 * band for t in truth)
    highest = sum(t >= expected - 2 * band for t in truth)
    # If even the last recorded id may tie, unrecorded ones may too: no upper bound.
    bounded = truth[-1] < expected - 2 * band
    if entry.rank < lowest or (bounded and entry.rank > highest):
        wanted = (
            f"{lowest}" if bounded and lowest == highest else f"{lowest} to {highest if bounded else '…'}"
        )
        yield f"rank {entry.rank} of id {entry.token_id}, the truth allows {wanted}"
