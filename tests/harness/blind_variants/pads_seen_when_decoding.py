"""Prompts served together are padded on the left, and decoding forgets to mask the pads.

Why a porter does it: the mask is made for the prompts. A decode step has one row, which "sees everything".
Alone, or as the longest of a batch, a request is right.

Shows: tokens.
Declared first wrong stage: in a batch
"""

import dataclasses

import torch
from small_llama import Llama, SmallLlama


class Model(Llama):
    pads = 0

    def rotate(self, x, positions):
        return super().rotate(x, (positions - self.pads).clamp(min=0))

    def attend(self, q, k, v, positions):
        if len(q) == 1:
            return super().attend(q, k, v, positions)
        real = super().attend(
            q[self.pads :], k[self.pads :], v[self.pads :], positions[self.pads :] - self.pads
        )
        return torch.cat([v.new_zeros(self.pads, *q.shape[1:]), real])


class Engine(SmallLlama):
    model_class = Model
    features = frozenset({"token_ids", "output_ids"})

    def __init__(self, model, options):
        super().__init__(model, options)
        self.chunk, self.reuse = 1 << 30, False

    def generate(self, requests):
        longest = max(len(request.prompt_token_ids) for request in requests)
        return [self.padded(request, longest - len(request.prompt_token_ids)) for request in requests]

    def padded(self, request, pads):
        self.model.pads = pads
        prompt = request.prompt_token_ids
        ids = (self.model.config["pad_token_id"],) * pads + prompt
        output = self.answer(dataclasses.replace(request, prompt_token_ids=ids, text=None, chat=None))
        return dataclasses.replace(output, prompt_token_ids=prompt)
