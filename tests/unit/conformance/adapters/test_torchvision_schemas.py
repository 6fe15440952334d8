"""A torchvision that describes operators nobody registered can be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = """
import torch

@torch.library.register_fake("torchvision::nms")
def nms(*_):
    raise AssertionError

@torch.library.register_fake("torchvision::qroi_align")
def align(*_):
    raise AssertionError
"""


def imported(directory: Path, before: str) -> subprocess.CompletedProcess[str]:
    package = directory / "torchvision"
    package.mkdir(exist_ok=True)
    (package / "__init__.py").write_text(SOURCE)
    code = f"import sys; sys.path.insert(0, {str(directory)!r}); {before}; import torchvision; print('done')"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_declared_operators_make_it_importable(tmp_path: Path) -> None:
    schemas = "import conformance.adapters.torchvision_schemas as s; s.install(); s.install()"
    assert "does not exist" in imported(tmp_path, "pass").stderr
    assert imported(tmp_path, schemas).stdout.strip() == "done"
