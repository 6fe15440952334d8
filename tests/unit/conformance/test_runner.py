"""A scenario becomes a history: its passes, what was observed, and why it could not run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.adapters.base import EngineError
from conformance.adapters.fake import FakeEngine, fake_engine, minimal_engine
from conformance.adapters.fake_model import toy_logits, write_toy_suite
from conformance.archive import write_history
from conformance.history import History
from conformance.models import resolve_model
from conformance.outside import Terminated
from conformance.runner import Skipped, run_scenario, skip_reason
from conformance.scenario import Scenario, load_scenarios
from conformance.store import RecordStore

HEAD = """requirement: It answers.
level: must
source: [https://example.org]
model: toy
profile: smoke
"""
ONE = "{generate: {kind: random, length: 9, seed: 1, low: 3, high: 60}, max_tokens: 8}"
TWO = "{generate: {kind: random, length: 6, seed: 2, low: 3, high: 60}, max_tokens: 5}"
BODY = f"""requests:
  one: {ONE}
  two: {TWO}
steps: [{{submit: [one, two]}}, run]
checks:
  - tokens_match_golden
  - happened: {{finished: "==2"}}
"""


class Suite:
    """One toy scenario on disk, and how to run it."""

    def __init__(self, root: Path, text: str) -> None:
        self.root = write_toy_suite(root, {"toy/one": text})
        [self.scenario] = load_scenarios(self.root / "scenarios")
        self.store = RecordStore(self.root)

    def run(self, factory: Callable[..., Any], **point: Any) -> History:
        source = resolve_model("toy", self.root)
        return run_scenario(
            self.scenario, {**self.scenario.points()[0], **point}, factory, source, self.store
        )


def history(tmp_path: Path, text: str = HEAD + BODY, factory: Callable[..., Any] | None = None) -> History:
    return Suite(tmp_path, text).run(factory or fake_engine())


def test_a_right_engine_has_one_free_pass(tmp_path: Path) -> None:
    h = history(tmp_path)
    assert [one.name for one in h.passes] == ["free"]
    assert h.scenario == "toy/one"
    assert h.point == {"model": "toy", "dtype": "float32"}
    assert h.capabilities.engine == "fake"
    free = h.passes[0]
    assert free.error is None
    assert free.pool_before == free.pool_after
    assert {n: r.output.finish_reason for n, r in free.requests.items() if r.output} == {
        "one": "length",
        "two": "length",
    }


def test_every_request_names_its_golden(tmp_path: Path) -> None:
    suite = Suite(tmp_path, HEAD + BODY)
    run = suite.run(fake_engine()).passes[0].requests["one"]
    assert run.golden_key is not None
    record = suite.store.get(run.golden_key)
    assert run.output is not None
    assert run.output.token_ids == record.token_ids
    assert run.prompt_token_ids == record.prompt_token_ids


def test_logits_are_reduced_to_the_goldens_ids(tmp_path: Path) -> None:
    suite = Suite(tmp_path, HEAD + BODY)
    run = suite.run(fake_engine()).passes[0].requests["one"]
    record = suite.store.get(str(run.golden_key))
    assert len(run.output_rows) == 8
    for row, ids in zip(run.output_rows, record.output.top_ids, strict=True):
        assert row.ids == tuple(ids)
    first = toy_logits(record.prompt_token_ids)
    assert run.output_rows[0].values[0] == float(first.max())


def test_a_divergence_is_followed_by_a_forced_pass(tmp_path: Path) -> None:
    suite = Suite(tmp_path, HEAD + BODY)
    h = suite.run(fake_engine(fault="wrong_token"))
    assert [one.name for one in h.passes] == ["free", "forced"]
    run = h.passes[1].requests["one"]
    record = suite.store.get(str(run.golden_key))
    assert run.forced
    assert run.output is not None
    assert run.output.token_ids == record.token_ids
    assert run.output.choice_token_ids != record.token_ids
    assert not h.passes[0].requests["one"].forced


def test_an_engine_that_cannot_be_forced_is_not(tmp_path: Path) -> None:
    h = history(
        tmp_path, factory=fake_engine(fault="wrong_token", without=["forced_decode", "forced_prompt"])
    )
    assert [one.name for one in h.passes] == ["free"]


def test_a_missing_golden_is_told_and_the_engine_still_runs(tmp_path: Path) -> None:
    suite = Suite(tmp_path, HEAD + BODY)
    suite.store = RecordStore(tmp_path / "elsewhere")
    run = suite.run(fake_engine()).passes[0].requests["one"]
    assert run.golden_key is None
    assert str(run.golden_error).startswith("no golden for this request")
    assert len(run.output_rows[0].ids) == 20


def test_a_golden_of_other_weights_is_not_used(tmp_path: Path) -> None:
    suite = Suite(tmp_path, HEAD + BODY)
    weights = tmp_path / "golden/checkpoints/toy/model.safetensors"
    weights.write_bytes(weights.read_bytes() + b" ")
    run = suite.run(fake_engine()).passes[0].requests["one"]
    assert run.golden_key is None
    assert str(run.golden_error).startswith("recorded for other weights")


def test_a_sampled_request_has_no_golden_and_no_error_about_it(tmp_path: Path) -> None:
    text = (HEAD + BODY).replace("tokens_match_golden", "tokens_match_golden: one")
    text = text.replace("seed: 2, low: 3, high: 60}, ", "seed: 2, low: 3, high: 60}, logit_bias: {3: 0.5}, ")
    run = history(tmp_path, text, _Spy()).passes[0].requests["two"]
    assert (run.golden_key, run.golden_error) == (None, None)


def test_a_crash_is_written_down_with_what_happened_before(tmp_path: Path) -> None:
    [free] = history(tmp_path, factory=fake_engine(fault="crash")).passes
    assert free.error is not None
    assert (free.error.type, free.error.message) == ("RuntimeError", "the toy crashed, as it was told to")
    assert free.events
    assert len(free.requests["one"].output_rows) == 2


class _Panic(BaseException):
    """As code in Rust raises it."""


def _raising(error: BaseException) -> type[FakeEngine]:
    class Raises(FakeEngine):
        def advance(self) -> None:
            raise error

    return Raises


@pytest.mark.parametrize("error", [SystemExit(0), _Panic("0"), GeneratorExit("0")])
def test_an_engine_that_leaves_or_panics_has_crashed(tmp_path: Path, error: BaseException) -> None:
    [free] = history(tmp_path, factory=_raising(error)).passes
    assert free.error is not None
    assert (free.error.type, free.error.message) == (type(error).__name__, "0")


@pytest.mark.parametrize("error", [KeyboardInterrupt, Terminated])
def test_what_comes_from_outside_is_passed_on(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        history(tmp_path, factory=_raising(error()))


@pytest.mark.parametrize(
    ("method", "answer", "message"),
    [
        ("drain_events", [{"event": "x", "of": object()}], "is no number, text, list or mapping"),
        ("pool", None, "must return a PoolState"),
        ("submit", EngineError("ValueError", None), "must be an EngineError of two texts"),
    ],
)
def test_what_no_history_could_hold_is_the_adapters_mistake(
    tmp_path: Path, method: str, answer: object, message: str
) -> None:
    engine = type("Odd", (FakeEngine,), {method: lambda *_: answer})
    told = history(tmp_path, factory=engine)
    [free] = told.passes
    assert free.error is not None
    assert free.error.type == "AdapterError"
    assert message in free.error.message
    write_history(tmp_path / "saved", told)


class _CannotLoad:
    def __init__(self, *_: Any) -> None:
        self._inner = fake_engine()(*_)

    def capabilities(self) -> Any:
        return self._inner.capabilities()

    def __enter__(self) -> Any:
        raise FileNotFoundError("config.json is missing")

    def __exit__(self, *_: object) -> None: ...


def test_an_error_while_loading_is_the_pass_es_error(tmp_path: Path) -> None:
    text = HEAD + "damage: {remove_file: config.json}\nchecks: [{error: {engine: FileNotFoundError}}]\n"
    [free] = history(tmp_path, text, _CannotLoad).passes
    assert free.error is not None
    assert free.error.type == "FileNotFoundError"
    assert free.requests == {}


def test_a_damaged_model_is_what_the_engine_gets(tmp_path: Path) -> None:
    seen: list[Any] = []

    def factory(source: Any, options: Any) -> Any:
        seen.append((source.path, (source.path / "config.json").is_file()))
        return fake_engine()(source, options)

    text = (HEAD + BODY).replace("profile:", "damage: {remove_file: config.json}\nprofile:")
    history(tmp_path, text, factory)
    assert [there for _, there in seen] == [True, False]  # asked for capabilities; loaded damaged
    assert not seen[1][0].exists()


def test_options_the_engine_does_not_honour_are_noted_and_not_passed(tmp_path: Path) -> None:
    text = (HEAD + BODY).replace("profile:", "engine: {block_size: 4, max_num_seqs: 3}\nprofile:")
    [free] = history(tmp_path, text).passes
    assert free.options == {"block_size": 4, "dtype": "float32"}
    first = free.operations[0]
    assert (first.kind, first.argument) == ("options_not_honoured", ["max_num_seqs"])


def test_a_minimal_engine_is_judged_by_what_it_returns(tmp_path: Path) -> None:
    [free] = history(tmp_path, factory=minimal_engine()).passes
    run = free.requests["one"]
    assert run.output is not None
    assert run.output.token_ids is not None
    assert run.output_rows == ()
    assert run.output.logprobs is not None  # asked for, because nothing else shows numbers
    assert free.pool_after is None


def test_logprobs_are_asked_for_beside_logits_where_numbers_are_judged_only(tmp_path: Path) -> None:
    [free] = history(tmp_path / "tokens").passes
    assert free.requests["one"].output is not None
    assert free.requests["one"].output.logprobs is None
    numbers = (HEAD + BODY).replace("- tokens_match_golden", "- logits_within_yardstick")
    [free] = history(tmp_path / "numbers", numbers).passes
    assert free.requests["one"].output is not None
    assert [len(row) for row in free.requests["one"].output.logprobs or ()] == [20] * 8


# ---- arms ----------------------------------------------------------------------------------------


def with_arms(arms: str) -> str:
    return HEAD + BODY + f"  - same_under: {arms}\n"


def test_each_arm_is_a_pass_of_its_name(tmp_path: Path) -> None:
    h = history(tmp_path, with_arms("{chunk: [2, 5], block_size: [3], order: [reversed]}"))
    assert [one.name for one in h.passes] == ["free", "chunk=2", "chunk=5", "block_size=3", "order=reversed"]
    assert all(one.error is None for one in h.passes)


def test_preempt_every_is_one_pass_per_step_that_leaves_work(tmp_path: Path) -> None:
    h = history(tmp_path, with_arms("{preempt: every}"))
    names = [one.name for one in h.passes[1:]]
    assert names == [f"preempt={k}" for k in range(1, 8)]  # eight tokens, none left after the eighth
    for one in h.passes[1:]:
        assert any(e["event"] == "preempted" for e in one.events)


def test_an_arm_the_engine_cannot_be_put_into_is_noted_with_the_reason(tmp_path: Path) -> None:
    factory = fake_engine(without=["chunked_prefill"])
    h = history(tmp_path, with_arms("{chunk: [2], block_size: [3]}"), factory)
    assert [one.name for one in h.passes] == ["free", "block_size=3"]
    [note] = [o for o in h.passes[0].operations if o.kind == "arm_not_offered"]
    assert note.argument == {"axis": "chunk", "value": 2}
    assert note.outcome == "fake lacks chunked_prefill: left out for a test"


def test_no_arm_runs_after_a_broken_free_pass(tmp_path: Path) -> None:
    h = history(tmp_path, with_arms("{chunk: [2]}"), fake_engine(fault="crash"))
    assert [one.name for one in h.passes] == ["free"]


# ---- what is skipped -----------------------------------------------------------------------------


def scenario_of(tmp_path: Path, text: str) -> Scenario:
    return Suite(tmp_path, text).scenario


@pytest.mark.parametrize(
    ("change", "factory", "reason"),
    [
        (("profile:", "needs: [text]\nprofile:"), fake_engine(), "fake lacks text"),
        (
            ("profile:", "dtype: bfloat16\nprofile:"),
            fake_engine(),
            "does not offer bfloat16; it offers float32",
        ),
        ((", run]", ", {advance: 1}, run]"), minimal_engine(), "fake-minimal lacks stepped"),
        ((", run]", ", {run: {poison: true}}]"), fake_engine(without=["poison"]), "lacks poison: left out"),
        (("max_tokens: 8", "max_tokens: 8, stop: [x]"), fake_engine(), "fake lacks stop_strings"),
        (("max_tokens: 8", "max_tokens: 8, prompt_logprobs: 1"), minimal_engine(), "lacks prompt_logprobs"),
        (
            ("profile:", "engine: {batch_invariant: true}\nprofile:"),
            fake_engine(without=["bitwise"]),
            "fake lacks bitwise: left out for a test",
        ),
    ],
)
def test_a_scenario_the_engine_cannot_run_is_skipped_with_the_reason(
    tmp_path: Path, change: tuple[str, str], factory: Callable[..., Any], reason: str
) -> None:
    suite = Suite(tmp_path, HEAD + BODY)
    path = tmp_path / "scenarios/toy/one.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace(*change), encoding="utf-8")
    [suite.scenario] = load_scenarios(tmp_path / "scenarios")
    with pytest.raises(Skipped, match=reason):
        suite.run(factory)


def test_a_matrix_over_an_option_that_is_not_honoured_runs_once(tmp_path: Path) -> None:
    text = (HEAD + BODY).replace("profile:", "matrix: {max_num_seqs: [1, 2]}\nprofile:")
    scenario = scenario_of(tmp_path, text)
    capabilities = fake_engine()(resolve_model("toy", tmp_path), {}).capabilities()
    reasons = [skip_reason(scenario, point, capabilities) for point in scenario.points()]
    assert reasons == [None, "fake does not honour the option max_num_seqs"]


@pytest.mark.parametrize("option", ["max_model_len: 9", "max_num_seqs: 9"])
def test_a_refusal_that_follows_from_an_option_is_due_only_where_the_option_is_honoured(
    tmp_path: Path, option: str
) -> None:
    text = (HEAD + BODY).replace("profile:", f"engine: {{{option}}}\nprofile:")
    text = text.replace(
        "[{submit: [one, two]}", "[{submit: [two]}, {expect_error: {one: {type: ValueError}}}"
    )
    scenario = scenario_of(tmp_path, text)
    [point] = scenario.points()
    capabilities = fake_engine()(resolve_model("toy", tmp_path), {}).capabilities()
    assert capabilities.options.isdisjoint({"max_model_len", "max_num_seqs"})
    told = skip_reason(scenario, point, capabilities)
    assert told == ("fake does not honour the option max_model_len" if "len" in option else None)
    honoured = replace(capabilities, options=capabilities.options | {"max_model_len"})
    assert skip_reason(scenario, point, honoured) is None


# ---- prompts -------------------------------------------------------------------------------------


class _Spy:
    """A factory that keeps what was submitted."""

    def __init__(self, **changes: Any) -> None:
        self.requests: dict[str, Any] = {}
        self._make = fake_engine(**changes)

    def __call__(self, source: Any, options: Any) -> Any:
        adapter = self._make(source, options)
        submit, capabilities = adapter.submit, adapter.capabilities

        def spying(request: Any) -> Any:
            self.requests[request.request_id] = request
            return submit(request)

        def more() -> Any:  # than it does: what it is handed is all that is looked at
            seen = capabilities()
            return replace(seen, features=seen.features | {"text", "chat", "logit_control"})

        adapter.submit, adapter.capabilities = spying, more
        return adapter


def test_chat_is_handed_over_as_messages(tmp_path: Path) -> None:
    text = (HEAD + BODY).replace(ONE, "{chat: [{text: Hi}, {text: ' there'}], logit_bias: {3: 1.0}}")
    text = text.replace("tokens_match_golden", "tokens_match_golden: two")
    spy = _Spy()
    history(tmp_path, text, spy)
    assert spy.requests["one"].chat == ({"role": "user", "content": "Hi there"},)
    assert spy.requests["one"].prompt_token_ids is None


def test_everything_else_of_a_request_is_handed_over(tmp_path: Path) -> None:
    text = (HEAD + BODY).replace(
        "max_tokens: 8", "max_tokens: 8, cache_salt: mine, priority: 3, ignore_eos: true"
    )
    spy = _Spy()
    history(tmp_path, text, spy)
    one = spy.requests["one"]
    assert (one.cache_salt, one.priority) == ("mine", 3)
    assert one.sampling == {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    assert one.capture == {"logits"}


def test_kv_and_prompt_logits_are_captured_where_a_check_wants_them(tmp_path: Path) -> None:
    text = with_arms("{chunk: [2]}").replace("max_tokens: 8", "max_tokens: 8, prompt_logprobs: 2")
    spy = _Spy()
    history(tmp_path, text, spy)
    assert spy.requests["one"].capture == {"logits", "prompt_logits", "kv"}
    assert spy.requests["two"].capture == {"logits", "kv"}


def test_a_request_that_must_fail_captures_nothing(tmp_path: Path) -> None:
    text = (HEAD + BODY).replace("{submit: [one, two]}", "{submit: two}, {expect_error: {one: any}}")
    spy = _Spy()
    history(tmp_path, text.replace("max_tokens: 8", "max_tokens: 999999"), spy)
    assert spy.requests["one"].capture == frozenset()
