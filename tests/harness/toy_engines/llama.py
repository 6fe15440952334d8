"""llama.py: a small Llama in plain PyTorch, which the suite is plugged into."""

import json
import math

import torch
from safetensors.torch import load_file


class Llama:
    """The model: [n] token ids and their positions -> [n, vocab] logits, appending to a KV cache."""

    def __init__(self, path, dtype):
        self.config = json.loads((path / "config.json").read_text())
        self.weights = {n: w.to(dtype) for n, w in load_file(path / "model.safetensors").items()}
        self.heads = self.config["num_attention_heads"]
        self.kv_heads = self.config["num_key_value_heads"]
        self.head_dim = self.config.get("head_dim") or self.config["hidden_size"] // self.heads
        self.layers = self.config["num_hidden_layers"]
        self.frequencies = self.rope_frequencies()

    def rope_frequencies(self):
        rope = self.config.get("rope_parameters") or {"rope_theta": self.config.get("rope_theta", 10000.0)}
        powers = torch.arange(0, self.head_dim, 2).float() / self.head_dim
        frequencies = 1.0 / rope["rope_theta"] ** powers
        kind = rope.get("rope_type", "default")
        if kind == "llama3":
            turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            smooth = ((turns - low) / (high - low)).clamp(0, 1)
            frequencies = (1 - smooth) * frequencies / rope["factor"] + smooth * frequencies
        elif kind != "default":
            raise NotImplementedError(f"rope kind {kind}")
        return frequencies

    def linear(self, x, name):
        return torch.nn.functional.linear(x, self.weights[name + ".weight"])

    def norm(self, x, name):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return self.weights[name + ".weight"] * wide.to(x.dtype)

    def rotate(self, x, positions):
        angles = torch.outer(positions.float(), self.frequencies)
        angles = torch.cat([angles, angles], dim=-1)[:, None, :]
        first, second = x.chunk(2, dim=-1)
        return x * angles.cos().to(x.dtype) + torch.cat([-second, first], dim=-1) * angles.sin().to(x.dtype)

    def attend(self, q, k, v, positions):
        """[n, heads, d] queries over [m, kv heads, d] keys and values of positions 0 to m - 1."""
        k = k.repeat_interleave(self.heads // self.kv_heads, dim=1)
        v = v.repeat_interleave(self.heads // self.kv_heads, dim=1)
        scores = torch.einsum("nhd,mhd->hnm", q, k) / math.sqrt(self.head_dim)
        hidden = torch.arange(len(k))[None, :] > positions[:, None]
        weights = scores.masked_fill(hidden, -math.inf).float().softmax(-1).to(v.dtype)
        return torch.einsum("hnm,mhd->nhd", weights, v)

    def forward(self, ids, positions, cache, note=lambda *_: None):
        x = self.weights["model.embed_tokens.weight"][ids]
        note("embeddings", x)
        note("positions", positions)
        for i in range(self.layers):
            name = f"model.layers.{i}."
            y = self.norm(x, name + "input_layernorm")
            q, k, v = (
                self.linear(y, f"{name}self_attn.{part}_proj").unflatten(-1, (-1, self.head_dim))
                for part in "qkv"
            )
            q, k = self.rotate(q, positions), self.rotate(k, positions)
            k, v = cache.extend(i, k, v)
            x = x + self.linear(self.attend(q, k, v, positions).flatten(1), name + "self_attn.o_proj")
            y = self.norm(x, name + "post_attention_layernorm")
            gate, up = self.linear(y, name + "mlp.gate_proj"), self.linear(y, name + "mlp.up_proj")
            x = x + self.linear(torch.nn.functional.silu(gate) * up, name + "mlp.down_proj")
            note(f"hidden.{i}", x)
        x = self.norm(x, "model.norm")
        note("final", x)
        tied = self.config.get("tie_word_embeddings")
        return self.linear(x, "model.embed_tokens" if tied else "lm_head").float()


class Cache:
    """Keys and values of one request, a tensor per layer; given those of a prefix to start with."""

    def __init__(self, tensors=()):
        self.tensors = dict(tensors)

    def extend(self, layer, k, v):
        if layer in self.tensors:
            old_k, old_v = self.tensors[layer]
            k, v = torch.cat([old_k, k]), torch.cat([old_v, v])
        self.tensors[layer] = k, v
        return k, v
