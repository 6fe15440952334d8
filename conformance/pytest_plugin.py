"""The suite as pytest tests: `pytest --pyargs conformance --conformance-engine my_engine:MyEngine`.

Loaded by the entry point `pytest11`, so it is light: nothing of the suite is imported before
`conformance.test_scenarios` is collected. Each case is one test, named after its scenario, so that
`-k prefix-cache` selects an area. PASS, NOISE and WEAK pass; SKIP is skipped with its reason; WAIVED
is an expected failure; FAIL and ERROR fail. A run in which nothing was judged fails, and so does one
with a stale waiver.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conformance.suite import Case
    from conformance.verdicts import Finding

__all__: list[str] = []

#: The fixture that stands for one case, and the property in which its verdict travels.
_CASE, _VERDICT = "conformance_case", "conformance_verdict"
_PROFILES = ("smoke", "default", "full")


class _Run:
    """What the options ask for, loaded once, and the verdicts so far."""

    def __init__(self, config: pytest.Config) -> None:
        from conformance.again import Invocation
        from conformance.engines import find_engine, parse_options, with_options
        from conformance.paths import data_root
        from conformance.scenario import load_scenarios
        from conformance.store import RecordStore
        from conformance.suite import Selection, select
        from conformance.waivers import load_waivers

        def option(name: str) -> Any:
            return config.getoption(f"conformance_{name}")

        waivers = option("waivers")
        self.root: Path | None = option("data")
        self.scenarios = load_scenarios((self.root or data_root()) / "scenarios")
        selection = Selection(
            profile=option("profile"), models=tuple(option("model")), device=option("device")
        )
        self.cases = {case.label: case for case in select(self.scenarios, selection)}
        self.waivers = load_waivers(waivers) if waivers else []
        options = option("engine_option")
        self.factory = with_options(find_engine(option("engine")), parse_options(options))
        self.invocation = Invocation(option("engine"), options=tuple(options), data=self.root)
        self.store = RecordStore(self.root)


_RUN = pytest.StashKey[_Run]()


def _run(config: pytest.Config) -> _Run:
    """The run of this session.

    Raises:
        pytest.UsageError: an option or one of its files is wrong.
    """
    if _RUN not in config.stash:
        from conformance.engines import EngineNotFound, EngineOptionError
        from conformance.paths import DataMissing
        from conformance.scenario import ScenarioError
        from conformance.suite import SelectionError
        from conformance.waivers import WaiverError

        try:
            config.stash[_RUN] = _Run(config)
        except (
            DataMissing,
            EngineNotFound,
            EngineOptionError,
            ScenarioError,
            SelectionError,
            WaiverError,
        ) as error:
            raise pytest.UsageError(str(error)) from error
    return config.stash[_RUN]


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance", "conformance suite (pytest --pyargs conformance)")

    def add(name: str, **about: Any) -> None:
        group.addoption(f"--conformance-{name}", dest=f"conformance_{name.replace('-', '_')}", **about)

    add("engine", default="minivllm", metavar="ENGINE", help="name, or package.module:Class")
    add("engine-option", action="append", default=[], metavar="NAME=VALUE", help="for the adapter")
    add("device", metavar="DEVICE", help="where device is auto: this one (cpu, cuda, mps)")
    add("profile", default="default", choices=_PROFILES, help="which scenarios")
    add("model", action="append", default=[], metavar="MODEL", help="only these; may be repeated")
    add("waivers", type=Path, metavar="FILE", help="known failures of this engine")
    add("data", type=Path, metavar="DIR", help="directory with golden/ and scenarios/")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if _CASE in metafunc.fixturenames:
        cases = _run(metafunc.config).cases
        metafunc.parametrize(_CASE, list(cases.values()), ids=list(cases))


@pytest.fixture
def judge_case(request: pytest.FixtureRequest, record_property: Any) -> Any:
    """Judges a case on the engine of the options, and ends the test as its verdict says."""
    run = _run(request.config)

    def judge(case: Case) -> None:
        from conformance.again import with_commands
        from conformance.report import reproduce, telling
        from conformance.suite import apply_waivers, run_case
        from conformance.terminal import escape_controls
        from conformance.verdicts import Verdict

        outcome = run_case(case, run.factory, run.store, root=run.root)
        record_property(_VERDICT, [case.label, outcome.verdict.value])
        [outcome], _stale = apply_waivers([outcome], run.waivers, [])
        told = escape_controls("\n".join(_sentence(one) for one in telling(outcome.judgement.findings)))
        if outcome.verdict is Verdict.SKIP:
            pytest.skip(told)
        if outcome.waiver is not None:
            pytest.xfail(f"waived until {outcome.waiver.expiry}: {outcome.waiver.reason}")
        if outcome.verdict is Verdict.FAIL and not outcome.judgement.fails_run():
            pytest.xfail(f"a recommendation is not followed: {told}")
        if outcome.judgement.fails_run():
            again = reproduce(with_commands(outcome, run.invocation))
            told += f"\nagain: {again}" if again else ""
            pytest.fail(f"{outcome.verdict.value} {case.label}\n{told}", pytrace=False)

    return judge


def _sentence(finding: Finding) -> str:
    who = f" {finding.request}" if finding.request else ""
    return f"{finding.check}{who}: {finding.message}"


# ---- what only the whole run tells ----------------------------------------------------------------


class _Summary:
    """Gathers verdicts, from xdist's workers too, and judges the run as a whole."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.verdicts: dict[str, str] = {}
        self.problems: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties:
            if name == _VERDICT and report.when == "call":
                recorded: Any = value
                self.verdicts[str(recorded[0])] = str(recorded[1])

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self.verdicts:
            return
        self.problems = _problems(_run(self.config), self.verdicts)
        if self.problems and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if not self.verdicts:
            return
        counts = Counter(self.verdicts.values())
        engine = self.config.getoption("conformance_engine")
        terminalreporter.section("conformance")
        shown = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        terminalreporter.line(f"{engine}: {shown}")
        for problem in self.problems:
            terminalreporter.line(problem, red=True)


def _problems(run: _Run, verdicts: dict[str, str]) -> list[str]:
    """Stale waivers, and whether nothing was judged."""
    from conformance.suite import Outcome, apply_waivers
    from conformance.verdicts import Judgement, Power, Verdict

    outcomes = [
        Outcome(run.cases[label], Judgement(Verdict(verdict), (), Power((), {})), 0.0)
        for label, verdict in verdicts.items()
    ]
    _final, stale = apply_waivers(outcomes, run.waivers, [scenario.id for scenario in run.scenarios])
    problems = [f"STALE waiver on line {w.line} ({w.scenario}): {why}" for w, why in stale]
    if all(outcome.verdict is Verdict.SKIP for outcome in outcomes):
        problems.append(f"FAILED: nothing was judged, all of {len(outcomes)} cases were skipped")
    return problems


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Summary(config), "conformance-summary")
