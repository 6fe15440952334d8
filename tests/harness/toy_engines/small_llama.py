"""The small Llama with everything an adapter can cheaply offer; `blind_variants` are made from it."""

import json

import numpy as np
import torch
from llama import Cache, Llama
from transformers import AutoTokenizer

from conformance.adapters.base import Capabilities, EngineOutput, TokenLogprob

BLOCK = 4  # prefixes are reused in multiples of so many tokens


class SmallLlama:
    """The adapter. Requests are served one after the other; whole blocks of prefixes are reused."""

    model_class = Llama
    features = frozenset(
        {
            "token_ids",
            "text",
            "chat",
            "output_ids",
            "logprobs",
            "prompt_logprobs",
            "forced_decode",
            "chunked_prefill",
            "prefix_cache",
            "stages",
        }
    )

    def __init__(self, model, options):
        self.path = model.path
        self.dtype = getattr(torch, options["dtype"])
        self.chunk = options.get("max_num_batched_tokens", 64)
        self.reuse = options.get("enable_prefix_caching", True)
        self.captured = {}
        self.blocks = {}  # key of a block -> per layer (k, v)

    def __enter__(self):
        self.model = self.model_class(self.path, self.dtype)
        self.tokenizer = AutoTokenizer.from_pretrained(self.path)
        self.eos = self.stop_ids()
        return self

    def __exit__(self, *error):
        del self.model

    def capabilities(self):
        return Capabilities(
            engine="small-llama",
            version="1.0",
            dtypes=("float32", "bfloat16"),
            features=self.features,
            options=frozenset({"max_num_batched_tokens", "enable_prefix_caching"}),
        )

    def generate(self, requests):
        return [self.answer(request) for request in requests]

    def stop_ids(self):
        eos = json.loads((self.path / "generation_config.json").read_text())["eos_token_id"]
        return frozenset(eos if isinstance(eos, list) else [eos])

    def prompt_ids(self, request):
        if request.text is not None:
            return self.tokenizer(request.text)["input_ids"]
        if request.chat is not None:
            chat = list(request.chat)
            return self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)[
                "input_ids"
            ]
        return list(request.prompt_token_ids)

    def key(self, salt, ids, end):
        return salt, tuple(ids[:end])

    def reused(self, salt, prompt):
        """The cache to start with, and how many tokens it holds: never the last one of the prompt."""
        cache, end = Cache(), BLOCK
        while end < len(prompt) and self.key(salt, prompt, end) in self.blocks:
            for layer, (k, v) in self.blocks[self.key(salt, prompt, end)].items():
                cache.extend(layer, k, v)
            end += BLOCK
        return cache, end - BLOCK

    def remember(self, salt, ids, cache):
        """Keep the whole blocks of what was computed; the last generated token was not."""
        for end in range(BLOCK, len(cache.tensors[0][0]) + 1, BLOCK):
            rows = slice(end - BLOCK, end)
            self.blocks.setdefault(
                self.key(salt, ids, end), {i: (k[rows], v[rows]) for i, (k, v) in cache.tensors.items()}
            )

    @torch.inference_mode()
    def answer(self, request):
        sampling, forced, capture = request.sampling, request.forced_token_ids, request.capture
        prompt, cache, known, seen = self.prompt_ids(request), Cache(), 0, {}
        wants_prompt = sampling.get("prompt_logprobs") is not None or "prompt_logits" in capture
        if self.reuse and not wants_prompt:
            cache, known = self.reused(request.cache_salt, prompt)

        def note(name, rows):
            if name.split(".")[0] in capture:
                seen.setdefault(name, []).append(rows)

        def run(start, ids):
            return self.model.forward(torch.tensor(ids), torch.arange(start, start + len(ids)), cache, note)

        parts = [run(at, prompt[at : at + self.chunk]) for at in range(known, len(prompt), self.chunk)]
        prompt_logits, logits = torch.cat(parts)[:-1], parts[-1][-1]
        ids, choices, rows, reason = [], [], [], "length"
        stops = frozenset() if sampling.get("ignore_eos") or forced is not None else self.eos
        most = sampling["max_tokens"] if forced is None else len(forced)
        while len(ids) < most and reason == "length":
            if ids:
                logits = run(len(prompt) + len(ids) - 1, ids[-1:])[-1]
            rows.append(logits)
            choices.append(int(logits.argmax()))
            ids.append(choices[-1] if forced is None else forced[len(ids)])
            reason = "stop" if ids[-1] in stops else "length"
        if self.reuse:
            self.remember(request.cache_salt, prompt + ids, cache)
        self.captured[request.request_id] = self.arrays(capture, seen, known, cache, prompt_logits, rows)
        return EngineOutput(
            request_id=request.request_id,
            text=self.tokenizer.decode(ids, skip_special_tokens=True),
            finished=True,
            prompt_token_ids=tuple(prompt),
            token_ids=tuple(ids),
            choice_token_ids=None if forced is None else tuple(choices),
            logprobs=self.logprobs(sampling.get("logprobs"), rows, ids),
            prompt_logprobs=self.prompt_logprobs(sampling.get("prompt_logprobs"), prompt_logits, prompt),
            num_cached_tokens=known,
            finish_reason=reason,
        )

    def logprobs(self, count, rows, ids):
        if count is None or "logprobs" not in self.features:
            return None
        return tuple(self.entries(count, row, token) for row, token in zip(rows, ids, strict=True))

    def prompt_logprobs(self, count, rows, prompt):
        if count is None or "prompt_logprobs" not in self.features:
            return None
        return (None, *self.logprobs(count, rows, prompt[1:]))

    def entries(self, count, row, token):
        values = row.log_softmax(-1)
        order = values.argsort(descending=True, stable=True).tolist()
        top = order[:count] if token in order[:count] else [*order[:count], token]
        return tuple(TokenLogprob(i, float(values[i]), order.index(i) + 1) for i in top)

    def arrays(self, capture, seen, known, cache, prompt_logits, rows):
        """What `stages` shows; rows that came from the prefix cache were not computed: NaN, or -1."""
        found = {}
        for name, parts in seen.items():
            array = torch.cat(parts).numpy() if name == "positions" else torch.cat(parts).float().numpy()
            missing = np.full((known, *array.shape[1:]), -1 if name == "positions" else np.nan, array.dtype)
            found[name] = np.concatenate([missing, array])
        if "kv" in capture:
            for i, (k, v) in cache.tensors.items():
                found[f"k.{i}"], found[f"v.{i}"] = k.float().numpy(), v.float().numpy()
        if "logits" in capture:
            found["logits"] = torch.stack(rows).numpy()
        if "prompt_logits" in capture:
            found["prompt_logits"] = prompt_logits.numpy()
        return found

    def stages(self, request_id):
        return self.captured.get(request_id, {})
