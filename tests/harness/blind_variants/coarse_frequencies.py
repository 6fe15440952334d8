"""The rotary frequencies are cast to the compute dtype together with the weights.

Why a porter does it: `model.to(dtype)` casts every buffer, and the table of frequencies is one. In
float32 nothing shows; in bfloat16 the angle of a far position is off by whole steps.

Shows: tokens, logprobs, stages.
Declared first wrong stage: k.0
"""

from small_llama import Llama, SmallLlama


class Model(Llama):
    def rope_frequencies(self):
        frequencies = super().rope_frequencies()
        return frequencies.to(self.weights["model.norm.weight"].dtype).float()


class Engine(SmallLlama):
    model_class = Model
