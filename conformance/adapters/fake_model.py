"""The toy's model: logits from a hash, and golden records made with them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import numpy as safetensors

from conformance import EDITION, RECORD_SCHEMA
from conformance.adapters.base import TokenLogprob
from conformance.canonical import media_parts, request_key
from conformance.models import weights_sha256
from conformance.records import ArmError, GoldenRecord, LogitTable, MediaRecord, Yardstick
from conformance.scenario import load_scenarios
from conformance.store import RecordStore

__all__ = [
    "EOS",
    "TOY",
    "VOCAB",
    "Logits",
    "entries",
    "replaying",
    "toy_logits",
    "toy_record",
    "write_toy_suite",
]

#: Size of the toy's vocabulary, its end-of-sequence id, and the name its records use.
VOCAB, EOS, TOY = 64, 0, "toy"

Logits = Callable[[Sequence[int]], NDArray[np.float32]]


def toy_logits(context: Sequence[int]) -> NDArray[np.float32]:
    """[VOCAB] logits between -8 and 8, a function of the token ids alone; EOS is unlikely."""
    seed = hashlib.sha256(repr(list(context)).encode()).digest()
    drawn = b"".join(hashlib.sha256(seed + bytes([i])).digest() for i in range(VOCAB * 2 // 32))
    row = np.frombuffer(drawn, dtype=np.uint16).astype(np.float32) / 4096.0 - 8.0
    row[EOS] = -20.0
    return row


def replaying(records: Sequence[GoldenRecord]) -> Logits:
    """The toy's logits, but a record's own where the context is one the record knows."""
    known: dict[tuple[int, ...], NDArray[np.float32]] = {}
    for record in records:
        for i in range(len(record.token_ids)):
            context = record.prompt_token_ids + record.token_ids[:i]
            known[context] = _row_of(record.output, i)
        if record.prompt is not None:
            for i in range(len(record.prompt)):
                known[record.prompt_token_ids[: i + 1]] = _row_of(record.prompt, i)

    def logits(context: Sequence[int]) -> NDArray[np.float32]:
        row = known.get(tuple(context))
        return toy_logits(context) if row is None else row.copy()

    return logits


def _row_of(table: LogitTable, position: int) -> NDArray[np.float32]:
    """A whole row with a table's top logits and its logsumexp, the rest spread evenly."""
    ids, top, total = table.top_ids[position], table.top_logits[position], table.logsumexp[position]
    size = max(VOCAB, int(table.top_ids.max()) + 1)
    left = math.exp(total) - float(np.exp(top).sum())
    # An even rest must stay below the listed logits, so it is capped where rounding left a surplus.
    rest = math.log(left / (size - len(ids))) if left > 0 and size > len(ids) else -60.0
    row = np.full(size, min(rest, float(top.min()) - 1e-3), dtype=np.float32)
    row[ids] = top
    return row


def toy_record(request: Mapping[str, Any], weights: str) -> GoldenRecord:
    """The golden record of a canonical request with token ids, as the toy's model has it."""
    prompt = tuple(request["prompt"]["token_ids"])
    tokens: list[int] = []
    rows = []
    stops = set(request["stop_token_ids"]) | (set() if request["ignore_eos"] else {EOS})
    while len(tokens) < request["max_tokens"] and not (tokens and tokens[-1] in stops):
        rows.append(toy_logits([*prompt, *tokens]))
        tokens.append(int(rows[-1].argmax()))
    stopped = tokens[-1] in stops
    pictures = media_parts(request["prompt"])  # of which the toy's model sees nothing
    key = request_key(request)
    return GoldenRecord(
        schema=RECORD_SCHEMA,
        edition=EDITION,
        key=key,
        model=request["model"],
        case=f"case-{key[:12]}",
        request=dict(request),
        provenance={"weights_sha256": weights},
        dtype=request["dtype"],
        prompt_token_ids=prompt,
        token_ids=tuple(tokens),
        text="",
        finish_reason="stop" if stopped else "length",
        stop_reason=tokens[-1] if stopped and tokens[-1] != EOS else None,
        output=_table(rows),
        yardstick=Yardstick({"eager_cached": ArmError(1e-5, 4e-5)}),
        prompt=_table([toy_logits(prompt[: i + 1]) for i in range(len(prompt) - 1)])
        if request["prompt_logprobs"]
        else None,
        media=MediaRecord(tuple({"rows": 0} for _ in pictures), (), "", "") if pictures else None,
    )


def write_toy_suite(root: Path, scenarios: Mapping[str, str]) -> Path:
    """A whole data directory about the model "toy": checkpoint, scenarios and their goldens.

    Args:
        scenarios: id → the YAML text after `schema` and `id`.

    Returns:
        `root`, for `--data` and `load_scenarios(root / "scenarios")`.
    """
    checkpoint = root / "golden" / "checkpoints" / TOY
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "config.json").write_text(json.dumps({"vocab_size": VOCAB}), encoding="utf-8")
    safetensors.save_file({"w": np.ones((3, 2), np.float32)}, checkpoint / "model.safetensors")
    for name, text in scenarios.items():
        path = root / "scenarios" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"schema: 1\nid: {name}\n{text}", encoding="utf-8")
    store = RecordStore(root)
    for scenario in load_scenarios(root / "scenarios"):
        for _label, request in scenario.golden_requests():
            if request["model"] == TOY and request_key(request) not in store:
                store.save(toy_record(request, weights_sha256(checkpoint)), "made for a test")
    return root


def _table(rows: Sequence[NDArray[np.float32]]) -> LogitTable:
    logits = np.array(rows, dtype=np.float64).reshape(len(rows), VOCAB)
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :20]
    return LogitTable(
        top_ids=ids.astype(np.int64),
        top_logits=np.take_along_axis(logits, ids, axis=1),
        logsumexp=np.log(np.exp(logits).sum(axis=1)),
    )


def entries(row: NDArray[np.float32], token: int, count: int) -> tuple[TokenLogprob, ...]:
    """The `count` most likely tokens (-1: all) of a row of logits, and `token` if not among them."""
    exact = row.astype(np.float64)
    table = exact - (exact.max() + np.log(np.exp(exact - exact.max()).sum()))
    order = np.argsort(-table, kind="stable").tolist()
    kept = order if count == -1 else order[:count]
    ids = kept if token in kept else [*kept, token]
    return tuple(TokenLogprob(i, float(table[i]), order.index(i) + 1) for i in ids)
