"""`conformance run --ray` on a cluster of two nodes: `nox -s ray`.

The nodes are processes of this machine. Ray listens on every address a machine has, so the tests run
only where loopback is all there is.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance import EDITION
from conformance.cli import main
from conformance.distribute.calls import identity_of

pytest.importorskip("ray", reason="Ray is not installed; nox -s ray installs it")
if [name for _, name in socket.if_nameindex()] != ["lo"]:
    pytest.skip("there is more than loopback here; nox -s ray takes care of it", allow_module_level=True)

TOY = "conformance.adapters.fake:FakeEngine"
#: Seconds that a machine with much to do may need; `--ray-timeout`.
PATIENCE = "300"

pytestmark = pytest.mark.filterwarnings("ignore")  # of Ray's, about itself

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def marks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("marks")


@pytest.fixture(scope="module")
def cluster(marks: Path) -> Iterator[Any]:
    """Two nodes with a core each, labelled left and right; a worker finds the engines beside this file."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)]))
        patch.setenv("RAY_TEST_MARKS", str(marks))
        patch.syspath_prepend(str(Path(__file__).parent))
        head = {"num_cpus": 1, "resources": {"left": 1}, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(num_cpus=1, resources={"right": 1})
        yield cluster
        cluster.shutdown()


@pytest.fixture
def run(cluster: Any, marks: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """run(arguments…) → exit status, stdout, stderr; told again in the end, for `-rP`."""
    told = []
    for mark in marks.iterdir():
        mark.unlink()

    def command(*arguments: str | Path, ray: str | None = cluster.address) -> tuple[int, str, str]:
        words = ["run", *map(str, arguments)]
        if ray is not None:
            words += ["--ray", ray] + ([] if "--ray-timeout" in words else ["--ray-timeout", PATIENCE])
        status = main(words)
        out, err = capsys.readouterr()
        shown = " ".join(words).replace(f"{marks.parent}/", "")
        told.append(f"$ conformance {shown}\n{out}{err}exit status {status}\n")
        return status, out, err

    yield command
    print(re.sub(r"\x1b\[\d+m", "", "\n".join(told)))


def verdicts(report: Path) -> dict[str, str]:
    values = json.loads(report.read_text(encoding="utf-8"))
    return {f"{case['scenario']} {case['point']}": case["verdict"] for case in values["cases"]}


def test_a_killed_worker_is_replaced_and_the_verdicts_are_those_of_one_machine(
    run: Run, marks: Path, tmp_path: Path
) -> None:
    """minivllm on the node labelled left, killed in the middle; Transformers on the one labelled right."""
    there, histories = tmp_path / "ray.json", tmp_path / "histories"
    what = ["--profile", "smoke", "--area", "parity", "--area", "scheduling", "--model", "tiny-llama"]
    engines = ["--engine", "ray_engines:KilledOnce", "--engine", "hf"]
    labels = ["--ray-resource", "ray_engines:KilledOnce=left", "--ray-resource", "hf=right"]
    status, out, _ = run(*what, *engines, *labels, "--json", there, "--history", histories)
    assert status == 0, out
    loaded = [path.name.split() for path in sorted(marks.iterdir())]
    assert loaded[2][2] == loaded[1][2] != loaded[3][2], (
        "the killed process has loaded before, and never again"
    )
    values = json.loads(there.read_text(encoding="utf-8"))
    assert {entry["asked_for"]: entry["name"] for entry in values["engines"]} == {
        "ray_engines:KilledOnce": "minivllm",
        "hf": "hf",
    }
    for engine in ("minivllm", "hf"):
        here = tmp_path / f"{engine}.json"
        assert run(*what, "--engine", engine, "--json", here, ray=None)[0] == 0
        asked_for = "ray_engines:KilledOnce" if engine == "minivllm" else engine
        of_engine = {
            f"{case['scenario']} {case['point']}": case["verdict"]
            for case in values["cases"]
            if case["engine"] == asked_for
        }
        assert of_engine == verdicts(here)
        ran = [verdict for verdict in of_engine.values() if verdict != "SKIP"]
        saved = histories / asked_for.replace(":", "_")
        assert len(list(saved.iterdir())) == len(ran) > 0, "histories come back"


def test_the_cases_of_a_node_that_is_gone_run_on_another_or_are_errors(
    cluster: Any, run: Run, toy_suite: Path, marks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One engine may run anywhere; the other has asked for a label that goes with the node."""
    monkeypatch.setenv("RAY_TEST_DOOMED", "1")
    doomed = cluster.add_node(num_cpus=2, resources={"doomed": 1})
    monkeypatch.delenv("RAY_TEST_DOOMED")

    def end() -> None:
        while len(list(marks.iterdir())) < 2:
            time.sleep(0.1)
        cluster.remove_node(doomed, allow_graceful=False)

    ending = threading.Thread(target=end)
    ending.start()
    engines = ["--engine", "ray_engines:OnDoomedNode", "--engine", "ray_engines:AlsoOnDoomedNode"]
    label = ["--ray-resource", "ray_engines:AlsoOnDoomedNode=doomed"]
    monkeypatch.setattr("conformance.distribute.cluster.GONE", 5.0)
    status, out, _ = run(*engines, *label, "--data", toy_suite)
    ending.join()
    assert status == 1
    assert out.count("PASS   toy/") == 4
    assert out.count("[engine=ray_engines:OnDoomedNode, ") == 4
    assert out.count("no node is left that offers CPU 1, doomed 1") == 4


def test_a_label_that_nobody_has_is_an_error(run: Run, toy_suite: Path) -> None:
    arguments = ["--engine", TOY, "--device", "cuda", "--ray-timeout", "3", "--data", toy_suite]
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert "no node of the cluster at 127.0.0.1:" in err
    assert f"{TOY} on cuda asks for CPU 1, GPU 1" in err
    assert "(CPU 1, left 1)" in err
    assert "(CPU 1, right 1)" in err


def test_an_engine_that_is_not_on_a_node_is_an_error(run: Run, toy_suite: Path) -> None:
    status, out, err = run("--engine", "not_there:Engine", "--data", toy_suite)
    assert (status, out) == (2, "")
    assert err.count("cannot be imported from not_there:Engine: ModuleNotFoundError") == 2, "of each node"
    assert "label those and say so: --ray-resource not_there:Engine=NAME" in err


def test_another_suite_on_a_node_is_an_error_that_names_both(
    run: Run, toy_suite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = replace(identity_of(toy_suite), edition="99.0.0")
    monkeypatch.setattr("conformance.distribute.cluster.identity_of", lambda _: newer)
    status, out, err = run("--engine", TOY, "--data", toy_suite)
    assert (status, out) == (2, "")
    assert err.count(f" has suite {EDITION} with data {newer.data[:12]}, this machine has suite 99.0.0") == 2


def test_a_cluster_that_is_not_there_is_an_error(run: Run, toy_suite: Path) -> None:
    status, _, err = run("--engine", TOY, "--data", toy_suite, "--ray-timeout", "3", ray="127.0.0.1:1")
    assert status == 2
    assert "no Ray cluster at 127.0.0.1:1 (waited up to 3 s): [Errno 111] Connection refused" in err
