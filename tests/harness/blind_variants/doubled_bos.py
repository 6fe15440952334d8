"""A chat begins with two BOS tokens.

Why a porter does it: the chat template writes BOS already; its text then goes through the tokenizer, which
adds another one.

Shows: tokens, logprobs.
Declared first wrong stage: prompt ids
"""

from small_llama import SmallLlama


class Engine(SmallLlama):
    features = SmallLlama.features - {"stages", "prefix_cache", "chunked_prefill"}

    def prompt_ids(self, request):
        if request.chat is None:
            return super().prompt_ids(request)
        text = self.tokenizer.apply_chat_template(
            list(request.chat), add_generation_prompt=True, tokenize=False
        )
        bos = [self.tokenizer.bos_token_id]
        ids = self.tokenizer(text)["input_ids"]
        return ids if ids[:2] == bos * 2 else bos + ids
