"""A finished request leaves a block in the prefix cache whose last row was never computed.

Why a porter does it: the block is full by the count of tokens. But the last generated token was only
sampled, and its keys and values would have been written by the next step. Only a request that goes on
from the whole answer of another, as a second turn of a chat does, reads that row.

Shows: tokens, logprobs, stages.
Declared first wrong stage: k.0
"""

import torch
from small_llama import Cache, SmallLlama


class Engine(SmallLlama):
    def remember(self, salt, ids, cache):
        slots = Cache()
        for layer, (k, v) in cache.tensors.items():
            missing = len(ids) - len(k)
            slots.extend(
                layer, *(torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])]) for rows in (k, v))
            )
        super().remember(salt, ids, slots)
