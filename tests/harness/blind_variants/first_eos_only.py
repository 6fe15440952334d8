"""Only the end token of config.json stops an answer; generation_config.json names three.

Why a porter does it: config.json has an `eos_token_id`, and for base models it is all there is. Chat models
end their turn with another one.

Shows: tokens, logprobs.
Declared first wrong stage: sampling
"""

from small_llama import SmallLlama


class Engine(SmallLlama):
    features = SmallLlama.features - {"stages", "prefix_cache", "chunked_prefill"}

    def stop_ids(self):
        return frozenset([self.model.config["eos_token_id"]])
