"""What usually goes wrong at a stage: the words triage adds to the first stage outside of its band."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["CAUSES", "Cause", "kind_of", "usual_causes"]


@dataclass(frozen=True, slots=True)
class Cause:
    """One usual cause. `source` is a public thread about such a fault; "" where there is none to cite."""

    text: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.source})" if self.source else self.text


_VLLM = "https://github.com/vllm-project/vllm"
_HF = "https://github.com/huggingface/transformers"
_MLX_VLM = "https://github.com/Blaizzy/mlx-vlm"

#: Kind of stage → its usual causes, the likeliest first.
CAUSES: Mapping[str, tuple[Cause, ...]] = {
    "prompt ids": (
        Cause(
            "two BOS tokens: the template writes one and the tokenizer adds another", f"{_VLLM}/pull/55288"
        ),
        Cause("another chat template, or no generation prompt at its end"),
        Cause(
            "content parts flattened, so that pictures stand before the text",
            "https://github.com/OpenGVLab/InternVL/issues/1065",
        ),
        Cause("placeholders expanded to another number of tokens: see the resize rule"),
    ),
    "spans": (
        Cause("the separators between tiles, rows or frames are counted as embeddings"),
        Cause("an item's rows start again at 0 in its second span"),
    ),
    "pixels": (
        Cause("another resampling filter or image processor backend", f"{_HF}/pull/39591"),
        Cause(
            "transparency dropped instead of composited, or another mode conversion", f"{_VLLM}/pull/18569"
        ),
        Cause(
            "the resize rule: smallest and largest pixels, multiples of the patch",
            "https://github.com/QwenLM/Qwen3-VL/pull/1145",
        ),
        Cause("mean, standard deviation or the order of channels"),
    ),
    "vision": (
        Cause("the projector: a bias left out, another activation, a norm before or after"),
        Cause(
            "pixel shuffle or merge along the wrong axis",
            "https://github.com/OpenGVLab/InternVL/issues/927",
        ),
        Cause("the layer of the tower whose output is taken, or its class token kept or dropped"),
        Cause(
            "an encoder cache keyed by less than the picture",
            "https://github.com/vllm-project/vllm/pull/49975",
        ),
    ),
    "deepstack": (
        Cause("rows not advanced with the chunk: each chunk starts at row 0 again", f"{_MLX_VLM}/pull/1332"),
        Cause("the list of levels applied to the wrong layers"),
    ),
    "embeddings": (
        Cause("pictures merged by matching token ids instead of by span, so a spelled placeholder counts"),
        Cause("rows of a picture cut wrongly where a chunk ends inside it"),
        Cause("the embedding scale of the family left out"),
    ),
    "positions": (
        Cause(
            "number of tokens used where the next position is meant",
            "https://github.com/ggml-org/llama.cpp/pull/22439",
        ),
        Cause("a position delta left over from another request", f"{_HF}/pull/43952"),
        Cause("frames per second dropped, so that videos are spaced alike", f"{_VLLM}/pull/47736"),
        Cause("positions not extended over generated tokens after a preemption"),
    ),
    "kv": (
        Cause(
            "rope: theta, its scaling, how much of a head is rotated, interleaved or halves",
            f"{_VLLM}/pull/43770",
        ),
        Cause("rope angles in low precision, or a cos and sin table that is too coarse", f"{_HF}/pull/29285"),
        Cause("a block of another request: freed, reused or published too early", f"{_VLLM}/issues/46592"),
        Cause("slot mapping: rows written past a block's end", f"{_VLLM}/pull/54296"),
        Cause("query and key norms over the wrong axis", f"{_VLLM}/pull/16311"),
    ),
    "hidden": (
        Cause("rope, where the keys are right: queries rotated by other positions"),
        Cause("the mask: window off by one, or a row that sees its future", f"{_HF}/issues/39408"),
        Cause(
            "at a picture's rows: they see each other in some models (Gemma 3), and a causal mask hides it",
            f"{_VLLM}/pull/27938",
        ),
        Cause("NaN or stale values of unused slots that reach attention", f"{_VLLM}/pull/936"),
        Cause("the block table: keys of another block, or in another order"),
        Cause("a weight transposed, fused in another order, or a bias left out"),
        Cause("norm epsilon, a norm's +1, or the wrong activation"),
    ),
    "final": (Cause("the last norm left out or applied twice"),),
    "logits": (
        Cause("the head: tied though it has weights of its own, or a bias dropped", f"{_VLLM}/pull/46835"),
        Cause("logits of another row than the last of the request"),
        Cause("soft-capping or scaling of logits", "https://github.com/InternLM/lmdeploy/pull/2842"),
    ),
    "sampling": (
        Cause("ties: the lowest id must win"),
        Cause(
            "temperature 0 not taken as greedy, or a penalty of another request applied",
            f"{_VLLM}/pull/51890",
        ),
        Cause("stop ids masked or left unmasked (min_tokens)", f"{_VLLM}/pull/5849"),
        Cause("end ids of generation_config that are not heeded", f"{_VLLM}/pull/4182"),
        Cause("log-probabilities normalised over the likeliest ids only"),
    ),
    "text": (
        Cause("a prompt that ends inside a character is given out again", f"{_VLLM}/issues/48853"),
        Cause("a character that the last token completes is held back for good", f"{_VLLM}/issues/3131"),
        Cause("tokens decoded one by one, special ones shown, or spaces cleaned up"),
    ),
}


def kind_of(stage: str) -> str:
    """The kind a stage belongs to: "hidden.3" is of kind "hidden", "k.0" and "v.0" of kind "kv"."""
    kind = stage.partition(".")[0]
    return "kv" if kind in ("k", "v") else kind


def usual_causes(stage: str) -> tuple[Cause, ...]:
    """The usual causes for a stage, the likeliest first; () for a stage nobody knows."""
    return CAUSES.get(kind_of(stage), ())
