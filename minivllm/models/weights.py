"""Strict loading: every tensor of a checkpoint is used or ignorable, every parameter is filled once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from minivllm.errors import WeightError
from minivllm.models.base import LanguageModel

__all__ = ["TensorSource", "check_weights", "fill", "replace_weights"]

_HEAD = "lm_head.weight"

#: Tensors that old checkpoints carry but that follow from the config.
_IGNORABLE = re.compile(r"(model\.layers\.\d+\.self_attn\.|model\.)rotary_emb\.inv_freq")


class TensorSource(Protocol):
    """Named tensors of one checkpoint, read one at a time."""

    #: For messages: the file or directory.
    where: str

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, without reading any; names as in Transformers."""
        ...

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, in the dtype it is stored in."""
        ...


def fill(model: LanguageModel, source: TensorSource) -> None:
    """Copy a checkpoint into a model's parameters, cast to the model's dtype.

    Tensors go by the names that `model.rename` gives them.

    A tied model whose checkpoint holds a head of its own keeps both if they differ, as
    Transformers does; one that holds only the head takes the embeddings from it.

    Raises:
        WeightError: naming every missing and unknown tensor and every wrong shape, before
            anything is copied; two tensors for one parameter; a tensor that is not floating point.
    """
    read_from = check_weights(model, source)
    for name, parameter in model.named_parameters():
        tensor = source.read(read_from[name])
        if not tensor.dtype.is_floating_point:
            raise WeightError(
                f"{source.where}: {name} is stored as {tensor.dtype}; it must be floating point"
            )
        with torch.no_grad():
            parameter.copy_(tensor)


def check_weights(model: LanguageModel, source: TensorSource) -> dict[str, str]:
    """Our parameter → the tensor of a checkpoint that fills it. The model may be on the meta device.

    Raises:
        WeightError: as `fill`, of names and shapes.
    """
    shapes = source.shapes()
    read_from = _origins(model, shapes, source.where)
    embedding, head = model.embedding_name, model.text_prefix + _HEAD
    if model.config.tie_word_embeddings and head in read_from:
        if embedding not in read_from:
            read_from[embedding] = read_from.pop(head)
        elif _are_equal(source, read_from[head], read_from[embedding]):
            del read_from[head]
        else:
            model.untie_lm_head()
    found = {name: shapes[origin] for name, origin in read_from.items()}
    _check(source.where, found, dict(model.named_parameters()))
    return read_from


def _origins(model: LanguageModel, names: Iterable[str], where: str) -> dict[str, str]:
    """Our parameter → the one checkpoint tensor that is for it, where it is of use."""
    read_from: dict[str, str] = {}
    doubled = []
    for name in names:
        ours = None if _IGNORABLE.fullmatch(name) else model.rename(name)
        if ours is None:
            continue
        if ours in read_from:
            doubled.append(f"{read_from[ours]} and {name} are both {ours}")
        read_from[ours] = name
    if doubled:
        raise WeightError(f"{where}: {'; '.join(doubled)}")
    return read_from


def _are_equal(source: TensorSource, one: str, other: str) -> bool:
    shapes = source.shapes()
    return shapes[one] == shapes[other] and torch.equal(source.read(one), source.read(other))


def replace_weights(model: LanguageModel, tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors into parameters of a loaded model, by name and shape, cast to the model's dtype.

    Names are those of the parameters or of a checkpoint. Parameters that are not named keep their
    values.

    Raises:
        WeightError: naming every unknown parameter, wrong shape and tensor that is not floating
            point, before anything is copied.
    """
    given: object = tensors
    wrong = (
        [name for name, tensor in tensors.items() if not _is_named_tensor(name, tensor)]
        if isinstance(given, Mapping)
        else [given]
    )
    if wrong:
        raise WeightError(
            f"weights were not updated: a mapping from name to tensor is needed, got {wrong[0]!r}"
        )
    parameters = dict(model.named_parameters())
    tensors = {
        name if name in parameters else model.rename(name) or name: tensor for name, tensor in tensors.items()
    }
    problems = []
    if unknown := [name for name in tensors if name not in parameters]:
        problems.append(f"unknown to the model: {_some(unknown)}")
    for name, tensor in tensors.items():
        if name in parameters and tensor.shape != parameters[name].shape:
            wanted = list(parameters[name].shape)
            problems.append(f"{name} has shape {list(tensor.shape)}, the model needs {wanted}")
        if not tensor.dtype.is_floating_point:
            problems.append(f"{name} is {tensor.dtype}; it must be floating point")
    if problems:
        raise WeightError(f"weights were not updated: {'; '.join(problems)}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)


def _is_named_tensor(name: object, tensor: object) -> bool:
    return isinstance(name, str) and isinstance(tensor, Tensor)


def _check(
    where: str, found: Mapping[str, tuple[int, ...]], parameters: Mapping[str, torch.nn.Parameter]
) -> None:
    problems = []
    if missing := [name for name in parameters if name not in found]:
        problems.append(f"missing {_some(missing)}")
    if unknown := [name for name in found if name not in parameters]:
        problems.append(f"unknown to the model {_some(unknown)}")
    problems += [
        f"{name} has shape {list(found[name])}, the model needs {list(parameter.shape)}"
        for name, parameter in parameters.items()
        if name in found and tuple(found[name]) != tuple(parameter.shape)
    ]
    if problems:
        raise WeightError(f"{where}: " + "; ".join(problems))


def _some(names: Sequence[str], limit: int = 10) -> str:
    shown = ", ".join(sorted(names)[:limit])
    return f"{len(names)} tensors ({shown}{', …' if len(names) > limit else ''})"
