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

    def mask(self, start: int, num_tokens: int) -> Tensor | None:
        if num_tokens == 1:
            return None
        positions = torch.arange(start + num_tokens, device=self.cache.device)
        hidden = positions > positions[start:, None]
        mask = torch.zeros(hidden.shape, dtype=self.cache.dtype, device=self.cache.device)
        return mask.masked_fill_(hidden, torch.finfo(self.cache.dtype).min)

    def attend_request(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        query = q.transpose(0, 1)
        groups = q.shape[1] // k.shape[1]
        key = _repeat_heads(k, groups)
        value = _repeat_heads(v, groups)
        scores = torch.matmul(query, key.transpose(1, 2)) * scale
        if mask is not None:
            scores = scores + mask
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.matmul(weights, value).transpose(0, 1)


def _repeat_heads(x: Tensor, groups: int) -> Tensor:
    """[length, kv_heads, dim] → contiguous [kv_heads * groups, length, dim], each head `groups` times."""
    return x.transpose(0, 1).repeat_interleave(groups, dim=0).contiguous()
