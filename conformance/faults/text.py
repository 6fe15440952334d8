"""Faults of stop conditions, text and templates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from conformance.faults.base import VLLM, Seam, Table
from minivllm.output.detokenizer import Detokenizer
from minivllm.output.generation import Generation
from minivllm.output.processor import OutputProcessor
from minivllm.output.stops import StopStrings
from minivllm.request import FinishReason
from minivllm.sampling import sampler as sampler_module
from minivllm.scheduler import Scheduler
from minivllm.tokenizer import Tokenizer

__all__ = ["STOPPING", "TEXT"]

STOPPING = Table("stopping")
TEXT = Table("text")


# --- stop conditions -----------------------------------------------------------------------------


@STOPPING.add(
    "only-one-eos",
    "stopping/several-eos",
    origin=f"{VLLM}/pull/4182",
    at="Scheduler._append: list of EOS ids",
    detector="finish_reason",
)
def _single_eos(seam: Seam) -> None:
    """Only the first of several end-of-sequence ids ends a request."""

    def append(self: Scheduler, request: Any, sampled: Any) -> None:
        seam.fire(sampled.token_id in request.eos_token_ids[1:])
        kept, request.eos_token_ids = request.eos_token_ids, request.eos_token_ids[:1]
        genuine(self, request, sampled)
        request.eos_token_ids = kept

    genuine = seam.set(Scheduler, "_append", append)


@STOPPING.add(
    "ignore-eos-stops-anyway",
    "stopping/ignore-eos",
    origin=f"{VLLM}/issues/4589",
    at="Scheduler._append: ignore_eos",
    detector="finish_reason",
)
def _ignore_eos_leaks(seam: Seam) -> None:
    """EOS ids are stop tokens too, which ignore_eos does not cover."""

    def append(self: Scheduler, request: Any, sampled: Any) -> None:
        hit = sampled.token_id in request.eos_token_ids and request.sampling.ignore_eos
        seam.fire(hit)
        kept = request.sampling
        if hit:
            request.sampling = replace(kept, ignore_eos=False)
        genuine(self, request, sampled)
        request.sampling = kept

    genuine = seam.set(Scheduler, "_append", append)


@STOPPING.add(
    "min-tokens-masks-one-eos",
    "stopping/several-eos",
    origin=f"{VLLM}/pull/5849",
    at="adjust: EOS ids under min_tokens",
    detector="happened",
)
def _min_tokens_eos(seam: Seam) -> None:
    """Before min_tokens only the first of several EOS ids is masked, and the others end the request."""

    def adjust(logits: Any, row: Any) -> None:
        under = len(row.tokens) - row.num_prompt_tokens < row.sampling.min_tokens
        seam.fire(under)
        one = replace(row.request, eos_token_ids=row.request.eos_token_ids[:1])
        genuine(logits, replace(row, request=one) if under else row)

    genuine = seam.set(sampler_module, "adjust", adjust)


@STOPPING.add(
    "min-tokens-forgets-stop-strings",
    "stopping/stop-string-across-tokens",
    origin=f"{VLLM}/issues/21987",
    at="Generation.add_token: min_tokens",
    detector="text_equals",
)
def _min_tokens_string(seam: Seam) -> None:
    """A stop string ends a request before min_tokens."""

    def push(self: StopStrings, piece: str, *, armed: bool = True) -> Any:
        seam.fire(not armed)
        return genuine(self, piece, armed=True)

    genuine = seam.set(StopStrings, "push", push)


@STOPPING.add(
    "stop-token-ids-ignored",
    "stopping/several-eos",
    origin=f"{VLLM}/pull/54196",
    at="Scheduler._append: stop_token_ids",
    detector="finish_reason",
)
def _stop_ids(seam: Seam) -> None:
    """Stop tokens of a request do not end it."""

    def append(self: Scheduler, request: Any, sampled: Any) -> None:
        kept = request.sampling
        seam.fire(sampled.token_id in kept.stop_token_ids)
        request.sampling = replace(kept, stop_token_ids=())
        genuine(self, request, sampled)
        request.sampling = kept

    genuine = seam.set(Scheduler, "_append", append)


@STOPPING.add(
    "stop-string-within-one-token",
    "stopping/stop-string-across-tokens",
    origin="https://github.com/mzau/mlx-knife/issues/68",
    at="StopStrings.push: text searched",
    detector="finish_reason",
)
def _per_token(seam: Seam) -> None:
    """A stop string is looked for in each token's text alone."""

    def push(self: StopStrings, piece: str, *, armed: bool = True) -> Any:
        before = self.text
        self.text = ""
        found = genuine(self, piece, armed=armed)
        self.text = before + self.text
        seam.fire(bool(before) and found is None)
        return found

    genuine = seam.set(StopStrings, "push", push)


@STOPPING.add(
    "stop-string-left-in-the-text",
    "stopping/stop-string-across-tokens",
    origin=f"{VLLM}/issues/16832 (text that does not end where it should)",
    at="StopStrings: include_in_output",
    detector="text_equals",
)
def _stop_left(seam: Seam) -> None:
    """The stop string stays in the text although nobody asked for it."""

    def init(self: StopStrings, stops: Any, *, include_in_output: bool) -> None:
        seam.fire(stops and not include_in_output)
        genuine(self, stops, include_in_output=True)

    genuine = seam.set(StopStrings, "__init__", init)


@STOPPING.add(
    "latest-stop-string-wins",
    "stopping/stop-string-across-tokens",
    origin="first principles: the list of stop strings is searched in order, not by where they end",
    at="StopStrings.push: which of several",
    detector="finish_reason",
)
def _list_order(seam: Seam) -> None:
    """Of several stop strings the first in the list is waited for, even if another is complete."""

    def init(self: StopStrings, stops: Any, *, include_in_output: bool) -> None:
        seam.fire(len(stops) > 1)
        genuine(self, stops[:1], include_in_output=include_in_output)

    genuine = seam.set(StopStrings, "__init__", init)


@STOPPING.add(
    "finish-reason-always-stop",
    "scheduling/one-token",
    origin="https://github.com/vllm-project/vllm-metal/pull/200 (a stream without its end marker)",
    at="Scheduler._finish: reason",
    detector="finish_reason",
)
def _always_stop(seam: Seam) -> None:
    """A request cut by max_tokens says that it stopped by itself."""

    def finish(self: Scheduler, request: Any, reason: Any, stop_reason: Any) -> None:
        seam.fire(reason is FinishReason.LENGTH)
        genuine(self, request, FinishReason.STOP, stop_reason)

    genuine = seam.set(Scheduler, "_finish", finish)


@STOPPING.add(
    "stop-reason-missing",
    "stopping/stop-string-across-tokens",
    origin=f"{VLLM}/issues/8625 (what ended a request is not told)",
    at="Generation.end: stop_reason",
    detector="finish_reason",
)
def _reason_missing(seam: Seam) -> None:
    """What stopped a request is not told."""

    def output(self: Generation) -> Any:
        found = genuine(self)
        seam.fire(found.stop_reason is not None)
        return replace(found, stop_reason=None)

    genuine = seam.set(Generation, "output", output)


@STOPPING.add(
    "abort-treated-as-a-normal-end",
    "scheduling/priority-order",
    origin=f"{VLLM}/pull/29987",
    at="OutputProcessor.abort: reason",
    detector="finish_reason",
)
def _abort_reason(seam: Seam) -> None:
    """A cancelled request says that it stopped by itself."""

    def abort(self: OutputProcessor, request_id: str) -> Any:
        found = genuine(self, request_id)
        seam.fire()
        return replace(found, outputs=tuple(replace(one, finish_reason="stop") for one in found.outputs))

    genuine = seam.set(OutputProcessor, "abort", abort)


# --- text ----------------------------------------------------------------------------------------


@TEXT.add(
    "each-token-decoded-alone",
    "streaming/emoji-and-cjk",
    origin=f"{VLLM}/pull/984",
    at="Detokenizer.push: window",
    detector="text_equals",
)
def _decoded_alone(seam: Seam) -> None:
    """Each token becomes text by itself, so characters of several tokens are lost."""

    def push(self: Detokenizer, token_id: int) -> str:
        seam.fire()
        return self._tokenizer.decode([token_id], skip_special_tokens=self._skip_special_tokens)

    seam.set(Detokenizer, "push", push)
    seam.set(Detokenizer, "flush", lambda self: "")  # noqa: ARG005 - it has nothing left


@TEXT.add(
    "half-a-character-shown",
    "streaming/emoji-and-cjk",
    origin="first principles: bytes of a character shown before the character is whole",
    at="Detokenizer.push: incomplete characters",
    detector="text_equals",
)
def _half_shown(seam: Seam) -> None:
    """Bytes that are no character yet are shown as replacement characters, and taken back later."""

    def push(self: Detokenizer, token_id: int) -> str:
        piece: str = genuine(self, token_id)
        seam.fire(not piece)
        return piece or "\ufffd"

    genuine = seam.set(Detokenizer, "push", push)


@TEXT.add(
    "prompt-leaks-into-the-first-piece",
    "streaming/emoji-and-cjk",
    origin=f"{VLLM}/issues/48853",
    at="Detokenizer.__init__: prompt that ends in half a character",
    detector="text_equals",
)
def _prompt_leak(seam: Seam) -> None:
    """A prompt that ends inside a character appears in the text of the answer."""

    def init(self: Detokenizer, tokenizer: Any, prompt: Any, *, skip_special_tokens: bool) -> None:
        genuine(self, tokenizer, prompt, skip_special_tokens=skip_special_tokens)
        if self._prompt_text.endswith("\ufffd"):
            seam.fire()
            self._num_settled, self._prompt_text = 0, ""

    genuine = seam.set(Detokenizer, "__init__", init)


@TEXT.add(
    "last-bytes-dropped",
    "streaming/emoji-and-cjk",
    origin=f"{VLLM}/issues/16832 (the end of a text is missing)",
    at="Detokenizer.flush: bytes that never became a character",
    detector="text_equals",
)
def _no_flush(seam: Seam) -> None:
    """What is still held back when a request ends is never shown."""

    def flush(self: Detokenizer) -> str:
        seam.fire(genuine(self))
        return ""

    genuine = seam.set(Detokenizer, "flush", flush)


@TEXT.add(
    "doubled-bos",
    "parity/chat-template[model=tiny-llama]",
    origin=f"{VLLM}/pull/55288",
    at="Tokenizer.encode_chat: special tokens",
    detector="tokens_match_golden",
)
def _doubled_bos(seam: Seam) -> None:
    """The template writes BOS, and the tokenizer adds another."""

    def encode(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> Any:
        seam.fire(not add_special_tokens)
        return genuine(self, text, add_special_tokens=True)

    genuine = seam.set(Tokenizer, "encode", encode)


@TEXT.add(
    "no-generation-prompt",
    "parity/chat-template[model=tiny-llama]",
    origin="https://github.com/Blaizzy/mlx-vlm/pull/309 (a turn that does not end or begin where it should)",
    at="Tokenizer.render_chat: add_generation_prompt",
    detector="tokens_match_golden",
)
def _no_generation_prompt(seam: Seam) -> None:
    """The header of the assistant's turn is left out."""

    def render(self: Tokenizer, messages: Any, **more: Any) -> Any:
        seam.fire(more.get("add_generation_prompt"))
        return genuine(self, messages, **{**more, "add_generation_prompt": False})

    genuine = seam.set(Tokenizer, "render_chat", render)


@TEXT.add(
    "system-message-dropped",
    "parity/chat-template[model=tiny-llama]",
    origin="https://github.com/OpenGVLab/InternVL/issues/1065 (parts of a conversation out of place)",
    at="Tokenizer.render_chat: messages",
    detector="tokens_match_golden",
)
def _no_system(seam: Seam) -> None:
    """The system message of a conversation is lost."""

    def render(self: Tokenizer, messages: Any, **more: Any) -> Any:
        kept = [message for message in messages if message["role"] != "system"]
        seam.fire(len(kept) < len(messages))
        return genuine(self, kept, **more)

    genuine = seam.set(Tokenizer, "render_chat", render)
