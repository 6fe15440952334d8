"""The truth: Hugging Face in float64, as it is, one request at a time.

Transformers keeps its norms, softmax and rope angles in float32 whatever the dtype; that is part
of the specification and stays so. Token ids come from `generate`, numbers from one forced full
forward pass. The bfloat16 truth is float64 arithmetic on the weights rounded to bfloat16.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from conformance import EDITION, RECORD_SCHEMA
from conformance.adapters.base import ModelSource
from conformance.canonical import CanonicalError, parse_canonical, request_key
from conformance.hf_models import (
    HFModel,
    NoTruth,
    has_stateless_rope,
    load_config,
    load_hf,
    load_tokenizer,
    prompt_token_ids,
)
from conformance.hf_stages import traced_forward
from conformance.records import ArmError, GoldenRecord, LogitTable
from conformance.store import check_weights
from conformance.yardstick import error_between, forward, measure_yardstick

__all__ = ["TOP_IDS", "Reference", "NoTruth", "StageVerdict", "logit_table"]

#: How many of the most likely ids a record keeps per position.
TOP_IDS = 20

# `generate` compares logits in float32, so it may take the second of two ids that lie closer.
_TIE = 1e-4

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StageVerdict:
    """How a stage computed again compares with the record.

    Attributes:
        verdict: "same" (bits), "inside band" (no further off than the yardstick) or "changed".
        error: rms and largest difference, where the stage has values.
    """

    stage: str
    verdict: str
    error: ArmError | None = None


class Reference:
    """Answers requests for one model.

    A model object is reused only where no forward pass can change its rotary buffers; every other
    model is loaded afresh for each use.

    Args:
        source: the checkpoint.
    """

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self._config = load_config(source.path)
        self._tokenizer = load_tokenizer(source.path)
        self._reusable = has_stateless_rope(self._config)
        self._loaded: dict[tuple[str, str], HFModel] = {}

    def record(self, request: Mapping[str, Any], case: str, *, traced: bool = False) -> GoldenRecord:
        """Compute the golden record of a canonical request.

        Args:
            case: file name of the record.
            traced: keep stage arrays (tiny models and short prompts only: they are large).

        Raises:
            NoTruth: Hugging Face cannot answer, or contradicts itself.
        """
        request = parse_canonical(request)
        if request["model"] != self.source.name:
            raise CanonicalError(
                f"the request is for {request['model']!r}, this reference is about {self.source.name!r}"
            )
        dtype = request["dtype"]
        prompt = prompt_token_ids(self._tokenizer, request["prompt"])
        self._check_rope(len(prompt) + request["max_tokens"])
        tokens, stop_reason, stopped = self._generate(request, prompt)
        output, prompt_table, stages = self._numbers(
            dtype, prompt, tokens, request["prompt_logprobs"], traced
        )
        _check_choice(tokens, output)
        yardstick = measure_yardstick(
            lambda attention: self._model(dtype, attention).module,
            prompt,
            tokens,
            output.top_ids,
            output.top_logits,
        )
        return GoldenRecord(
            schema=RECORD_SCHEMA,
            edition=EDITION,
            key=request_key(request),
            model=self.source.name,
            case=case,
            request=request,
            provenance=self._provenance(dtype),
            dtype=dtype,
            prompt_token_ids=prompt,
            token_ids=tokens,
            text=self._text(tokens[:-1] if stopped else tokens),
            finish_reason="stop" if stopped else "length",
            stop_reason=stop_reason,
            output=output,
            yardstick=yardstick,
            prompt=prompt_table,
            stages=stages,
            stage_bands=self._stage_bands(dtype, prompt, tokens, stages),
        )

    def verify(self, record: GoldenRecord) -> list[StageVerdict]:
        """Compute a record's forced forward pass again and compare it stage by stage.

        Raises:
            WrongWeights: the checkpoint here is not the recorded one.
        """
        check_weights(record, self.source.sha256)
        prompt, tokens = record.prompt_token_ids, record.token_ids
        same_prompt = prompt_token_ids(self._tokenizer, record.request["prompt"]) == prompt
        asked = record.prompt is not None
        rows, stages = self._rows(record.dtype, prompt, tokens, asked, bool(record.stages))
        verdicts = [StageVerdict("prompt_ids", "same" if same_prompt else "changed")]
        for stage, recorded in record.stages.items():
            band = record.stage_bands.get(stage, ArmError(0.0, 0.0))
            verdicts.append(_compare(stage, stages[stage], recorded, band))
        band = ArmError(record.yardstick.R, record.yardstick.M)
        output = rows[len(rows) - len(tokens) :]
        if record.prompt is not None:
            verdicts.append(_compare_table("prompt_logits", rows[: len(prompt) - 1], record.prompt, band))
        verdicts.append(_compare_table("output_logits", output, record.output, band))
        chosen = output.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        agrees = bool((output.max(dim=1).values - chosen <= max(_TIE, 2 * band.max)).all())
        verdicts.append(StageVerdict("token_ids", "same" if agrees else "changed"))
        return verdicts

    def _check_rope(self, length: int) -> None:
        if self._reusable:
            return
        parameters = getattr(self._config, "rope_parameters", None) or {}
        limit = parameters.get("original_max_position_embeddings", self._config.max_position_embeddings)
        if length > limit:
            raise NoTruth(
                f"{self.source.name} has rope kind {parameters.get('rope_type')!r}, and {length} tokens "
                f"exceed its original length {limit}: there Hugging Face's own cached and full forward "
                "passes disagree, so there is no truth; use a shorter request"
            )

    def _generate(
        self, request: Mapping[str, Any], prompt: Sequence[int]
    ) -> tuple[tuple[int, ...], int | None, bool]:
        """Greedy ids, the stop token id that ended them (None for EOS), and whether one did."""
        model = self._model(request["dtype"], "truth")
        eos = set() if request["ignore_eos"] else set(model.eos_token_ids)
        ends = sorted(eos | set(request["stop_token_ids"]))
        config = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=request["max_tokens"], eos_token_id=ends or None, pad_token_id=0
        )
        ids = torch.tensor([list(prompt)])
        # An explicit mask: without one, generate takes pad ids inside the prompt for padding.
        mask = torch.ones_like(ids)
        answer = model.module.generate(input_ids=ids, attention_mask=mask, generation_config=config)
        tokens = tuple(answer[0, len(prompt) :].tolist())
        stopped = tokens[-1] in ends
        return tokens, (tokens[-1] if stopped and tokens[-1] not in eos else None), stopped

    def _numbers(
        self, dtype: str, prompt: Sequence[int], tokens: Sequence[int], asked: bool, traced: bool
    ) -> tuple[LogitTable, LogitTable | None, dict[str, NDArray[Any]]]:
        rows, stages = self._rows(dtype, prompt, tokens, asked, traced)
        output = logit_table(rows[len(rows) - len(tokens) :])
        return output, (logit_table(rows[: len(prompt) - 1]) if asked else None), stages

    def _rows(
        self, dtype: str, prompt: Sequence[int], tokens: Sequence[int], asked: bool, traced: bool
    ) -> tuple[torch.Tensor, dict[str, NDArray[Any]]]:
        """Float64 logits at all positions if `asked`, else at those that chose a token; stages."""
        module = self._model(dtype, "truth").module
        ids = [*prompt, *tokens[:-1]]
        keep = 0 if asked else len(tokens)
        if not traced:
            return forward(module, ids, keep=keep), {}
        return traced_forward(module, ids, keep, len(tokens))

    def _stage_bands(
        self, dtype: str, prompt: Sequence[int], tokens: Sequence[int], truth: Mapping[str, NDArray[Any]]
    ) -> dict[str, ArmError]:
        if not truth:
            return {}
        ids = [*prompt, *tokens[:-1]]
        bands: dict[str, ArmError] = {}
        for attention in ("eager", "sdpa"):
            module = self._model(dtype, attention).module
            _, stages = traced_forward(module, ids, len(tokens), len(tokens))
            for stage, values in stages.items():
                error, known = error_between(values, truth[stage]), bands.get(stage, ArmError(0.0, 0.0))
                bands[stage] = ArmError(max(error.rms, known.rms), max(error.max, known.max))
        return bands

    def _model(self, dtype: str, kind: str) -> HFModel:
        """kind: "truth", or the attention of a yardstick arm."""
        if any(loaded != dtype for loaded, _ in self._loaded):
            self._loaded.clear()  # never two dtypes in memory at once
        if (dtype, kind) in self._loaded:
            return self._loaded[dtype, kind]
        model = (
            self._load_truth(dtype) if kind == "truth" else load_hf(self.source.path, _DTYPES[dtype], kind)
        )
        if self._reusable:
            self._loaded[dtype, kind] = model
        return model

    def _load_truth(self, dtype: str) -> HFModel:
        model = load_hf(self.source.path, torch.float64)
        if dtype == "float32":
            return model
        # Rounded by loading, so that whatever Transformers keeps in float32 stays exact.
        rounded = load_hf(self.source.path, _DTYPES[dtype]).module.state_dict()
        for name, tensor in model.module.state_dict().items():
            tensor.copy_(rounded[name])
        return model

    def _text(self, tokens: Sequence[int]) -> str:
        """What an engine shows: the token that ended the answer and special tokens left out."""
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def _provenance(self, dtype: str) -> dict[str, str]:
        names = ("torch", "transformers", "tokenizers", "numpy", "safetensors", "gguf")
        truth = "float64" + (" on weights rounded to bfloat16" if dtype == "bfloat16" else "")
        model = self._model(dtype, "truth")
        return {name: version(name) for name in names} | {
            "weights_sha256": self.source.sha256,
            "hf_class": type(model.module).__name__,
            "attn_implementation": "eager",
            "truth": truth,
            "platform": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "threads": str(torch.get_num_threads()),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }


def logit_table(rows: torch.Tensor, top: int = TOP_IDS) -> LogitTable:
    """Cut float64 logits [positions, vocab] to the top ids; the lower id first among equals."""
    top = min(top, rows.shape[-1])
    ids = np.zeros((len(rows), top), dtype=np.int64)
    values = np.zeros((len(rows), top), dtype=np.float64)
    for i, row in enumerate(rows.numpy()):
        # Every id that ties with the last kept one is a candidate, so that ties are ordered by id.
        candidates = np.flatnonzero(row >= np.partition(row, len(row) - top)[len(row) - top])
        ids[i] = candidates[np.lexsort((candidates, -row[candidates]))][:top]
        values[i] = row[ids[i]]
    return LogitTable(ids, values, torch.logsumexp(rows, dim=-1).numpy())


def _check_choice(tokens: Sequence[int], output: LogitTable) -> None:
    for i, token in enumerate(tokens):
        near = output.top_ids[i][output.top_logits[i] >= output.top_logits[i, 0] - _TIE]
        if token not in near:
            raise NoTruth(
                f"generate chose token {token} at generated position {i}, one forced forward pass chooses "
                f"{output.top_ids[i, 0]} by {output.margins[i]:.3g}: Hugging Face contradicts itself"
            )


def _compare(stage: str, values: NDArray[Any], recorded: NDArray[Any], band: ArmError) -> StageVerdict:
    if values.shape != recorded.shape:
        return StageVerdict(stage, "changed")
    if values.size == 0 or np.array_equal(values, recorded):
        return StageVerdict(stage, "same", ArmError(0.0, 0.0))
    error = error_between(values, recorded)
    inside = error.rms <= band.rms and error.max <= band.max
    return StageVerdict(stage, "inside band" if inside else "changed", error)


def _compare_table(stage: str, rows: torch.Tensor, recorded: LogitTable, band: ArmError) -> StageVerdict:
    values = rows.gather(1, torch.from_numpy(recorded.top_ids)).numpy()
    logsumexp = torch.logsumexp(rows, dim=-1).numpy()
    return _compare(
        stage,
        np.column_stack([values, logsumexp]),
        np.column_stack([recorded.top_logits, recorded.logsumexp]),
        band,
    )
