"""Attention in the order of operations of Transformers' eager attention."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from minivllm.attention.base import PagedBackend

__all__ = ["DenseBackend"]


class DenseBackend(PagedBackend):
    """Scores, additive mask, float32 softmax, weighted sum: each a whole matrix.

    Bit for bit Transformers' eager attention with a cache, when one request runs alone with the
    same rows per step. Memory is heads × rows × length per request.
    """

    name: ClassVar[str] = "dense"

    def mask(self, hidden: Tensor, *, causal: bool) -> Tensor | None:
        if hidden.shape[1] == 1 and causal:
            return None
        mask = torch.zeros(hidden.shape, dtype=self.cache.dtype, device=self.cache.device)
        return mask.masked_fill_(hidden, torch.finfo(self.cache.dtype).min)[:, None]

    def attend_group(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        groups = q.shape[2] // k.shape[2]
        key, value = _repeat_heads(k, groups), _repeat_heads(v, groups)
        scores = torch.matmul(q.transpose(1, 2), key.transpose(2, 3)) * scale
        if mask is not None:
            scores = scores + mask
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, value).transpose(1, 2)


def _repeat_heads(x: Tensor, groups: int) -> Tensor:
    """[n, keys, kv_heads, dim] → contiguous [n, kv_heads * groups, keys, dim], each head `groups` times."""
    return x.transpose(1, 2).repeat_interleave(groups, dim=1).contiguous()
