"""Scenario files become value objects, or an error with file and line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.assets import find_asset
from conformance.canonical import request_key
from conformance.manifest import sign
from conformance.scenario import CheckSpec, Scenario, ScenarioError, load_scenario, load_scenarios

HEAD = """schema: 1
id: area/name
requirement: It answers.
level: must
source: [https://example.org]
model: toy
profile: smoke
"""
BODY = """requests:
  one: {token_ids: [3, 4], max_tokens: 5}
  two: {text: "hello there", temperature: 0.7, seed: 1}
steps: [{submit: [one, two]}, run]
checks:
  - tokens_match_golden: one
  - happened: {finished: "==2"}
"""


def write(root: Path, text: str, name: str = "area/name") -> Path:
    path = root / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def load(root: Path, text: str = HEAD + BODY) -> Scenario:
    return load_scenario(write(root, text), root)


def error_of(root: Path, text: str) -> str:
    with pytest.raises(ScenarioError) as caught:
        load(root, text)
    return str(caught.value)


def test_a_file_becomes_a_scenario(tmp_path: Path) -> None:
    scenario = load(tmp_path)
    assert (scenario.id, scenario.area, scenario.level) == ("area/name", "area", "must")
    assert scenario.models == ("toy",)
    assert scenario.requests["one"].prompt == {"token_ids": [3, 4]}
    assert scenario.requests["one"].sampling == {"temperature": 0.0, "max_tokens": 5}
    assert scenario.requests["two"].sampling == {"temperature": 0.7, "seed": 1, "max_tokens": 16}
    assert [step.kind for step in scenario.steps] == ["submit", "run"]
    assert scenario.checks == (
        CheckSpec("tokens_match_golden", "one", 13),
        CheckSpec("happened", {"finished": "==2"}, 14),
    )


def test_lines_of_requests_and_steps_are_kept(tmp_path: Path) -> None:
    scenario = load(tmp_path)
    assert [scenario.requests[name].line for name in ("one", "two")] == [9, 10]
    assert scenario.steps[0].line == 11


def test_the_id_must_be_the_path(tmp_path: Path) -> None:
    assert ":2: id: id 'area/other' must be the path 'area/name'" in error_of(
        tmp_path, (HEAD + BODY).replace("area/name", "area/other")
    )


def test_an_unknown_key_is_told_with_its_line(tmp_path: Path) -> None:
    text = (HEAD + BODY).replace("max_tokens: 5", "max_tokens: 5, stopp: x")
    assert f"{tmp_path}/area/name.yaml:9: requests.one.stopp: unknown key" in error_of(tmp_path, text)


def test_a_wrong_value_is_told_with_the_value(tmp_path: Path) -> None:
    text = (HEAD + BODY).replace("max_tokens: 5", "max_tokens: many")
    assert ":9: requests.one.max_tokens: Input should be a valid integer, got 'many'" in error_of(
        tmp_path, text
    )


def test_a_check_is_linted_with_its_line(tmp_path: Path) -> None:
    text = (HEAD + BODY).replace('happened: {finished: "==2"}', 'happened: {finnished: "==2"}')
    assert ":14: checks[1]: happened: unknown counter 'finnished'" in error_of(tmp_path, text)
    text = (HEAD + BODY).replace("tokens_match_golden: one", "tokens_match: one")
    assert ":13: checks[0]: tokens_match: unknown check 'tokens_match'" in error_of(tmp_path, text)


@pytest.mark.parametrize(
    "check",
    ["tokens_match_golden: three", "tokens_match_golden: [one, three]", "cached_tokens: {three: 1}",
     "finish_reason: {three: stop}", "text_equals: {three: x}", "error: {three: any}",
     "logits_within_yardstick: {requests: three}"],
)  # fmt: skip
def test_a_check_about_a_request_that_is_not_there_is_refused(tmp_path: Path, check: str) -> None:
    text = (HEAD + BODY).replace("tokens_match_golden: one", check)
    assert "unknown request 'three'; requests are ['one', 'two']" in error_of(tmp_path, text)


def test_a_golden_check_on_a_sampled_request_is_refused(tmp_path: Path) -> None:
    text = (HEAD + BODY).replace("tokens_match_golden: one", "tokens_match_golden: two")
    assert ":10: requests.two: a golden check judges 'two', but no golden exists" in error_of(tmp_path, text)


def test_one_candidate_is_greedy_at_any_temperature(tmp_path: Path) -> None:
    text = (HEAD + BODY).replace("tokens_match_golden: one", "tokens_match_golden: [two/1]")
    text = text.replace(", seed: 1", ", top_k: 1, n: 2") + "  - same_under: {chunk: [1]}\n"
    scenario = load(tmp_path, text)
    assert [request.name for request in scenario.judged_by_golden()] == ["two"]


def test_a_golden_check_about_nobody_is_refused(tmp_path: Path) -> None:
    text = (HEAD + BODY).replace("tokens_match_golden: one", "tokens_match_golden")
    text = text.replace("max_tokens: 5", "max_tokens: 5, presence_penalty: 1")
    assert "['tokens_match_golden'] judge no request" in error_of(tmp_path, text)


def test_same_under_without_a_seed_is_refused(tmp_path: Path) -> None:
    text = (HEAD + BODY).replace(", seed: 1", "") + "  - same_under: {chunk: [1]}\n"
    assert ":10: requests.two: same_under needs a seed" in error_of(tmp_path, text)


def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    assert error_of(tmp_path, "- 1\n").endswith("name.yaml:1: a scenario is a mapping, got list")


def test_every_broken_file_is_told_at_once(tmp_path: Path) -> None:
    write(tmp_path, HEAD + BODY)
    write(tmp_path, "a: [", "area/broken")
    write(tmp_path, HEAD.replace("must", "may").replace("area/name", "area/wrong") + BODY, "area/wrong")
    with pytest.raises(ScenarioError) as caught:
        load_scenarios(tmp_path)
    assert "broken.yaml:" in str(caught.value)
    assert "wrong.yaml:4: level" in str(caught.value)


def test_a_directory_without_scenarios_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="no scenario here"):
        load_scenarios(tmp_path)


def test_scenarios_come_in_order_of_id(tmp_path: Path) -> None:
    for name in ("b/a", "a/b", "a/a"):
        write(tmp_path, (HEAD + BODY).replace("area/name", name), name)
    assert [s.id for s in load_scenarios(tmp_path)] == ["a/a", "a/b", "b/a"]


def test_a_profile_includes_the_shorter_ones(tmp_path: Path) -> None:
    scenario = load(tmp_path, (HEAD + BODY).replace("profile: smoke", "profile: default"))
    assert [scenario.in_profile(p) for p in ("smoke", "default", "full")] == [False, True, True]


def test_two_axes_are_multiplied_out(tmp_path: Path) -> None:
    text = (HEAD + BODY).replace(
        "model: toy", "model: [toy, other]\nmatrix: {block_size: [1, 4], device: auto}"
    )
    assert load(tmp_path, text).points() == [
        {"model": model, "dtype": "float32", "block_size": size, "device": "auto"}
        for model in ("toy", "other")
        for size in (1, 4)
    ]


def test_three_axes_are_covered_by_pairs(tmp_path: Path) -> None:
    matrix = "matrix: {block_size: [1, 3, 4], max_num_seqs: [1, 2, 3], seed: [1, 2, 3]}"
    points = load(tmp_path, (HEAD + BODY).replace("profile:", f"{matrix}\nprofile:")).points()
    assert 9 <= len(points) < 27


def test_a_generated_prompt_is_token_ids(tmp_path: Path) -> None:
    piece = "{kind: repeat, ids: [5, 6], length: 3}"
    scenario = load(tmp_path, (HEAD + BODY).replace("token_ids: [3, 4]", f"generate: [{piece}, {piece}]"))
    assert scenario.requests["one"].prompt == {"token_ids": [5, 6, 5, 5, 6, 5]}


def test_golden_requests_name_each_model_and_dtype(tmp_path: Path) -> None:
    text = (HEAD + BODY).replace("model: toy", "model: [toy, other]\ndtype: [float32, bfloat16]")
    requests = load(tmp_path, text).golden_requests()
    assert [(label, r["model"], r["dtype"]) for label, r in requests] == [
        ("area/name:one", model, dtype) for model in ("toy", "other") for dtype in ("float32", "bfloat16")
    ]
    assert requests[0][1] == {
        "model": "toy",
        "dtype": "float32",
        "prompt": {"token_ids": [3, 4]},
        "max_tokens": 5,
        "ignore_eos": False,
        "stop_token_ids": [],
        "prompt_logprobs": False,
    }


def test_what_cannot_change_the_truth_does_not_change_the_golden(tmp_path: Path) -> None:
    keys = set()
    for extra in (
        "",
        ", logprobs: 3",
        ", seed: 4",
        ", cache_salt: x, priority: 2",
        ", stop: [abc]",
        ", top_k: 5",
    ):
        scenario = load(tmp_path, (HEAD + BODY).replace("max_tokens: 5", f"max_tokens: 5{extra}"))
        keys.add(request_key(scenario.golden_requests()[0][1]))
    assert len(keys) == 1


def test_what_changes_the_truth_changes_the_golden(tmp_path: Path) -> None:
    keys = set()
    extras = ("", ", ignore_eos: true", ", stop_token_ids: [7]", ", prompt_logprobs: 2")
    for extra in extras:
        scenario = load(tmp_path, (HEAD + BODY).replace("max_tokens: 5", f"max_tokens: 5{extra}"))
        keys.add(request_key(scenario.golden_requests()[0][1]))
    assert len(keys) == len(extras)


def _greedy(text: str) -> str:
    return text.replace(", temperature: 0.7, seed: 1", "").replace(
        "tokens_match_golden: one", "tokens_match_golden"
    )


@pytest.mark.parametrize(
    ("change", "judged"),
    [
        ({}, ["one", "two"]),
        ({"{submit: [one, two]}": "{submit: one}, {expect_error: {two: any}}"}, ["one"]),
        ({"max_tokens: 5": "max_tokens: 5, repetition_penalty: 1.1"}, ["two"]),
        ({"max_tokens: 5": "max_tokens: 5, min_tokens: 1"}, ["two"]),
        ({"max_tokens: 5": "max_tokens: 5, logit_bias: {7: 1.0}"}, ["two"]),
    ],
)
def test_a_golden_check_without_names_judges_every_plain_greedy_request(
    tmp_path: Path, change: dict[str, str], judged: list[str]
) -> None:
    text = _greedy(HEAD + BODY)
    for old, new in change.items():
        text = text.replace(old, new)
    assert [request.name for request in load(tmp_path, text).judged_by_golden()] == judged


def test_a_text_compared_with_the_golden_needs_the_golden(tmp_path: Path) -> None:
    text = _greedy(HEAD + BODY).replace(
        "tokens_match_golden", "text_equals: {two: {golden: true}, one: hello}"
    )
    assert [request.name for request in load(tmp_path, text).judged_by_golden()] == ["two"]


def test_an_expected_error_is_a_step_and_a_check(tmp_path: Path) -> None:
    expectation = '{two: {type: PromptTooLong, contains: ["64"]}}'
    text = _greedy(HEAD + BODY).replace(
        "{submit: [one, two]}", f"{{submit: one}}, {{expect_error: {expectation}}}"
    )
    scenario = load(tmp_path, text)
    assert scenario.steps[1].kind == "expect_error"
    assert scenario.steps[1].argument == ["two"]
    assert scenario.check("error")[0].args == {"two": {"type": "PromptTooLong", "contains": ["64"]}}
    assert scenario.must_fail == {"two"}


def test_an_error_while_loading_needs_no_requests(tmp_path: Path) -> None:
    scenario = load(
        tmp_path, HEAD + "damage: {remove_file: config.json}\nchecks: [{error: {engine: ConfigError}}]\n"
    )
    assert scenario.damage == {"remove_file": "config.json"}
    assert scenario.golden_requests() == []
    assert dict(scenario.requests) == {}


def test_run_has_all_its_arguments(tmp_path: Path) -> None:
    scenario = load(tmp_path)
    plain: dict[str, Any] = {"preempt": None, "period": 1, "poison": False}
    assert scenario.steps[1].argument == plain
    text = (HEAD + BODY).replace(", run]", ", {run: {preempt: every, period: 3, poison: true}}]")
    assert load(tmp_path, text).steps[1].argument == {"preempt": ["every"], "period": 3, "poison": True}


# ---- pictures -----------------------------------------------------------------------------------


PICTURES = """requests:
  red:
    chat: [{image: shapes/red.png}, {text: "What is this?"}]
    mm_processor_kwargs: {max_pixels: 3136}
  both:
    text: "<image> and <image>"
    media: [{image: shapes/red.png}, {video: {frames: [shapes/red.png], fps: 2}}]
    media_as: embeddings
steps: [{submit: [red, both]}, run]
checks:
  - tokens_match_golden
  - happened: {finished: "==2"}
"""


@pytest.fixture
def with_assets(tmp_path: Path) -> Path:
    assets = tmp_path / "assets"
    (assets / "shapes").mkdir(parents=True)
    (assets / "shapes" / "red.png").write_bytes(b"red")
    sign(assets, "first")
    return tmp_path


def test_pictures_are_found_and_named_by_content_in_the_canonical_request(with_assets: Path) -> None:
    scenario = load(with_assets, HEAD + PICTURES)
    red, both = scenario.requests["red"], scenario.requests["both"]
    digest = find_asset(with_assets / "assets", "shapes/red.png").digest
    assert [ref.modality for ref in both.media] == ["image", "video"]
    assert red.media[0].assets[0].path.read_bytes() == b"red"
    assert red.canonical("toy", "float32")["prompt"]["messages"] == [
        {"role": "user", "content": [{"image": digest}, {"text": "What is this?"}]}
    ]
    assert red.canonical("toy", "float32")["mm_processor_kwargs"] == {"max_pixels": 3136}
    media = both.canonical("toy", "float32")["prompt"]["media"]
    assert media == [{"image": digest}, {"video": {"frames": [digest], "fps": 2.0}}]
    assert (red.media_as, red.traced, both.media_as, both.traced) == ("pixels", False, "embeddings", True)


def test_embeddings_and_pixels_of_a_picture_have_the_same_golden(with_assets: Path) -> None:
    other = PICTURES.replace("    media_as: embeddings\n", "")
    [one, two] = [
        load(with_assets, HEAD + text).requests["both"].canonical("toy", "float32")
        for text in (PICTURES, other)
    ]
    assert request_key(one) == request_key(two)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("shapes/red.png}, {text", "shapes/rot.png}, {text", ":10: requests.red.chat[0].image: no asset"),
        ("{image: shapes/red.png}, {text", "{sound: a}, {text", ":10: requests.red.chat[0]: expected {text"),
        (
            "fps: 2",
            "fps: fast",
            ":14: requests.both.media[1].video.fps: expected a number above 0, got 'fast'",
        ),
        ("media_as: embeddings", "media_as: pictures", ":15: requests.both.media_as: Input should be"),
        ("    media_as: embeddings", "    media: []", ":15: duplicate key 'media'"),
        (
            "    mm_processor_kwargs: {max_pixels: 3136}",
            "    media: [{image: shapes/red.png}]",
            ":9: requests.red: a chat holds its pictures as parts, not under media",
        ),
        (
            "    media: [{image: shapes/red.png}, {video: {frames: [shapes/red.png], fps: 2}}]\n",
            "",
            "requests.both.media_as: the request has no picture",
        ),
    ],
)
def test_a_wrong_picture_is_an_error_with_file_and_line(
    with_assets: Path, old: str, new: str, message: str
) -> None:
    assert old in PICTURES
    assert message in error_of(with_assets, HEAD + PICTURES.replace(old, new, 1))
