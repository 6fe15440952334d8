"""The norms use the usual epsilon, 1e-6, and not the one in config.json.

Why a porter does it: the checkpoint he tried first had 1e-6, and the key is easily misnamed (layer_norm_eps,
norm_eps) behind a `config.get` with a default.

Shows: tokens, logprobs, stages.
Declared first wrong stage: k.0
"""

from small_llama import Llama, SmallLlama


class Model(Llama):
    def __init__(self, path, dtype):
        super().__init__(path, dtype)
        self.config["rms_norm_eps"] = self.config.get("norm_eps", 1e-6)


class Engine(SmallLlama):
    model_class = Model
