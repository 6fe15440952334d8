"""The control plane runs without torch and transformers, so it can be fuzzed in microseconds."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

TORCH_FREE = (
    "minivllm",
    "minivllm.admission",
    "minivllm.bench",
    "minivllm.cache",
    "minivllm.config",
    "minivllm.errors",
    "minivllm.groups",
    "minivllm.integrity",
    "minivllm.output",
    "minivllm.registry",
    "minivllm.request",
    "minivllm.scheduler",
    "minivllm.trace",
    "minivllm.waiting",
)

IMPORT_BLOCKED = """
import importlib, sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers"):
            raise ImportError(f"{name} is blocked")

sys.meta_path.insert(0, Block())
for name in sys.argv[1:]:
    importlib.import_module(name)
print("imported", len(sys.argv) - 1)
"""


def import_without_torch(*modules: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", IMPORT_BLOCKED, *modules],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def with_submodules(module: str) -> list[str]:
    directory = ROOT.joinpath(*module.split("."))
    if module == "minivllm" or not directory.is_dir():
        return [module]
    return [module, *(info.name for info in pkgutil.walk_packages([str(directory)], prefix=f"{module}."))]


def test_the_control_plane_imports_with_torch_and_transformers_blocked() -> None:
    modules = [name for module in TORCH_FREE for name in with_submodules(module)]
    outcome = import_without_torch(*modules)
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.split() == ["imported", str(len(modules))]


@pytest.mark.parametrize("module", ["minivllm.runner", "minivllm.layers.ops"])
def test_the_block_is_real_since_the_data_plane_does_not_import_under_it(module: str) -> None:
    outcome = import_without_torch(module)
    assert outcome.returncode != 0
    assert "torch is blocked" in outcome.stderr
