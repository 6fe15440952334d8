"""Where a run took place, for its report and its histories."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from conformance import EDITION

__all__ = ["describe_environment", "shared_environment"]

#: Packages whose version can change an answer.
_PACKAGES = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "pillow")

#: Variables that change how CPU arithmetic is split.
_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MKL_CBWR", "ATEN_CPU_CAPABILITY")


def describe_environment() -> dict[str, str]:
    """Suite edition, interpreter, machine, and the versions and variables that change answers."""
    facts = {
        "suite": EDITION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpus": str(os.cpu_count()),
    }
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    facts.update({name: os.environ[name] for name in _VARIABLES if name in os.environ})
    return facts


def shared_environment(several: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """One description of several runs: where they differ, every value, in order of appearance."""
    names = dict.fromkeys(name for one in several for name in one)
    return {name: " | ".join(dict.fromkeys(one.get(name, "not told") for one in several)) for name in names}


def _cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's marketing name; platform.processor() is empty on Linux."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
