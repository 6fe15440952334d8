"""The truth: Hugging Face in float64, as it is, one request at a time.

Transformers keeps its norms, softmax and rope angles in float32 whatever the dtype; that is part
of the specification and stays so. Token ids come from `generate`, numbers from one forced full
forward pass. The bfloat16 truth is float64 arithmetic on the weights rounded to bfloat16.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from conformance import EDITION, RECORD_SCHEMA
from conformance.adapters.base import ModelSource
from conformance.assets import Asset, AssetError, asset_directory, asset_of_digest
from conformance.canonical import CanonicalError, media_parts, parse_canonical, request_key
from conformance.hf_models import (
    HFModel,
    NoTruth,
    has_stateless_rope,
    load_config,
    load_hf,
    text_model,
)
from conformance.hf_prompts import OpenedMedia, Prompt, PromptMaker, open_picture
from conformance.hf_stages import prompt_positions, traced_forward
from conformance.paths import data_root
from conformance.records import ArmError, GoldenRecord, LogitTable, MediaRecord
from conformance.store import check_weights
from conformance.yardstick import error_between, forward, full_logits, measure_yardstick

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

    A model object is reused only where no forward pass can change its rotary buffers, nor the
    position delta a vision-language model keeps; every other model is loaded afresh for each use.

    Args:
        source: the checkpoint.
        root: directory with scenarios/assets; the default is the suite's own.
        pictures: pictures beside those assets, by their digests.
    """

    def __init__(
        self, source: ModelSource, root: Path | None = None, pictures: Mapping[str, Asset] | None = None
    ) -> None:
        self.source = source
        self._pictures = dict(pictures or {})
        self._assets = asset_directory(root or data_root())
        self._config = load_config(source.path)
        self._text_config = self._config.get_text_config(decoder=True)
        self._make_prompt = PromptMaker(source.path, self._config)
        self._tokenizer = self._make_prompt.tokenizer
        self._stateless_rope = has_stateless_rope(self._text_config)
        self._reusable = self._stateless_rope and self._text_config is self._config
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
        prompt = self._prompt(request)
        self._check_rope(len(prompt.token_ids) + request["max_tokens"])
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
            provenance=self._provenance(dtype) | ({"pillow": version("pillow")} if prompt.media else {}),
            dtype=dtype,
            prompt_token_ids=prompt.token_ids,
            token_ids=tokens,
            text=self._text(tokens[:-1] if stopped else tokens),
            finish_reason="stop" if stopped else "length",
            stop_reason=stop_reason,
            output=output,
            yardstick=yardstick,
            prompt=prompt_table,
            stages=stages,
            stage_bands=self._stage_bands(dtype, prompt, tokens, stages),
            media=self._media(dtype, prompt),
        )

    def verify(self, record: GoldenRecord) -> list[StageVerdict]:
        """Compute a record's forced forward pass again and compare it stage by stage.

        Raises:
            WrongWeights: the checkpoint here is not the recorded one.
        """
        check_weights(record, self.source.sha256)
        prompt, tokens = self._prompt(record.request), record.token_ids
        same_prompt = prompt.token_ids == record.prompt_token_ids
        verdicts = [StageVerdict("prompt_ids", "same" if same_prompt else "changed")]
        if record.media is not None:
            verdicts.append(_compare_media(self._media(record.dtype, prompt), record.media))
        if not same_prompt:
            # Text can be judged along the recorded ids all the same; pictures would be elsewhere.
            if record.media is not None:
                return verdicts
            prompt = Prompt(record.prompt_token_ids)
        asked = record.prompt is not None
        rows, stages = self._rows(record.dtype, prompt, tokens, asked, bool(record.stages))
        for stage, recorded in record.stages.items():
            band = record.stage_bands.get(stage, ArmError(0.0, 0.0))
            verdicts.append(_compare(stage, stages[stage], recorded, band))
        band = ArmError(record.yardstick.R, record.yardstick.M)
        output = rows[len(rows) - len(tokens) :]
        if record.prompt is not None:
            count = len(record.prompt_token_ids) - 1
            verdicts.append(_compare_table("prompt_logits", rows[:count], record.prompt, band))
        verdicts.append(_compare_table("output_logits", output, record.output, band))
        chosen = output.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        agrees = bool((output.max(dim=1).values - chosen <= max(_TIE, 2 * band.max)).all())
        verdicts.append(StageVerdict("token_ids", "same" if agrees else "changed"))
        return verdicts

    def trace(self, record: GoldenRecord) -> GoldenRecord:
        """The record with stages, and their bands, as if it had been recorded traced.

        Raises:
            WrongWeights: the checkpoint here is not the recorded one.
            NoTruth: the prompt has other ids here, or the model cannot be traced.
        """
        check_weights(record, self.source.sha256)
        prompt = self._prompt(record.request)
        if prompt.token_ids != record.prompt_token_ids:
            raise NoTruth("the prompt has other token ids here than in the record")
        _, stages = self._rows(record.dtype, prompt, record.token_ids, False, True)
        bands = self._stage_bands(record.dtype, prompt, record.token_ids, stages)
        return replace(record, stages=stages, stage_bands=bands)

    def _prompt(self, request: Mapping[str, Any]) -> Prompt:
        media = [self._open(part) for part in media_parts(request["prompt"])]
        return self._make_prompt(request["prompt"], media, request.get("mm_processor_kwargs"))

    def _open(self, part: Mapping[str, Any]) -> OpenedMedia:
        [(modality, value)] = part.items()
        digests = [value] if modality == "image" else value["frames"]
        try:
            assets = [
                self._pictures.get(digest) or asset_of_digest(self._assets, digest) for digest in digests
            ]
        except AssetError as error:
            raise NoTruth(str(error)) from error
        facts = {"digests": digests, "names": [asset.name for asset in assets]}
        pictures = tuple(open_picture(asset.path) for asset in assets)
        return OpenedMedia(modality, pictures, None if modality == "image" else value.get("fps"), facts)

    def _media(self, dtype: str, prompt: Prompt) -> MediaRecord | None:
        """What is recorded about the prompt's pictures, positions among it."""
        if prompt.media is None:
            return None
        positions, delta = prompt_positions(self._model(dtype, "truth").module, prompt)
        return replace(prompt.media, positions=positions, position_delta=delta)

    def _check_rope(self, length: int) -> None:
        if self._stateless_rope:
            return
        parameters = getattr(self._text_config, "rope_parameters", None) or {}
        limit = parameters.get("original_max_position_embeddings", self._text_config.max_position_embeddings)
        if length > limit:
            raise NoTruth(
                f"{self.source.name} has rope kind {parameters.get('rope_type')!r}, and {length} tokens "
                f"exceed its original length {limit}: there Hugging Face's own cached and full forward "
                "passes disagree, so there is no truth; use a shorter request"
            )

    def _generate(
        self, request: Mapping[str, Any], prompt: Prompt
    ) -> tuple[tuple[int, ...], int | None, bool]:
        """Greedy ids, the stop token id that ended them (None for EOS), and whether one did."""
        model = self._model(request["dtype"], "truth")
        eos = set() if request["ignore_eos"] else set(model.eos_token_ids)
        ends = sorted(eos | set(request["stop_token_ids"]))
        config = transformers.GenerationConfig(
            do_sample=False, max_new_tokens=request["max_tokens"], eos_token_id=ends or None, pad_token_id=0
        )
        ids = torch.tensor([list(prompt.token_ids)])
        # An explicit mask: without one, generate takes pad ids inside the prompt for padding.
        mask = torch.ones_like(ids)
        module = model.module if prompt.inputs else text_model(model.module)
        inputs = prompt.inputs_for(ids.shape[1], module.dtype)
        answer = module.generate(input_ids=ids, attention_mask=mask, generation_config=config, **inputs)
        tokens = tuple(answer[0, ids.shape[1] :].tolist())
        stopped = tokens[-1] in ends
        return tokens, (tokens[-1] if stopped and tokens[-1] not in eos else None), stopped

    def _numbers(
        self, dtype: str, prompt: Prompt, tokens: Sequence[int], asked: bool, traced: bool
    ) -> tuple[LogitTable, LogitTable | None, dict[str, NDArray[Any]]]:
        rows, stages = self._rows(dtype, prompt, tokens, asked, traced)
        output = logit_table(rows[len(rows) - len(tokens) :])
        return output, (logit_table(rows[: len(prompt.token_ids) - 1]) if asked else None), stages

    def _rows(
        self, dtype: str, prompt: Prompt, tokens: Sequence[int], asked: bool, traced: bool
    ) -> tuple[torch.Tensor, dict[str, NDArray[Any]]]:
        """Float64 logits at all positions if `asked`, else at those that chose a token; stages."""
        module = self._model(dtype, "truth").module
        if traced:
            return traced_forward(module, prompt, tokens, 0 if asked else len(tokens))
        if asked:
            return forward(module, [*prompt.token_ids, *tokens[:-1]], prompt=prompt), {}
        return full_logits(module, prompt, tokens), {}

    def _stage_bands(
        self, dtype: str, prompt: Prompt, tokens: Sequence[int], truth: Mapping[str, NDArray[Any]]
    ) -> dict[str, ArmError]:
        if not truth:
            return {}
        bands: dict[str, ArmError] = {}
        for attention in ("eager", "sdpa"):
            module = self._model(dtype, attention).module
            _, stages = traced_forward(module, prompt, tokens, len(tokens))
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


def _compare_media(made: MediaRecord | None, recorded: MediaRecord) -> StageVerdict:
    """Files, spans, processor and positions are the same, or they are not."""
    if made is None:
        return StageVerdict("media", "changed")
    same = replace(made, positions=None) == replace(recorded, positions=None)
    if made.positions is None or recorded.positions is None:
        same = same and made.positions is None and recorded.positions is None
    else:
        same = same and np.array_equal(made.positions, recorded.positions)
    return StageVerdict("media", "same" if same else "changed")
