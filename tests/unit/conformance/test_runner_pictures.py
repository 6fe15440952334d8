"""What an engine gets of a scenario's pictures, and which engines are spared them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.adapters.base import Capabilities, EngineRequest
from conformance.adapters.fake import fake_engine
from conformance.adapters.hf import HFAdapter
from conformance.golden_cli import main as golden
from conformance.models import resolve_model
from conformance.runner import Skipped, engine_requests, run_scenario, skip_reason
from conformance.scenario import Scenario, load_scenario
from conformance.store import RecordStore
from conformance.suite import judge_history
from conformance.verdicts import Verdict

ROOT = Path(__file__).parents[3]
MODEL = "tiny-qwen3-vl"
TEXT = f"""schema: 1
id: vision/name
requirement: It sees.
level: must
source: [https://example.org]
model: {MODEL}
profile: smoke
requests:
  pixels: {{chat: [{{image: shapes/square_four.png}}, {{text: "What?"}}], max_tokens: 4}}
  rows: {{chat: [{{image: shapes/square_four.png}}, {{text: "What?"}}], max_tokens: 4, media_as: embeddings}}
  video: {{chat: [{{video: {{frames: [video/frame_0.png, video/frame_1.png], fps: 2}}}}], max_tokens: 2}}
  text: {{chat: [{{text: "What?"}}], max_tokens: 2, prompt_as: embeddings}}
steps: [{{submit: [pixels, rows, video, text]}}, run]
checks:
  - tokens_match_golden
  - happened: {{finished: "==4"}}
"""


class Seeing:
    """An engine that declares everything; only its capabilities are asked."""

    def __init__(self, *_: Any) -> None:
        pass

    def capabilities(self) -> Capabilities:
        features = frozenset({"image", "video", "image_embeds", "prompt_embeds", "output_ids"})
        return Capabilities("seeing", "1", ("float32",), features)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A suite of one scenario with its goldens."""
    root = tmp_path_factory.mktemp("suite")
    (root / "golden").mkdir()
    (root / "golden" / "checkpoints").symlink_to(ROOT / "golden" / "checkpoints")
    (root / "scenarios" / "vision").mkdir(parents=True)
    (root / "scenarios" / "assets").symlink_to(ROOT / "scenarios" / "assets")
    (root / "scenarios" / "vision" / "name.yaml").write_text(TEXT, encoding="utf-8")
    assert golden(["record", "--root", str(root)]) == 0
    return root


@pytest.fixture(scope="module")
def scenario(root: Path) -> Scenario:
    return load_scenario(root / "scenarios" / "vision" / "name.yaml", root / "scenarios")


@pytest.fixture(scope="module")
def requests(root: Path, scenario: Scenario) -> dict[str, EngineRequest]:
    [point] = scenario.points()
    return engine_requests(scenario, point, Seeing, resolve_model(MODEL, ROOT), RecordStore(root))  # type: ignore[arg-type]


def test_an_engine_gets_files_typed_parts_and_the_expanded_ids(
    root: Path, requests: dict[str, EngineRequest]
) -> None:
    request = requests["pixels"]
    [media] = request.media
    assert (media.modality, media.paths[0].name, media.embeddings) == ("image", "square_four.png", None)
    assert request.chat == (
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]},
    )
    record = next(r for r in RecordStore(root).all() if r.request["max_tokens"] == 4)
    assert request.prompt_token_ids == record.prompt_token_ids


def test_a_video_is_its_frames_and_their_rate(requests: dict[str, EngineRequest]) -> None:
    [media] = requests["video"].media
    assert (media.modality, media.fps) == ("video", 2.0)
    assert [path.name for path in media.paths] == ["frame_0.png", "frame_1.png"]


def test_embeddings_and_deepstack_rows_are_those_of_the_golden(
    requests: dict[str, EngineRequest],
) -> None:
    [media] = requests["rows"].media
    assert media.embeddings is not None
    assert media.embeddings.shape == (media.facts["rows"], 64)
    assert media.embeddings.dtype == np.float32
    assert [level.shape for level in media.deepstack] == [media.embeddings.shape] * 2
    assert media.facts["grid_thw"] == [1, 4, 4]
    embeds = requests["text"].prompt_embeds
    assert embeds is not None
    assert embeds.shape == (len(requests["text"].prompt_token_ids or ()), 64)


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ({"image_embeds", "video", "prompt_embeds"}, "lacks image_embeds"),
        ({"prompt_embeds"}, "lacks prompt_embeds"),
        ({"video"}, "lacks video"),
        ({"image"}, "lacks image"),
    ],
)
def test_an_engine_that_lacks_a_form_is_skipped(
    root: Path, scenario: Scenario, lacks: set[str], reason: str
) -> None:
    class Blind(Seeing):
        def capabilities(self) -> Capabilities:
            seeing = super().capabilities()
            return Capabilities("blind", "1", seeing.dtypes, seeing.features - lacks)

    [point] = scenario.points()
    with pytest.raises(Skipped, match=reason):
        engine_requests(scenario, point, Blind, resolve_model(MODEL, ROOT), RecordStore(root))  # type: ignore[arg-type]


def test_settings_of_a_request_need_an_engine_that_takes_them(scenario: Scenario) -> None:
    settings = {"pixels": replace(scenario.requests["pixels"], mm_processor_kwargs={"max_pixels": 3136})}
    with_settings = replace(scenario, requests=scenario.requests | settings)
    [point] = scenario.points()
    capabilities = Seeing().capabilities()
    assert skip_reason(scenario, point, capabilities) is None
    assert skip_reason(with_settings, point, capabilities) == "seeing lacks media_settings"
    taking = replace(capabilities, features=capabilities.features | {"media_settings"})
    assert skip_reason(with_settings, point, taking) is None


def test_the_toy_is_skipped(root: Path, scenario: Scenario) -> None:
    [point] = scenario.points()
    with pytest.raises(Skipped, match="fake lacks image"):
        run_scenario(scenario, point, fake_engine(), resolve_model(MODEL, ROOT), RecordStore(root))


def test_transformers_answers_what_the_truth_says(root: Path) -> None:
    """Pixels and video; it takes no embeddings."""
    text = (
        TEXT.replace("  rows:", "  #").replace("  text:", "  #").replace(", rows, video, text]", ", video]")
    )
    path = root / "scenarios" / "vision" / "seen.yaml"
    path.write_text(text.replace("vision/name", "vision/seen").replace("==4", "==2"), encoding="utf-8")
    scenario = load_scenario(path, root / "scenarios")
    path.unlink()
    [point] = scenario.points()
    store = RecordStore(root)
    history = run_scenario(scenario, point, HFAdapter, resolve_model(MODEL, ROOT), store)
    found = [f for f in judge_history(history, scenario, store).findings if f.check == "tokens_match_golden"]
    assert [f.verdict for f in found] == [Verdict.PASS, Verdict.PASS]
