"""A history read from disk is the history that was written."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from conformance import EDITION, HISTORY_SCHEMA
from conformance.adapters.base import Capabilities, EngineError, EngineOutput, PoolState, TokenLogprob
from conformance.archive import ArchiveError, history_name, read_histories, read_history, write_history
from conformance.history import History, LogitRow, Operation, Pass, RequestRun

OUTPUT = EngineOutput(
    request_id="one",
    text="naïve 🙂",
    finished=True,
    prompt_token_ids=(1, 2),
    token_ids=(3,),
    logprobs=((TokenLogprob(3, -0.5, 1), TokenLogprob(9, -math.inf, None)),),
    prompt_logprobs=(None, (TokenLogprob(2, -1e-17, 4),)),
    finish_reason="length",
    num_cached_tokens=0,
)
RUN = RequestRun(
    request_id="one",
    sampling={"temperature": 0.0, "logit_bias": {7: -1.5}, "stop": ["a"]},
    output=OUTPUT,
    golden_key="k",
    output_rows=(LogitRow((3, 4), (math.nan, 0.1 + 0.2), math.inf, 3, 1, "d"),),
    refused=None,
)
HISTORY = History(
    schema=HISTORY_SCHEMA,
    edition=EDITION,
    scenario="area/name",
    point={"model": "toy", "dtype": "float32", "block_size": 4},
    model="toy",
    weights_sha256="w",
    dtype="float32",
    device="cpu",
    capabilities=Capabilities("fake", "1", ("float32",), frozenset({"kv"}), missing={"bitwise": "off"}),
    environment={"python": "3"},
    passes=(
        Pass(
            "free",
            {"block_size": 4},
            (Operation("submit", ["one"], {}),),
            {"one": RUN},
            events=({"event": "planned", "scheduled": [["one", 0, 2]]},),
            pool_before=PoolState(9, 9, 0, 0),
            seconds=0.25,
        ),
        Pass("chunk=1", {}, (), {}, error=EngineError("RuntimeError", "no")),
    ),
)


def test_a_round_trip_changes_nothing(tmp_path: Path) -> None:
    read = read_history(write_history(tmp_path, HISTORY))
    assert repr(read) == repr(HISTORY)  # repr, because NaN is not equal to itself


def test_floats_keep_every_bit(tmp_path: Path) -> None:
    read = read_history(write_history(tmp_path, HISTORY))
    row = read.passes[0].requests["one"].output_rows[0]
    assert row.values[1] == 0.1 + 0.2
    assert math.isnan(row.values[0])
    assert row.logsumexp == math.inf


def test_logit_bias_has_numbers_as_keys_again(tmp_path: Path) -> None:
    read = read_history(write_history(tmp_path, HISTORY))
    assert read.passes[0].requests["one"].sampling["logit_bias"] == {7: -1.5}


def test_distinct_points_have_distinct_files(tmp_path: Path) -> None:
    other = replace(HISTORY, point={**HISTORY.point, "block_size": 1})
    assert history_name(HISTORY) != history_name(other)
    assert "/" not in history_name(HISTORY)
    write_history(tmp_path, HISTORY)
    write_history(tmp_path, HISTORY)
    write_history(tmp_path, other)
    assert len(read_histories(tmp_path)) == 2


def test_an_empty_directory_is_an_error_and_not_a_pass(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="no histories here"):
        read_histories(tmp_path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "not JSON"),
        pytest.param("[" * 100_000, "not JSON", id="deep"),
        ("[]", "history schema None"),
        ('{"schema": 99}', "history schema 99; this suite reads"),
        (json.dumps({"schema": HISTORY_SCHEMA}), "not a history"),
        (json.dumps({"schema": HISTORY_SCHEMA, "passes": [{"requests": {"a": {}}}]}), "not a history"),
    ],
)
def test_a_file_that_is_no_history_is_refused_by_name(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ArchiveError, match=problem) as caught:
        read_history(path)
    assert str(path) in str(caught.value)
