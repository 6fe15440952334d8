"""Captures stages inside vLLM's model runner: forward hooks, sorted out by request and position.

vLLM computes all scheduled tokens of a step in one flat batch. Its decoder layers hand on a hidden state
and a residual that is still to be added to it: what enters a layer is their sum. Layers of Transformers,
which vLLM runs where it has none of its own, get a batch of one and no residual. What enters the layer
after layer i, or the final norm, is the stage "hidden.i", as in a golden record.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["StageTap"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)$")

#: stage → position (or index of a generated token, for logits) → its row.
_Rows = defaultdict[str, dict[int, NDArray[Any]]]


class StageTap:
    """Keeps the stages of requests that were asked for, of one loaded engine.

    Args:
        runner: vLLM's model runner, in this process.

    Raises:
        ValueError: its model has no decoder layers that these hooks understand.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._wanted: dict[str, bool] = {}  # vLLM's request id → whether its prompt's logits are wanted
        self._rows: dict[str, _Rows] = {}
        self._step: list[tuple[str, int, int, int]] = []  # request, first position, tokens, length so far
        self._plan: Any = None
        layers, norm = _decoder(runner.model)
        layers[0].register_forward_pre_hook(self._first, with_kwargs=True)
        for i, module in enumerate([*layers[1:], norm]):
            module.register_forward_pre_hook(self._entering(f"hidden.{i}", module is norm), with_kwargs=True)
        norm.register_forward_hook(self._final)
        self._execute, runner.execute_model = runner.execute_model, self._noting_plan
        self._logits, runner.model.compute_logits = runner.model.compute_logits, self._noting_logits

    def want(self, request_id: str, *, prompt_logits: bool) -> None:
        """Keep this request's stages from now on, by the id without vLLM's random suffix."""
        self._wanted[request_id] = prompt_logits

    def clear(self) -> None:
        """Forget everything."""
        self._wanted.clear()
        self._rows.clear()

    def stages(self, request_id: str) -> dict[str, NDArray[Any]]:
        """Stage → array whose row i is position i (logits: generated token i).

        Rows that were never computed, because they came from the prefix cache, are NaN (positions: -1).
        """
        return {name: _array(rows) for name, rows in self._rows.get(request_id, {}).items() if rows}

    # ---- hooks ----------------------------------------------------------------------------------

    def _noting_plan(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        self._plan, self._step = scheduler_output, []
        try:
            return self._execute(scheduler_output, *args, **kwargs)
        finally:
            self._plan, self._step = None, []

    def _first(self, _module: Any, args: Any, kwargs: Any) -> None:
        if self._plan is None or not self._wanted:
            return
        batch, counts = self._runner.input_batch, self._plan.num_scheduled_tokens
        self._step = [
            (
                key,
                int(batch.num_computed_tokens_cpu[i]),
                int(counts[key]),
                int(self._runner.requests[key].num_tokens),
            )
            for i, key in enumerate(batch.req_ids)
            if key in counts
        ]
        positions, hidden = _entered(args, kwargs)
        if positions is not None:  # else the embeddings hold them already, and are none of a record's
            self._keep("positions", (positions.T if positions.ndim == 2 else positions).cpu())
            self._keep("embeddings", hidden)

    def _entering(self, stage: str, is_norm: bool) -> Any:
        def hook(_module: Any, args: Any, kwargs: Any) -> None:
            if self._step:
                self._keep(stage, _flat(_sum(args, kwargs)) if is_norm else _entered(args, kwargs)[1])

        return hook

    def _final(self, _module: Any, _args: Any, output: Any) -> None:
        if not self._step:
            return
        hidden = _flat(output[0] if isinstance(output, tuple) else output)
        for key, rows, start in self._slices(hidden):
            if self._wanted[_short(key)]:
                self._store(key, "prompt_logits", self._logits(rows), start)

    def _noting_logits(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        logits = self._logits(hidden, *args, **kwargs)
        if self._step and logits is not None and len(logits) == len(self._step):
            for row, (key, start, count, length) in zip(logits, self._step, strict=True):
                # One that is still inside its prompt samples nothing.
                if _short(key) in self._wanted and start + count >= length:
                    generated = length - self._runner.requests[key].num_prompt_tokens
                    self._store(key, "logits", row[None], generated)
            self._step = []  # what follows are logits of prompts
        return logits

    # ---- pieces ---------------------------------------------------------------------------------

    def _slices(self, flat: torch.Tensor) -> Iterator[tuple[str, torch.Tensor, int]]:
        offset = 0
        for key, start, count, _ in self._step:
            if _short(key) in self._wanted:
                yield key, flat[offset : offset + count], start
            offset += count

    def _keep(self, stage: str, flat: torch.Tensor) -> None:
        for key, rows, start in self._slices(flat):
            self._store(key, stage, rows, start)

    def _store(self, key: str, stage: str, rows: torch.Tensor, start: int) -> None:
        if stage != "positions":
            rows = rows.float()
        table = self._rows.setdefault(_short(key), defaultdict(dict))[stage]
        for i, row in enumerate(rows.detach().cpu().numpy().copy()):
            table[start + i] = row


def _decoder(model: Any) -> tuple[list[Any], Any]:
    """Decoder layers and the final norm of the language model inside `model`."""
    found: dict[str, list[tuple[int, Any]]] = defaultdict(list)
    for name, module in model.named_modules():
        match = _LAYER.search(name)
        if match and "DecoderLayer" in type(module).__name__:
            found[name[: match.start()]].append((int(match[1]), module))
    if len(found) != 1:
        raise ValueError(f"{type(model).__name__}: stacks of decoder layers at {sorted(found)}, expected one")
    [(place, layers)] = found.items()
    stack = model.get_submodule(place)
    norm = getattr(stack, "norm", None) or getattr(stack, "final_layer_norm", None)
    if norm is None:
        raise ValueError(f"{type(model).__name__} has no final norm where its layers are")
    return [layer for _, layer in sorted(layers, key=lambda item: item[0])], norm


def _entered(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Positions and what enters a decoder layer: one of vLLM's, or one of Transformers that it runs."""
    if "position_ids" in kwargs:  # Transformers': a batch of one, and no residual beside it
        return kwargs["position_ids"][0], _flat(_sum(args[:1], kwargs))
    if len(args) == 1 and not kwargs:  # OPT's: its positions are in the embeddings already
        return None, args[0]
    return (args[0] if args else kwargs["positions"]), _sum(args[1:], kwargs)


def _flat(hidden: torch.Tensor) -> torch.Tensor:
    """[tokens, hidden] of [tokens, hidden] or [1, tokens, hidden]."""
    return hidden.reshape(-1, hidden.shape[-1])


def _sum(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """hidden + residual of a call (hidden, residual)."""
    hidden = args[0] if args else kwargs["hidden_states"]
    residual = args[1] if len(args) > 1 else kwargs.get("residual")
    whole: torch.Tensor = hidden if residual is None else hidden + residual
    return whole


def _short(key: str) -> str:
    """vLLM's id of a request without its random suffix."""
    return key.rpartition("-")[0] or key


def _array(rows: Mapping[int, NDArray[Any]]) -> NDArray[Any]:
    one = next(iter(rows.values()))
    missing = -1 if np.issubdtype(one.dtype, np.integer) else np.nan
    table = np.full((max(rows) + 1, *one.shape), missing, dtype=one.dtype)
    for position, row in rows.items():
        table[position] = row
    return table
