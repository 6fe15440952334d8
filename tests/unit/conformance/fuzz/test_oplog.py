"""Failing examples on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.fuzz.allocator_world import AllocatorSetup
from conformance.fuzz.driver import Failure
from conformance.fuzz.engine_jobs import EngineSetup
from conformance.fuzz.operations import (
    ALLOCATOR_OPERATIONS,
    ENGINE_OPERATIONS,
    Abort,
    Add,
    Commit,
    Fork,
    Grant,
    PlanStep,
    Run,
    from_plain,
    to_plain,
)
from conformance.fuzz.oplog import LogError, file_stem, load_log, save_log

ALLOCATOR = Failure(
    "package.module:Adapter",
    "context @ kv.py:read",
    "LawBroken: …",
    AllocatorSetup(num_blocks=4, block_size=2, vocabulary=2, max_len=8),
    (Grant("r0", (1, 0, 1), 2, "s", ((0, 2, "a"),)), Run(), Fork("r0", "r1", 1)),
    7,
    19,
)
ENGINE = Failure(
    "package.module:Adapter",
    "leak @ x.py:y",
    "LawBroken: …",
    EngineSetup(4, 2, 2, 3, 4, 10, policy="priority"),
    (Add("r0", (1,), 3, n=2), PlanStep(), Commit(), Abort("r0")),
    0,
    1,
)


@pytest.mark.parametrize("failure", [ALLOCATOR, ENGINE], ids=["allocator", "engine"])
def test_a_log_comes_back_as_it_was_written(failure: Failure, tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    save_log(failure, path)
    assert load_log(path) == failure
    lines = path.read_text().splitlines()
    assert sum('"op"' in line for line in lines) == len(failure.operations), "one operation a line"


@pytest.mark.parametrize("kind", [*ALLOCATOR_OPERATIONS.values(), *ENGINE_OPERATIONS.values()])
def test_every_operation_has_a_plain_form(kind: Any) -> None:
    values: dict[str, Any] = {"tokens": (1, 2), "spans": (), "stop_ids": (), "salt": None, "fail": None}
    fields = {
        name: values.get(name, f"r{i}" if name in ("request", "child") else 1)
        for i, name in enumerate(kind._fields)
        if name not in kind._field_defaults
    }
    operation = kind(**fields)
    assert from_plain(json.loads(json.dumps(to_plain(operation)))) == operation


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nonsense", "JSONDecodeError"),
        ('{"kind": "something else", "schema": 1}', "not a conformance fuzz operation log of schema 1"),
        ('{"kind": "conformance fuzz operation log", "schema": 1}', "KeyError: 'target'"),
        ("[]", "AttributeError"),
        pytest.param("[" * 100_000, "RecursionError", id="deep"),
    ],
)
def test_a_file_that_is_no_log_is_refused_with_its_name(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "log.json"
    path.write_text(text)
    with pytest.raises(LogError, match=words) as caught:
        load_log(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LogError, match="FileNotFoundError"):
        load_log(tmp_path / "none.json")


def test_the_file_name_tells_law_seed_and_example() -> None:
    assert file_stem(ALLOCATOR) == "context-seed7-example19"
