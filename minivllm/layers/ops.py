"""The `ops` seam: every matrix product, norm and activation of a model goes through here.

Two implementations: "torch" does what Transformers does, operation for operation; "torch-pad"
gives a row the same bits whatever rows it is computed with. Attention has a seam of its own
(`minivllm.attention`).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from minivllm.device import pin_numerics
from minivllm.errors import ConfigError
from minivllm.layers.ops_pad import PadOps
from minivllm.layers.ops_torch import TorchOps
from minivllm.registry import Registry

__all__ = ["OPS", "Ops", "make_ops"]


class Ops(Protocol):
    """What a model may compute with. A result depends on the arguments only, once prepared.

    Attributes:
        name: the registered name, for reports.
        bitwise: whether a row's result depends on nothing but that row and the weights.
    """

    @property
    def name(self) -> str: ...

    @property
    def bitwise(self) -> bool: ...

    def prepare(self, model: nn.Module, *, max_rows: int) -> None:
        """Check that these ops keep their promise for this model's shapes; before the first batch.

        Args:
            model: what computes rows of several requests at once; its weights are already on their
                device, in their dtype.
            max_rows: most rows of one step.

        Raises:
            ConfigError: they do not; names the shape that failed.
        """
        ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [rows, in] @ weight [out, in] transposed (+ bias [out]) → [rows, out]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last axis, in float32 inside; x [..., dim], weight [dim]."""
        ...

    def rms_norm_plus_one(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`rms_norm` with 1 + weight for weight, and float32 until after the product (Gemma's norm)."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Mean and variance norm over the last axis; x [..., dim], weight [dim], bias [dim]."""
        ...

    def silu(self, x: Tensor) -> Tensor:
        """x * sigmoid(x), element by element."""
        ...

    def gelu(self, x: Tensor) -> Tensor:
        """x * (1 + erf(x / √2)) / 2, element by element."""
        ...

    def gelu_tanh(self, x: Tensor) -> Tensor:
        """`gelu` with the tanh approximation of arXiv:1606.08415, element by element."""
        ...

    def quick_gelu(self, x: Tensor) -> Tensor:
        """x * sigmoid(1.702 x), element by element."""
        ...

    def relu(self, x: Tensor) -> Tensor:
        """max(x, 0), element by element."""
        ...

    def tanh(self, x: Tensor) -> Tensor:
        """Hyperbolic tangent, element by element."""
        ...

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Log-probabilities over the last axis, in float32; logits [rows, vocab]."""
        ...


OPS: Registry[type[TorchOps] | type[PadOps]] = Registry("ops backend")
OPS.register("torch", TorchOps)
OPS.register("torch-pad", PadOps)


def make_ops(name: str, device: torch.device) -> Ops:
    """Build the ops of this name and pin the numeric switches they rely on.

    Raises:
        ConfigError: the name is unknown, or these ops cannot run on this device.
    """
    ops = OPS.get(name)
    problem = ops.supports(device)
    if problem is not None:
        raise ConfigError(f"ops {name!r} cannot run here: {problem}")
    pin_numerics()
    return ops()
