"""Every module says what is public, and what it says is there."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import pytest

import conformance
import minivllm


def modules(package: ModuleType) -> list[str]:
    found = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
    return sorted(m.name for m in found if not m.name.endswith("__main__"))


@pytest.mark.parametrize("name", [*modules(minivllm), *modules(conformance)])
def test_every_module_has_a_docstring_and_its_public_names_exist(name: str) -> None:
    module = importlib.import_module(name)
    if not module.__file__ or (module.__file__.endswith("__init__.py") and not hasattr(module, "__all__")):
        # A package without a face of its own: its modules are the face.
        assert (
            not [n for n in vars(module) if not n.startswith("_") and n != "annotations"] or module.__path__
        )
        return
    assert module.__doc__
    for public in module.__all__:
        assert hasattr(module, public), f"{name}.__all__ names {public!r}, which is not there"


def test_the_lazy_package_offers_exactly_its_public_names() -> None:
    assert set(minivllm.__all__) <= set(dir(minivllm))
    for public in minivllm.__all__:
        assert getattr(minivllm, public) is not None
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        minivllm.Nothing  # noqa: B018  (the access is what is tested)


@pytest.mark.parametrize("name", [n for n in minivllm.__all__ if n != "__version__"])
def test_public_classes_are_documented(name: str) -> None:
    assert (getattr(minivllm, name).__doc__ or "").strip()
