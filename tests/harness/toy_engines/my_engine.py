"""my_engine.py: the adapter of llama.py, in the smallest useful form."""

import json

import torch
from llama import Cache, Llama
from tokenizers import Tokenizer

from conformance.adapters.base import Capabilities, EngineOutput, TokenLogprob


class MyEngine:
    def __init__(self, model, options):
        self.path = model.path  # a directory, or a .gguf file
        self.dtype = getattr(torch, options["dtype"])

    def __enter__(self):
        self.llama = Llama(self.path, self.dtype)
        self.tokenizer = Tokenizer.from_file(str(self.path / "tokenizer.json"))
        self.ends = json.loads((self.path / "generation_config.json").read_text())["eos_token_id"]
        return self

    def __exit__(self, *error):
        del self.llama

    def capabilities(self):
        return Capabilities(
            engine="my-engine",
            version="1.0",
            dtypes=("float32", "bfloat16"),
            features=frozenset({"token_ids", "output_ids", "logprobs"}),
        )

    def generate(self, requests):
        return [self.answer(request) for request in requests]

    @torch.inference_mode()
    def answer(self, request):
        sampling, prompt = request.sampling, request.prompt_token_ids
        ends = () if sampling.get("ignore_eos") else self.ends
        cache, fresh, ids, rows = Cache(), prompt, [], []
        while len(ids) < sampling["max_tokens"] and not (ids and ids[-1] in ends):
            seen = len(prompt) + len(ids) - len(fresh)
            positions = torch.arange(seen, seen + len(fresh))
            rows.append(self.llama.forward(torch.tensor(fresh), positions, cache)[-1])
            fresh = [int(rows[-1].argmax())]
            ids += fresh
        count = sampling.get("logprobs")
        return EngineOutput(
            request_id=request.request_id,
            text=self.tokenizer.decode(ids),
            finished=True,
            prompt_token_ids=prompt,
            token_ids=tuple(ids),
            logprobs=None if count is None else tuple(self.top(row, count) for row in rows),
            finish_reason="stop" if ids[-1] in ends else "length",
        )

    def top(self, row, count):
        values, ids = row.log_softmax(-1).topk(max(count, 1))
        pairs = zip(ids.tolist(), values.tolist(), strict=True)
        return tuple(TokenLogprob(token, value, rank) for rank, (token, value) in enumerate(pairs, 1))
