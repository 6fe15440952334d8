"""Devices by name, and the numeric switches."""

from __future__ import annotations

import errno

import pytest
import torch

from minivllm.device import DEVICE_ORDER, pin_numerics, ran_out_of_memory, resolve_device, total_memory
from minivllm.errors import ConfigError


def absent(monkeypatch: pytest.MonkeyPatch, *, cuda: int = 0, mps: bool = False) -> None:
    """Pretend this machine has so many CUDA devices, and Metal or not."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"), [(2, True, "cuda"), (0, True, "mps"), (1, False, "cuda"), (0, False, "cpu")]
)
def test_auto_takes_the_first_present_device_of_the_published_order(
    monkeypatch: pytest.MonkeyPatch, cuda: int, mps: bool, expected: str
) -> None:
    absent(monkeypatch, cuda=cuda, mps=mps)
    assert DEVICE_ORDER == ("cuda", "mps", "cpu")
    assert resolve_device("auto") == torch.device(expected)


def test_the_memory_of_the_cpu_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = total_memory(torch.device("cpu"))
    assert memory is None or memory > 2**28

    def hidden(_name: str) -> int:
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr("os.sysconf", hidden, raising=False)
    assert total_memory(torch.device("cpu")) is None


def test_a_present_device_is_taken_by_name_and_index(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, cuda=2, mps=True)
    for name in ("cpu", "cpu:0", "cuda", "cuda:1", "mps"):
        assert resolve_device(name) == torch.device(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda", "no CUDA device"),
        ("cuda:0", "no CUDA device"),
        ("mps", "no Metal"),
        ("cpu:1", "only one cpu"),
    ],
)
def test_an_absent_device_is_refused_with_what_is_present(
    monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    absent(monkeypatch)
    with pytest.raises(ConfigError, match=rf"'{name}' is not available: .*{message}.*; present: cpu"):
        resolve_device(name)


def test_an_index_past_the_last_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, cuda=2)
    with pytest.raises(ConfigError, match="there are 2 CUDA devices"):
        resolve_device("cuda:2")


@pytest.mark.parametrize("name", ["", "gpu", "meta", "cuda:x", "CPU"])
def test_an_unknown_device_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown device '{name}'.*cuda, mps, cpu"):
        resolve_device(name)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 8.00 GiB"),
        type("ArrayMemoryError", (MemoryError,), {})("as NumPy's"),
        torch.OutOfMemoryError("CUDA out of memory"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        OSError("out of memory error when reading image file"),  # Pillow's decoders
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 8.00 GB)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_memory_that_ran_out_is_told_whoever_says_so(error: Exception) -> None:
    assert ran_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOENT, "No such file", "out of memory.png"),
        OSError("image file is truncated"),
        RuntimeError("shapes cannot be multiplied"),
        ValueError("out of memory, says a template"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_not_memory_that_ran_out(error: BaseException) -> None:
    assert not ran_out_of_memory(error)


def test_pinning_restores_full_precision_whatever_was_set_before() -> None:
    torch.set_float32_matmul_precision("medium")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True
    pin_numerics()
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    assert not torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
