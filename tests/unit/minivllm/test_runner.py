"""The runner packs a plan into rows, and gives each request its own results and failures."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from minivllm.attention import ATTENTION_BACKENDS, KVCache, PlannedAttention
from minivllm.config import ModelConfig, RopeConfig
from minivllm.errors import InvariantError
from minivllm.layers import Ops, make_ops
from minivllm.layers.ops_pad import PadOps
from minivllm.layers.padding import TILES
from minivllm.request import (
    BlockCopy,
    Logprob,
    Request,
    SampledToken,
    SamplingParams,
    ScheduledRequest,
    StepPlan,
    StepResult,
    TokenView,
)
from minivllm.runner import CAPTURES, ModelRunner

CPU = torch.device("cpu")
VOCAB, HEADS, KV_HEADS, DIM, LAYERS = 40, 4, 2, 16, 2
CONFIG = ModelConfig(
    architecture="StandIn",
    vocab_size=VOCAB,
    hidden_size=HEADS * DIM,
    intermediate_size=96,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_dim=DIM,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    max_position_embeddings=512,
    tie_word_embeddings=False,
    attention_bias=False,
    attention_output_bias=False,
    mlp_bias=False,
    qk_norm=False,
    hidden_act="silu",
    dtype="float32",
    bos_token_id=None,
    eos_token_ids=(),
)
BROKEN, LOUD = 38, 39
"""Token ids of the stand-in: one has a NaN embedding, one makes the logits overflow."""


class StandIn(torch.nn.Module):
    """A small decoder through both seams; positions enter as a sine."""

    def __init__(self, ops: Ops, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(rows: int, columns: int) -> torch.nn.Parameter:
            drawn = torch.randn(rows, columns, generator=generator) / columns**0.5
            return torch.nn.Parameter(drawn.to(dtype), requires_grad=False)

        hidden = CONFIG.hidden_size
        self.ops = ops
        self.table = weight(VOCAB, hidden)
        self.table[:BROKEN] *= hidden**0.5
        self.table[BROKEN] = float("nan")
        self.q = torch.nn.ParameterList(weight(hidden, hidden) for _ in range(LAYERS))
        self.k = torch.nn.ParameterList(weight(KV_HEADS * DIM, hidden) for _ in range(LAYERS))
        self.v = torch.nn.ParameterList(weight(KV_HEADS * DIM, hidden) for _ in range(LAYERS))
        self.head = weight(VOCAB, hidden)
        self.gain = torch.nn.Parameter(torch.ones(hidden, dtype=dtype), requires_grad=False)
        self.logit_rows: list[int] = []

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.table[token_ids]

    def forward(
        self,
        hidden: Tensor,
        positions: Tensor,
        attention: PlannedAttention,
        observe: Callable[[str, Tensor], None] | None,
        deepstack: Sequence[Tensor] = (),
    ) -> Tensor:
        assert not deepstack
        loud = hidden.eq(self.table[LOUD]).all(-1, keepdim=True)
        hidden = hidden + torch.sin(positions[:, None] * 0.1).to(hidden.dtype)
        for layer in range(LAYERS):
            x = self.ops.rms_norm(hidden, self.gain, 1e-5)
            heads = [self.ops.linear(x, w[layer]).unflatten(1, (-1, DIM)) for w in (self.q, self.k, self.v)]
            attention.write(layer, heads[1], heads[2])
            hidden = hidden + self.ops.silu(attention.attend(layer, heads[0], DIM**-0.5))
            if observe is not None:
                observe(f"hidden.{layer}", hidden)
        return torch.where(loud, torch.finfo(hidden.dtype).max, hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        self.logit_rows.append(hidden.shape[0])
        return self.ops.linear(hidden, self.head)


class Argmax:
    """A sampler that remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.drawn: list[list[int]] = []
        self.logits: list[Tensor] = []
        self.refuse: str | None = None

    def sample(
        self,
        logits: Tensor,
        rows: Sequence[ScheduledRequest],
        sequence_indices: Sequence[int] | None = None,
    ) -> list[SampledToken | str]:
        assert logits.dtype == torch.float32
        assert not logits.requires_grad
        assert logits.shape == (len(rows), VOCAB)
        self.asked.append([r.request_id for r in rows])
        self.drawn.append(list(sequence_indices or ()))
        self.logits.append(logits.clone())
        ids = logits.argmax(-1).tolist()
        return [
            "refused" if r.request_id == self.refuse else SampledToken(i, i)
            for r, i in zip(rows, ids, strict=True)
        ]

    def prompt_logprobs(self, logits: Tensor, next_ids: Sequence[int], top: int) -> list[dict[int, Logprob]]:
        assert logits.shape == (len(next_ids), VOCAB)
        values = torch.log_softmax(logits, -1)
        return [{i: Logprob(float(row[i]), rank=top)} for i, row in zip(next_ids, values, strict=True)]


class Rig:
    """Runner, cache, model and sampler of one test."""

    def __init__(
        self,
        backend: str = "dense",
        ops: str = "torch",
        dtype: torch.dtype = torch.float32,
        block_size: int = 4,
        num_blocks: int = 64,
        num_host_blocks: int = 0,
    ) -> None:
        self.cache = KVCache(
            CONFIG,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            device=CPU,
            num_host_blocks=num_host_blocks,
        )
        made = make_ops(ops, CPU)
        self.model = StandIn(made, dtype)
        made.prepare(self.model, max_rows=64)
        self.sampler = Argmax()
        self.runner = ModelRunner(
            self.model, self.cache, ATTENTION_BACKENDS.get(backend)(self.cache), self.sampler, CPU
        )

    def run(self, *requests: ScheduledRequest, **plan: Any) -> StepResult:
        return self.runner.run(StepPlan(step=0, requests=requests, **plan))


def ask(
    name: str,
    tokens: Sequence[int],
    table: tuple[int, ...],
    start: int = 0,
    end: int | None = None,
    *,
    prompt: int | None = None,
    capture: Sequence[str] = (),
    **sampling: Any,
) -> ScheduledRequest:
    """Schedule positions start … end - 1 of a request whose first `prompt` tokens are its prompt."""
    end = len(tokens) if end is None else end
    prompt = len(tokens) if prompt is None else prompt
    request = Request(name, list(tokens), prompt, SamplingParams(**sampling), capture=frozenset(capture))
    return ScheduledRequest(
        request_id=name,
        start=start,
        num_tokens=end - start,
        tokens=TokenView(request.token_ids),
        num_prompt_tokens=prompt,
        block_table=table,
        sample=end == len(tokens),
        request=request,
    )


A, B = [1, 2, 3, 4, 5, 6, 7], [9, 8, 7]


def test_a_batch_gives_each_request_what_it_gets_alone() -> None:
    together = Rig().run(ask("a", A, (9, 3), capture=CAPTURES), ask("b", B, (5,), capture=CAPTURES))
    for name, tokens, table in (("a", A, (2, 1)), ("b", B, (1,))):
        alone = Rig().run(ask(name, tokens, table, capture=CAPTURES))
        assert together.samples[name] == alone.samples[name]
        assert together.stages[name].keys() == alone.stages[name].keys()
        for stage, rows in alone.stages[name].items():
            np.testing.assert_allclose(
                together.stages[name][stage], rows, rtol=1e-5, atol=1e-6, err_msg=stage
            )
    assert together.failures == {}


def test_bitwise_ops_and_attention_give_the_same_bits_in_any_batch_and_chunking() -> None:
    def rig() -> Rig:
        return Rig(backend="tiled", ops="torch-pad")

    want = ("hidden", "logits", "kv")
    whole = rig().run(ask("a", A, (9, 3), capture=want)).stages["a"]
    other = rig()
    first = other.run(ask("b", B, (5,)), ask("a", A, (4, 2), 0, 3, capture=want)).stages["a"]
    second = other.run(ask("a", A, (4, 2), 3, 7, capture=want), ask("c", [3] * 9, (7, 8, 6))).stages["a"]
    for layer in range(LAYERS):
        rows = np.concatenate([first[f"hidden.{layer}"], second[f"hidden.{layer}"]])
        assert rows.tobytes() == whole[f"hidden.{layer}"].tobytes()
        for name in (f"k.{layer}", f"v.{layer}"):
            assert second[name].tobytes() == whole[name].tobytes()
    assert second["logits"].tobytes() == whole["logits"].tobytes()


def test_stages_hold_the_rows_of_this_step_and_only_what_was_asked() -> None:
    result = Rig().run(
        ask("a", A, (9, 3), 2, 5, capture=("positions", "embeddings", "kv")),
        ask("b", B, (5,), capture=("logits",)),
        ask("c", B, (6,)),
    )
    a = result.stages["a"]
    assert sorted(a) == ["embeddings", "k.0", "k.1", "positions", "v.0", "v.1"]
    assert a["positions"].tolist() == [2, 3, 4]
    assert a["positions"].dtype == np.int64
    model = StandIn(make_ops("torch", CPU))
    np.testing.assert_array_equal(a["embeddings"], model.table[[3, 4, 5]].numpy())
    assert a["k.0"].shape == (5, KV_HEADS, DIM)
    assert {name: rows.shape for name, rows in result.stages["b"].items()} == {"logits": (1, VOCAB)}
    assert "c" not in result.stages


def test_captured_rows_are_copies() -> None:
    rig = Rig()
    stages = rig.run(ask("a", B, (5,), capture=("kv", "embeddings"))).stages["a"]
    kept = {name: rows.copy() for name, rows in stages.items()}
    rig.runner.poison(range(64), {})
    rig.model.table.fill_(0)
    assert all(np.array_equal(stages[name], rows) for name, rows in kept.items())


def test_stages_of_a_bfloat16_model_are_its_values_in_float32() -> None:
    rig = Rig(dtype=torch.bfloat16)
    stages = rig.run(ask("a", A, (9, 3), capture=("kv", "hidden", "logits"))).stages["a"]
    k, v = rig.runner.read_kv((9, 3), 7)[1]
    assert k.dtype == torch.bfloat16
    for name, exact in (("k.1", k), ("v.1", v)):
        assert stages[name].dtype == np.float32
        assert np.array_equal(stages[name], exact.float().numpy())
    assert all(rows.dtype == np.float32 for rows in stages.values())


def test_logits_are_computed_only_for_rows_that_need_them() -> None:
    rig = Rig()
    rig.run(ask("a", A, (9, 3), 0, 4), ask("b", B, (5,)), ask("c", A, (7, 8)))
    assert rig.model.logit_rows == [2]
    assert rig.sampler.asked == [["b", "c"]]
    rig.run(ask("a", A, (9, 3), 4, 6))
    assert rig.model.logit_rows == [2]


def test_prompt_logits_cover_the_prompt_rows_of_the_step_and_no_generated_one() -> None:
    rig = Rig()
    request = ask("a", A, (9, 3), 1, 7, prompt=5, capture=("prompt_logits", "logits"))
    stages = rig.run(request).stages["a"]
    assert stages["prompt_logits"].shape == (4, VOCAB)
    assert stages["logits"].shape == (1, VOCAB)
    assert rig.model.logit_rows == [5]
    last = Rig().run(ask("a", A, (9, 3), capture=("prompt_logits", "logits"))).stages["a"]
    assert np.array_equal(last["prompt_logits"][-1:], last["logits"])


def test_prompt_logprobs_predict_the_next_prompt_token_across_chunks() -> None:
    rig, entries = Rig(), []
    for start, end in ((0, 3), (3, 5), (5, 7)):
        result = rig.run(ask("a", A, (9, 3), start, end, prompt=6, prompt_logprobs=2))
        entries += result.prompt_logprobs.get("a", [])
    assert [list(entry) for entry in entries] == [[2], [3], [4], [5], [6]]
    whole = Rig().run(ask("a", A[:6], (9, 3), prompt_logprobs=2, capture=("prompt_logits",)))
    truth = torch.log_softmax(torch.from_numpy(whole.stages["a"]["prompt_logits"]), -1)
    for i, entry in enumerate(entries):
        ((token, got),) = entry.items()
        assert got.rank == 2, "the number asked for is handed on"
        assert got.logprob == pytest.approx(float(truth[i, token]), abs=1e-5)


def test_a_decode_step_has_no_prompt_logprobs() -> None:
    result = Rig().run(ask("a", A, (9, 3), 6, 7, prompt=6, prompt_logprobs=2))
    assert result.prompt_logprobs == {}


@pytest.mark.parametrize("backend", list(ATTENTION_BACKENDS))
@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, BROKEN, 3], r"hidden state is not finite .* at position \d"),
        ([1, 2, LOUD], "logits are not finite"),
    ],
)
def test_a_request_with_unusable_numbers_fails_by_name_and_the_others_go_on(
    backend: str, tokens: list[int], message: str
) -> None:
    clean = Rig(backend).run(
        ask("a", A, (9, 3), capture=CAPTURES), ask("x", [1, 2, 3], (5,)), ask("b", B, (6,))
    )
    result = Rig(backend).run(
        ask("a", A, (9, 3), capture=CAPTURES), ask("x", tokens, (5,)), ask("b", B, (6,))
    )
    assert list(result.failures) == ["x"]
    assert re.search(message, result.failures["x"])
    assert result.samples == {name: clean.samples[name] for name in ("a", "b")}
    for name, rows in clean.stages["a"].items():
        assert rows.tobytes() == result.stages["a"][name].tobytes()


def test_a_request_fails_in_the_chunk_that_breaks_it_before_it_samples() -> None:
    result = Rig().run(ask("x", [1, BROKEN, 3, 4], (5,), 0, 3))
    assert list(result.failures) == ["x"]
    assert result.samples == {}


def test_prompt_rows_with_unusable_logits_fail_the_request() -> None:
    result = Rig().run(ask("x", [1, LOUD, 3], (5,), prompt_logprobs=1))
    assert list(result.failures) == ["x"]
    assert result.prompt_logprobs == {}
    assert result.samples == {}


def test_a_refusal_of_the_sampler_fails_that_request_only() -> None:
    rig = Rig()
    rig.sampler.refuse = "a"
    result = rig.run(ask("a", A, (9, 3)), ask("b", B, (5,)))
    assert result.failures == {"a": "refused"}
    assert list(result.samples) == ["b"]


@pytest.mark.parametrize("backend", list(ATTENTION_BACKENDS))
def test_decode_over_copied_blocks_continues_the_sequence(backend: str) -> None:
    rig = Rig(backend)
    rig.run(ask("a", A, (9, 3), 0, 6))
    expected = rig.run(ask("a", A, (9, 3), 6, 7, capture=("logits",)))
    copies = (BlockCopy(9, 20), BlockCopy(3, 21))
    got = rig.run(ask("a", A, (20, 21), 6, 7, capture=("logits",)), copies=copies)
    assert got.stages["a"]["logits"].tobytes() == expected.stages["a"]["logits"].tobytes()
    assert got.samples == expected.samples


def test_a_plan_of_copies_alone_is_carried_out() -> None:
    rig = Rig()
    rig.run(ask("b", B, (5,)))
    assert rig.run(copies=(BlockCopy(5, 7),)) == StepResult(samples={})
    assert torch.equal(rig.cache.keys[1][7], rig.cache.keys[1][5])


@pytest.mark.parametrize("backend", list(ATTENTION_BACKENDS))
def test_decode_after_a_swap_to_the_host_and_back_continues_the_sequence_to_the_bit(backend: str) -> None:
    rig = Rig(backend, num_host_blocks=4)
    rig.run(ask("a", A, (9, 3), 0, 6))
    expected = rig.run(ask("a", A, (9, 3), 6, 7, capture=("logits",)))
    rig.run(swap_out=(BlockCopy(9, 3), BlockCopy(3, 0)))
    rig.runner.poison(range(64), {})
    swap_in = (BlockCopy(3, 20), BlockCopy(0, 21))
    got = rig.run(ask("a", A, (20, 21), 6, 7, capture=("logits",)), swap_in=swap_in)
    assert got.stages["a"]["logits"].tobytes() == expected.stages["a"]["logits"].tobytes()
    assert got.samples == expected.samples


def test_a_plan_is_carried_out_in_the_order_swap_out_swap_in_copies_forward() -> None:
    """In one plan: "a" leaves blocks 9 and 3, "c" comes back into 9, "d" gets a copy of it in 3."""
    rig = Rig(num_host_blocks=2)
    rig.run(ask("a", A[:4], (9,)), ask("c", A[4:7], (5,)))
    a, c = rig.runner.read_kv((9,), 4), rig.runner.read_kv((5,), 3)
    rig.run(swap_out=(BlockCopy(5, 0),))
    rig.run(
        ask("d", [*A[4:7], 1], (3,), 3, 4),
        swap_out=(BlockCopy(9, 1),),
        swap_in=(BlockCopy(0, 9),),
        copies=(BlockCopy(9, 3),),
    )
    assert all(torch.equal(rig.cache.host_keys[i][1], a[i][0]) for i in range(LAYERS))
    assert all(torch.equal(rig.runner.read_kv((9,), 3)[i][1], c[i][1]) for i in range(LAYERS))
    assert all(torch.equal(rig.runner.read_kv((3,), 3)[i][1], c[i][1]) for i in range(LAYERS))
    fresh = Rig()
    fresh.run(ask("d", [*A[4:7], 1], (7,)))
    # Computed token by token and at once: the same numbers within rounding.
    for (k, v), (want_k, want_v) in zip(
        rig.runner.read_kv((3,), 4), fresh.runner.read_kv((7,), 4), strict=True
    ):
        torch.testing.assert_close(k, want_k)
        torch.testing.assert_close(v, want_v)


def test_each_fork_draws_from_the_same_row_of_logits_with_its_own_index() -> None:
    rig = Rig()
    forking = replace(ask("a", A, (9, 3), temperature=1.0, n=3), fork_ids=("a/1", "a/2"))
    later = ask("b/4", B, (5,), temperature=1.0)
    later.request.sequence_index = 4
    result = rig.run(forking, later)
    assert list(result.samples) == ["a", "a/1", "a/2", "b/4"]
    assert rig.sampler.asked == [["a", "a", "a", "b/4"]]
    assert rig.sampler.drawn == [[0, 1, 2, 4]]
    (logits,) = rig.sampler.logits
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert rig.model.logit_rows == [2], "the row is computed once"


def test_forks_of_a_request_that_fails_get_no_token_and_the_failure_is_told_once() -> None:
    for broken in (True, False):
        rig = Rig()
        rig.sampler.refuse = "a"
        tokens = [1, 2, BROKEN] if broken else A[:3]
        forking = replace(ask("a", tokens, (9,), temperature=1.0, n=2), fork_ids=("a/1",))
        result = rig.run(forking, ask("b", B, (5,)))
        assert list(result.failures) == ["a"]
        assert list(result.samples) == ["b"]


def test_a_plan_that_names_a_host_block_that_is_not_there_is_a_bug_and_says_so() -> None:
    with pytest.raises(InvariantError, match="an empty pool"):
        Rig().run(ask("b", B, (5,)), swap_out=(BlockCopy(1, 2),))


@pytest.mark.parametrize("backend", list(ATTENTION_BACKENDS))
def test_poison_reaches_only_what_no_request_reads(backend: str) -> None:
    results = []
    for poison in (False, True):
        rig = Rig(backend)
        rig.run(ask("a", A, (9, 3), 0, 6), ask("b", B, (5,)))
        if poison:
            unused = [block for block in range(64) if block not in (9, 3, 5)]
            assert rig.runner.poison(unused, {3: 2, 5: 3}) == 61 * 4 + 2 + 1
        results.append(rig.run(ask("a", A, (9, 3), 6, 7, capture=CAPTURES)))
    clean, poisoned = results
    assert clean.samples == poisoned.samples
    assert all(
        rows.tobytes() == poisoned.stages["a"][name].tobytes() for name, rows in clean.stages["a"].items()
    )


def test_read_kv_gives_logical_order_per_layer() -> None:
    rig = Rig()
    captured = rig.run(ask("a", A, (9, 3), capture=("kv",))).stages["a"]
    layers = rig.runner.read_kv((9, 3), 5)
    assert len(layers) == LAYERS
    for layer, (k, v) in enumerate(layers):
        assert np.array_equal(k.numpy(), captured[f"k.{layer}"][:5])
        assert np.array_equal(v.numpy(), captured[f"v.{layer}"][:5])


def test_a_plan_beyond_the_known_tokens_is_a_bug_and_says_so() -> None:
    with pytest.raises(InvariantError, match="not known yet"):
        Rig().run(ask("a", A, (9, 3, 4), 0, 8))


def test_the_bitwise_rig_really_uses_a_probed_tile() -> None:
    ops = Rig(backend="tiled", ops="torch-pad").model.ops
    assert isinstance(ops, PadOps)
    assert ops.report is not None
    assert ops.report.tile in TILES
