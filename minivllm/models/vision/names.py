"""Tensor names of the models that Transformers derives from LLaVA.

Such checkpoints exist with three spellings: as published first ("language_model.model.layers…",
"vision_tower.vision_model.…"), as `save_pretrained` writes them ("vision_tower.…"), and as the
modules are called in memory ("model.language_model.layers…", "lm_head.weight").
"""

from __future__ import annotations

import re

__all__ = ["llava_name"]

_TOWER = re.compile(r"(model\.)?vision_tower\.(vision_model\.)?")
_DECODER = re.compile(r"(model\.language_model\.|language_model\.model\.)(?!lm_head)")
_HEAD = re.compile(r"(model\.)?(language_model\.)?lm_head\.weight")

#: Buffers that old checkpoints hold, and the pooling head that features are taken before.
_NOT_NEEDED = re.compile(r"vision\.(embeddings\.position_ids|head\..*)|.*rotary_emb\.inv_freq")


def llava_name(name: str) -> str | None:
    """Our parameter's name for a checkpoint's tensor; None if the tensor is not needed.

    The decoder is "language_model", the tower "vision"; a projector keeps its own name.
    """
    if _HEAD.fullmatch(name):
        return "language_model.lm_head.weight"
    if match := _TOWER.match(name):
        name = "vision." + name[match.end() :]
    elif match := _DECODER.match(name):
        name = "language_model.model." + name[match.end() :]
    else:
        name = name.removeprefix("model.")
    return None if _NOT_NEEDED.fullmatch(name) else name
