"""Where tensors live, and the numeric switches that are pinned there."""

from __future__ import annotations

import errno
import os

import torch

from minivllm.errors import ConfigError

__all__ = ["DEVICE_ORDER", "pin_numerics", "ran_out_of_memory", "resolve_device", "total_memory"]

DEVICE_ORDER = ("cuda", "mps", "cpu")
"""What "auto" tries, first to last; the cpu is always there."""

#: What errors without a type or number of their own say when memory has run out.
_OUT_OF_MEMORY = ("defaultcpuallocator", "out of memory", "bad_alloc", "_status_alloc_failed")


def resolve_device(name: str) -> torch.device:
    """Turn a device name into a device that exists.

    Args:
        name: "auto" (first of `DEVICE_ORDER` that is present), "cpu", "cuda", "cuda:1" or "mps".

    Raises:
        ConfigError: the name is unknown, or this machine has no such device.
    """
    if name == "auto":
        return next(torch.device(kind) for kind in DEVICE_ORDER if _absence(kind, None) is None)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in DEVICE_ORDER:
        known = ", ".join(DEVICE_ORDER)
        raise ConfigError(f"unknown device {name!r}; use auto, one of {known}, or cuda with an index")
    problem = _absence(device.type, device.index)
    if problem is not None:
        present = ", ".join(kind for kind in DEVICE_ORDER if _absence(kind, None) is None)
        raise ConfigError(f"device {name!r} is not available: {problem}; present: {present} (or use 'auto')")
    return device


def total_memory(device: torch.device) -> int | None:
    """Bytes of memory that a device has; None where the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not a POSIX system, or one that hides it
        return None


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: that may pass, so it must not be called the fault of a request or a file.

    Whoever turns all exceptions of foreign code into an error of its own lets these through, and the
    step that broke off is done again. The system says it by a number; torch on the CPU, CUDA libraries
    and Pillow's decoders by nothing but the text of a plain RuntimeError or OSError.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    said = str(error).lower() if isinstance(error, RuntimeError | OSError) else ""
    return any(sign in said for sign in _OUT_OF_MEMORY)


def pin_numerics() -> None:
    """Switch off every option that trades float32 or bfloat16 precision for speed.

    TF32 and "medium" products change results by far more than rounding
    (https://pytorch.org/docs/stable/notes/numerical_accuracy.html). The switches are global to the
    process, so whoever needs the numbers calls this: `make_ops` does.
    """
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def _absence(kind: str, index: int | None) -> str | None:
    """Why this device cannot be used, or None when it can."""
    if kind == "cuda":
        if not torch.cuda.is_available():
            return "this torch finds no CUDA device"
        count = torch.cuda.device_count()
        return None if (index or 0) < count else f"there are {count} CUDA devices, counted from 0"
    if kind == "mps":
        return None if torch.backends.mps.is_available() else "this torch finds no Metal (MPS) device"
    return None if not index else "there is only one cpu; leave the index out"
