"""The HTML report in a real browser: filters, links, keyboard, no scripts, no requests, no complaints."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.adapters.fake import fake_engine
from conformance.adapters.fake_model import write_toy_suite
from conformance.html.page import render
from conformance.report import as_json
from conformance.saved_report import parse_report
from conformance.scenario import load_scenarios
from conformance.store import RecordStore
from conformance.suite import Selection, run_case, select
from tests.integration.browser import Browser, find_browser

EXECUTABLE = find_browser()

pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="no Chromium or Chrome on this machine")

SCENARIO = """requirement: It answers NAME.
level: must
source: [https://example.org]
model: toy
profile: smoke
matrix: {block_size: [1, 4]}
requests:
  one: {token_ids: [3, 4, 5], max_tokens: 9}
steps: [{submit: one}, run]
checks:
  - tokens_match_golden
  - logits_within_yardstick
  - happened: {finished: "==1"}
"""

#: What must not run: as text of an engine, and put into the page by hand.
HOSTILE = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of the toy: one right, one in which everything of the area "one" is wrong."""
    folder = tmp_path_factory.mktemp("report")
    root = write_toy_suite(
        folder / "data", {f"{name}/answers": SCENARIO.replace("NAME", name) for name in ("one", "two")}
    )
    cases, store = select(load_scenarios(root / "scenarios"), Selection()), RecordStore(root)
    reports = []
    for fault in (None, "wrong_token"):
        outcomes = [
            run_case(
                case, fake_engine(fault=fault if case.scenario.area == "one" else None), store, root=root
            )
            for case in cases
        ]
        data = json.loads(as_json(outcomes, [], {("", ""): None}, {"torch": "2"}))
        data["engine"] = {"name": "wrong" if fault else "right", "version": "1"}
        data["cases"][-1]["findings"][0]["message"] = HOSTILE
        reports.append(parse_report(json.dumps(data), "toy"))
    path = folder / "report.html"
    path.write_text(render(reports), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert EXECUTABLE is not None
    with Browser(EXECUTABLE, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture
def browser(started: Browser, page: Path) -> Browser:
    """The page, freshly loaded."""
    started.requests.clear()
    started.complaints.clear()
    started.open(page.as_uri())
    return started


def shown(browser: Browser) -> list[str]:
    """Verdict and label of the cases that are not hidden."""
    script = """[...document.querySelectorAll("details.case")].filter((c) => c.offsetParent !== null)
        .map((c) => c.dataset.verdict + " " + c.dataset.engine + " " + c.dataset.area)"""
    return list(browser.run(script))


def choose(browser: Browser, name: str, value: str) -> None:
    browser.run(
        f"""(() => {{ const field = document.querySelector('[name="{name}"]');
        field.value = "{value}"; field.dispatchEvent(new Event("input", {{bubbles: true}})); }})()"""
    )


ALL = [
    f"{verdict} {engine} 1 {area}"
    for area in ("one", "two")
    for engine, verdict in (("right", "PASS"), ("wrong", "FAIL" if area == "one" else "PASS"))
    for _ in range(2)
]


def test_it_opens_without_a_complaint_and_asks_for_nothing(browser: Browser, page: Path) -> None:
    assert shown(browser) == ALL
    assert [address for address in browser.requests if not address.startswith("data:")] == [page.as_uri()]
    assert browser.complaints == []
    assert browser.run("document.getElementById('shown').value") == "8 of 8 cases"
    assert browser.run("[...document.images].every((i) => i.complete && i.naturalWidth)") is True


def test_filters_hide_cases_squares_rows_and_headings(browser: Browser) -> None:
    browser.run("document.querySelector('[name=verdict][value=PASS]').click()")
    assert shown(browser) == ["FAIL wrong 1 one"] * 2
    assert browser.run("document.getElementById('shown').value") == "2 of 8 cases"
    visible = "[...document.querySelectorAll('{}')].filter((e) => e.offsetParent !== null).length"
    assert browser.run(visible.format("a.sq")) == 2
    assert browser.run(visible.format(".matrix tbody tr:not(.area)")) == 1
    assert browser.run(visible.format("article")) == 1
    browser.run("document.querySelector('#filters button[type=reset]').click()")
    browser.run("new Promise((done) => setTimeout(done))")
    assert shown(browser) == ALL
    assert browser.complaints == []


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("area", "two", [one for one in ALL if one.endswith("two")]),
        ("engine", "wrong 1", [one for one in ALL if "wrong" in one]),
        ("model", "toy", ALL),
        ("text", "ANSWERS two", [one for one in ALL if one.endswith("two")]),
        ("text", "tokens_match_golden position", [one for one in ALL if one.startswith("FAIL")]),
        ("text", "nothing like this", []),
    ],
)
def test_a_filter_keeps_what_it_names(browser: Browser, name: str, value: str, kept: list[str]) -> None:
    choose(browser, name, value)
    assert shown(browser) == kept
    assert browser.run("document.getElementById('nothing').hidden") is bool(kept)


def test_a_square_opens_its_case_even_where_a_filter_hides_it(browser: Browser) -> None:
    choose(browser, "area", "two")
    browser.run(
        """new Promise((done) => {
        addEventListener("hashchange", () => setTimeout(done), { once: true });
        document.querySelector("a.sq.FAIL").click(); })"""
    )
    opened = browser.run(
        "(() => { const c = document.querySelector(location.hash); return [c.open, c.dataset.verdict]; })()"
    )
    assert opened == [True, "FAIL"]
    assert browser.run("document.activeElement.parentElement.id === location.hash.slice(1)") is True
    assert shown(browser) == ALL


def test_the_command_can_be_copied_or_is_at_least_selected(browser: Browser) -> None:
    label = browser.run(
        """(async () => { const b = document.querySelector(".again button"); b.click();
        while (b.textContent === "Copy") await new Promise((done) => setTimeout(done, 20));
        const code = b.parentElement.querySelector("code");
        return [b.textContent, code.textContent, String(getSelection())]; })()"""
    )
    assert label[0] in ("Copied", "Selected")
    assert label[1].startswith("conformance run one/answers")
    assert label[0] == "Copied" or label[2] == label[1]


def test_the_keyboard_reaches_what_the_mouse_does(browser: Browser) -> None:
    browser.press("Tab")
    assert browser.run("document.activeElement.className") == "skip"
    browser.press("Enter")
    assert browser.run("location.hash") == "#matrix"
    browser.run("document.querySelector('details.case:not([open]) > summary').focus()")
    browser.press("Enter")
    assert browser.run("document.activeElement.parentElement.open") is True


def test_no_script_but_its_own_runs(browser: Browser) -> None:
    browser.run("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    assert browser.run("window.hacked === undefined") is True
    assert browser.complaints == []
    refused = browser.run(
        f"""new Promise((done) => {{
        const told = (event) => done(event.violatedDirective);
        addEventListener("securitypolicyviolation", told, {{ once: true }});
        document.body.insertAdjacentHTML("beforeend", {json.dumps(HOSTILE)});
        const script = document.createElement("script");
        script.textContent = "window.hacked = 1";
        document.body.append(script); }})"""
    )
    assert refused in ("script-src-elem", "script-src-attr", "script-src", "img-src")
    assert browser.run("window.hacked === undefined") is True


def test_without_scripts_everything_is_there_to_read(started: Browser, page: Path) -> None:
    started.open(page.as_uri(), scripts=False)
    assert shown(started) == ALL
    assert started.run("document.getElementById('filters').offsetParent === null") is True
    assert started.run("document.querySelector('details.case[open] svg') !== null") is True


@pytest.mark.parametrize("width", [360, 800, 1600])
def test_no_width_makes_the_page_scroll_sideways(started: Browser, page: Path, width: int) -> None:
    started.open(page.as_uri(), width=width)
    started.run("document.querySelectorAll('details').forEach((d) => (d.open = true))")
    assert started.run("document.documentElement.scrollWidth <= innerWidth") is True


def test_it_is_dark_where_the_reader_wants_it_dark_and_stays_legible(browser: Browser) -> None:
    light = _contrast(browser)
    browser.emulate(prefers_color_scheme="dark")
    dark = _contrast(browser)
    browser.emulate(prefers_color_scheme="light")
    assert light.pop("page") > 0.8
    assert dark.pop("page") < 0.1
    for scheme in (light, dark):
        assert {what: ratio for what, ratio in scheme.items() if ratio < 4.5} == {}


def _contrast(browser: Browser) -> dict[str, float]:
    """Contrast (WCAG 2.1) of each verdict's badge, of grey text and of links; and the page's luminance."""
    script = """(() => {
      const light = (colour) => {
        const [r, g, b] = colour.match(/[\\d.]+/g).map((c) => c / 255)
          .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
      };
      const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
      const page = light(getComputedStyle(document.body).backgroundColor);
      const ink = (selector) => light(getComputedStyle(document.querySelector(selector)).color);
      const found = { page, grey: ratio(page, ink(".power")), link: ratio(page, ink("a")) };
      for (const verdict of ["PASS", "NOISE", "WEAK", "SKIP", "WAIVED", "STALE", "FAIL", "ERROR"]) {
        const badge = document.body.appendChild(document.createElement("span"));
        badge.className = "v " + verdict;
        const style = getComputedStyle(badge);
        found[verdict] = ratio(light(style.backgroundColor), light(style.color));
        badge.remove();
      }
      return found;
    })()"""
    return dict(browser.run(script))
