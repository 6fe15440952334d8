"""The llama3 rope scaling switches at the middle of its band instead of going over smoothly.

Why a porter does it: the two ends are what the paper's figure shows, and with the usual numbers (theta
500000, 8192 tokens) only three of 64 frequencies lie in between.

Shows: tokens, logprobs.
Declared first wrong stage: alone
"""

import math

import torch
from small_llama import Llama, SmallLlama


class Model(Llama):
    def rope_frequencies(self):
        rope = self.config["rope_parameters"]
        if rope.get("rope_type") != "llama3":
            return super().rope_frequencies()
        frequencies = rope["rope_theta"] ** -(torch.arange(0, self.head_dim, 2).float() / self.head_dim)
        turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        slow = turns < (rope["low_freq_factor"] + rope["high_freq_factor"]) / 2
        return torch.where(slow, frequencies / rope["factor"], frequencies)


class Engine(SmallLlama):
    model_class = Model
    features = SmallLlama.features - {"stages", "prefix_cache", "chunked_prefill"}
