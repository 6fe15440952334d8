"""Faults of attention and its masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conformance.faults.base import GREEDY, HF, LOGITS, VLLM, Seam, Table
from minivllm.attention import base as attention_base
from minivllm.attention import dense as dense_module

__all__ = ["ATTENTION", "tiny"]

ATTENTION = Table("attention")


def tiny(model: str) -> str:
    """The scenario of short prompts, for one model."""
    return f"parity/tiny-families[model={model}]"


WINDOW = "parity/sliding-windows[model=tiny-qwen2-window, attention_backend=dense]"
GEMMA_WINDOW = "parity/sliding-windows[model=tiny-gemma3, attention_backend=dense]"
DENSE = "scheduling/poisoned-pool[model=tiny-llama, attention_backend=dense]"


# --- attention -----------------------------------------------------------------------------------


def _mask_fault(seam: Seam, change: Callable[[Any, int], Any]) -> None:
    """Hide other keys under a window: `change(group, window)` → [n, rows, keys] booleans to hide too."""

    def mask(self: Any, window: int | None) -> Any:
        if window is None or window >= self._longest:
            return genuine(self, window)
        hidden, window = change(self, window)
        seam.fire()
        return self._backend.mask(hidden, causal=False) if hidden is not None else genuine(self, window)

    genuine = seam.set(attention_base._Group, "mask", mask)


@ATTENTION.add(
    "window-one-longer", WINDOW, origin=f"{HF}/issues/39408", at="_Group.mask: bound", detector=GREEDY
)
def _window_longer(seam: Seam) -> None:
    """A window of W sees W + 1 keys, its bound being inclusive."""
    _mask_fault(seam, lambda _, window: (None, window + 1))


@ATTENTION.add(
    "window-of-the-oldest",
    WINDOW,
    origin=f"{HF}/pull/47911",
    at="_Group.mask: start of the ring",
    detector=GREEDY,
)
def _ring_start(seam: Seam) -> None:
    """Past the window, the ring of keys is read from its start instead of from the oldest valid entry."""

    def oldest(group: Any, window: int) -> Any:
        behind = group._last_seen - group._keys >= window
        moved = torch.where(group._last_seen >= window, group._keys == group._last_seen - 1, False)
        return (group._keys > group._last_seen) | behind | moved, window

    _mask_fault(seam, oldest)


@ATTENTION.add(
    "window-in-prefill-only",
    WINDOW,
    origin="https://github.com/ml-explore/mlx-lm/pull/390",
    at="_Group.mask: decode rows",
    detector=GREEDY,
)
def _window_prefill(seam: Seam) -> None:
    """Prompts see a window, generated tokens see everything."""

    def mask(self: Any, window: int | None) -> Any:
        decodes = window is not None and window < self._longest and self._last_seen.shape[1] == 1
        seam.fire(decodes)
        return genuine(self, None if decodes else window)

    genuine = seam.set(attention_base._Group, "mask", mask)


@ATTENTION.add(
    "window-on-every-layer",
    GEMMA_WINDOW,
    origin="https://github.com/InternLM/lmdeploy/issues/3767",
    at="_PagedPlan.attend: layers without a window",
    detector=GREEDY,
)
def _window_everywhere(seam: Seam) -> None:
    """Layers that see everything are given the window of the others."""

    def attend(self: Any, layer: int, q: Any, scale: float, window: int | None = None) -> Any:
        seam.fire(window is None)
        return genuine(self, layer, q, scale, 16 if window is None else window)

    genuine = seam.set(attention_base._PagedPlan, "attend", attend)


@ATTENTION.add(
    "scores-scaled-a-little-wrong",
    tiny("tiny-llama"),
    origin=f"{VLLM}/issues/48621 (scores off by a constant factor)",
    at="_PagedPlan.attend: scale",
    detector=LOGITS,
)
def _scale(seam: Seam) -> None:
    """Scores are one per cent too large."""

    def attend(self: Any, layer: int, q: Any, scale: float, window: int | None = None) -> Any:
        seam.fire()
        return genuine(self, layer, q, scale * 1.01, window)

    genuine = seam.set(attention_base._PagedPlan, "attend", attend)


@ATTENTION.add(
    "heads-share-the-wrong-keys",
    DENSE,
    origin="first principles: KV heads repeated in turn instead of side by side",
    at="dense._repeat_heads: order",
    detector=GREEDY,
)
def _gqa(seam: Seam) -> None:
    """Query heads read the keys of another group."""

    def repeat(x: Any, groups: int) -> Any:
        seam.fire(groups > 1)
        return x.transpose(1, 2).repeat(1, groups, 1, 1).contiguous()

    seam.set(dense_module, "_repeat_heads", repeat)


@ATTENTION.add(
    "row-sees-the-next",
    DENSE,
    origin="first principles: causal mask shifted by one",
    at="DenseBackend.mask: diagonal",
    detector=GREEDY,
)
def _sees_next(seam: Seam) -> None:
    """In a prompt every row sees the position after its own."""

    def mask(self: Any, hidden: Any, *, causal: bool) -> Any:
        if hidden.shape[1] > 1:
            seam.fire()
            hidden = torch.cat((hidden[:, 1:], hidden[:, -1:]), dim=1)
        return genuine(self, hidden, causal=causal)

    genuine = seam.set(dense_module.DenseBackend, "mask", mask)


@ATTENTION.add(
    "picture-rows-are-causal",
    "vision/whole-pictures",
    origin=f"{VLLM}/issues/40106",
    at="attention.base._last_seen: spans that see themselves whole",
    detector=GREEDY,
)
def _not_bidirectional(seam: Seam) -> None:
    """Tokens of a picture, which should see one another, see only what is before them."""

    def last_seen(r: Any) -> Any:
        seam.fire(genuine(r) is not None)

    genuine = seam.set(attention_base, "_last_seen", last_seen)
