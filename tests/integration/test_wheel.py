"""The wheel carries its own models, goldens and scenarios: installed alone, it judges by them."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUDGET = 60 * 2**20


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(out), str(ROOT)]
    subprocess.run([*command, "--disable-pip-version-check"], check=True, cwd=out)
    [path] = out.glob("*.whl")
    return path


def test_the_wheel_holds_the_data_and_keeps_its_budget(wheel: Path) -> None:
    assert wheel.stat().st_size < BUDGET
    names = set(zipfile.ZipFile(wheel).namelist())
    for source in ("golden", "scenarios"):
        here = {
            f"conformance/_data/{p.relative_to(ROOT).as_posix()}"
            for p in (ROOT / source).rglob("*")
            if p.is_file()
        }
        assert here
        assert here <= names


def test_installed_into_an_empty_directory_it_judges_by_its_own_data(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:  # what pip does with a pure-Python wheel
        archive.extractall(site)
    work = tmp_path / "elsewhere"
    work.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    where = subprocess.run(
        [sys.executable, "-P", "-c", "import conformance; print(conformance.__file__)"],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert where.stdout.strip().startswith(str(site))
    run = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "conformance",
            "run",
            "parity/*",
            "--model",
            "tiny-llama",
            "--html",
            "r.html",
        ],
        cwd=work,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "PASS" in run.stdout
    assert (work / "r.html").read_text(encoding="utf-8").rstrip().endswith("</html>")
