"""Attention by PyTorch's scaled_dot_product_attention: portable, and its kernels never hold all scores."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F  # noqa: N812 - the name every PyTorch reader knows
from torch import Tensor

from minivllm.attention.base import PagedBackend

__all__ = ["SdpaBackend"]


class SdpaBackend(PagedBackend):
    """One fused call per request. Bits depend on rows, length and the kernel PyTorch picks."""

    name: ClassVar[str] = "sdpa"

    def mask(self, start: int, num_tokens: int) -> Tensor | None:
        if num_tokens == 1:
            return None
        positions = torch.arange(start + num_tokens, device=self.cache.device)
        return positions <= positions[start:, None]

    def attend_request(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        rows, length = q.shape[0], k.shape[0]
        # From position 0 on, the mask is the triangle that the kernels know without reading one.
        whole = rows == length and rows > 1
        out = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=None if whole else mask,
            is_causal=whole,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out[0].transpose(0, 1)
