"""Workers of a Ray cluster, chosen by resources of their nodes.

The cluster's workers have the suite installed, of the same edition and with the same goldens; they are
asked before the first case. What is sent to them is a few hundred bytes per case.
"""

from __future__ import annotations

import os
import pickle
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from conformance.distribute.calls import Call, Identity, Lost, identity_of
from conformance.distribute.labels import Labels, shown
from conformance.suite import Case

__all__ = ["Cluster", "ClusterError"]

#: How often a case is tried whose worker dies.
TRIES = 2

#: Seconds between two looks at what nodes are left.
GLANCE = 5.0

#: Seconds after which a label that went with its node is not expected back.
GONE = 60.0

#: How an HTTP/2 client begins, gRPC's too: the preface, and an empty frame of settings (RFC 9113, 3.4).
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0" + b"\4" + b"\0" + b"\0\0\0\0"
_FRAME_HEADER, _SETTINGS = 9, 4

_HOST_PORT = re.compile(r"(?:\w+://)?(?P<host>[^:/]+|\[[^\]]+\]):(?P<port>\d+)")


class ClusterError(RuntimeError):
    """The cluster cannot be reached, or cannot run what is asked for; the message says why."""


@dataclass(frozen=True, slots=True)
class _Node:
    id: str
    name: str
    resources: Mapping[str, float]

    def offers(self, wanted: Mapping[str, float]) -> bool:
        return all(self.resources.get(name, 0.0) >= amount for name, amount in wanted.items())

    def __str__(self) -> str:
        # Ray's own entries are about memory and the node itself.
        own = {n: a for n, a in self.resources.items() if "memory" not in n and not n.startswith("node:")}
        return f"{self.name} ({shown(own)})"


class Cluster:
    """A running cluster; see `Workers`. Use it as a context manager.

    Args:
        address: HOST:PORT of its head, from one of its machines; "auto" finds it there.
        labels: what a case asks for.
        timeout: seconds for the cluster to answer, and for a node with the asked-for labels to be there.
        root: the suite's data on the workers; None is their own suite's.

    Raises:
        ClusterError: on entering: Ray is not installed, or the cluster does not answer.
    """

    def __init__(self, address: str, labels: Labels, *, timeout: float, root: Path | None = None) -> None:
        self._address, self._labels, self._timeout, self._root = address, labels, timeout, root
        self._identity = identity_of(root)
        self._ray: Any = None

    def __enter__(self) -> Cluster:
        try:
            self._ray = import_module("ray")
        except ImportError as error:
            raise ClusterError(
                f"--ray needs the package ray, which cannot be imported here ({error}); "
                "install it with: python -m pip install 'minivllm[ray]'"
            ) from error
        _must_answer(self._address, self._timeout)
        try:
            self._ray.init(address=self._address, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # what Ray raises has many types; each means the same here
            told = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise ClusterError(f"no Ray cluster at {self._address}: {told}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    # ---- before the run -------------------------------------------------------------------------

    def check(self, cases: Iterable[Case]) -> None:
        """See that the cluster can run these cases.

        Raises:
            ClusterError: no node offers a label; or a node that may get cases has not this suite, or
                cannot import an engine.
        """
        places = sorted({(case.engine, case.device) for case in cases})
        deadline = time.monotonic() + self._timeout
        while missing := self._nowhere(places, self._nodes()):
            if time.monotonic() > deadline:
                nodes = "; ".join(map(str, self._nodes())) or "none"
                told = " and ".join(f"{e} on {d} asks for {shown(w)}" for (e, d), w in missing.items())
                raise ClusterError(
                    f"no node of the cluster at {self._address} offers what is asked for: {told}. After "
                    f"{self._timeout:g} s its nodes are: {nodes}. A node gets a label by "
                    "ray start --resources='{\"NAME\": 1}'; --ray-resource WHO=NAME asks for another"
                )
            time.sleep(min(1.0, self._timeout / 4))
        self._ask_nodes(places)

    def _nowhere(
        self, places: Iterable[tuple[str, str]], nodes: Sequence[_Node]
    ) -> dict[tuple[str, str], dict[str, float]]:
        """The places no node offers → what they ask for."""
        wanted = {place: self._labels.of(*place) for place in places}
        return {place: w for place, w in wanted.items() if not any(node.offers(w) for node in nodes)}

    def _nodes(self) -> list[_Node]:
        return [
            _Node(
                node["NodeID"], f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}", node["Resources"]
            )
            for node in self._ray.nodes()
            if node["Alive"]
        ]

    def _ask_nodes(self, places: Sequence[tuple[str, str]]) -> None:
        """Ask every node that may get a case who it is, without waiting for its resources."""
        by_id = import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
        # A process of its own: it sees no GPU, and must not be kept for cases that do.
        ask = self._ray.remote(num_cpus=0, max_calls=1, max_retries=1)(_introducer())
        asked = {}
        for node in self._nodes():
            engines = sorted({e for e, d in places if node.offers(self._labels.of(e, d))})
            if engines:
                strategy = by_id(node_id=node.id, soft=False)
                asked[ask.options(scheduling_strategy=strategy).remote(engines, self._root)] = node
        ready, late = self._ray.wait(list(asked), num_returns=len(asked), timeout=self._timeout)
        if late:
            names = ", ".join(asked[ref].name for ref in late)
            raise ClusterError(
                f"no answer from node {names} within {self._timeout:g} s; --ray-timeout waits longer"
            )
        problems = [problem for ref in ready for problem in self._problems(asked[ref], ref)]
        if problems:
            raise ClusterError("\n".join(problems))

    def _problems(self, node: _Node, ref: Any) -> list[str]:
        try:
            told = self._ray.get(ref)
        except Exception as error:  # its code is unknown, and so is what it raises
            told = f"{type(error).__name__}: {error}"
        if isinstance(told, str):
            return [f"node {node.name} cannot run the suite: {told}"]
        identity, engines = Identity(*told[0]), told[1]
        if identity != self._identity:
            return [f"node {node.name} has {identity}, this machine has {self._identity}; use one suite"]
        return [
            f"on node {node.name}: {trouble}; if it is for other nodes, label those and say so: "
            f"--ray-resource {engine}=NAME"
            for engine, trouble in engines.items()
        ]

    # ---- the run --------------------------------------------------------------------------------

    def map(self, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        perform = self._ray.remote(_performer())
        places: dict[Any, int] = {}
        for index, call in enumerate(calls):
            payload = pickle.dumps((call.function, call.arguments))
            options = self._options(call)
            places[perform.options(**options).remote(self._identity.as_tuple(), self._root, payload)] = index
        began = time.monotonic()
        gone_since: float | None = None
        while places:
            ready, _ = self._ray.wait(list(places), num_returns=1, timeout=GLANCE)
            for ref in ready:
                yield places.pop(ref), self._answer(ref, began)
            if ready:
                gone_since = None
                continue
            # Nothing came: a label may have gone with its node, and Ray would wait for ever.
            waiting = {(calls[index].engine, calls[index].device) for index in places.values()}
            gone = self._nowhere(waiting, self._nodes())
            gone_since = (gone_since or time.monotonic()) if gone else None
            if gone_since is not None and time.monotonic() - gone_since > GONE:
                for ref, index in list(places.items()):
                    wanted = gone.get((calls[index].engine, calls[index].device))
                    if wanted is not None:
                        del places[ref]
                        self._ray.cancel(ref, force=True)
                        reason = f"no node is left that offers {shown(wanted)}"
                        yield index, Lost(reason, time.monotonic() - began)

    def _options(self, call: Call) -> dict[str, Any]:
        resources = self._labels.of(call.engine, call.device)
        named = {"num_cpus": resources.pop("CPU"), "num_gpus": resources.pop("GPU", 0)}
        return {**named, "resources": resources, "max_retries": TRIES - 1, "name": call.label}

    def _answer(self, ref: Any, began: float) -> Any:
        try:
            return self._ray.get(ref)
        except Exception as error:  # as above
            told = " ".join(f"{type(error).__name__}: {error}".split())
            return Lost(f"its worker gave no answer, {TRIES} times: {told}", time.monotonic() - began)


def _must_answer(address: str, timeout: float) -> None:
    """Raise ClusterError unless somebody there speaks gRPC, as Ray does: Ray itself would try for minutes."""
    if address == "auto":
        return
    match = _HOST_PORT.fullmatch(address)
    if match is None:
        raise ClusterError(f"--ray takes HOST:PORT or auto, got {address!r}")
    try:
        with socket.create_connection((match["host"].strip("[]"), int(match["port"])), timeout) as there:
            trouble = None if _uses_tls() else _trouble_with(there, time.monotonic() + timeout)
    except (OSError, OverflowError) as error:
        trouble = str(error)
    if trouble is not None:
        raise ClusterError(f"no Ray cluster at {address} (waited up to {timeout:g} s): {trouble}")


def _uses_tls() -> bool:
    """Whether Ray is told to encrypt, as it reads it: then only Ray can greet."""
    return os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true")


def _trouble_with(there: socket.socket, deadline: float) -> str | None:
    """What is wrong with the answer to a greeting; None if it begins with a frame of settings."""
    there.sendall(_HELLO)
    answer = b""
    while len(answer) < _FRAME_HEADER:
        there.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            more = there.recv(_FRAME_HEADER - len(answer))
        except TimeoutError:
            return "what listens there takes the connection and does not answer"
        if not more:
            break
        answer += more
    if len(answer) == _FRAME_HEADER and answer[3] == _SETTINGS and not any(answer[5:]):
        return None
    return f"what listens there does not speak gRPC, as Ray does; it says {answer!r}"


# Functions inside of functions, so that they travel by value: a worker without the suite, or with
# another, is to say so, and not to fail at finding them.


def _introducer() -> Any:
    def introduce(engines: list[str], root: Path | None) -> Any:
        import os

        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        try:
            from conformance.distribute import calls
        except ImportError as missing:
            try:
                from conformance import EDITION
            except ImportError:
                return f"it is not installed there ({missing})"
            return f"it has suite {EDITION}, which cannot be distributed ({missing})"
        try:
            told = calls.introduce(engines, root)
        except OSError as missing:
            return str(missing)
        return told.identity.as_tuple(), dict(told.engines)

    return introduce


def _performer() -> Any:
    def perform(identity: tuple[str, str], root: Path | None, payload: bytes) -> Any:
        import os

        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        from conformance.distribute import calls

        return calls.perform(calls.Identity(*identity), root, payload)

    return perform
