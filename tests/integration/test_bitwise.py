"""The determinism contract, in bits: `batch_invariant=True` on the tiny checkpoints.

A request's logits and KV are a function of the weights, the dtype and its tokens, of nothing else.
The oracle is Transformers' own modules with our operations patched in, run alone; the negative
control is plain operations under the same changes.
"""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the name every PyTorch reader knows
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from minivllm.attention.tiled import KEY_TILE, tiled_attention
from minivllm.config import EngineConfig
from minivllm.engine import LLMEngine
from minivllm.layers import Ops
from minivllm.layers.ops_pad import PadOps
from minivllm.layers.probe import threads
from minivllm.models import LanguageModel
from minivllm.request import SamplingParams
from minivllm.trace import Event

MODELS = ("tiny-llama", "tiny-qwen2", "tiny-qwen3")
CASES = [*((model, "float32") for model in MODELS), ("tiny-llama", "bfloat16")]
#: Windows and two ropes: less of everything than CASES, the scenarios do the rest.
GEMMA = ("tiny-gemma3", "float32")
NEW_TOKENS = 9

#: Lengths around the softmax's short rows, the blocks, and one and two tiles of keys.
LENGTHS = (1, 3, 5, 14, 16, 17, 33, 120, 190, 193, 390)


def prompts() -> dict[str, tuple[int, ...]]:
    """Name → token ids; "again" names share a long prefix with another prompt, or all of it."""
    draw = random.Random(7)
    made = {f"p{n}": tuple(draw.randrange(3, 430) for _ in range(n)) for n in LENGTHS}
    made["again-p120"] = made["p120"]
    made["again-p190"] = (*made["p190"][:101], 9, 8, 7)
    made["again-p33"] = (*made["p33"], *made["p17"])
    return made


@dataclass
class Bits:
    """What one request computed; rows that were never computed are absent."""

    token_ids: tuple[int, ...]
    logits: dict[int, bytes]
    kv: dict[str, np.ndarray[Any, np.dtype[np.generic]]]

    def differs(self, other: Bits) -> str | None:
        """The first difference, in words, or None."""
        if self.token_ids != other.token_ids:
            return f"tokens {self.token_ids} != {other.token_ids}"
        wrong = [p for p in self.logits.keys() & other.logits.keys() if self.logits[p] != other.logits[p]]
        if wrong:
            return f"logits of positions {sorted(wrong)[:5]}"
        for name, rows in self.kv.items():
            n = min(len(rows), len(other.kv[name]))
            if rows[:n].tobytes() != other.kv[name][:n].tobytes():
                unequal = (rows[:n] != other.kv[name][:n]).any((1, 2))
                return f"{name} at position {int(np.flatnonzero(unequal)[0])}"
        return None


@dataclass
class Arm:
    """One way to run the same requests.

    Attributes:
        options: of the engine.
        order: names, in order of submission; all of them if empty.
        seed: of arrivals and preemptions; None submits everything at once and preempts nothing.
        poison: fill unused slots with NaN before every step.
        threads: inside operators.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    order: Sequence[str] = ()
    seed: int | None = None
    poison: bool = False
    threads: int = 1


@dataclass
class Lab:
    """Runs arms on one model, loaded once."""

    path: str
    dtype: str
    model: LanguageModel | None = None
    ops: Ops | None = None

    def run(self, arm: Arm, *, bitwise: bool = True) -> tuple[dict[str, Bits], Counter[str]]:
        """Bits by request, and how often each kind of event happened."""
        events: Counter[str] = Counter()

        def sink(event: Event) -> None:
            events[type(event).__name__] += 1

        options = {"block_size": 16, "num_kv_blocks": 256, **arm.options}
        config = EngineConfig(
            model=self.path, dtype=self.dtype, batch_invariant=bitwise, prefix_cache_seed=1, **options
        )
        with threads(arm.threads):
            engine = LLMEngine(config, trace=sink, model=self.model)
            self.model, self.ops = engine.model, engine.model.ops
            return self._drive(engine, arm), events

    def _drive(self, engine: LLMEngine, arm: Arm) -> dict[str, Bits]:
        draw = random.Random(arm.seed)
        known = prompts()
        waiting = list(arm.order or known)
        tokens: dict[str, tuple[int, ...]] = {}
        while waiting or engine.has_unfinished_requests():
            while waiting and (arm.seed is None or draw.random() < 0.4):
                name = waiting.pop(0)
                sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
                capture = ("prompt_logits", "logits", "kv")
                engine.add_request(name, {"prompt_token_ids": list(known[name])}, sampling, capture=capture)
                tokens.setdefault(name, ())
            if arm.seed is not None and draw.random() < 0.15:
                live = [name for name in tokens if name in engine._scheduler.requests]
                if live:
                    engine.preempt_request(draw.choice(live))
            if arm.poison:
                engine.poison()
            for output in engine.step():
                assert output.error is None
                tokens[output.request_id] = output.outputs[0].token_ids
        return {name: _bits(known[name], ids, engine.stages(name)) for name, ids in tokens.items()}


def _bits(prompt: Sequence[int], ids: tuple[int, ...], stages: Mapping[str, Any]) -> Bits:
    rows = dict(enumerate(stages["prompt_logits"]))
    rows |= {len(prompt) - 1 + i: row for i, row in enumerate(stages["logits"])}
    logits = {position: row.tobytes() for position, row in rows.items() if not np.isnan(row).any()}
    return Bits(ids, logits, {name: a for name, a in stages.items() if name[:2] in ("k.", "v.")})


@cache
def laboratory(path: str, dtype: str) -> tuple[Lab, dict[str, Bits]]:
    """A lab, and the bits of every request run in it alone: whole prefill, no prefix cache, one thread."""
    made = Lab(path, dtype)
    options = {"enable_prefix_caching": False}
    return made, {name: made.run(Arm(options, order=[name]))[0][name] for name in prompts()}


@pytest.fixture
def lab(case: tuple[str, str], checkpoints: Any) -> Lab:
    return laboratory(str(checkpoints / case[0]), case[1])[0]


@pytest.fixture
def alone(case: tuple[str, str], checkpoints: Any) -> dict[str, Bits]:
    return laboratory(str(checkpoints / case[0]), case[1])[1]


def same(expected: Mapping[str, Bits], got: Mapping[str, Bits]) -> dict[str, str]:
    found = {name: expected[name].differs(got[name]) for name in got}
    return {name: what for name, what in found.items() if what is not None}


CHUNKS = {"enable_prefix_caching": False, "max_num_batched_tokens": 1, "max_num_seqs": 1}
SOME = {"max_num_batched_tokens": 300}  # several steps, so that the last prompts find the first ones' blocks
ARMS = {
    "all at once": (Arm({"enable_prefix_caching": False}), ()),
    "other order": (Arm({"enable_prefix_caching": False}, order=sorted(prompts())), ()),
    "two threads": (Arm({"enable_prefix_caching": False}, threads=2), ()),
    "chunk 1": (Arm(CHUNKS, order=["p5", "p16", "p33", "p193"]), ()),
    "chunk 7": (Arm({"max_num_batched_tokens": 7, "max_num_seqs": 3}), ()),
    "block 1": (Arm({"block_size": 1, "num_kv_blocks": 3000, **SOME}, poison=True), ("PrefixHit",)),
    "block 3": (Arm({"block_size": 3, "num_kv_blocks": 900, **SOME}, poison=True), ("PrefixHit",)),
    "block 256": (Arm({"block_size": 256, "num_kv_blocks": 60}, poison=True), ()),
    "small pool": (
        Arm({"block_size": 4, "num_kv_blocks": 130, "max_num_batched_tokens": 50}, poison=True),
        ("Preempted", "PrefixHit"),
    ),
}


#: One model goes through everything, the others through what has most in it.
RUNS = [(case, arm) for case in CASES for arm in ARMS if case == CASES[0] or arm in ("chunk 7", "small pool")]
#: Odd seeds run on two threads.
FUZZ = [(CASES[0], 0), (CASES[0], 1), *((case, 4) for case in CASES[1:-1]), (CASES[-1], 5), (GEMMA, 6)]


@pytest.mark.parametrize(("case", "name"), RUNS, ids=str)
def test_one_change_of_circumstances_changes_no_bit(lab: Lab, alone: dict[str, Bits], name: str) -> None:
    arm, must_happen = ARMS[name]
    got, events = lab.run(arm)
    assert [kind for kind in must_happen if not events[kind]] == []
    assert same(alone, got) == {}


@pytest.mark.parametrize(("case", "seed"), FUZZ, ids=str)
def test_a_fuzz_of_all_circumstances_changes_no_bit(lab: Lab, alone: dict[str, Bits], seed: int) -> None:
    draw = random.Random(seed)
    order = list(prompts())
    draw.shuffle(order)
    block_size = draw.choice([1, 2, 5, 8, 16])
    options = {
        "block_size": block_size,
        "num_kv_blocks": 2 + draw.randrange(450, 900) // block_size,
        "max_num_batched_tokens": draw.choice([5, 33, 64, 257]),
        "max_num_seqs": draw.choice([2, 4, 64]),
    }
    got, events = lab.run(Arm(options, order=order, seed=seed, poison=True, threads=1 + seed % 2))
    assert events["Preempted"] > 0
    assert events["PrefixHit"] > 0
    assert same(alone, got) == {}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_running_again_changes_no_bit(lab: Lab, alone: dict[str, Bits]) -> None:
    assert same(alone, lab.run(Arm({"enable_prefix_caching": False}, order=["p193"]))[0]) == {}


# ---- the oracle: Transformers' modules with our operations ------------------------------------


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """`tiled_attention` in the shape of a Transformers attention function; the mask is its own."""
    del module, attention_mask
    end, rows, tile = key.shape[2], query.shape[2], KEY_TILE[query.dtype]
    missing = -end % tile
    keys, queries = torch.arange(end + missing), torch.arange(end - rows, end)[:, None]
    hidden = (keys > queries) | (keys <= queries - (sliding_window or end))
    k, v = (F.pad(part.transpose(1, 2), (0, 0, 0, 0, 0, missing)) for part in (key, value))
    return tiled_attention(query.transpose(1, 2), k, v, hidden[None], scaling), None


def patched(lab: Lab) -> nn.Module:
    """Transformers' model with its products, norms, activation and attention replaced by ours."""
    ops = lab.ops
    assert isinstance(ops, PadOps)
    ALL_ATTENTION_FUNCTIONS.register("minivllm_tiled", _attend)
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        lab.path, dtype=getattr(torch, lab.dtype), attn_implementation="eager"
    ).eval()
    model.config._attn_implementation = "minivllm_tiled"  # type: ignore[union-attr] # a config, not a Tensor

    def linear(module: nn.Linear) -> Callable[[Tensor], Tensor]:
        return lambda x: ops.linear(x.flatten(0, -2), module.weight, module.bias).view(*x.shape[:-1], -1)

    def norm(module: Any) -> Callable[[Tensor], Tensor]:
        if type(module).__name__ == "Gemma3RMSNorm":
            return lambda x: ops.rms_norm_plus_one(x, module.weight, module.eps)
        return lambda x: ops.rms_norm(x, module.weight, module.variance_epsilon)

    replaced: Counter[str] = Counter()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = linear(module)  # type: ignore[assignment] # patched on purpose
        elif type(module).__name__.endswith("RMSNorm"):
            module.forward = norm(module)
        elif type(module).__name__ == "SiLUActivation":
            module.forward = ops.silu
        elif type(module).__name__ == "GELUTanh":
            module.forward = ops.gelu_tanh
        else:
            continue
        replaced[type(module).__name__] += 1
    assert len(replaced) == 3, replaced
    return model


@torch.inference_mode()
def _oracle(
    model: nn.Module, ids: Sequence[int], chunks: Sequence[int], keep: int = 0
) -> tuple[Tensor, DynamicCache]:
    """Logits of the last `keep` rows of each chunk (0: all), and the cache, computed in these chunks."""
    held, rows, start = DynamicCache(), [], 0
    # transformers 5.24 renamed the argument, and warns of the old name
    argument = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    for size in chunks:
        part = torch.tensor([ids[start : start + size]])
        rows.append(model(part, use_cache=True, logits_to_keep=keep, **{argument: held}).logits[0].float())
        start += size
    return torch.cat(rows), held


@pytest.mark.parametrize("case", [*CASES, GEMMA], ids=str)
@pytest.mark.parametrize("cached", [False, True], ids=["whole", "token by token after the prompt"])
def test_the_engine_equals_transformers_with_our_operations_patched_in(
    lab: Lab, alone: dict[str, Bits], cached: bool
) -> None:
    model = patched(lab)
    for name, prompt in prompts().items():
        bits = alone[name]
        ids = [*prompt, *bits.token_ids[:-1]]
        chunks = [len(prompt), *[1] * (len(ids) - len(prompt))] if cached else [len(ids)]
        logits, kept = _oracle(model, ids, chunks)
        assert sorted(bits.logits) == list(range(len(ids)))
        wrong = [p for p, row in bits.logits.items() if logits[p].numpy().tobytes() != row]
        assert wrong == [], name
        for layer, held in enumerate(kept.layers):
            for kind, rows in (("k", held.keys), ("v", held.values)):
                mine = bits.kv[f"{kind}.{layer}"]
                assert mine.tobytes() == rows[0].transpose(0, 1).float().numpy().tobytes(), (
                    name,
                    kind,
                    layer,
                )


@pytest.mark.parametrize("case", [*CASES, GEMMA], ids=str)
def test_plain_operations_on_one_request_equal_stock_transformers_with_a_cache(
    case: tuple[str, str], checkpoints: Any
) -> None:
    path, dtype = str(checkpoints / case[0]), case[1]
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).eval()
    # A product of one row depends on whether its weight starts at a multiple of 16 bytes, and a weight
    # mapped from a file may start anywhere. Ours are copied to aligned memory; so are these.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    options: dict[str, Any] = {
        "attention_backend": "dense",
        "enable_prefix_caching": False,
        "num_kv_blocks": 64,
    }
    config = EngineConfig(model=path, dtype=dtype, **options)
    engine = LLMEngine(config)
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for name, prompt in prompts().items():
        if name.startswith("again") or len(prompt) in (3, 16, 190):  # alone they are like their neighbours
            continue
        engine.add_request(name, {"prompt_token_ids": prompt}, sampling, capture=("logits", "kv"))
        while engine.has_unfinished_requests():
            outputs = engine.step()
        ids = [*prompt, *outputs[-1].outputs[0].token_ids[:-1]]
        logits, kept = _oracle(model, ids, [len(prompt), *[1] * (NEW_TOKENS - 1)], keep=1)
        stages = engine.stages(name)
        assert stages["logits"].tobytes() == logits.numpy().tobytes(), name
        for layer, held in enumerate(kept.layers):
            for kind, rows in (("k", held.keys), ("v", held.values)):
                assert (
                    stages[f"{kind}.{layer}"].tobytes() == rows[0].transpose(0, 1).float().numpy().tobytes()
                )


# ---- the tests above can fail ------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_plain_operations_do_not_survive_chunks_of_one(model: str, checkpoints: Any) -> None:
    bitwise = Lab(str(checkpoints / model), "float32")
    order = ["p5", "p16", "p33"]
    bitwise.run(Arm(CHUNKS, order=order[:1]))
    assert isinstance(bitwise.ops, PadOps)
    assert bitwise.ops.report is not None
    if not bitwise.ops.report.plain_changes_bits:
        pytest.skip("no power here: plain products keep their bits on this machine")
    plain = Lab(str(checkpoints / model), "float32")
    off = {"enable_prefix_caching": False, "attention_backend": "dense"}
    whole = {name: plain.run(Arm(off, order=[name]), bitwise=False)[0][name] for name in order}
    by_one = plain.run(Arm({**CHUNKS, **off}, order=order), bitwise=False)[0]
    assert sorted(same(whole, by_one)) == sorted(order)


def test_one_changed_bit_of_one_key_is_seen(checkpoints: Any) -> None:
    lab = Lab(str(checkpoints / "tiny-llama"), "float32")
    bits = lab.run(Arm(order=["p14"]))[0]["p14"]
    other = lab.run(Arm(order=["p14"]))[0]["p14"]
    assert bits.differs(other) is None
    other.kv["k.1"].view(np.int32)[3, 0, 0] ^= 1
    assert bits.differs(other) == "k.1 at position 3"
