"""Makes a torchvision importable whose compiled operators do not fit the torch beside it.

vLLM's CPU wheel brings torch for CPU and a torchvision built for CUDA, which fails while it is imported:
it describes operators that its library never registered. Declaring them beforehand is enough for its
transforms, which are plain torch; calling one of the operators still fails, by name.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

__all__ = ["OPERATORS", "install"]

#: Names of torchvision's operators; the schema of none matters, as none is called.
OPERATORS = (
    "nms",
    "qnms",
    "roi_align",
    "qroi_align",
    "_roi_align_backward",
    "roi_pool",
    "_roi_pool_backward",
    "ps_roi_align",
    "_ps_roi_align_backward",
    "ps_roi_pool",
    "_ps_roi_pool_backward",
    "deform_conv2d",
    "_deform_conv2d_backward",
)


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the operators when torchvision is first looked for, then steps aside."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if name == "torchvision":
            sys.meta_path.remove(self)
            _declare()
        return None


def install() -> None:
    """Declare the operators as soon as torchvision is imported.

    Only where torchvision's own library cannot be loaded; where it can, both would declare them.
    """
    if "torchvision" not in sys.modules and not any(isinstance(f, _BeforeTorchvision) for f in sys.meta_path):
        sys.meta_path.insert(0, _BeforeTorchvision())


def _declare() -> None:
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's
    for operator in OPERATORS:
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}(Tensor x) -> Tensor")  # type: ignore[no-untyped-call]  # torch's
    _kept.append(library)


#: A library's declarations last as long as the object.
_kept: list[object] = []
