"""Hooks in a model runner like vLLM's: rows come out by request and position, whatever the batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from conformance.adapters.vllm_stages import StageTap

WIDTH, VOCAB = 4, 7


class ToyDecoderLayer(nn.Module):
    """Hands on (hidden, residual) whose sum is what went in, plus one."""

    def forward(self, positions: Tensor, hidden: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        del positions
        whole = hidden if residual is None else hidden + residual
        return torch.full_like(whole, 3.0), whole - 2.0


class ToyNorm(nn.Module):
    def forward(self, hidden: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return hidden + residual, residual


class ToyStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([ToyDecoderLayer(), ToyDecoderLayer()])
        self.norm = ToyNorm()

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        hidden, residual = ids[:, None].float().expand(-1, WIDTH), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        normed: Tensor = self.norm(hidden, residual)[0]
        return normed


class GuestDecoderLayer(nn.Module):
    """As Transformers calls its layers: a batch of one, positions by name, no residual beside it."""

    def forward(self, hidden: Tensor, *, position_ids: Tensor) -> Tensor:
        del position_ids
        return hidden + 1


class GuestStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([GuestDecoderLayer(), GuestDecoderLayer()])
        self.norm = nn.Identity()

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        hidden = ids[None, :, None].float().expand(-1, -1, WIDTH)
        for layer in self.layers:
            hidden = layer(hidden, position_ids=positions[None])
        return self.norm(hidden)[0]


class PlainDecoderLayer(nn.Module):
    """As OPT's: what enters it is all it gets."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + 1


class PlainStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([PlainDecoderLayer(), PlainDecoderLayer()])
        self.final_layer_norm = nn.Identity()

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        del positions
        hidden = ids[:, None].float().expand(-1, WIDTH)
        for layer in self.layers:
            hidden = layer(hidden)
        normed: Tensor = self.final_layer_norm(hidden)
        return normed


class ToyModel(nn.Module):
    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.language_model = stack

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden[:, :1] * 10 + torch.arange(VOCAB)


class Runner:
    """Computes the ids that a plan gives per request, in one flat batch."""

    def __init__(self, stack: nn.Module) -> None:
        self.model: Any = ToyModel(stack)
        self.input_batch: Any = None
        self.requests: dict[str, Any] = {}

    def execute_model(self, plan: Any) -> Tensor:
        keys = list(plan.num_scheduled_tokens)
        starts = [plan.starts[key] for key in keys]
        self.input_batch = SimpleNamespace(req_ids=keys, num_computed_tokens_cpu=np.array(starts))
        ids, positions, last = [], [], []
        for key, start in zip(keys, starts, strict=True):
            count = plan.num_scheduled_tokens[key]
            ids += plan.ids[key][start : start + count]
            positions += range(start, start + count)
            last.append(len(ids) - 1)
        hidden = self.model.language_model(torch.tensor(ids), torch.tensor(positions))
        logits: Tensor = self.model.compute_logits(hidden[last])
        return logits


def step(runner: Runner, **scheduled: tuple[list[int], int, int, int]) -> None:
    """Run one step of request → (ids, first position, tokens, length of the prompt)."""
    names = {key.replace("_x", "-x"): value for key, value in scheduled.items()}
    plan = SimpleNamespace(
        num_scheduled_tokens={k: count for k, (_, _, count, _) in names.items()},
        starts={k: start for k, (_, start, _, _) in names.items()},
        ids={k: ids for k, (ids, *_) in names.items()},
    )
    runner.requests = {
        k: SimpleNamespace(num_tokens=len(ids), num_prompt_tokens=prompt)
        for k, (ids, _, _, prompt) in names.items()
    }
    runner.execute_model(plan)


@pytest.fixture
def runner() -> Runner:
    return Runner(ToyStack())


def column(array: Any) -> list[float]:
    return [float(row[0]) for row in array]


@pytest.mark.parametrize("stack", [ToyStack, GuestStack])
def test_rows_are_sorted_out_by_request_and_position(stack: type[nn.Module]) -> None:
    runner = Runner(stack())
    tap = StageTap(runner)
    tap.want("a", prompt_logits=False)
    tap.want("b", prompt_logits=False)
    step(runner, a_x=([5, 6, 7], 0, 2, 3), b_x=([1, 2], 0, 2, 2))
    step(runner, b_x=([1, 2, 9], 2, 1, 2), a_x=([5, 6, 7], 2, 1, 3))
    a, b = tap.stages("a"), tap.stages("b")
    assert a["positions"].tolist() == [0, 1, 2]
    assert b["positions"].tolist() == [0, 1, 2]
    assert column(a["embeddings"]) == [5, 6, 7]
    assert column(b["embeddings"]) == [1, 2, 9]
    assert column(a["hidden.0"]) == [6, 7, 8]
    assert column(b["hidden.1"]) == [3, 4, 11]


def test_logits_are_kept_where_a_token_was_sampled(runner: Runner) -> None:
    tap = StageTap(runner)
    tap.want("a", prompt_logits=False)
    step(runner, a_x=([5, 6, 7], 0, 2, 3))  # inside the prompt: nothing is sampled
    assert "logits" not in tap.stages("a")
    step(runner, a_x=([5, 6, 7], 2, 1, 3))
    step(runner, a_x=([5, 6, 7, 8], 3, 1, 3))
    assert column(tap.stages("a")["logits"]) == [90, 100]
    assert "prompt_logits" not in tap.stages("a")


@pytest.mark.parametrize("stack", [ToyStack, GuestStack])
def test_logits_of_a_whole_prompt_come_where_wanted(stack: type[nn.Module]) -> None:
    runner = Runner(stack())
    tap = StageTap(runner)
    tap.want("a", prompt_logits=True)
    step(runner, a_x=([5, 6, 7], 0, 3, 3), b_x=([1], 0, 1, 1))
    assert column(tap.stages("a")["prompt_logits"]) == [70, 80, 90]
    assert not tap.stages("b")


def test_a_layer_that_gets_no_positions_tells_none() -> None:
    runner = Runner(PlainStack())
    tap = StageTap(runner)
    tap.want("a", prompt_logits=True)
    step(runner, a_x=([5, 6, 7], 0, 3, 3))
    stages = tap.stages("a")
    assert not {"positions", "embeddings"} & set(stages)
    assert column(stages["hidden.0"]) == [6, 7, 8]
    assert column(stages["prompt_logits"]) == [70, 80, 90]


def test_rows_that_came_from_a_cache_are_marked(runner: Runner) -> None:
    tap = StageTap(runner)
    tap.want("a", prompt_logits=False)
    step(runner, a_x=([5, 6, 7], 2, 1, 3))
    stages = tap.stages("a")
    assert stages["positions"].tolist() == [-1, -1, 2]
    assert np.isnan(stages["hidden.0"][:2]).all()
    assert column(stages["hidden.0"][2:]) == [8]


def test_a_cleared_tap_keeps_nothing_and_leaves_the_numbers_alone(runner: Runner) -> None:
    plan = SimpleNamespace(num_scheduled_tokens={"a-x": 2}, starts={"a-x": 0}, ids={"a-x": [5, 6]})
    runner.requests = {"a-x": SimpleNamespace(num_tokens=2, num_prompt_tokens=2)}
    plain = runner.execute_model(plan)
    tap = StageTap(runner)
    tap.want("a", prompt_logits=True)
    assert torch.equal(runner.execute_model(plan), plain)
    tap.clear()
    assert not tap.stages("a")
    runner.execute_model(plan)
    assert not tap.stages("a")


def test_a_model_without_one_stack_of_layers_is_refused(runner: Runner) -> None:
    runner.model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="stacks of decoder layers at \\[\\]"):
        StageTap(runner)
