"""Imports of minivllm and conformance, parsed from the source, against the layers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: From the top down. A module may import its own level and any level below it.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"<package>", "__main__", "llm", "server", "cli", "bench"}),
    frozenset({"engine", "build"}),
    frozenset(
        {"scheduler", "admission", "groups", "integrity", "waiting"}
        | {"runner", "media", "output", "tokenizer", "processor", "stages"},
    ),
    frozenset({"models", "attention", "multimodal"}),
    frozenset({"cache", "layers", "sampling"}),
    frozenset({"device", "config", "request", "registry", "errors", "trace"}),
)

#: Where conformance may know minivllm: paths under conformance/.
MEETING_POINTS = ("adapters/minivllm.py", "faults/", "contracts/minivllm.py")

#: What models/ must leave to the ops seam and the attention backends, because the order of its
#: sums decides whether results depend on the batch.
DIRECT_PRODUCTS = frozenset(
    [
        "addbmm",
        "addmm",
        "addmv",
        "addr",
        "baddbmm",
        "bilinear",
        "bmm",
        "chain_matmul",
        "dot",
        "einsum",
        "inner",
        "matmul",
        "mm",
        "multi_head_attention_forward",
        "mv",
        "scaled_dot_product_attention",
        "tensordot",
        "vdot",
        "Bilinear",
        "Linear",
        "MultiheadAttention",
    ]
)

LAZY_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

Graph = dict[str, set[str]]


def python_files(package: Path) -> Iterator[Path]:
    return (path for path in sorted(package.rglob("*.py")) if "__pycache__" not in path.parts)


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path, root: Path) -> set[str]:
    """Dotted names a file imports anywhere in it, lazy "module:attribute" strings included."""
    module = module_name(path, root)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            names.update(f"{base}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and LAZY_TARGET.fullmatch(node.value)
        ):
            names.add(node.value.partition(":")[0])
    return names


def import_graph(package: Path) -> Graph:
    """Module → modules of the same package it imports; names are resolved to the nearest module."""
    root = package.parent
    files = {module_name(path, root): path for path in python_files(package)}
    graph: Graph = {}
    for module, path in files.items():
        targets = set()
        for name in imports_of(path, root):
            while name and name not in files:
                name = name.rpartition(".")[0]
            if name:
                targets.add(name)
        graph[module] = targets - {module}
    return graph


def part_of(module: str) -> str:
    """The part of minivllm a module belongs to: its first name below the package."""
    return module.split(".")[1] if "." in module else "<package>"


def level_of(part: str, layers: Iterable[frozenset[str]]) -> int | None:
    return next((level for level, parts in enumerate(layers) if part in parts), None)


def layer_violations(graph: Graph, layers: tuple[frozenset[str], ...]) -> list[str]:
    found = []
    for module, targets in sorted(graph.items()):
        level = level_of(part_of(module), layers)
        if level is None:
            found.append(f"{module} has no layer")
            continue
        for target in sorted(targets):
            below = level_of(part_of(target), layers)
            if below is not None and below < level:
                found.append(f"{module} imports {target}, which is above it")
    return found


def cycle_in(graph: Mapping[str, set[str]]) -> list[str] | None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return None


def parts_graph(graph: Graph) -> Graph:
    parts: Graph = {}
    for module, targets in graph.items():
        parts.setdefault(part_of(module), set()).update(part_of(target) for target in targets)
    return {part: targets - {part} for part, targets in parts.items()}


def direct_products(source: str) -> list[str]:
    """Matrix products and attention written out in a source text, as "line: what"."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.MatMult):
            found.append(f"{node.lineno}: @")
        elif isinstance(node, ast.Attribute):
            functional = isinstance(node.value, ast.Name) and node.value.id in ("F", "functional", "torch")
            functional |= isinstance(node.value, ast.Attribute) and node.value.attr == "functional"
            if node.attr in DIRECT_PRODUCTS or (node.attr == "linear" and functional):
                found.append(f"{node.lineno}: {node.attr}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            found += [
                f"{node.lineno}: {alias.name}"
                for alias in node.names
                if alias.name in {*DIRECT_PRODUCTS, "linear"}
            ]
    return found


def write_package(root: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = root / "minivllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root / "minivllm"


# --- the repository ------------------------------------------------------------------------------


def test_every_import_of_minivllm_points_down_its_layers() -> None:
    assert layer_violations(import_graph(ROOT / "minivllm"), LAYERS) == []


def test_no_two_modules_of_minivllm_import_each_other_even_indirectly() -> None:
    assert cycle_in(import_graph(ROOT / "minivllm")) is None


def test_no_two_parts_of_minivllm_import_each_other_even_indirectly() -> None:
    assert cycle_in(parts_graph(import_graph(ROOT / "minivllm"))) is None


def test_no_two_modules_of_conformance_import_each_other_even_indirectly() -> None:
    assert cycle_in(import_graph(ROOT / "conformance")) is None


def test_minivllm_never_imports_conformance() -> None:
    guilty = [
        str(path.relative_to(ROOT))
        for path in python_files(ROOT / "minivllm")
        if any(name.split(".")[0] == "conformance" for name in imports_of(path, ROOT))
    ]
    assert guilty == []


def test_conformance_imports_minivllm_only_where_they_meet() -> None:
    guilty = [
        str(path.relative_to(ROOT))
        for path in python_files(ROOT / "conformance")
        if any(name.split(".")[0] == "minivllm" for name in imports_of(path, ROOT))
        and not path.relative_to(ROOT / "conformance").as_posix().startswith(MEETING_POINTS)
    ]
    assert guilty == []


def test_models_leave_every_matrix_product_to_the_ops_seam() -> None:
    guilty = {}
    for path in python_files(ROOT / "minivllm" / "models"):
        found = direct_products(path.read_text(encoding="utf-8"))
        if path.parent.name == "vision":
            # A tower has one picture at a time and no cache: its attention needs no backend.
            found = [product for product in found if not product.endswith(": matmul")]
        if found:
            guilty[str(path.relative_to(ROOT))] = found
    assert guilty == {}


# --- the checks themselves -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "target"),
    [
        ("import minivllm.engine", "minivllm.engine"),
        ("from minivllm.engine import LLMEngine", "minivllm.engine"),
        ("from minivllm import engine", "minivllm.engine"),
        ("from .. import engine", "minivllm.engine"),
        ("from ..engine import LLMEngine", "minivllm.engine"),
        ("def f():\n    import minivllm.engine", "minivllm.engine"),
        ('TARGET = "minivllm.engine:LLMEngine"', "minivllm.engine"),
        ("from minivllm import __version__", "minivllm"),
    ],
)
def test_an_upward_import_is_found_however_it_is_written(tmp_path: Path, line: str, target: str) -> None:
    package = write_package(
        tmp_path, {"__init__.py": "", "engine.py": "", "cache/__init__.py": "", "cache/pool.py": line}
    )
    assert layer_violations(import_graph(package), LAYERS) == [
        f"minivllm.cache.pool imports {target}, which is above it"
    ]


def test_a_downward_import_and_one_within_a_level_are_allowed(tmp_path: Path) -> None:
    package = write_package(
        tmp_path,
        {
            "__init__.py": "",
            "scheduler.py": "import minivllm.waiting\nimport minivllm.trace",
            "waiting.py": "",
            "trace.py": "",
        },
    )
    assert layer_violations(import_graph(package), LAYERS) == []


def test_a_module_without_a_layer_is_named(tmp_path: Path) -> None:
    package = write_package(tmp_path, {"__init__.py": "", "helpers.py": ""})
    assert layer_violations(import_graph(package), LAYERS) == ["minivllm.helpers has no layer"]


def test_a_cycle_between_modules_of_one_level_is_found(tmp_path: Path) -> None:
    package = write_package(
        tmp_path, {"scheduler.py": "import minivllm.waiting", "waiting.py": "import minivllm.scheduler"}
    )
    assert set(cycle_in(import_graph(package)) or ()) == {"minivllm.scheduler", "minivllm.waiting"}


def test_a_cycle_between_parts_is_found_although_no_modules_form_one(tmp_path: Path) -> None:
    package = write_package(
        tmp_path,
        {
            "models/a.py": "import minivllm.attention.x",
            "attention/x.py": "",
            "attention/y.py": "import minivllm.models.b",
            "models/b.py": "",
        },
    )
    graph = import_graph(package)
    assert cycle_in(graph) is None
    assert set(cycle_in(parts_graph(graph)) or ()) == {"models", "attention"}


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("y = x @ w", "@"),
        ("x @= w", "@"),
        ("torch.matmul(x, w)", "matmul"),
        ("x.bmm(w)", "bmm"),
        ("F.linear(x, w)", "linear"),
        ("torch.nn.functional.linear(x, w)", "linear"),
        ("self.proj = nn.Linear(2, 2)", "Linear"),
        ("F.scaled_dot_product_attention(q, k, v)", "scaled_dot_product_attention"),
        ("from torch.nn.functional import linear", "linear"),
        ("f = torch.einsum", "einsum"),
    ],
)
def test_a_matrix_product_is_found_however_it_is_written(source: str, what: str) -> None:
    assert direct_products(source) == [f"1: {what}"]


def test_a_product_through_the_ops_seam_is_allowed() -> None:
    assert direct_products("y = self.ops.linear(x, w) * 2 + ops.rms_norm(x, w, eps)") == []
