"""The base of the vision-language models: a decoder inside, weights by a family's own names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from minivllm.config import ModelConfig
from minivllm.errors import WeightError
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import (
    DecoderModel,
    MediaEmbeddings,
    VisionLanguageModel,
    load_model,
    load_model_config,
    replace_weights,
)
from minivllm.models.llama import LlamaForCausalLM
from minivllm.models.modules import Linear
from minivllm.models.weights import fill
from minivllm.request import MediaItem


class Toy(VisionLanguageModel):
    """A projector as the whole tower."""

    model_type: ClassVar[str] = "toy"
    text_models: ClassVar[Mapping[str, type[DecoderModel]]] = {"llama": LlamaForCausalLM}

    def __init__(self, config: ModelConfig, **kw: Any) -> None:
        super().__init__(config, **kw)
        self.projector = Linear(
            3, config.hidden_size, bias=False, ops=kw["ops"], dtype=kw["dtype"], device=kw["device"]
        )

    def encode(self, item: MediaItem) -> MediaEmbeddings:
        return MediaEmbeddings(self.projector(item.data["pixel_values"]))

    @classmethod
    def rename(cls, name: str) -> str | None:
        if name.startswith("unused."):
            return None
        if name.startswith("text."):
            return "language_model." + name.removeprefix("text.")
        return name.replace("old_projector", "projector")


class Tensors:
    """A checkpoint in memory."""

    where = "the checkpoint"

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


@pytest.fixture(scope="module")
def decoder(checkpoints: Path) -> DecoderModel:
    model = load_model(checkpoints / "tiny-llama", dtype=torch.float32, device="cpu", ops=TorchOps())
    assert isinstance(model, DecoderModel)
    return model


def make(decoder: DecoderModel, **changes: Any) -> Toy:
    config = replace(decoder.config, text_model_type="llama", **changes)
    return Toy(config, dtype=torch.float32, device="cpu", ops=TorchOps())


def tensors_of(decoder: DecoderModel, prefix: str = "text.") -> dict[str, Tensor]:
    text = {prefix + name: p for name, p in decoder.named_parameters()}
    return {**text, "old_projector.weight": torch.ones(decoder.config.hidden_size, 3)}


def test_tensors_go_by_the_familys_names(decoder: DecoderModel) -> None:
    model = make(decoder)
    fill(model, Tensors({**tensors_of(decoder), "unused.x": torch.zeros(2)}))
    parameters = dict(model.named_parameters())
    assert all(torch.equal(parameters[f"language_model.{n}"], p) for n, p in decoder.named_parameters())
    assert torch.equal(parameters["projector.weight"], torch.ones(decoder.config.hidden_size, 3))


def test_it_answers_for_its_decoder(decoder: DecoderModel) -> None:
    model = make(decoder)
    fill(model, Tensors(tensors_of(decoder)))
    ids = torch.tensor([3, 4, 5])
    assert torch.equal(model.embed(ids), decoder.embed(ids))
    hidden = torch.randn(2, decoder.config.hidden_size, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.logits(hidden), decoder.logits(hidden))
    assert (model.dtype, model.device, model.max_model_len) == (
        decoder.dtype,
        decoder.device,
        decoder.max_model_len,
    )
    assert model.num_deepstack_layers == 0


def test_use_ops_reaches_tower_and_decoder(decoder: DecoderModel) -> None:
    model, ops = make(decoder), TorchOps()
    model.use_ops(ops)
    assert all(module.ops is ops for module in model.modules() if hasattr(module, "ops"))
    assert model.projector.ops is ops


def test_a_tied_head_is_the_decoders(decoder: DecoderModel) -> None:
    model = make(decoder, tie_word_embeddings=True)
    tensors = tensors_of(decoder)
    embedding = tensors["text.model.embed_tokens.weight"]
    fill(model, Tensors({**tensors, "text.lm_head.weight": embedding}))
    assert model.language_model.lm_head.weight is model.language_model.model.embed_tokens.weight
    fill(model, Tensors(tensors))  # a head of its own in the file: kept apart
    assert torch.equal(model.language_model.lm_head.weight, tensors["text.lm_head.weight"])


def test_two_tensors_for_one_parameter_are_refused(decoder: DecoderModel) -> None:
    doubled = {**tensors_of(decoder), "projector.weight": torch.ones(decoder.config.hidden_size, 3)}
    with pytest.raises(
        WeightError, match=r"old_projector\.weight and projector\.weight are both projector\.weight"
    ):
        fill(make(decoder), Tensors(doubled))


def test_missing_and_unknown_tensors_are_named_as_ours(decoder: DecoderModel) -> None:
    tensors = tensors_of(decoder)
    del tensors["text.model.norm.weight"]
    with pytest.raises(
        WeightError, match=r"missing 1 tensors \(language_model\.model\.norm\.weight\).*unknown .*more"
    ):
        fill(make(decoder), Tensors({**tensors, "more": torch.ones(1)}))


def test_weights_are_replaced_by_either_name(decoder: DecoderModel) -> None:
    model = make(decoder)
    fill(model, Tensors(tensors_of(decoder)))
    size = decoder.config.hidden_size
    replace_weights(model, {"old_projector.weight": torch.full((size, 3), 2.0)})
    assert model.projector.weight[0, 0] == 2
    replace_weights(model, {"projector.weight": torch.full((size, 3), 3.0)})
    assert model.projector.weight[0, 0] == 3


def test_a_family_says_what_it_reads_of_its_tower() -> None:
    with pytest.raises(NotImplementedError, match="Toy does not say"):
        Toy.read_vision({})


def test_the_configuration_of_a_checkpoint_knows_decoder_and_tower(checkpoints: Path) -> None:
    config = load_model_config(checkpoints / "tiny-qwen2-vl")
    assert config.architecture == "Qwen2VLForConditionalGeneration"
    assert config.text_model_type == "qwen2_vl_text"
    assert config.rope is not None
    assert config.rope.mrope_section == (4, 6, 6)
    assert config.vision is not None
