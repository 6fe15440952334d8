"""Every tensor of a checkpoint is used, every parameter is filled, and what is not is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from minivllm.errors import WeightError
from minivllm.layers.ops_torch import TorchOps
from minivllm.models import LanguageModel, load_model
from minivllm.models.weights import fill, replace_weights

Tensors = dict[str, torch.Tensor]


def load(path: Path, dtype: torch.dtype = torch.float32) -> LanguageModel:
    return load_model(path, dtype=dtype, device="cpu", ops=TorchOps())


def edit(path: Path, change: Callable[[Tensors], object]) -> Tensors:
    """Rewrite a checkpoint's tensors; returns them."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return tensors


def hf_load(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


class MemorySource:
    """Tensors in memory that count their readings."""

    where = "memory"

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.reads: list[str] = []

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(t.shape) for name, t in self.tensors.items()}

    def read(self, name: str) -> torch.Tensor:
        self.reads.append(name)
        return self.tensors[name]


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_every_parameter_is_what_transformers_loads(family: str, make_checkpoint: Callable[..., Any]) -> None:
    checkpoint = make_checkpoint(family)
    theirs = dict(checkpoint.hf.named_parameters())
    ours = dict(load(checkpoint.path).named_parameters())
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_every_tensor_is_read_exactly_once(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Qwen3").path
    source = MemorySource(load_file(path / "model.safetensors"))
    fill(load(path), source)
    assert sorted(source.reads) == sorted(source.tensors)


def test_missing_tensors_are_named_and_nothing_is_copied(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Llama").path
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    model = load(path)
    for parameter in model.parameters():
        parameter.fill_(7)
    with pytest.raises(
        WeightError,
        match=r"memory: missing 2 tensors \(model\.layers\.1\.mlp\.up_proj\.weight, model\.norm\.weight\)",
    ):
        fill(model, MemorySource(tensors))
    assert all((p == 7).all() for p in model.parameters())


def test_unknown_tensors_are_named(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Llama").path
    edit(path, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}))
    with pytest.raises(
        WeightError, match=r"unknown to the model 1 tensors \(model\.layers\.0\.self_attn\.q_proj\.bias\)"
    ):
        load(path)


def test_a_long_list_of_names_is_cut_but_counted(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Llama").path
    edit(path, lambda t: t.update({f"x{i:02}": torch.zeros(1) for i in range(12)}))
    with pytest.raises(WeightError, match=r"12 tensors \(x00, .*x09, …\)$"):
        load(path)


def test_a_wrong_shape_is_told_with_both_shapes(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Llama").path
    edit(path, lambda t: t.update({"model.norm.weight": torch.ones(47)}))
    with pytest.raises(WeightError, match=r"model\.norm\.weight has shape \[47\], the model needs \[48\]"):
        load(path)


def test_a_transposed_matrix_is_a_wrong_shape(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Llama").path
    name = "model.layers.2.mlp.down_proj.weight"
    edit(path, lambda t: t.update({name: t[name].T.contiguous()}))
    with pytest.raises(WeightError, match=r"has shape \[80, 48\], the model needs \[48, 80\]"):
        load(path)


def test_all_problems_are_told_at_once(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Llama").path

    def change(tensors: Tensors) -> None:
        tensors["model.norm.weight"] = torch.ones(3)
        tensors["other"] = torch.ones(3)
        del tensors["lm_head.weight"]

    edit(path, change)
    with pytest.raises(
        WeightError, match=r"missing 1 .*lm_head.*; unknown .*other.*; model\.norm\.weight has shape"
    ):
        load(path)


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_cast_from_the_stored_dtype(
    stored: torch.dtype, wanted: torch.dtype, make_checkpoint: Callable[..., Any]
) -> None:
    path = make_checkpoint("Llama").path
    tensors = edit(path, lambda t: t.update({name: x.to(stored) for name, x in t.items()}))
    for name, parameter in load(path, wanted).named_parameters():
        assert parameter.dtype == wanted
        assert torch.equal(parameter, tensors[name].to(wanted))


def test_integer_weights_are_refused(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Llama").path
    edit(path, lambda t: t.update({"model.norm.weight": torch.ones(48, dtype=torch.int8)}))
    with pytest.raises(WeightError, match=r"model\.norm\.weight is stored as torch\.int8"):
        load(path)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.rotary_emb.inv_freq"]
)
def test_stored_rotary_frequencies_are_ignored(name: str, make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Llama").path
    edit(path, lambda t: t.update({name: torch.zeros(16)}))
    load(path)


def test_an_untied_model_keeps_both_tensors(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Qwen2", tie_word_embeddings=False).path
    tensors = load_file(path / "model.safetensors")
    model = load(path)
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    assert torch.equal(model.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])


def test_an_untied_model_without_a_head_is_refused(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Llama").path
    edit(path, lambda t: t.pop("lm_head.weight"))
    with pytest.raises(WeightError, match=r"missing 1 tensors \(lm_head\.weight\)"):
        load(path)


def test_a_tied_model_with_a_head_of_its_own_keeps_both_as_transformers_does(
    make_checkpoint: Callable[..., Any], token_ids: torch.Tensor, run_model: Callable[..., Any]
) -> None:
    path = make_checkpoint("Llama", tie_word_embeddings=True).path
    tensors = edit(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].flip(0)}))
    model = load(path)
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"])
    assert "lm_head.weight" in dict(model.named_parameters())
    theirs = hf_load(path)
    theirs.set_attn_implementation("eager")
    with torch.no_grad():
        expected = theirs(token_ids[None]).logits[0]
    assert torch.equal(run_model(model, token_ids).logits, expected)


def test_a_tied_model_with_an_equal_head_stays_tied(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Llama", tie_word_embeddings=True).path
    edit(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    model = load(path)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_a_tied_model_with_only_a_head_takes_its_embeddings_from_it_as_transformers_does(
    make_checkpoint: Callable[..., Any],
) -> None:
    path = make_checkpoint("Llama", tie_word_embeddings=True).path
    tensors = edit(path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    model = load(path)
    assert torch.equal(model.model.embed_tokens.weight, tensors["lm_head.weight"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(hf_load(path).model.embed_tokens.weight, tensors["lm_head.weight"])


def test_a_tied_head_of_another_shape_is_told_with_both_shapes(make_checkpoint: Callable[..., Any]) -> None:
    path = make_checkpoint("Llama", tie_word_embeddings=True).path
    edit(path, lambda t: t.update({"lm_head.weight": torch.zeros(99, 48)}))
    with pytest.raises(
        WeightError, match=r"lm_head\.weight has shape \[99, 48\], the model needs \[101, 48\]"
    ):
        load(path)


def test_replaced_weights_are_cast_copied_and_the_rest_stays(make_checkpoint: Callable[..., Any]) -> None:
    model = load(make_checkpoint("Llama").path, dtype=torch.bfloat16)
    before = {name: p.clone() for name, p in model.named_parameters()}
    name = "model.layers.0.mlp.up_proj.weight"
    mine = torch.randn(before[name].shape)
    replace_weights(model, {name: mine})
    mine.zero_()
    after = dict(model.named_parameters())
    assert not torch.equal(after[name], before[name])
    assert after[name].count_nonzero() > 0, "the caller's tensor is copied, not kept"
    assert all(torch.equal(after[n], before[n]) for n in before if n != name)


def test_weights_are_replaced_all_or_none_and_every_problem_is_named(
    make_checkpoint: Callable[..., Any],
) -> None:
    model = load(make_checkpoint("Llama").path)
    before = {name: p.clone() for name, p in model.named_parameters()}
    good, short, whole = "model.norm.weight", "model.embed_tokens.weight", "lm_head.weight"
    with pytest.raises(WeightError) as refused:
        replace_weights(
            model,
            {
                good: torch.zeros_like(before[good]),
                "model.nose.weight": torch.zeros(3),
                short: torch.zeros(3, 4),
                whole: torch.zeros(before[whole].shape, dtype=torch.int64),
            },
        )
    message = str(refused.value)
    assert all(word in message for word in ("model.nose.weight", "[3, 4]", "torch.int64"))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("wrong", [None, [], {1: torch.zeros(1)}, {"lm_head.weight": np.zeros(1)}])
def test_what_is_no_mapping_to_tensors_is_refused(make_checkpoint: Callable[..., Any], wrong: Any) -> None:
    model = load(make_checkpoint("Llama").path)
    with pytest.raises(WeightError, match="a mapping from name to tensor is needed, got"):
        replace_weights(model, wrong)


def test_an_empty_update_changes_nothing(make_checkpoint: Callable[..., Any]) -> None:
    model = load(make_checkpoint("Llama").path)
    before = {name: p.clone() for name, p in model.named_parameters()}
    replace_weights(model, {})
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
