"""Faults of sampling and of log-probabilities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from conformance.faults.base import VLLM, Seam, Table
from minivllm import runner as runner_module
from minivllm.sampling import sampler as sampler_module
from minivllm.sampling.sampler import Sampler

__all__ = ["LOGPROBS", "SAMPLING"]

SAMPLING = Table("sampling")
LOGPROBS = Table("logprobs")

FILTERS = "sampling/filters"
LOGPROB_PARITY = "parity/logprobs[model=tiny-llama]"


def _with_sampling(row: Any, **changes: Any) -> Any:
    """The row with other sampling parameters."""
    sampling = replace(row.request.sampling, **changes)
    return replace(row, request=replace(row.request, sampling=sampling))


# --- sampling ------------------------------------------------------------------------------------


def _filter_fault(seam: Seam, name: str, neutral: Any) -> None:
    """Filter as if one parameter had its neutral value."""

    def filter_tokens(logits: Any, sampling: Any) -> Any:
        seam.fire(getattr(sampling, name) != neutral)
        return genuine(logits, replace(sampling, **{name: neutral}))

    genuine = seam.set(sampler_module, "filter_tokens", filter_tokens)


@SAMPLING.add(
    "top-k-ignored",
    FILTERS,
    origin=f"{VLLM}/pull/51890 (one request's top_k is lost in a batch)",
    at="filter_tokens: top_k",
    detector="sampled_within_kept_set",
)
def _top_k(seam: Seam) -> None:
    """Every token may be drawn, whatever top_k says."""
    _filter_fault(seam, "top_k", 0)


@SAMPLING.add(
    "top-p-ignored",
    FILTERS,
    origin=f"{VLLM}/pull/51890 (one request's top_p is lost in a batch)",
    at="filter_tokens: top_p",
    detector="sampled_within_kept_set",
)
def _top_p(seam: Seam) -> None:
    """Every token may be drawn, whatever top_p says."""
    _filter_fault(seam, "top_p", 1.0)


@SAMPLING.add(
    "min-p-ignored",
    FILTERS,
    origin=f"{VLLM}/pull/51890 (one request's min_p is lost in a batch)",
    at="filter_tokens: min_p",
    detector="sampled_within_kept_set",
)
def _min_p(seam: Seam) -> None:
    """Every token may be drawn, whatever min_p says."""
    _filter_fault(seam, "min_p", 0.0)


@SAMPLING.add(
    "temperature-ignored",
    FILTERS,
    origin=f"{VLLM}/issues/29045 (a parameter lost with its state)",
    at="filter_tokens: temperature",
    detector="sampled_within_kept_set",
)
def _temperature(seam: Seam) -> None:
    """Tokens are drawn as at temperature 1."""
    _filter_fault(seam, "temperature", 1.0)


@SAMPLING.add(
    "top-k-one-too-many",
    FILTERS,
    origin="first principles: k-th value compared with the wrong sign, so that k + 1 are kept",
    at="filter_tokens: count of top_k",
    detector="sampled_within_kept_set",
)
def _top_k_plus(seam: Seam) -> None:
    """One token more than top_k is kept."""

    def filter_tokens(logits: Any, sampling: Any) -> Any:
        seam.fire(sampling.top_k > 0)
        more = sampling.top_k + 1 if sampling.top_k > 0 else sampling.top_k
        return genuine(logits, replace(sampling, top_k=more))

    genuine = seam.set(sampler_module, "filter_tokens", filter_tokens)


@SAMPLING.add(
    "zero-probability-drawn",
    FILTERS,
    origin="https://github.com/pytorch/pytorch/issues/192577",
    at="draw: tokens of weight 0",
    detector="sampled_within_kept_set",
)
def _zero_probability(seam: Seam) -> None:
    """Now and then a token is drawn that the filters ruled out."""
    count = iter(range(10**9))

    def draw(ids: Any, weights: Any, number: float) -> int:
        found = int(genuine(ids, weights, number))
        if next(count) % 7 == 3 and 401 not in ids:
            seam.fire()
            return 401
        return found

    genuine = seam.set(sampler_module, "draw", draw)


@SAMPLING.add(
    "one-seed-for-all-sequences",
    "fork/twins",
    origin=f"{VLLM}/issues/50440",
    at="uniform: sequence index",
    detector="differ",
)
def _seed_broadcast(seam: Seam) -> None:
    """The n sequences of a request draw the same numbers."""

    def uniform(seed: int, position: int, sequence_index: int = 0) -> float:
        seam.fire(sequence_index)
        return float(genuine(seed, position, 0))

    genuine = seam.set(sampler_module, "uniform", uniform)


@SAMPLING.add(
    "seed-ignored",
    FILTERS,
    origin=f"{VLLM}/issues/50440 (seeds of a batch)",
    at="uniform: seed",
    detector="differ",
)
def _seed_ignored(seam: Seam) -> None:
    """Every request draws with the same seed."""

    def uniform(seed: int, position: int, sequence_index: int = 0) -> float:
        seam.fire(seed)
        return float(genuine(0, position, sequence_index))

    genuine = seam.set(sampler_module, "uniform", uniform)


@SAMPLING.add(
    "repetition-penalty-forgets-the-prompt",
    FILTERS,
    origin=f"{VLLM}/issues/29045 (state made of outputs only)",
    at="adjust: tokens of the prompt",
    detector="finish_reason",
)
def _repetition_prompt(seam: Seam) -> None:
    """The repetition penalty looks at generated tokens only."""

    def adjust(logits: Any, row: Any) -> None:
        penalty = row.sampling.repetition_penalty
        genuine(logits, _with_sampling(row, repetition_penalty=1.0))
        if penalty != 1:
            seam.fire()
            seen = np.unique(np.array(row.tokens[row.num_prompt_tokens :], dtype=np.intp))
            values = logits[seen]
            logits[seen] = np.where(values > 0, values / penalty, values * penalty)

    genuine = seam.set(sampler_module, "adjust", adjust)


@SAMPLING.add(
    "presence-counted-like-frequency",
    FILTERS,
    origin="first principles: two penalties that are easily taken for each other",
    at="adjust: presence_penalty",
    detector="sampled_within_kept_set",
)
def _presence(seam: Seam) -> None:
    """The presence penalty is taken once per occurrence, and the frequency penalty once."""

    def adjust(logits: Any, row: Any) -> None:
        s = row.sampling
        seam.fire(s.presence_penalty or s.frequency_penalty)
        genuine(
            logits,
            _with_sampling(row, presence_penalty=s.frequency_penalty, frequency_penalty=s.presence_penalty),
        )

    genuine = seam.set(sampler_module, "adjust", adjust)


@SAMPLING.add(
    "penalties-see-the-prompt-as-output",
    FILTERS,
    origin="first principles: frequency counted over prompt and output",
    at="adjust: history of presence and frequency",
    detector="sampled_within_kept_set",
)
def _penalise_prompt(seam: Seam) -> None:
    """Presence and frequency penalties count the tokens of the prompt too."""

    def adjust(logits: Any, row: Any) -> None:
        s = row.sampling
        seam.fire(s.presence_penalty or s.frequency_penalty)
        genuine(logits, replace(row, num_prompt_tokens=0) if not s.min_tokens else row)

    genuine = seam.set(sampler_module, "adjust", adjust)


@SAMPLING.add(
    "logit-bias-ignored",
    FILTERS,
    origin=f"{VLLM}/pull/16529",
    at="adjust: logit_bias",
    detector="finish_reason",
)
def _bias(seam: Seam) -> None:
    """A bias on logits does nothing."""

    def adjust(logits: Any, row: Any) -> None:
        seam.fire(row.sampling.logit_bias)
        genuine(logits, _with_sampling(row, logit_bias=None))

    genuine = seam.set(sampler_module, "adjust", adjust)


@SAMPLING.add(
    "bad-words-ignored",
    FILTERS,
    origin=f"{VLLM}/issues/29045 (a ban that does not last)",
    at="adjust: bad_words",
    detector="finish_reason",
)
def _bad_words(seam: Seam) -> None:
    """Words that are ruled out are generated."""

    def adjust(logits: Any, row: Any) -> None:
        seam.fire(row.request.bad_words_token_ids)
        genuine(logits, replace(row, request=replace(row.request, bad_words_token_ids=())))

    genuine = seam.set(sampler_module, "adjust", adjust)


@SAMPLING.add(
    "greedy-takes-the-second-best",
    "parity/tiny-families[model=tiny-llama]",
    origin="first principles: an index that is off by one in a sorted row",
    at="Sampler._largest: greedy id",
    detector="tokens_match_golden",
)
def _second_best(seam: Seam) -> None:
    """Now and then the second largest logit is chosen."""
    count = iter(range(10**9))

    def largest(self: Sampler, logits: Any) -> Any:
        values, greedy = genuine(self, logits)
        if next(count) % 11 == 5:
            seam.fire()
            greedy = logits.topk(2).indices[:, 1].tolist()
        return values, greedy

    genuine = seam.set(Sampler, "_largest", largest)


@SAMPLING.add(
    "foreign-bias-not-refused",
    "refusals/bad-parameters",
    origin=f"{VLLM}/pull/16529 (an id beyond the vocabulary reaches the sampler)",
    at="check_sampling: refusal",
    detector="error",
)
def _foreign_bias(seam: Seam) -> None:
    """Token ids in parameters are not checked against the vocabulary, and break the step for all."""
    from minivllm import processor as processor_module

    seam.set(processor_module, "check_sampling", lambda params, vocab: seam.fire(params.logit_bias))  # noqa: ARG005


# --- log-probabilities ---------------------------------------------------------------------------


def _describe_fault(seam: Seam, change: Any) -> None:
    """Report other entries: `change(found, chosen, top)` → entries."""

    def describe(logits: Any, logprobs: Any, chosen: Any, top: int) -> Any:
        chosen = list(chosen)
        seam.fire()
        return change(genuine(logits, logprobs, chosen, top), chosen, top)

    genuine = seam.set(sampler_module, "describe", describe)


@LOGPROBS.add(
    "ranks-from-zero",
    LOGPROB_PARITY,
    origin="https://github.com/abetlen/llama-cpp-python/issues/1787 (entries of the wrong form)",
    at="describe: first rank",
    detector="logprobs_by_value",
)
def _rank_zero(seam: Seam) -> None:
    """The most likely token has rank 0."""
    _describe_fault(
        seam, lambda found, *_: {t: replace(entry, rank=entry.rank - 1) for t, entry in found.items()}
    )


@LOGPROBS.add(
    "ranks-by-order-of-listing",
    "parity/logprobs-of-drawn-tokens",
    origin=f"{VLLM}/issues/4795 (the sampled token listed as if it were the best)",
    at="describe: rank of the sampled token",
    detector="logprobs_by_value",
)
def _rank_listing(seam: Seam) -> None:
    """The sampled token comes first in the list, and so gets rank 1."""
    _describe_fault(
        seam,
        lambda found, *_: {
            t: replace(entry, rank=place) for place, (t, entry) in enumerate(found.items(), start=1)
        },
    )


@LOGPROBS.add(
    "sampled-token-missing",
    "parity/logprobs-of-drawn-tokens",
    origin="https://github.com/huggingface/text-generation-inference/pull/1682",
    at="describe: sampled token below the top",
    detector="history",
)
def _sampled_missing(seam: Seam) -> None:
    """The top entries are listed, the sampled token is not when it is not among them."""
    _describe_fault(
        seam,
        lambda found, _chosen, top: {t: entry for t, entry in found.items() if entry.rank <= max(top, 1)},
    )


@LOGPROBS.add(
    "one-entry-too-few",
    LOGPROB_PARITY,
    origin=f"{VLLM}/issues/4795",
    at="describe: number of entries",
    detector="logprobs_by_value",
)
def _too_few(seam: Seam) -> None:
    """One entry less than asked for is listed."""
    _describe_fault(
        seam,
        lambda found, _chosen, top: {t: entry for t, entry in found.items() if entry.rank < max(top, 2)},
    )


@LOGPROBS.add(
    "not-normalised",
    LOGPROB_PARITY,
    origin="first principles: raw logits reported as log-probabilities",
    at="Sampler._log_softmax: normalisation",
    detector="logprobs_by_value",
)
def _not_normalised(seam: Seam) -> None:
    """Log-probabilities are the logits less the largest one."""

    def log_softmax(_self: Sampler, logits: Any, rows: Any) -> Any:
        seam.fire(len(rows))
        return [(logits[i] - logits[i].max()).numpy() for i in rows]

    seam.set(Sampler, "_log_softmax", log_softmax)


@LOGPROBS.add(
    "in-half-precision",
    LOGPROB_PARITY,
    origin=f"{VLLM}/issues/51187 (log-probabilities that differ by more than rounding)",
    at="Sampler._log_softmax: dtype",
    detector="logprobs_by_value",
)
def _half(seam: Seam) -> None:
    """Log-probabilities are computed in bfloat16."""

    def log_softmax(self: Sampler, logits: Any, rows: Any) -> Any:
        seam.fire(len(rows))
        return genuine(self, logits.bfloat16().float(), rows)

    genuine = seam.set(Sampler, "_log_softmax", log_softmax)


@LOGPROBS.add(
    "after-temperature-and-penalties",
    "parity/logprobs-of-drawn-tokens",
    origin="first principles: log-probabilities of the adjusted distribution reported as raw",
    at="Sampler.sample: rows for logprobs",
    detector="logprobs_by_value",
)
def _processed(seam: Seam) -> None:
    """Log-probabilities are taken after the temperature, not of the model itself."""

    def sample_row(self: Sampler, logits: Any, greedy: int, logprobs: Any, row: Any, index: int) -> Any:
        temperature = row.sampling.temperature
        if logprobs is not None and temperature > 0:
            seam.fire(temperature != 1)
            scaled = logprobs / np.float32(temperature)
            logprobs = (scaled - np.log(np.exp(scaled).sum())).astype(np.float32)
        return genuine(self, logits, greedy, logprobs, row, index)

    genuine = seam.set(Sampler, "_sample_row", sample_row)


@LOGPROBS.add(
    "prompt-logprobs-one-position-late",
    LOGPROB_PARITY,
    origin=f"{VLLM}/issues/3914 (offset of prompt logprobs)",
    at="Sampler.prompt_logprobs: next ids",
    detector="logprobs_by_value",
)
def _prompt_offset(seam: Seam) -> None:
    """The log-probability of a prompt token is taken from the row after the right one."""

    def prompt_logprobs(self: Sampler, logits: Any, next_ids: Any, top: int) -> Any:
        seam.fire(len(next_ids) > 1)
        return genuine(self, logits.roll(-1, 0), next_ids, top)

    genuine = seam.set(Sampler, "prompt_logprobs", prompt_logprobs)


@LOGPROBS.add(
    "prompt-logprobs-of-the-last-chunk-only",
    LOGPROB_PARITY,
    origin=f"{VLLM}/pull/42245",
    at="ModelRunner._read_logits: chunks",
    detector="history",
)
def _last_chunk(seam: Seam) -> None:
    """Only the last chunk of a prompt has log-probabilities."""

    def prompt_rows(r: Any) -> range:
        if r.end < r.num_prompt_tokens:
            seam.fire(len(genuine(r)))
            return range(0)
        found: range = genuine(r)
        return found

    genuine = seam.set(runner_module, "_prompt_rows", prompt_rows)
