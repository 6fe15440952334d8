"""One small probe for each feature an engine may declare.

A probe raises `ProbeFailed` (or whatever the engine raises) when the feature is not there. It asks
whether the engine *does* the thing, not whether its answers are right: that is the suite's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import numpy as np

from conformance.adapters.base import (
    Controlled,
    EngineOutput,
    EngineRequest,
    KVAccess,
    Snapshots,
    Stages,
    Stepped,
    Swapping,
    TokenLogprob,
    Traced,
    Weights,
)
from conformance.doctor.bench import LONG, PROMPTS, Bench, ProbeFailed, ids_of
from conformance.kv_snapshot import parse_snapshot

__all__ = ["PROBES", "SCENARIOS", "Probe"]

Probe = Callable[[Bench], None]


def _must(true: bool, message: str) -> None:
    if not true:
        raise ProbeFailed(message)


# ---- prompts and answers --------------------------------------------------------------------------


def _token_ids(bench: Bench) -> None:
    for number, prompt in enumerate(PROMPTS):
        told = bench.one(bench.request(f"r{number}", prompt)).prompt_token_ids
        _must(told is None or told == prompt, f"given the ids {prompt}, it says the prompt was {told}")


def _text(bench: Bench) -> None:
    _tokenised(bench, EngineRequest("r", _GREEDY, text="The red boat is on the lake."))


def _chat(bench: Bench) -> None:
    _tokenised(bench, EngineRequest("r", _GREEDY, chat=({"role": "user", "content": "Where is the lamp?"},)))


def _tokenised(bench: Bench, request: EngineRequest) -> None:
    told = bench.one(request).prompt_token_ids
    _must(bool(told), f"prompt_token_ids must tell the ids that the prompt became, got {told}")


_GREEDY: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


def _output_ids(bench: Bench) -> None:
    for count in (1, 6):
        ids = ids_of(bench.one(bench.request(max_tokens=count)))
        _must(len(ids) == count, f"max_tokens {count} with ignore_eos gave {len(ids)} tokens")


def _logprobs(bench: Bench) -> None:
    output = bench.one(bench.request(logprobs=3))
    for row in _rows(output):
        best = [entry.logprob for entry in row[:3]]
        _must(len(row) >= 3, f"logprobs=3 gave a position {len(row)} entries")
        _must(best == sorted(best, reverse=True), f"the likeliest must come first, got {best}")


def _chosen_logprobs(bench: Bench) -> None:
    _rows(bench.one(bench.request(logprobs=0)))


def _rows(output: EngineOutput) -> Sequence[Sequence[TokenLogprob]]:
    ids, rows = ids_of(output), output.logprobs or ()
    _must(len(rows) == len(ids), f"{len(ids)} tokens were generated and logprobs has {len(rows)} lists")
    for token, row in zip(ids, rows, strict=True):
        _check_row(token, row)
    return rows


def _check_row(token: int, row: Sequence[TokenLogprob]) -> None:
    ids = [entry.token_id for entry in row]
    _must(token in ids, f"no entry for the token {token} itself, only for {ids}")
    _must(len(set(ids)) == len(ids), f"one token is listed twice: {ids}")
    total = sum(np.exp(entry.logprob) for entry in row)
    _must(bool(total <= 1 + 1e-4), f"the listed probabilities add up to {total}")


def _prompt_logprobs(bench: Bench) -> None:
    rows = bench.one(bench.request(prompt_logprobs=2)).prompt_logprobs or ()
    prompt = PROMPTS[0]
    if bench.has("token_ids"):
        _must(len(rows) == len(prompt), f"the prompt has {len(prompt)} tokens, prompt_logprobs {len(rows)}")
    _must(bool(rows) and rows[0] is None, "prompt_logprobs must begin with None: nothing comes before it")
    for token, row in zip(prompt[1:], rows[1:], strict=False):
        _must(row is not None, "only the first prompt token may have None")
        if bench.has("token_ids"):
            _check_row(token, row or ())


def _forced_decode(bench: Bench) -> None:
    free = ids_of(bench.one(bench.request()))
    path = tuple(3 + (t + 1) % 60 for t in free)
    output = bench.one(replace(bench.request(), forced_token_ids=path))
    _must(ids_of(output) == path, f"forced along {path}, it returned {output.token_ids}")
    choices = output.choice_token_ids or ()
    _must(len(choices) == len(path), f"choice_token_ids has {len(choices)} ids for {len(path)} positions")
    _must(choices[0] == free[0], "its first choice is another when it is forced, in the same context")


# ---- sampling -------------------------------------------------------------------------------------


def _sampling(bench: Bench) -> None:
    hot: dict[str, Any] = {"temperature": 2.0, "max_tokens": 16}
    first, again = (ids_of(bench.one(bench.request(**hot, seed=1))) for _ in range(2))
    _must(first == again, f"the same seed gave {first} and {again}")
    others = {ids_of(bench.one(bench.request(**hot, seed=seed))) for seed in range(2, 6)}
    _must(others != {first}, "five seeds at temperature 2 gave the same tokens")
    greedy = ids_of(bench.one(bench.request(max_tokens=16)))
    for name, value in (("top_k", 1), ("top_p", 1e-6), ("min_p", 1.0)):
        settings: dict[str, Any] = {**hot, "seed": 1, name: value}
        narrow = ids_of(bench.one(bench.request(**settings)))
        _must(narrow == greedy, f"{name}={value} leaves one token, and it is not the likeliest")


def _penalties(bench: Bench) -> None:
    plain: dict[str, Any] = {"max_tokens": 32}
    for number in range(8):
        prompt = (5 + number, *PROMPTS[1])
        free = ids_of(bench.one(bench.request("r", prompt, **plain)))
        if len(set(free)) < len(free):
            changed = ids_of(bench.one(bench.request("r", prompt, **plain, repetition_penalty=50.0)))
            _must(changed != free, f"repetition_penalty 50 changes nothing in {free}, which repeats itself")
            break
    for name in ("presence_penalty", "frequency_penalty"):
        settings: dict[str, Any] = {name: 1.5}
        ids_of(bench.one(bench.request(**settings)))


def _parallel_sampling(bench: Bench) -> None:
    outputs = bench.generate([bench.request(n=2, temperature=1.0, seed=3)])
    _must(len({ids_of(o) for o in outputs.values()}) >= 1 and len(outputs) == 2, "n=2 must give two outputs")


def _logit_control(bench: Bench) -> None:
    first = ids_of(bench.one(bench.request()))[0]
    other = 30 if first != 30 else 31
    biased = ids_of(bench.one(bench.request(logit_bias={other: 100.0})))
    _must(biased[0] == other, f"logit_bias +100 on {other} gave {biased[0]}")
    end = bench.eos()
    if end is not None:
        ends: dict[str, Any] = {"ignore_eos": False, "logit_bias": {end: 100.0}}
        short = ids_of(bench.one(bench.request(**ends)))
        _must(short == (end,), f"logit_bias +100 on the end id {end} gave {short}")
        held = ids_of(bench.one(bench.request(**ends, min_tokens=3)))
        _must(len(held) >= 3 and end not in held[:3], f"min_tokens=3 gave {held} (the end id is {end})")


def _stop_strings(bench: Bench) -> None:
    output = bench.one(bench.request(max_tokens=16))
    at = next((i for i in range(2, len(output.text) - 1) if output.text[i : i + 2].isprintable()), None)
    _must(at is not None, f"no text to stop at: {output.text!r}")
    stop = output.text[at : (at or 0) + 2]
    cut = bench.one(bench.request(max_tokens=16, stop=[stop]))
    told = (cut.text, cut.finish_reason, cut.stop_reason)
    wanted = (output.text[: output.text.index(stop)], "stop", stop)
    _must(told == wanted, f"stopping at {stop!r} gave text, finish_reason, stop_reason {told}, not {wanted}")


# ---- steps ----------------------------------------------------------------------------------------


def _stepped(bench: Bench) -> None:
    alone = bench.one(bench.request("kept"))
    with bench.make() as adapter:
        _must(isinstance(adapter, Stepped), "it lacks a method of Stepped: submit, advance, abort, outputs")
        stepped = cast("Stepped", adapter)
        bench.submit(adapter, bench.request("kept"))
        bench.submit(adapter, bench.request("dropped", PROMPTS[1], max_tokens=64))
        _must(stepped.advance() is True, "advance() says there is no work right after two requests came")
        stepped.abort("dropped")
        outputs = bench.finish(adapter, ["kept"])
    _must(outputs["kept"].text == alone.text, "a request that was stepped answers another text than alone")


def _streaming(bench: Bench) -> None:
    texts = []
    with bench.make() as adapter:
        stepped = cast("Stepped", adapter)
        bench.submit(adapter, bench.request(max_tokens=16))
        for _step in range(200):
            more = stepped.advance()
            texts.append(next((o.text for o in stepped.outputs()), ""))
            if not more:
                break
    grown = [t for t in dict.fromkeys(texts) if t]
    _must(len(grown) > 1, f"the text never grew from step to step: {grown}")
    for one, longer in pairwise(grown):
        _must(longer.startswith(one), f"a text that was told is taken back: {one!r}, then {longer!r}")


def _preempt(bench: Bench) -> None:
    _interrupted(bench, lambda adapter: adapter.preempt("r"), "preempt()")


def _swap(bench: Bench) -> None:
    def swap(adapter: Controlled) -> bool:
        _must(isinstance(adapter, Swapping), "it lacks the method swap")
        return cast("Swapping", adapter).swap("r")

    _interrupted(bench, swap, "swap()")


def _interrupted(bench: Bench, interrupt: Callable[[Controlled], bool], name: str) -> None:
    request = bench.request(max_tokens=8)
    free = bench.one(request)
    with bench.make() as adapter:
        bench.submit(adapter, request)
        _advance_into(adapter)
        _must(interrupt(cast("Controlled", adapter)) is True, f"{name} on a running request returned False")
        output = bench.finish(adapter, ["r"])["r"]
    _must(output.text == free.text and output.token_ids == free.token_ids, f"{name} changes the answer")
    _must(
        output.num_preemptions in (None, 1), f"after one {name}, num_preemptions is {output.num_preemptions}"
    )


def _advance_into(adapter: Any) -> None:
    """Step until a token is there, and one further."""
    for _step in range(50):
        adapter.advance()
        if any(o.token_ids for o in adapter.outputs()):
            break
    adapter.advance()


def _poison(bench: Bench) -> None:
    request = bench.request(max_tokens=8)
    free = bench.one(request)
    with bench.make() as adapter:
        bench.submit(adapter, request)
        _advance_into(adapter)
        filled = cast("Controlled", adapter).poison()
        _must(filled > 0, f"poison() says it filled {filled} slots")
        output = bench.finish(adapter, ["r"])["r"]
    _must(output.token_ids == free.token_ids, "NaN in unused memory changes the answer")


# ---- the cache ------------------------------------------------------------------------------------


def _prefix_cache(bench: Bench) -> None:
    with bench.make() as adapter:
        cold = bench.generate([bench.request("cold", LONG)], adapter)["cold"]
        hit = bench.generate([bench.request("hit", LONG)], adapter)["hit"]
    _must(not cold.num_cached_tokens, f"the first request already had {cold.num_cached_tokens} cached tokens")
    told = hit.num_cached_tokens
    _must(bool(told), f"the same {len(LONG)} tokens again: num_cached_tokens is {told}")
    _must((told or 0) < len(LONG), f"{told} of {len(LONG)} tokens cached: at least one must be computed")
    _must(hit.token_ids == cold.token_ids, "a cache hit changes the answer")


def _chunked_prefill(bench: Bench) -> None:
    request = bench.request("r", LONG)
    whole, parts = bench.one(request), bench.one(request, max_num_batched_tokens=16)
    _must(parts.token_ids == whole.token_ids, "a prompt in chunks of 16 gets another answer")


def _block_size(bench: Bench) -> None:
    request = bench.request("r", LONG)
    answers = {size: bench.one(request, block_size=size).token_ids for size in (4, 16)}
    _must(answers[4] == answers[16], f"the block size changes the answer: {answers}")


def _pool_size(bench: Bench) -> None:
    bench.one(bench.request(), num_kv_blocks=32)
    if bench.has("pool"):
        totals = []
        for blocks in (24, 32):
            with bench.make(num_kv_blocks=blocks) as adapter:
                totals.append(cast("Controlled", adapter).pool().total)
        _must(totals[1] - totals[0] == 8, f"num_kv_blocks 24 and 32 make pools of {totals} blocks")


def _pool(bench: Bench) -> None:
    with bench.make() as adapter:
        _must(hasattr(adapter, "pool"), "it lacks the method pool")
        before = cast("Controlled", adapter).pool()
        bench.generate([bench.request()], adapter)
        after = cast("Controlled", adapter).pool()
    for state in (before, after):
        _must(state.free + state.cached + state.in_use == state.total, f"free, cached, in use: {state}")
    _must(after.in_use == before.in_use, f"blocks stay in use after the last request: {before}, {after}")


def _kv(bench: Bench) -> None:
    with bench.make() as adapter:
        _must(isinstance(adapter, KVAccess), "it lacks the method read_kv")
        bench.submit(adapter, bench.request("r", LONG, max_tokens=16))
        _advance_into(adapter)
        layers = cast("KVAccess", adapter).read_kv("r")
    _must(bool(layers), "read_kv() of a running request gives no layer")
    for keys, values in layers:
        shapes = (np.shape(keys), np.shape(values))
        _must(all(len(s) == 3 and s[0] >= len(LONG) for s in shapes), f"k and v have shapes {shapes}")


def _snapshot(bench: Bench) -> None:
    with bench.make() as adapter:
        _must(isinstance(adapter, Snapshots), "it lacks the method kv_snapshot")
        bench.submit(adapter, bench.request("r", LONG, max_tokens=16))
        _advance_into(adapter)
        parse_snapshot(cast("Snapshots", adapter).kv_snapshot())


# ---- what it shows --------------------------------------------------------------------------------


def _traced(bench: Bench) -> None:
    with bench.make() as adapter:
        _must(isinstance(adapter, Traced), "it lacks the method drain_events")
        bench.generate([bench.request()], adapter)
        events = cast("Traced", adapter).drain_events()
    told = [event.get("event") for event in events]
    absent = [name for name in ("submitted", "finished") if name not in told]
    _must(not absent, f"one request ran, and no event is {' or '.join(absent)}: {told[:12]}")


def _stages(bench: Bench) -> None:
    with bench.make() as adapter:
        _must(isinstance(adapter, Stages), "it lacks the method stages")
        request = replace(bench.request(), capture=frozenset({"logits"}))
        ids = ids_of(bench.generate([request], adapter)["r"])
        logits = np.asarray(cast("Stages", adapter).stages("r").get("logits"))
    _must(logits.ndim == 2 and len(logits) == len(ids), f"{len(ids)} tokens, logits of shape {logits.shape}")
    _must(bool(np.isfinite(logits).all()), "a logit is not finite")
    _must(logits.argmax(axis=1).tolist() == list(ids), "greedy tokens are not the largest logits")


def _bitwise(bench: Bench) -> None:
    def numbers(names: Sequence[str]) -> Any:
        requests = [bench.request(f"r{i}", PROMPTS[i], logprobs=5) for i in range(len(names))]
        capture = frozenset({"logits"}) if bench.has("stages") else frozenset[str]()
        with bench.make(batch_invariant=True) as adapter:
            output = bench.generate([replace(r, capture=capture) for r in requests], adapter)["r0"]
            if capture:
                return np.asarray(cast("Stages", adapter).stages("r0")["logits"]).tobytes()
            return [[(e.token_id, e.logprob) for e in row] for row in output.logprobs or ()]

    _must(numbers("a") == numbers("abc"), "company in the batch changes the bits of a request's numbers")


def _update_weights(bench: Bench) -> None:
    pair = _equal_parameters(bench)
    with bench.make() as adapter:
        _must(isinstance(adapter, Weights), "it lacks the method swap_weights")
        weights = cast("Weights", adapter)
        # Another prompt each time: nothing may come from a cache.
        texts = []
        for number in range(3):
            request = replace(bench.request(f"r{number}", LONG, max_tokens=12), cache_salt=f"s{number}")
            texts.append(bench.generate([request], adapter)[f"r{number}"].token_ids)
            weights.swap_weights(*pair)
    _must(texts[0] == texts[2], f"exchanging {pair} twice is not as before")
    _must(texts[0] != texts[1], f"exchanging {pair} changes no token")


def _equal_parameters(bench: Bench) -> tuple[str, str]:
    from safetensors import safe_open

    for path in sorted(bench.source.path.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        for name, shape in shapes.items():
            other = name.replace("layers.0.", "layers.1.")
            if "layers.0.mlp" in name and len(shape) == 2 and shapes.get(other) == shape:
                return name, other
    raise ProbeFailed(f"{bench.source.name} has no two parameters to exchange: give another --model")


#: Feature → its probe.
PROBES: Mapping[str, Probe] = {
    "token_ids": _token_ids,
    "text": _text,
    "chat": _chat,
    "output_ids": _output_ids,
    "logprobs": _logprobs,
    "chosen_logprobs": _chosen_logprobs,
    "prompt_logprobs": _prompt_logprobs,
    "forced_decode": _forced_decode,
    "forced_prompt": _forced_decode,
    "sampling": _sampling,
    "penalties": _penalties,
    "parallel_sampling": _parallel_sampling,
    "logit_control": _logit_control,
    "stop_strings": _stop_strings,
    "streaming": _streaming,
    "stepped": _stepped,
    "preempt": _preempt,
    "swap": _swap,
    "prefix_cache": _prefix_cache,
    "chunked_prefill": _chunked_prefill,
    "block_size": _block_size,
    "pool_size": _pool_size,
    "poison": _poison,
    "traced": _traced,
    "stages": _stages,
    "kv": _kv,
    "pool": _pool,
    "snapshot": _snapshot,
    "bitwise": _bitwise,
    "update_weights": _update_weights,
}

#: Features that only a checkpoint made for them can show: a scenario of the suite is their probe.
SCENARIOS: Mapping[str, str] = {
    "image": "vision/one-image",
    "video": "vision/video",
    "media_settings": "vision/pixel-limits",
    "image_embeds": "vision/image-embeddings-equal-pixels",
    "prompt_embeds": "vision/prompt-embeddings-equal-tokens",
    "strict_loading": "loading/missing-tensor",
    "strict_rope": "loading/dynamic-rope",
    "sliding_windows": "parity/sliding-windows",
    "strict_windows": "loading/sliding-window",
}
