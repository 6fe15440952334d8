"""Attention by PyTorch's scaled_dot_product_attention: portable, and its kernels never hold all scores."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F  # noqa: N812 - the name every PyTorch reader knows
from torch import Tensor

from minivllm.attention.base import PagedBackend

__all__ = ["SdpaBackend"]


class SdpaBackend(PagedBackend):
    """One fused call per group. Bits depend on rows, lengths and the kernel PyTorch picks."""

    name: ClassVar[str] = "sdpa"
    batches_decode: ClassVar[bool] = True

    def mask(self, hidden: Tensor, *, causal: bool) -> Tensor | None:
        size, rows, keys = hidden.shape
        # A whole prompt is the triangle that the kernels know; one decode row sees everything.
        if size == 1 and rows in (1, keys) and causal:
            return None
        return ~hidden[:, None]

    def attend_group(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None and q.shape[1] > 1,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return out.transpose(1, 2)
