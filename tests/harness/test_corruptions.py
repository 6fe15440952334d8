"""The oracle is itself tested: every kind of corrupted history is caught, by the check meant for it.

Each row corrupts a sound history in one way. The sound one passes every check, so whatever is
caught is caught because of the corruption.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from conformance.adapters.base import EngineError, EngineOutput, PoolState, TokenLogprob
from conformance.checks import judge
from conformance.history import History, LogitRow, Operation, Pass, RequestRun
from conformance.records import ArmError
from conformance.testing import (
    M,
    R,
    Spec,
    answer,
    make_events,
    make_history,
    make_pass,
    make_record,
    records_of,
    replace_run,
    text_of,
    truth_logits,
)
from conformance.verdicts import Verdict

RED, BLUE = make_record("red"), make_record("blue")
SWAP = make_record("swap", undecided=[10])
HIDDEN = np.random.default_rng(1).normal(size=(len(RED.prompt_token_ids) + len(RED.token_ids) - 1, 8))
TRACED = replace(
    make_record("traced"), stages={"hidden.0": HIDDEN}, stage_bands={"hidden.0": ArmError(1e-6, 4e-6)}
)
RECORDS = records_of(RED, BLUE, SWAP, TRACED)

TOKENS = Spec("tokens_match_golden")
LOGITS = Spec("logits_within_yardstick")
LOGPROBS = Spec("logprobs_by_value")
REASON = Spec("finish_reason", {"red": {"reason": "length", "stop_reason": None}})
CACHED = Spec("cached_tokens", {"red": {"max": 3}})
TEXT = Spec("text_equals", {"red": {"golden": True, "streaming": "consistent"}})
HAPPENED = Spec("happened", {"chunked": ">=1", "batch": ">=2", "finished": "==2"})
POOL = Spec("pool_conserved")
SAME = Spec("same_under", {"chunk": [3], "preempt": [2]})
SAMPLED = Spec("sampled_within_kept_set")
ERROR = Spec("error", {"huge": {"type": "PromptTooLong", "contains": ["4096"]}})
DIFFER = Spec("differ", ["red", "blue"])
EQUAL = Spec("equal", ["red", "again"])
STAGES = Spec("stages_within_band")
ALL = (TOKENS, LOGITS, LOGPROBS, REASON, CACHED, TEXT, HAPPENED, POOL, SAME, SAMPLED, DIFFER, ERROR)


@cache
def sound() -> History:
    """Free pass, a chunked and a preempted arm, everything in order; one request rightly refused."""
    red = answer(RED, prompt_logprobs=3)
    assert red.output is not None
    red = replace(red, texts=(text_of(RED.token_ids[:3]), text_of(RED.token_ids[:9]), red.output.text))
    blue = answer(BLUE, logprobs=None)
    refusal = EngineError("PromptTooLong", "prompt of 5000 tokens, max_model_len is 4096: shorten it")
    huge = RequestRun("huge", {"temperature": 0.0}, None, refused=refusal)
    runs = [red, blue]
    preempted: Mapping[str, Any] = {"event": "preempted", "request_id": "red", "mode": "recompute"}
    invariant = {"block_size": 16, "batch_invariant": True}
    free = make_pass("free", runs, options=invariant, events=make_events(runs, chunk=5))
    free = replace(
        free,
        requests={**free.requests, "huge": huge},
        operations=(*free.operations, Operation("submit", ["huge"])),
    )
    return make_history(
        [
            free,
            make_pass("chunk=3", runs, options=invariant, events=make_events(runs, chunk=3)),
            make_pass("preempt=2", runs, options=invariant, events=(*make_events(runs), preempted)),
        ]
    )


def swapped(early: Any = None, late: Any = None) -> History:
    """One legal swap at position 10 of "swap", then the forced pass; both can be corrupted."""
    other = int(SWAP.output.top_ids[10, 1])
    free = answer(SWAP, undecided=[10], choices={10: other, **(early or {})}, logprobs=None)
    forced = answer(SWAP, undecided=[10], choices={10: other, **(late or {})}, forced=True, logprobs=None)
    return make_history([make_pass("free", [free]), make_pass("forced", [forced])])


def asked_twice() -> History:
    """One request asked in two ways, and answered with the same bits."""
    red = answer(RED)
    again = replace(red, request_id="again")
    return make_history([make_pass("free", [red, again], options={"batch_invariant": True})])


def traced() -> History:
    """One request whose stages were captured."""
    run = replace(answer(TRACED), stages={"hidden.0": HIDDEN.tolist()})
    return make_history([make_pass("free", [run])])


# ---- ways to corrupt ----------------------------------------------------------------------------

Mutate = Callable[[History], History]


def output(**changes: Any) -> Mutate:
    """Replace fields of red's output in the free pass; a callable gets the old value."""

    def change(run: RequestRun) -> RequestRun:
        assert run.output is not None
        new = {k: v(getattr(run.output, k)) if callable(v) else v for k, v in changes.items()}
        return replace(run, output=replace(run.output, **new))

    return lambda h: replace_run(h, change)


def rows(change: Callable[[int, LogitRow], LogitRow]) -> Mutate:
    """Change every row of red's logits in the free pass."""
    return lambda h: replace_run(
        h, lambda run: replace(run, output_rows=tuple(change(i, r) for i, r in enumerate(run.output_rows)))
    )


def shift_one(by: float, position: int = 5, index: int = 3) -> Mutate:
    def change(at: int, row: LogitRow) -> LogitRow:
        if at != position:
            return row
        values = list(row.values)
        values[index] += by
        return replace(row, values=tuple(values))

    return rows(change)


def lists(change: Callable[[tuple[TokenLogprob, ...]], tuple[TokenLogprob, ...]], at: int = 4) -> Mutate:
    """Change the list of logprobs at one position."""
    return output(logprobs=lambda old: tuple(change(e) if i == at else e for i, e in enumerate(old)))


def prompt_lists(change: Callable[[list[Any]], list[Any]]) -> Mutate:
    return output(prompt_logprobs=lambda old: tuple(change(list(old))))


def entry(index: int, **changes: Any) -> Callable[[tuple[TokenLogprob, ...]], tuple[TokenLogprob, ...]]:
    return lambda es: tuple(replace(e, **changes) if i == index else e for i, e in enumerate(es))


def ids(change: Callable[[list[int]], list[int]]) -> Mutate:
    """Change red's ids, and its text, logits and logprobs with them: an engine that means it."""

    def run(old: RequestRun) -> RequestRun:
        assert old.output is not None
        assert old.output.token_ids is not None
        assert old.output.logprobs is not None
        new = change(list(old.output.token_ids))
        count = len(new)
        grown = old.output.logprobs + old.output.logprobs
        return replace(
            old,
            output=replace(
                old.output,
                token_ids=tuple(new),
                choice_token_ids=tuple(new),
                text=text_of(new),
                logprobs=grown[:count],
            ),
            output_rows=(old.output_rows + old.output_rows)[:count],
        )

    return lambda h: replace_run(h, run)


def in_pass(name: str, **changes: Any) -> Mutate:
    def change(one: Pass) -> Pass:
        if one.name != name:
            return one
        return replace(one, **{k: v(getattr(one, k)) if callable(v) else v for k, v in changes.items()})

    return lambda h: replace(h, passes=tuple(change(p) for p in h.passes))


def without_pass(name: str) -> Mutate:
    return lambda h: replace(h, passes=tuple(p for p in h.passes if p.name != name))


def in_run(of: str, **changes: Any) -> Mutate:
    """Replace fields of red's run in one pass."""
    return lambda h: replace_run(h, lambda run: replace(run, **changes), of=of)


def huge(refused: EngineError | None) -> Mutate:
    served = EngineOutput("huge", "x", True, token_ids=(1,), finish_reason="length")

    def change(run: RequestRun) -> RequestRun:
        return replace(run, refused=refused, output=None if refused else served)

    return lambda h: replace_run(h, change, name="huge")


def other_rows(h: History) -> History:
    """Red is answered with blue's logits: two requests' results are mixed up."""
    blue = truth_logits("blue", 24)

    def change(at: int, row: LogitRow) -> LogitRow:
        return replace(row, values=tuple(float(blue[at][i]) for i in row.ids))

    return rows(change)(h)


def shifted_rows(h: History) -> History:
    """Off by one: each position shows the logits that chose the next token."""

    def change(run: RequestRun) -> RequestRun:
        moved = (*run.output_rows[1:], run.output_rows[0])
        kept = tuple(
            replace(m, ids=r.ids) if set(m.ids) != set(r.ids) else m
            for m, r in zip(moved, run.output_rows, strict=True)
        )
        return replace(run, output_rows=kept)

    return replace_run(h, change)


def answered_as_blue(h: History) -> History:
    """Both requests get one answer: what two seeds drew is one draw."""
    blue = _out(h.passes[0].requests["blue"])
    return replace_run(h, lambda run: replace(run, output=replace(blue, request_id="red")))


def one_hidden_number(run: RequestRun) -> RequestRun:
    rows = HIDDEN.copy()
    rows[3, 2] += 1e-3
    return replace(run, stages={"hidden.0": rows.tolist()})


def negative(es: tuple[TokenLogprob, ...]) -> tuple[TokenLogprob, ...]:
    """Right tokens, values nothing like the truth: -12 instead of about -0.5."""
    return tuple(replace(e, logprob=e.logprob - 12) for e in es)


NAN = float("nan")
WRONG_ID = next(i for i in range(64) if i not in RED.output.top_ids[6].tolist())
SECOND = int(RED.output.top_ids[6, 1])
FAIL, ERR = Verdict.FAIL, Verdict.ERROR


@dataclass(frozen=True)
class Corruption:
    name: str
    mutate: Mutate
    check: str
    verdict: Verdict = FAIL
    base: Callable[[], History] = sound


T, G, L = "tokens_match_golden", "logits_within_yardstick", "logprobs_by_value"
CORRUPTIONS = [
    # what vLLM's default comparator lets pass
    Corruption("same tokens, far-off logprobs", output(logprobs=lambda old: tuple(map(negative, old))), L),
    Corruption(
        "same tokens, all logprobs NaN",
        output(logprobs=lambda old: tuple(tuple(replace(e, logprob=NAN) for e in es) for es in old)),
        L,
    ),
    Corruption("stops after one token", ids(lambda t: t[:1]), T),
    Corruption("returns nothing", ids(lambda _: []), T),
    Corruption(
        "one legal swap, then garbage",
        lambda _: swapped(late=dict.fromkeys(range(11, 24), WRONG_ID)),
        T,
        base=swapped,
    ),
    Corruption("a swap between ids far apart, both in the top", ids(lambda t: [*t[:6], SECOND, *t[7:]]), T),
    Corruption(
        "illegal divergence after a legal one", lambda _: swapped(late={20: WRONG_ID}), T, base=swapped
    ),
    # tokens, length, reasons, text
    Corruption("one wrong id in the middle", ids(lambda t: [*t[:6], WRONG_ID, *t[7:]]), T),
    Corruption("wrong first id", ids(lambda t: [WRONG_ID, *t[1:]]), T),
    Corruption("wrong last id", ids(lambda t: [*t[:-1], (t[-1] + 1) % 64]), T),
    Corruption("stops one token early", ids(lambda t: t[:-1]), T),
    Corruption("one token too many", ids(lambda t: [*t, 5]), T),
    Corruption("ids shifted by one", ids(lambda t: t[1:] + t[:1]), T),
    Corruption("wrong finish reason", output(finish_reason="stop"), T),
    Corruption("no finish reason", output(finish_reason=None), T),
    Corruption("wrong stop reason", output(stop_reason=7), T),
    Corruption("never finished", output(finished=False), T),
    Corruption("wrong finish reason, asked for", output(finish_reason="stop"), "finish_reason"),
    Corruption("wrong stop reason, asked for", output(stop_reason=""), "finish_reason"),
    Corruption("text differs from the ids", output(text=lambda t: t.replace(" w", " v", 1)), T),
    Corruption("text lost its end", output(text=lambda t: t[:-1]), T),
    Corruption("text wrong, asked for", output(text="?"), "text_equals"),
    Corruption(
        "streaming takes text back",
        in_run("free", texts=(" wrong", text_of(RED.token_ids))),
        "text_equals",
    ),
    Corruption("streaming ends short of the text", in_run("free", texts=(" w",)), "text_equals"),
    Corruption("streaming shows nothing", in_run("free", texts=()), "text_equals"),
    Corruption("wrong prompt ids", output(prompt_token_ids=(3, *RED.prompt_token_ids[1:])), T),
    Corruption("BOS added to the prompt", output(prompt_token_ids=(0, *RED.prompt_token_ids)), T),
    Corruption("wrong prompt ids, by logits", output(prompt_token_ids=(1,)), G),
    Corruption("wrong prompt ids, by logprobs", output(prompt_token_ids=(1,)), L),
    Corruption("request failed", output(error=EngineError("OOM", "no block")), T),
    Corruption(
        "too many swaps to be rounding",
        lambda _: _many_swaps(),
        T,
        base=lambda: make_history([make_pass("free", [answer(RED)])]),
    ),
    Corruption(
        "forced pass leaves the forced ids",
        lambda h: replace_run(
            h,
            lambda r: replace(r, output=replace(_out(r), token_ids=(1, *_ids(r)[1:]))),
            name="swap",
            of="forced",
        ),
        T,
        base=swapped,
    ),
    Corruption(
        "forced pass gives too few choices",
        lambda h: replace_run(
            h,
            lambda r: replace(r, output=replace(_out(r), choice_token_ids=_ids(r)[:5])),
            name="swap",
            of="forced",
        ),
        T,
        base=swapped,
    ),
    Corruption(
        "forced pass already wrong before the divergence",
        lambda _: swapped(late={2: WRONG_ID}),
        T,
        base=swapped,
    ),
    Corruption(
        "forced pass that was not forced",
        lambda h: replace_run(h, lambda r: replace(r, forced=False), name="swap", of="forced"),
        T,
        ERR,
        base=swapped,
    ),
    # logits
    Corruption("one NaN logit", rows(lambda i, r: replace(r, num_nan=1) if i == 9 else r), G),
    Corruption(
        "all logits NaN",
        rows(lambda _, r: replace(r, values=(NAN,) * len(r.values), logsumexp=NAN, num_nan=64)),
        G,
    ),
    Corruption("values NaN, none counted", shift_one(NAN), G),
    Corruption("one logit off by 6 M", shift_one(6 * M), G),
    Corruption("one logit off by -4.1 M at the last id", shift_one(-4.1 * M, 23, 19), G),
    Corruption("one logit infinite", shift_one(float("inf")), G),
    Corruption(
        "small bias everywhere (rms 5 R)",
        rows(lambda _, r: replace(r, values=tuple(v + 5 * R for v in r.values))),
        G,
    ),
    Corruption(
        "scale 1.0001 on every logit",
        rows(lambda _, r: replace(r, values=tuple(v * 1.0001 for v in r.values))),
        G,
    ),
    Corruption(
        "a fault outside of the top ids", rows(lambda _, r: replace(r, logsumexp=r.logsumexp + 1e-3)), G
    ),
    Corruption("logits of the next position", shifted_rows, G),
    Corruption("logits of another request", other_rows, G),
    Corruption(
        "a row of logits missing",
        in_run("free", output_rows=sound().passes[0].requests["red"].output_rows[:-1]),
        G,
    ),
    Corruption("logits declared, none captured", in_run("free", output_rows=()), G),
    Corruption(
        "sampled id is not its own logits' argmax",
        rows(lambda i, r: replace(r, argmax=63) if i == 4 and r.argmax != 63 else r),
        "sampled_within_kept_set",
    ),
    Corruption("sampled from NaN", rows(lambda _, r: replace(r, num_nan=3)), "sampled_within_kept_set"),
    # logprobs
    Corruption("one logprob off by 10 M", lists(lambda es: entry(1, logprob=es[1].logprob + 10 * M)(es)), L),
    Corruption("one NaN logprob", lists(entry(2, logprob=NAN)), L),
    Corruption("wrong ranks", lists(lambda es: tuple(replace(e, rank=7 - (e.rank or 0)) for e in es)), L),
    Corruption("ranks from zero", lists(lambda es: tuple(replace(e, rank=(e.rank or 0) - 1) for e in es)), L),
    Corruption("one rank one too high", lists(lambda es: entry(0, rank=2)(es)), L),
    Corruption("a rank missing", lists(entry(2, rank=None)), L),
    Corruption("list cut short", lists(lambda es: es[:3]), L),
    Corruption(
        "list too long",
        lists(lambda es: (*es, *(TokenLogprob(60 + i, -50.0 - i, None) for i in range(2)))),
        L,
    ),
    Corruption("sampled token missing", lists(lambda es: es[1:]), L),
    Corruption("a positive logprob", lists(entry(0, logprob=0.25)), L),
    Corruption("not sorted", lists(lambda es: (es[0], es[2], es[1], *es[3:])), L),
    Corruption("an id twice", lists(lambda es: (*es[:2], es[1], *es[3:])), L),
    Corruption("an empty list", lists(lambda _: ()), L),
    Corruption(
        "a likely id left out",
        lists(
            lambda es: (
                es[0],
                *es[2:],
                replace(es[4], token_id=WRONG_ID, rank=6, logprob=es[4].logprob - 0.5),
            )
        ),
        L,
    ),
    Corruption("an unlikely id shown as likely", lists(lambda es: entry(1, token_id=_unlisted(4))(es)), L),
    Corruption("fewer lists than tokens", output(logprobs=lambda old: old[:-1]), L),
    Corruption("logprobs asked, none given", output(logprobs=None), L),
    Corruption("logprobs of the next token", output(logprobs=lambda old: (*old[1:], old[0])), L),
    Corruption("prompt logprobs asked, none given", output(prompt_logprobs=None), L),
    Corruption("first prompt logprob is not None", prompt_lists(lambda p: [p[1], *p[1:]]), L),
    Corruption("a later prompt logprob is None", prompt_lists(lambda p: [*p[:3], None, *p[4:]]), L),
    Corruption("prompt logprobs off by one position", prompt_lists(lambda p: [None, *p[2:], p[1]]), L),
    Corruption("prompt logprobs only of the last chunk", prompt_lists(lambda p: [None, *p[5:]]), L),
    # requests, passes, events, pool
    Corruption("a request vanished", lambda h: replace_run(h, lambda _: None), "history"),
    Corruption("a request was never answered", in_run("free", output=None), "history"),
    Corruption("the engine crashed", in_pass("free", error=EngineError("RuntimeError", "boom")), "history"),
    Corruption("the free pass is missing", without_pass("free"), "history", ERR),
    Corruption("an arm is missing", without_pass("preempt=2"), "same_under", ERR),
    Corruption(
        "nobody was preempted in its arm", in_pass("preempt=2", events=lambda e: e[:-1]), "same_under", ERR
    ),
    Corruption(
        "the chunked arm ran whole prompts",
        in_pass(
            "chunk=3",
            events=lambda e: [
                {**x, "scheduled": [["red", 0, 7], ["blue", 0, 7]]} if x["event"] == "planned" else x
                for x in e
            ],
        ),
        "same_under",
        ERR,
    ),
    Corruption(
        "an arm's request is missing",
        lambda h: replace_run(h, lambda _: None, of="chunk=3"),
        "same_under",
        ERR,
    ),
    Corruption("an arm crashed", in_pass("chunk=3", error=EngineError("RuntimeError", "boom")), "same_under"),
    Corruption(
        "one bit of the logits differs in an arm",
        lambda h: replace_run(
            h,
            lambda r: replace(r, output_rows=(*r.output_rows[:-1], replace(r.output_rows[-1], digest="0"))),
            of="chunk=3",
        ),
        "same_under",
    ),
    Corruption(
        "one bit of the KV cache differs in an arm", in_run("preempt=2", kv_digests=("k0", "x")), "same_under"
    ),
    Corruption("an arm's KV cache is not told", in_run("preempt=2", kv_digests=()), "same_under"),
    Corruption("an arm's logits are not told", in_run("preempt=2", output_rows=()), "same_under", ERR),
    Corruption(
        "an arm answers otherwise",
        lambda h: replace_run(
            h, lambda r: replace(r, output=replace(_out(r), token_ids=(*_ids(r)[:-1], 1))), of="chunk=3"
        ),
        "same_under",
    ),
    Corruption(
        "an arm's logprobs differ",
        lambda h: replace_run(
            h,
            lambda r: replace(r, output=replace(_out(r), logprobs=(_out(r).logprobs or ())[::-1])),
            of="chunk=3",
        ),
        "same_under",
    ),
    Corruption(
        "an arm's text differs",
        lambda h: replace_run(h, lambda r: replace(r, output=replace(_out(r), text="x")), of="chunk=3"),
        "same_under",
    ),
    Corruption(
        "one bit differs between two ways to ask",
        lambda h: replace_run(
            h, lambda r: replace(r, output_rows=(*r.output_rows[:-1], replace(r.output_rows[-1], digest="0")))
        ),
        "equal",
        base=asked_twice,
    ),
    Corruption(
        "two ways to ask are answered with other tokens", ids(lambda t: t[::-1]), "equal", base=asked_twice
    ),
    Corruption(
        "one number of one layer is wrong",
        lambda h: replace_run(h, one_hidden_number, name="traced"),
        "stages_within_band",
        base=traced,
    ),
    Corruption("two requests are given one answer", answered_as_blue, "differ"),
    Corruption(
        "the path was not taken",
        in_pass("free", events=lambda e: tuple(x for x in e if x["event"] != "planned")),
        "happened",
    ),
    Corruption("one request less finished", in_pass("free", events=lambda e: e[:-1]), "happened"),
    Corruption("a block leaked", in_pass("free", pool_after=PoolState(64, 60, 3, 1)), "pool_conserved"),
    Corruption("a block vanished", in_pass("chunk=3", pool_after=PoolState(64, 60, 3, 0)), "pool_conserved"),
    Corruption("a block freed twice", in_pass("free", pool_after=PoolState(64, 61, 4, 0)), "pool_conserved"),
    Corruption("the pool shrank", in_pass("free", pool_after=PoolState(63, 63, 0, 0)), "pool_conserved"),
    Corruption("a negative count", in_pass("free", pool_after=PoolState(64, 65, -1, 0)), "pool_conserved"),
    Corruption("the pool is not told", in_pass("free", pool_after=None), "pool_conserved"),
    Corruption("too many tokens reused", output(num_cached_tokens=4), "cached_tokens"),
    Corruption("the whole prompt reused", output(num_cached_tokens=7), "cached_tokens"),
    Corruption("reused tokens counted, no hit happened", output(num_cached_tokens=2), "cached_tokens"),
    Corruption(
        "a hit counted twice",
        in_pass(
            "free",
            events=lambda e: (
                *e,
                *[
                    {
                        "event": "prefix_hit",
                        "request_id": "red",
                        "num_tokens": 0,
                        "block_ids": (1,),
                        "resumed": False,
                    }
                ]
                * 2,
            ),
        ),
        "cached_tokens",
    ),
    Corruption("reused tokens not told", output(num_cached_tokens=None), "cached_tokens"),
    Corruption("error type wrong", huge(EngineError("ValueError", "4096")), "error"),
    Corruption("error message says nothing", huge(EngineError("PromptTooLong", "no")), "error"),
    Corruption("no error where one is due", huge(None), "error"),
    # goldens
    Corruption("no golden for this request", in_run("free", golden_key=None), T, ERR),
    Corruption("golden key unknown", in_run("free", golden_key="?"), T, ERR),
    Corruption("weights are not the golden's", lambda h: replace(h, weights_sha256="other"), T, ERR),
    Corruption("dtype is not the golden's", lambda h: replace(h, dtype="bfloat16"), T, ERR),
    Corruption("history of another schema", lambda h: replace(h, schema=99), "history", ERR),
]


def _out(run: RequestRun) -> EngineOutput:
    assert run.output is not None
    return run.output


def _ids(run: RequestRun) -> tuple[int, ...]:
    return _out(run).token_ids or ()


def _unlisted(position: int) -> int:
    return next(i for i in range(64) if i not in RED.output.top_ids[position].tolist())


UNDECIDED = list(range(0, 24, 4))
MANY = make_record("many", undecided=UNDECIDED)


def _many_swaps() -> History:
    """Every near tie falls to the other side: each alone is legal, all together are no rounding."""
    other = {p: int(MANY.output.top_ids[p, 1]) for p in UNDECIDED}
    free = answer(MANY, undecided=UNDECIDED, choices=other)
    forced = answer(MANY, undecided=UNDECIDED, choices=other, forced=True)
    return make_history([make_pass("free", [free]), make_pass("forced", [forced])])


ALL_RECORDS = records_of(RED, BLUE, SWAP, MANY, TRACED)


def specs_for(history: History) -> tuple[Spec, ...]:
    if "traced" in history.passes[0].requests:
        return (TOKENS, LOGITS, STAGES)
    if "again" in history.passes[0].requests:
        return (TOKENS, LOGITS, EQUAL)
    return ALL if "chunk=3" in [p.name for p in history.passes] else (TOKENS, LOGITS)


def test_the_sound_history_passes_every_check() -> None:
    found = judge(sound(), ALL, RECORDS)
    assert [f for f in found.findings if f.verdict is not Verdict.PASS] == []
    assert found.verdict is Verdict.PASS
    assert found.power.kinds == ("tokens", "logprobs", "logits", "bits", "behaviour")


def test_the_swapped_history_is_noise_and_nothing_worse() -> None:
    found = judge(swapped(), (TOKENS, LOGITS), RECORDS)
    assert found.verdict is Verdict.NOISE


def test_a_request_asked_twice_passes() -> None:
    found = judge(asked_twice(), (EQUAL,), RECORDS)
    assert (found.verdict, found.power.kinds) == (Verdict.PASS, ("bits",))


def test_stages_as_the_golden_has_them_pass() -> None:
    assert judge(traced(), (TOKENS, LOGITS, STAGES), RECORDS).verdict is Verdict.PASS


@pytest.mark.parametrize("case", CORRUPTIONS, ids=lambda c: c.name)
def test_is_caught_among_all_checks(case: Corruption) -> None:
    history = case.base()
    found = judge(case.mutate(history), specs_for(history), ALL_RECORDS)
    assert found.verdict.fails_run
    blamed = {f.check for f in found.findings if f.verdict is case.verdict}
    assert case.check in blamed


@pytest.mark.parametrize("case", [c for c in CORRUPTIONS if c.check != "history"], ids=lambda c: c.name)
def test_is_caught_by_its_check_alone(case: Corruption) -> None:
    history = case.base()
    alone = [s for s in (*ALL, EQUAL, STAGES) if s.name == case.check]
    # The refusal of "huge" is expected by the error check; without it, it would be a failure.
    found = judge(
        case.mutate(history),
        [*alone, *([ERROR] if ERROR not in alone and history is sound() else [])],
        ALL_RECORDS,
    )
    assert case.check in {f.check for f in found.findings if f.verdict is case.verdict}


def test_at_least_25_kinds_and_no_name_twice() -> None:
    names = [c.name for c in CORRUPTIONS]
    assert len(set(names)) == len(names) >= 25


def test_every_check_catches_some_corruption() -> None:
    from conformance.checks import CHECKS

    assert {c.check for c in CORRUPTIONS} == {*CHECKS, "history"}


def test_a_failure_names_position_size_and_a_command_that_shows_it_again() -> None:
    found = judge(shift_one(6 * M)(sound()), (LOGITS, ERROR), RECORDS)
    failure = next(f for f in found.findings if f.verdict is FAIL)
    assert failure.position == 5
    assert failure.size == pytest.approx(6, rel=0.01)
    assert failure.reproduce is not None
    assert "made/up" in failure.reproduce


def test_a_crashing_checker_is_an_error_that_names_it() -> None:
    broken = in_run("free", output_rows=(None,) * 24)(sound())
    found = judge(broken, (LOGITS, ERROR), RECORDS)
    assert found.verdict is ERR
    message = next(f.message for f in found.findings if f.verdict is ERR)
    assert "logits_within_yardstick" in message
    assert "AttributeError" in message
