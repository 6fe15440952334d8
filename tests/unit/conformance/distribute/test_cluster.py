"""What stops a run on a cluster before its first case. On a cluster: tests/integration/test_ray.py."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from conformance.cli import main

RUN = ["run", "--engine", "not_even_here:Engine"]

Refused = Callable[..., str]


class Ray(ModuleType):
    """As much of Ray as is needed to refuse."""

    def __init__(self, nodes: Sequence[dict[str, Any]] = (), error: Exception | None = None) -> None:
        super().__init__("ray")
        self._nodes, self._error, self.running = nodes, error, False

    def init(self, **_: Any) -> None:
        if self._error is not None:
            raise self._error
        self.running = True

    def nodes(self) -> Sequence[dict[str, Any]]:
        return self._nodes

    def shutdown(self) -> None:
        self.running = False


def node(name: str, alive: bool = True, **resources: float) -> dict[str, Any]:
    return {
        "NodeID": name,
        "NodeManagerAddress": name,
        "NodeManagerPort": 1,
        "Resources": {"CPU": 4.0, "memory": 1e9, f"node:{name}": 1.0, **resources},
        "Alive": alive,
    }


@pytest.fixture
def refused(toy_suite: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """refused(arguments…) → what a run that never begins says."""

    def command(*arguments: str) -> str:
        assert main([*RUN, *arguments, "--data", str(toy_suite)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        return " ".join(err.split())

    return command


def test_without_ray_the_way_to_install_it_is_told(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert "install it with: python -m pip install 'minivllm[ray]'" in refused("--ray", "auto")


def test_an_address_of_another_form_is_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", Ray())
    assert "--ray takes HOST:PORT or auto, got 'lab'" in refused("--ray", "lab")


def test_an_address_where_nobody_listens_is_refused_without_asking_ray(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", Ray(error=AssertionError("asked")))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    told = refused("--ray", f"127.0.0.1:{port}", "--ray-timeout", "2")
    assert f"no Ray cluster at 127.0.0.1:{port} (waited up to 2 s): [Errno 111]" in told


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "(waited up to 0.5 s): what listens there takes the connection and does not answer"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak gRPC, as Ray does; it says b'HTTP/1.1 '"),
        (b"\0", "does not speak gRPC, as Ray does; it says b'\\x00'"),
        (b"\0\0\0\4\0\0\0\0\0", "RuntimeError: it was asked"),
    ],
)
def test_an_address_that_does_not_answer_as_ray_does_is_refused_without_asking_ray(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, answer: bytes | None, message: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", Ray(error=RuntimeError("it was asked")))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):  # whoever refuses it hangs up on it
                if answer is not None:
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)
                while connection.recv(100):
                    pass

        there = threading.Thread(target=serve)
        there.start()
        patience = "0.5" if answer is None else "60"
        told = refused("--ray", f"127.0.0.1:{server.getsockname()[1]}", "--ray-timeout", patience)
        there.join()
    assert message in told


def test_what_ray_says_of_a_cluster_that_does_not_fit_is_told(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", Ray(error=RuntimeError("Version mismatch: 2.9\nand so on")))
    assert "no Ray cluster at auto: RuntimeError: Version mismatch: 2.9" in refused("--ray", "auto")


def test_a_label_no_living_node_offers_is_refused_with_what_there_is(
    refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node has the GPU, another the engine's label, and a dead one both."""
    both = {"GPU": 1.0, "lab": 1.0}
    ray = Ray([node("a", GPU=1.0), node("b", lab=1.0), node("c", alive=False, **both)])
    monkeypatch.setitem(sys.modules, "ray", ray)
    arguments = ["--device", "cuda", "--ray-resource", "not_even_here:Engine=lab"]
    told = refused("--ray", "auto", "--ray-timeout", "0.1", *arguments)
    assert "not_even_here:Engine on cuda asks for CPU 1, GPU 1, lab 1" in told
    assert "its nodes are: a:1 (CPU 4, GPU 1); b:1 (CPU 4, lab 1)." in told
    assert not ray.running, "the connection is given back"


def test_a_label_about_nobody_in_the_run_is_refused(refused: Refused) -> None:
    told = refused("--ray", "auto", "--ray-resource", "cuda=GPU")
    assert "this run has no engine or device 'cuda'; it has not_even_here:Engine, auto" in told


def test_jobs_and_ray_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*RUN, "--ray", "auto", "--jobs", "2"])
    assert "not allowed with argument" in capsys.readouterr().err
