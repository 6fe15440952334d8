"""Ops "torch-pad": a row has the same bits whatever rows, and however many threads, it meets."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from minivllm.errors import InvariantError
from minivllm.layers.ops_torch import TorchOps
from minivllm.layers.padding import (
    padded_linear,
    stable_gelu,
    stable_gelu_tanh,
    stable_quick_gelu,
    stable_silu,
)
from minivllm.layers.probe import ProbeReport, probe

__all__ = ["PadOps"]


class PadOps(TorchOps):
    """TorchOps in shapes and formulas that do not depend on the batch.

    The norms, relu, tanh and log_softmax of TorchOps treat one row at a time and need no change.

    Attributes:
        report: what the start-up probe found; None until `prepare`.
    """

    name: ClassVar[str] = "torch-pad"
    bitwise: ClassVar[bool] = True

    def __init__(self) -> None:
        self.report: ProbeReport | None = None

    @classmethod
    def supports(cls, device: torch.device) -> str | None:
        return None if device.type == "cpu" else f"its probe knows cpu libraries only, got device {device}"

    def prepare(self, model: nn.Module, *, max_rows: int) -> None:
        """Pick the tile by measurement; see `minivllm.layers.probe.probe`."""
        self.report = probe(model, max_rows=max_rows)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.report is None:
            raise InvariantError("ops 'torch-pad' have no tile yet; call prepare(model, max_rows=…) first")
        return padded_linear(x, weight, bias, self.report.tile)

    def silu(self, x: Tensor) -> Tensor:
        return stable_silu(x)

    def gelu(self, x: Tensor) -> Tensor:
        return stable_gelu(x)

    def gelu_tanh(self, x: Tensor) -> Tensor:
        return stable_gelu_tanh(x)

    def quick_gelu(self, x: Tensor) -> Tensor:
        return stable_quick_gelu(x)
