"""Builds checkpoint directories and says what they were made from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from conformance.recipes.blip2 import BLIP2_RECIPES
from conformance.recipes.gemma import GEMMA_RECIPES
from conformance.recipes.glm import GLM_RECIPES
from conformance.recipes.initialise import initialise
from conformance.recipes.internvl import INTERNVL_RECIPES
from conformance.recipes.llama import LLAMA_RECIPES
from conformance.recipes.llava import LLAVA_RECIPES
from conformance.recipes.qwen import QWEN_RECIPES
from conformance.recipes.qwen_vl import QWEN_VL_RECIPES
from conformance.recipes.recipe import MechanicsRecipe
from conformance.recipes.smolvlm import SMOLVLM_RECIPES
from conformance.recipes.tokenizer import text_tokenizer, wrap

__all__ = ["MECHANICS", "build", "make_model", "make_tokenizer", "sha256_of", "write_checkpoint"]

#: Every mechanics recipe by name.
MECHANICS: Mapping[str, MechanicsRecipe] = {
    recipe.name: recipe
    for family in (
        LLAMA_RECIPES,
        LLAVA_RECIPES,
        INTERNVL_RECIPES,
        QWEN_RECIPES,
        GLM_RECIPES,
        GEMMA_RECIPES,
        QWEN_VL_RECIPES,
        SMOLVLM_RECIPES,
        BLIP2_RECIPES,
    )
    for recipe in family
}


def make_model(recipe: MechanicsRecipe, seed: int | None = None) -> Any:
    """The Transformers model of a recipe, float32, in eval mode. `seed` overrides the recipe's."""
    import transformers

    model_class = getattr(transformers, recipe.architecture)
    special = recipe.special
    decoder = {
        **recipe.shape,
        **recipe.config,
        "bos_token_id": special.ids[special.bos] if special.bos else None,
        "eos_token_id": special.ids[recipe.end_tokens[0]],
        "pad_token_id": special.ids[special.pad],
        "attention_dropout": 0.0,
    }
    vision = recipe.vision
    config = (
        model_class.config_class(**decoder)
        if vision is None
        else model_class.config_class(
            text_config=decoder, vision_config=dict(vision.vision_config), **vision.config
        )
    )
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    initialise(model, recipe.seed if seed is None else seed, special_ids=list(special.ids.values()))
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=decoder["bos_token_id"],
        eos_token_id=[special.ids[token] for token in recipe.end_tokens],
        pad_token_id=decoder["pad_token_id"],
        do_sample=False,
    )
    return model


def make_tokenizer(recipe: MechanicsRecipe) -> Any:
    """The Transformers tokenizer of a recipe."""
    special = recipe.special
    return wrap(
        text_tokenizer(special),
        chat_template=recipe.chat_template,
        max_length=recipe.shape["max_position_embeddings"],
        bos_token=special.bos,
        eos_token=recipe.end_tokens[0],
        pad_token=special.pad,
        extra_special_tokens=dict(recipe.vision.tokens) if recipe.vision and recipe.vision.tokens else None,
    )


def build(name: str, directory: Path) -> None:
    """Write the checkpoint `name` below `directory` (which is created).

    Raises:
        ValueError: no mechanics recipe has this name.
    """
    if name not in MECHANICS:
        raise ValueError(f"no mechanics recipe {name!r}; known: {', '.join(MECHANICS)}")
    recipe = MECHANICS[name]
    facts = {"kind": "mechanics", "seed": recipe.seed, "dtypes": ["float32"]}
    processor = recipe.vision.processor if recipe.vision else None
    model, tokenizer = make_model(recipe), make_tokenizer(recipe)
    write_checkpoint(directory, name, recipe.summary, model, tokenizer, facts, processor)


def write_checkpoint(
    directory: Path,
    name: str,
    summary: str,
    model: Any,
    tokenizer: Any,
    facts: Mapping[str, Any],
    processor: Mapping[str, Any] | None = None,
) -> None:
    """Save model and tokenizer as Transformers does, without version stamps, and RECIPE.json.

    `processor` is the content of processor_config.json, for models that take pictures.
    RECIPE.json holds the recipe's name, `facts`, the versions used and the SHA-256 of every
    other file.
    """
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        values = json.loads((directory / file).read_text(encoding="utf-8"))
        # The version says who wrote the file, not what the model is: it is in RECIPE.json.
        values.pop("transformers_version", None)
        if file == "tokenizer_config.json":
            # The name that Transformers 4 knows too, for engines that still run it.
            values["tokenizer_class"] = "PreTrainedTokenizerFast"
        _write_json(directory / file, values)
    if processor is not None:
        _write_json(directory / "processor_config.json", processor)
    (directory / "model.safetensors").chmod(0o644)
    packages = ("numpy", "safetensors", "tokenizers", "torch", "transformers")
    files = sorted(p for p in directory.iterdir() if p.name != "RECIPE.json")
    recipe = {
        "name": name,
        "summary": summary,
        **facts,
        "author": "the minivllm authors",
        "licence": "Apache-2.0",
        "parameters": sum(p.numel() for p in model.parameters()),
        "versions": {package: version(package) for package in packages},
        "sha256": {p.name: sha256_of(p) for p in files},
    }
    _write_json(directory / "RECIPE.json", recipe)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
