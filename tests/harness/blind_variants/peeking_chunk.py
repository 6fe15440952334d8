"""In every chunk of a prompt but the first, each row sees one token too many: the next one.

Why a porter does it: the causal mask of a chunk is a triangle moved right by the tokens before it. With
`triu(diagonal=past + 1)` written over a matrix that starts at the chunk, one is easily counted twice.
Decoding has nothing to the right and stays right.

Shows: tokens, logprobs, stages.
Declared first wrong stage: hidden.0
"""

from small_llama import Llama, SmallLlama


class Model(Llama):
    def attend(self, q, k, v, positions):
        later_chunk = len(q) > 1 and len(k) > len(q)
        return super().attend(q, k, v, positions + 1 if later_chunk else positions)


class Engine(SmallLlama):
    model_class = Model
