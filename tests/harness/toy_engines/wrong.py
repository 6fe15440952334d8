"""Eleven toy engines, each wrong in one subtle way; see `test_toy_engines`."""

import numpy as np
from toy import ToyEngine


class PlainRope(ToyEngine):
    """Does not scale the slow frequencies, which matters far from the beginning only."""

    def frequencies(self):
        theta = self.config["rope_parameters"]["rope_theta"]
        return (1 / theta ** (np.arange(0, 32, 2, dtype=np.float32) / 32)).astype(np.float32)


class TiledHeads(ToyEngine):
    """Query heads share key heads in turn (0 1 0 1) instead of in groups (0 0 1 1)."""

    def share(self, heads, count):
        return np.tile(heads, (1, count // heads.shape[1], 1))


class ZeroEpsilon(ToyEngine):
    """Norms without an epsilon."""

    def norm(self, x, name):
        return self.weights[f"{name}.weight"] * (x / np.sqrt((x * x).mean(-1, keepdims=True)))


class QuickGelu(ToyEngine):
    """An activation that is near SiLU."""

    def activation(self, x):
        return x / (1 + np.exp(np.float32(-1.01) * x))


class SeesTheNext(ToyEngine):
    """The causal mask is one position too wide."""

    def visible(self, queries, keys):
        return keys[None, None, :] <= queries[None, :, None] + 1


class SaltBlind(ToyEngine):
    """Cached prefixes are shared between salts."""

    def cached_prefix(self, salt, tokens):
        self.seen = [(salt, ids, past) for _other, ids, past in self.seen]
        return super().cached_prefix(salt, tokens)


class StaleHit(ToyEngine):
    """A hit takes the first layer's keys rotated by one block too few."""

    def cached_prefix(self, salt, tokens):
        length, past = super().cached_prefix(salt, tokens)
        return (length, [past[1], *past[1:]]) if length else (length, past)


class WholePromptHit(ToyEngine):
    """Tells that it reused the whole prompt, though its last block was computed."""

    def answer(self, request):
        output = super().answer(request)
        told = output.num_cached_tokens and len(request.prompt_token_ids)
        return type(output)(
            **{name: getattr(output, name) for name in output.__slots__} | {"num_cached_tokens": told}
        )


class HalfScores(ToyEngine):
    """Attention reads queries in half precision."""

    def attend(self, q, k, v, positions):
        return super().attend(q.astype(np.float16).astype(np.float32), k, v, positions)


class LatePositions(ToyEngine):
    """Positions of decoded tokens are one too small."""

    def rotate(self, x, positions):
        return super().rotate(x, positions - (len(positions) == 1))


class TopOnly(ToyEngine):
    """Log-probabilities whose normaliser sums over the twenty likeliest tokens only."""

    def log_softmax(self, row):
        top = np.sort(row)[-20:]
        return row - row.max() - np.log(np.exp(top - row.max()).sum())
