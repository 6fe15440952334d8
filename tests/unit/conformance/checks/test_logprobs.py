"""Form and value of single lists of logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from conformance.adapters.base import FEATURES, TokenLogprob
from conformance.checks import judge
from conformance.checks.logprobs import structure_problems, value_problems
from conformance.testing import M, Spec, answer, make_history, make_pass, make_record, records_of
from conformance.verdicts import Verdict

RED = make_record("red")
IDS = RED.output.top_ids[0].tolist()
TRUTH = (RED.output.top_logits[0] - RED.output.logsumexp[0]).tolist()


def listing(*values: float, ranks: Sequence[int | None] | None = None, first: int = 1) -> list[TokenLogprob]:
    """Ids first, first + 1, … with these logprobs."""
    given = ranks if ranks is not None else [None] * len(values)
    return [TokenLogprob(first + i, v, r) for i, (v, r) in enumerate(zip(values, given, strict=True))]


def form(entries: list[TokenLogprob], asked: int, *chosen: int) -> str:
    return "; ".join(structure_problems(entries, asked, chosen))


def truth(count: int, ranks: bool = True) -> list[TokenLogprob]:
    return [TokenLogprob(IDS[i], TRUTH[i], i + 1 if ranks else None) for i in range(count)]


def value(entries: list[TokenLogprob], asked: int) -> str:
    return "; ".join(value_problems(RED, RED.output, 0, entries, asked))


@pytest.mark.parametrize(
    ("entries", "asked", "chosen"),
    [
        (listing(-1, -2, -3), 3, (1,)),
        (listing(-1, -2, -3, -9), 3, (4,)),  # the token itself comes after the top
        (listing(-1), 0, (1,)),
        (listing(-1, -1, -3, ranks=[1, 1, 3]), 3, (2,)),
        (listing(-1, -1, -3, ranks=[2, 2, 3]), 3, (2,)),
        (listing(-1, -1, -3, ranks=[1, 2, 3]), 3, (2,)),
        (listing(-1, -2, -2, ranks=[1, 2, 4]), 3, (2,)),  # more ties may follow unlisted
        (listing(-1, -2, -3, -9, ranks=[1, 2, 3, 17]), 3, (4,)),
        (listing(-1, -2, -3, -4, -5), -1, (5,)),
    ],
)
def test_well_formed_lists_have_no_problem(
    entries: list[TokenLogprob], asked: int, chosen: tuple[int, ...]
) -> None:
    assert form(entries, asked, *chosen) == ""


@pytest.mark.parametrize(
    ("entries", "asked", "chosen", "words"),
    [
        ([], 3, (1,), "no entry"),
        (listing(-1, float("nan"), -3), 3, (1,), "NaN"),
        (listing(0.1, -2, -3), 3, (1,), "positive"),
        (listing(-1, -2), 3, (1,), "2 entries"),
        (listing(-1, -2, -3, -4, -5), 3, (1,), "5 entries"),
        (listing(-1, -2, -3, -4), 3, (1,), "not the token itself"),
        (listing(-1, -2, -3, -2.5), 3, (4,), "belongs among the top"),
        (listing(-1, -3, -2), 3, (1,), "not sorted"),
        (listing(-1, -2, -3), 3, (9,), "missing"),
        (listing(-1, -2, -3, ranks=[1, None, 3]), 3, (1,), "2 of 3 entries have a rank"),
        (listing(-1, -2, -3, ranks=[1, 3, 2]), 3, (1,), "rank"),
        (listing(-1, -2, -3, ranks=[0, 1, 2]), 3, (1,), "rank 0"),
        (listing(-1, -2, -3, ranks=[1, 4, 5]), 3, (1,), "rank 4"),
        (listing(-1, -2, -3, -9, ranks=[1, 2, 3, 3]), 3, (4,), "rank 3"),
        (listing(-1, -1, -3, ranks=[3, 1, 3]), 3, (1,), "rank 3"),
    ],
)
def test_ill_formed_lists_are_told(
    entries: list[TokenLogprob], asked: int, chosen: tuple[int, ...], words: str
) -> None:
    assert words in form(entries, asked, *chosen)


def test_a_repeated_id_is_told() -> None:
    assert "twice" in form([TokenLogprob(1, -1.0), TokenLogprob(1, -1.0)], 2, 1)


def test_under_forcing_either_the_forced_id_or_the_choice_may_be_the_extra_one() -> None:
    assert form(listing(-1, -2, -9), 2, 3, 1) == ""
    assert form(listing(-1, -2), 2, 3, 1) == ""


def test_the_truth_itself_has_no_problem() -> None:
    assert value(truth(5), 5) == ""
    assert value(truth(20), 20) == ""


def test_a_value_off_by_more_than_its_band_is_told_in_units_of_m() -> None:
    wrong = truth(5)
    wrong[2] = replace(wrong[2], logprob=wrong[2].logprob + 7 * M)
    assert "off by 7 M" in value(wrong, 5)


def test_a_rank_the_truth_does_not_allow_is_told() -> None:
    wrong = truth(5)
    wrong[4] = replace(wrong[4], rank=6)
    assert "the truth allows 5" in value(wrong, 5)


def test_ranks_of_near_ties_may_be_either() -> None:
    record = make_record("red", undecided=[0])
    first, second = record.output.top_ids[0, :2].tolist()
    values = (record.output.top_logits[0] - record.output.logsumexp[0]).tolist()
    swapped = [TokenLogprob(second, values[0], 1), TokenLogprob(first, values[1], 2)]
    assert list(value_problems(record, record.output, 0, swapped, 2)) == []


def test_the_rank_of_the_last_recorded_id_has_no_upper_bound() -> None:
    last = [*truth(5), TokenLogprob(IDS[19], TRUTH[19], 23)]
    assert value(last, 5) == ""
    assert "20 to …" in value([*truth(5), TokenLogprob(IDS[19], TRUTH[19], 19)], 5)


def test_a_likely_id_that_is_not_listed_is_told() -> None:
    assert f"id {IDS[1]}" in value([truth(5)[0], *truth(5)[2:]], 4)


def test_an_unlikely_id_with_a_high_value_is_told() -> None:
    stranger = next(i for i in range(64) if i not in IDS)
    assert "ranks below 20" in value([*truth(2), TokenLogprob(stranger, TRUTH[2])], 3)


def test_an_engine_without_logprobs_is_skipped() -> None:
    h = make_history([make_pass("free", [answer(RED)])], features=frozenset(FEATURES) - {"logprobs"})
    assert judge(h, [Spec("logprobs_by_value")], records_of(RED)).verdict is Verdict.SKIP


def test_prompt_logprobs_without_a_recorded_truth_are_judged_by_form_only() -> None:
    record = replace(RED, prompt=None)
    h = make_history([make_pass("free", [answer(record, logprobs=None, prompt_logprobs=3)])])
    found = judge(h, [Spec("logprobs_by_value")], records_of(record))
    assert found.verdict is Verdict.WEAK
    assert "by form only" in found.findings[0].message


@pytest.mark.parametrize("args", [None, ["red"]])
def test_a_scenario_that_asks_for_no_logprobs_is_an_error(args: list[str] | None) -> None:
    h = make_history([make_pass("free", [answer(RED, logprobs=None)])])
    assert judge(h, [Spec("logprobs_by_value", args)], records_of(RED)).verdict is Verdict.ERROR


def test_logprobs_after_a_divergence_come_from_the_forced_pass() -> None:
    record = make_record("swap", undecided=[10])
    other = int(record.output.top_ids[10, 1])
    free = answer(record, undecided=[10], choices={10: other})
    forced = answer(record, undecided=[10], forced=True)
    passes = [make_pass("free", [free]), make_pass("forced", [forced])]
    spec = [Spec("logprobs_by_value")]
    assert judge(make_history(passes), spec, records_of(record)).verdict is Verdict.PASS
    assert judge(make_history(passes[:1]), spec, records_of(record)).verdict is Verdict.WEAK
    assert forced.output is not None
    lists = list(forced.output.logprobs or ())
    lists[20] = tuple(replace(e, logprob=e.logprob - 1) for e in lists[20])
    bad = replace(forced, output=replace(forced.output, logprobs=tuple(lists)))
    found = judge(make_history([passes[0], make_pass("forced", [bad])]), spec, records_of(record))
    assert found.verdict is Verdict.FAIL
    assert found.findings[0].position == 20
