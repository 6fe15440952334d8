"""toy.py: a Llama in NumPy with a KV cache and prefix caching, and its adapter, in a hundred lines."""

import json

import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from conformance.adapters.base import Capabilities, EngineOutput, TokenLogprob


class ToyEngine:
    def __init__(self, model, options):
        self.path, self.block_size = model.path, options.get("block_size", 16)

    def __enter__(self):
        self.weights = load_file(self.path / "model.safetensors")
        self.tokenizer = Tokenizer.from_file(str(self.path / "tokenizer.json"))
        self.config = json.loads((self.path / "config.json").read_text())
        self.ends = json.loads((self.path / "generation_config.json").read_text())["eos_token_id"]
        self.seen = []  # (salt, ids, keys and values of each layer) of every request so far
        self.rows = {}  # request → its logits
        return self

    def __exit__(self, *error):
        del self.weights, self.seen

    def capabilities(self):
        features = {"token_ids", "output_ids", "logprobs", "forced_decode", "prefix_cache", "stages"}
        return Capabilities("toy", "1.0", ("float32",), frozenset(features), frozenset({"block_size"}))

    def generate(self, requests):
        return [self.answer(request) for request in requests]

    def stages(self, request_id):
        return {"logits": np.stack(self.rows[request_id])}

    # ---- one request: find its prefix in the cache, then token after token -------------------------

    def answer(self, request):
        wanted, forced = request.sampling, request.forced_token_ids or ()
        tokens, ends = list(request.prompt_token_ids), self.end_ids(wanted)
        cached, past = self.cached_prefix(request.cache_salt, tokens)
        fresh, made, choices, rows = tokens[cached:], [], [], []
        while len(made) < wanted["max_tokens"] and not (made and made[-1] in ends):
            logits, past = self.forward(np.array(fresh), past)
            rows.append(logits[-1])
            choices.append(int(logits[-1].argmax()))
            fresh = [forced[len(made)] if len(made) < len(forced) else choices[-1]]
            made += fresh
        self.seen.append((request.cache_salt, (tokens + made)[:-1], past))
        self.rows[request.request_id] = rows
        count = wanted.get("logprobs")
        return EngineOutput(
            request_id=request.request_id,
            text=self.tokenizer.decode(made),
            finished=True,
            prompt_token_ids=tuple(tokens),
            token_ids=tuple(made),
            choice_token_ids=tuple(choices),
            logprobs=None
            if count is None
            else [self.best(r, t, count) for r, t in zip(rows, made, strict=True)],
            finish_reason="stop" if made[-1] in ends else "length",
            num_cached_tokens=cached,
        )

    def end_ids(self, wanted):
        return () if wanted.get("ignore_eos") else self.ends

    def cached_prefix(self, salt, tokens):
        length, found = 0, [(np.zeros((0, 1, 1)),) * 2] * self.config["num_hidden_layers"]
        for other, ids, past in self.seen:
            same = next(
                (i for i, (a, b) in enumerate(zip(ids, tokens, strict=False)) if a != b),
                min(len(ids), len(tokens)),
            )
            whole = min(same, len(tokens) - 1) // self.block_size * self.block_size
            if other == salt and whole > length:
                length, found = whole, [(k[:whole], v[:whole]) for k, v in past]
        return length, found

    def best(self, row, token, count):
        logprobs = self.log_softmax(row.astype(np.float64))
        order = np.argsort(-logprobs, kind="stable").tolist()
        ids = dict.fromkeys([*order[:count], token])
        return tuple(TokenLogprob(i, float(logprobs[i]), order.index(i) + 1) for i in ids)

    def log_softmax(self, row):
        return row - row.max() - np.log(np.exp(row - row.max()).sum())

    # ---- the model --------------------------------------------------------------------------------

    def forward(self, ids, past):
        start = len(past[0][0])
        x, positions, now = self.weights["model.embed_tokens.weight"][ids], start + np.arange(len(ids)), []
        for i, (keys, values) in enumerate(past):
            h = self.norm(x, f"model.layers.{i}.input_layernorm")
            q, k, v = (self.linear(h, i, f"self_attn.{n}_proj").reshape(len(ids), -1, 32) for n in "qkv")
            q, k = self.rotate(q, positions), self.rotate(k, positions)
            if start:
                k, v = np.concatenate([keys, k]), np.concatenate([values, v])
            now.append((k, v))
            x = x + self.linear(self.attend(q, k, v, positions), i, "self_attn.o_proj")
            h = self.norm(x, f"model.layers.{i}.post_attention_layernorm")
            gate, up = self.linear(h, i, "mlp.gate_proj"), self.linear(h, i, "mlp.up_proj")
            x = x + self.linear(self.activation(gate) * up, i, "mlp.down_proj")
        return self.norm(x, "model.norm") @ self.weights["lm_head.weight"].T, now

    def linear(self, x, layer, name):
        return x @ self.weights[f"model.layers.{layer}.{name}.weight"].T

    def norm(self, x, name):
        eps = np.float32(self.config["rms_norm_eps"])
        return self.weights[f"{name}.weight"] * (x / np.sqrt((x * x).mean(-1, keepdims=True) + eps))

    def activation(self, x):
        return x / (1 + np.exp(-x))

    def attend(self, q, k, v, positions):
        k, v = self.share(k, q.shape[1]), self.share(v, q.shape[1])
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(np.float32(q.shape[2]))
        scores = np.where(self.visible(positions, np.arange(len(k))), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)
        return mixed.reshape(len(q), -1)

    def share(self, heads, count):
        return np.repeat(heads, count // heads.shape[1], axis=1)

    def visible(self, queries, keys):
        return keys[None, None, :] <= queries[None, :, None]

    def frequencies(self):
        rope = self.config["rope_parameters"]
        plain = 1 / rope["rope_theta"] ** (np.arange(0, 32, 2, dtype=np.float32) / np.float32(32))
        turns = rope["original_max_position_embeddings"] * plain / (2 * np.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        share = np.clip((turns - low) / (high - low), 0, 1)
        return ((1 - share) * plain / rope["factor"] + share * plain).astype(np.float32)

    def rotate(self, x, positions):
        angles = (positions[:, None].astype(np.float32) * self.frequencies())[:, None, :]
        a, b = x[..., :16], x[..., 16:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
