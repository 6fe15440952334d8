"""Swapped pictures: an engine that sees passes; blind ones and ones that mix pictures up are named."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from conformance.adapters.base import Capabilities, EngineOutput, EngineRequest, Media, ModelSource
from conformance.adapters.fake import FakeEngine, fake_engine
from conformance.adapters.fake_model import write_toy_suite
from conformance.paths import data_root
from conformance.picture_probe import AGAIN, ANOTHER, COLD, can_swap, swap_pictures, write_other_picture
from conformance.probes import ALONE, probe
from conformance.scenario import load_scenarios
from conformance.store import RecordStore
from conformance.suite import Case
from conformance.verdicts import Verdict

TEXT = """requirement: It sees.
level: must
source: [https://example.org]
model: toy
profile: smoke
requests:
  one:
    generate: {kind: random, length: 19, seed: 1, low: 3, high: 60}
    media: [{image: shapes/square_four.png}]
    max_tokens: 6
steps: [{submit: one}, run]
checks:
  - tokens_match_golden
  - happened: {finished: "==1"}
"""
SOURCE = ModelSource("toy", Path("nowhere"), "w")
PASS, FAIL, SKIP, WEAK = Verdict.PASS, Verdict.FAIL, Verdict.SKIP, Verdict.WEAK


def draw(path: Path) -> Path:
    values = np.random.default_rng(3).integers(0, 256, (12, 20, 3), dtype=np.uint8)
    Image.fromarray(values).save(path)
    return path


class Seeing(FakeEngine):
    """The toy with eyes: a picture other than the known one turns every row of logits."""

    known = ""

    def capabilities(self) -> Capabilities:
        told = super().capabilities()
        return replace(told, features=told.features - {"stages", "bitwise"} | {"image"})

    def look(self, request: EngineRequest) -> str:
        seen = b"".join(p.read_bytes() for m in request.media for p in m.paths)
        return hashlib.sha256(seen).hexdigest() if seen else self.known

    def _row(self, live: Any, batch: int) -> Any:
        row = super()._row(live, batch)
        return row if self.look(live.request) == self.known else np.roll(row, 1)


class Blind(Seeing):
    def look(self, _request: EngineRequest) -> str:
        return self.known


class CachesByIds(Seeing):
    """What it saw beside some ids, it sees beside them for ever."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.seen: dict[tuple[int, ...], str] = {}

    def look(self, request: EngineRequest) -> str:
        return self.seen.setdefault(request.prompt_token_ids or (), super().look(request))


class OneTooLate(Seeing):
    """Looks at the picture of the request before."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.before: dict[str, str] = {}

    def look(self, request: EngineRequest) -> str:
        if request.request_id not in self.before:
            self.before[request.request_id] = super().look(request)
        names = list(self.before)
        return self.before[names[max(0, names.index(request.request_id) - 1)]]


def verdicts(kind: type[Seeing], tmp_path: Path, **sampling: Any) -> Mapping[str, Verdict]:
    path = draw(tmp_path / "known.png")
    kind.known = hashlib.sha256(path.read_bytes()).hexdigest()
    asked = {"temperature": 0.0, "max_tokens": 4, "logprobs": 3, **sampling}
    request = EngineRequest("one", asked, (5, 9, 20, 33), media=(Media("image", (path,)),))
    return swap_pictures(request, lambda: kind(SOURCE, {}), 1e-4)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Seeing, {COLD: PASS, ANOTHER: PASS, AGAIN: PASS}),
        (Blind, {COLD: FAIL, ANOTHER: SKIP, AGAIN: PASS}),
        (CachesByIds, {COLD: PASS, ANOTHER: FAIL, AGAIN: PASS}),
        (OneTooLate, {COLD: PASS, ANOTHER: FAIL, AGAIN: FAIL}),
    ],
)
def test_the_swap_that_breaks_is_told(
    kind: type[Seeing], expected: Mapping[str, Verdict], tmp_path: Path
) -> None:
    assert verdicts(kind, tmp_path) == expected


def test_the_same_tokens_without_numbers_prove_nothing(tmp_path: Path) -> None:
    class Mute(Blind):
        def generate(self, requests: Any) -> list[EngineOutput]:
            return [replace(output, logprobs=None) for output in super().generate(requests)]

    assert verdicts(Mute, tmp_path)[COLD] is WEAK


def test_a_choice_between_equals_is_rounding(tmp_path: Path) -> None:
    class Wavers(Seeing):
        """Two tokens are nearly as likely as each other, and every answer takes the other one."""

        turn = 0

        def _row(self, live: Any, batch: int) -> Any:
            row = super()._row(live, batch)
            best, second = np.argsort(-row)[:2]
            row[second] = row[best] + np.float32(1e-6 if type(self).turn % 2 else -1e-6)
            return row

        def submit(self, request: EngineRequest) -> Any:
            type(self).turn += 1
            return super().submit(request)

    path = draw(tmp_path / "known.png")
    Wavers.known = hashlib.sha256(path.read_bytes()).hexdigest()
    assert verdicts(Wavers, tmp_path, max_tokens=1)[AGAIN] is PASS


def test_every_value_of_the_other_picture_is_another_and_its_size_the_same(tmp_path: Path) -> None:
    path = draw(tmp_path / "a.png")
    before = np.asarray(Image.open(path))
    after = np.asarray(Image.open(write_other_picture(path, tmp_path / "b.png")))
    assert after.shape == before.shape
    assert (after[::-1] != before).all()


@pytest.mark.parametrize(
    "media",
    [(), (Media("image", (Path("a.png"),), embeddings=np.zeros((2, 3), np.float32)),), (Media("image", ()),)],
)
def test_only_pictures_whose_pixels_the_engine_gets_can_be_swapped(media: tuple[Media, ...]) -> None:
    request = EngineRequest("one", {"temperature": 0.0}, (3, 4), media=media)
    assert not can_swap(request)
    with pytest.raises(ValueError, match="one has no pictures whose pixels the engine gets"):
        swap_pictures(request, lambda: FakeEngine(SOURCE, {}), 1e-4)


# ---- as part of the probes -----------------------------------------------------------------------


def probed(kind: Any, tmp_path: Path) -> Any:
    assets = data_root() / "scenarios" / "assets"
    Seeing.known = hashlib.sha256((assets / "shapes" / "square_four.png").read_bytes()).hexdigest()
    (tmp_path / "scenarios").mkdir()
    (tmp_path / "scenarios" / "assets").symlink_to(assets)
    root = write_toy_suite(tmp_path, {"toy/one": TEXT})
    [scenario] = load_scenarios(root / "scenarios")
    return probe(Case(scenario, scenario.points()[0]), "one", kind, RecordStore(root), root)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Seeing, "right alone, cold and whole and under batch=mixed"),
        (Blind, "breaks with another picture: nothing of the pixels reaches the answer"),
        (CachesByIds, "breaks with another picture after the first: prefix-cache or encoder-cache keys"),
        (OneTooLate, "breaks with the same picture after another: caches that mix up pictures"),
    ],
)
def test_the_probes_name_it(kind: type[Seeing], words: str, tmp_path: Path) -> None:
    for one in (Blind, CachesByIds, OneTooLate):
        if "known" in vars(one):
            del one.known
    found = probed(kind, tmp_path)
    assert found.relations[ALONE].is_agreement
    assert words in found.text
    assert kind is not Seeing or AGAIN in found.text


def test_a_swap_that_the_engine_does_not_survive_is_told_beside_the_rest(tmp_path: Path) -> None:
    class Fragile(Seeing):
        def look(self, request: EngineRequest) -> str:
            if super().look(request) != self.known:
                raise RuntimeError("what is that?")
            return self.known

    found = probed(Fragile, tmp_path)
    assert found.text.endswith("; its pictures could not be swapped: RuntimeError: what is that?")
    assert found.relations["batch=mixed"].is_agreement


def test_a_request_without_pictures_has_no_such_relation(tmp_path: Path) -> None:
    text = TEXT.replace("    media: [{image: shapes/square_four.png}]\n", "")
    [scenario] = load_scenarios(write_toy_suite(tmp_path, {"toy/one": text}) / "scenarios")
    case = Case(scenario, scenario.points()[0])
    engine = fake_engine(without=("stages", "bitwise"))
    found = probe(case, "one", engine, RecordStore(tmp_path), tmp_path)
    assert not {COLD, ANOTHER, AGAIN} & set(found.relations)
