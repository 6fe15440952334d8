"""What is exchanged in vLLM is put back as it was; with stand-ins for the modules of vLLM concerned."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from conformance.adapters import vllm_exchanges
from conformance.adapters.vllm_exchanges import EXCHANGES, exchange


class Mapper:
    """As vLLM's `WeightsMapper`: prefixes in order, each replaced where a name starts with it."""

    def __init__(self, orig_to_new_prefix: dict[str, str]) -> None:
        self.prefixes = orig_to_new_prefix

    def __or__(self, other: Mapper) -> Mapper:
        return Mapper({**self.prefixes, **other.prefixes})

    def map(self, name: str) -> str:
        for old, new in self.prefixes.items():
            if name.startswith(old):
                name = new + name.removeprefix(old)
        return name


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stand-ins by name, and nothing exchanged before or after."""
    names = [module for module, _ in vllm_exchanges._TOWERS]
    names += ["vllm.model_executor.models.utils", "vllm.v1.engine", "vllm.v1.engine.detokenizer"]
    made: dict[str, Any] = {name: ModuleType(name) for name in names}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    made["vllm.model_executor.models.utils"].WeightsMapper = Mapper
    made["vllm.v1.engine"].detokenizer = made["vllm.v1.engine.detokenizer"]
    monkeypatch.setattr(vllm_exchanges, "_vllms_choice", {})
    monkeypatch.setattr(vllm_exchanges, "_exchanged", set())
    return made


def test_short_names_of_a_tower_get_the_level_back(modules: dict[str, Any]) -> None:
    models = []
    for module, name in vllm_exchanges._TOWERS:
        mapper = Mapper({"model.vision_tower.": "vision_tower."})
        model = type(name, (), {"hf_to_vllm_mapper": mapper})
        setattr(modules[module], name, model)
        models.append((model, mapper))
    exchange(set())
    assert all(model.hf_to_vllm_mapper is mapper for model, mapper in models)  # type: ignore[attr-defined]
    for _ in range(2):  # a second time adds no second level
        exchange({"short_tower_names"})
        for model, _mapper in models:
            read = model.hf_to_vllm_mapper.map  # type: ignore[attr-defined]
            assert read("vision_tower.encoder.x") == "vision_tower.vision_model.encoder.x"
            assert read("model.vision_tower.encoder.x") == "vision_tower.vision_model.encoder.x"
            assert read("language_model.model.x") == "language_model.model.x"
    exchange(set())
    assert all(model.hf_to_vllm_mapper is mapper for model, mapper in models)  # type: ignore[attr-defined]


def test_the_slow_detokenizer_is_taken_and_given_back(modules: dict[str, Any]) -> None:
    detokenizer = modules["vllm.v1.engine.detokenizer"]

    def theirs(_tokenizer: object) -> bool:
        return True

    detokenizer.uses_fast_detokenizer = theirs
    exchange({"slow_detokenizer"})
    assert detokenizer.uses_fast_detokenizer(object()) is False
    exchange(set())
    assert detokenizer.uses_fast_detokenizer is theirs


def test_newlines_of_gemma_stay_apart_and_are_joined_again(modules: dict[str, Any]) -> None:
    names = vllm_exchanges._NEWLINES
    parent = type("BaseMultiModalProcessor", (), {name: f"plain {name}" for name in names})
    gemma = type("Gemma3MultiModalProcessor", (parent,), {name: f"joined {name}" for name in names})
    modules["vllm.model_executor.models.gemma3_mm"].Gemma3MultiModalProcessor = gemma
    for plain in (True, True, False):
        exchange({"plain_newlines"} if plain else set())
        assert [getattr(gemma, name) for name in names] == [
            f"{'plain' if plain else 'joined'} {name}" for name in names
        ]


@pytest.mark.usefixtures("modules")
def test_pictures_are_made_by_pillow_and_then_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.auto import image_processing_auto

    def theirs(*_: object) -> str:
        return "torchvision"

    monkeypatch.setattr(image_processing_auto, "_resolve_backend", theirs)
    exchange({"pillow_pictures"})
    assert image_processing_auto._resolve_backend(None, None, "Qwen2VLImageProcessor") == "pil"
    exchange(set())
    assert image_processing_auto._resolve_backend is theirs


def test_every_exchange_can_be_made() -> None:
    assert set(EXCHANGES) == set(vllm_exchanges._CHOOSE)
