"""Log-probabilities are normalised over the returned entries instead of over the vocabulary.

Why a porter does it: top-k first and softmax after is cheaper, and the entries add up to one, which looks
right. Tokens and order are untouched.

Shows: tokens, logprobs.
Declared first wrong stage: sampling
"""

import torch
from small_llama import SmallLlama, TokenLogprob


class Engine(SmallLlama):
    features = SmallLlama.features - {"stages"}

    def entries(self, count, row, token):
        order = row.argsort(descending=True, stable=True).tolist()
        top = order[:count] if token in order[:count] else [*order[:count], token]
        values = row[torch.tensor(top)].log_softmax(-1).tolist()
        return tuple(TokenLogprob(i, value, order.index(i) + 1) for i, value in zip(top, values, strict=True))
