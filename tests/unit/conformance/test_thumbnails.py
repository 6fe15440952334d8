"""Pictures in a report are small, upright, named, and honest about files that cannot be read."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from conformance.assets import asset_directory
from conformance.paths import data_root
from conformance.scenario import load_scenario
from conformance.thumbnails import SIDE, Thumbnail, thumbnails_of

HEAD = """schema: 1
id: a/one
requirement: It answers.
level: must
source: [https://example.org]
model: toy
profile: smoke
"""


def thumbnails(tmp_path: Path, requests: str) -> list[Thumbnail]:
    (tmp_path / "a").mkdir()
    (tmp_path / "assets").symlink_to(asset_directory(data_root()))
    path = tmp_path / "a" / "one.yaml"
    path.write_text(HEAD + requests + "checks: [pool_conserved]\n", encoding="utf-8")
    return list(thumbnails_of(load_scenario(path, tmp_path)))


def opened(thumbnail: Thumbnail) -> Any:
    kind, _, data = thumbnail.uri.partition(",")
    assert kind == "data:image/png;base64"
    return Image.open(io.BytesIO(base64.b64decode(data)))


def test_each_picture_is_there_once_with_those_who_show_it(tmp_path: Path) -> None:
    found = thumbnails(
        tmp_path,
        """requests:
  x: {chat: [{image: shapes/yellow_seven.png}, {text: What is this}], max_tokens: 2}
  y: {chat: [{image: shapes/yellow_seven.png}, {text: And why}], max_tokens: 2}
steps: [{submit: [x, y]}, run]
""",
    )
    [one] = found
    assert (one.requests, one.name) == (("x", "y"), "shapes/yellow_seven.png")
    with Image.open(asset_directory(data_root()) / one.name) as picture:
        assert one.size == picture.size
    assert max(opened(one).size) <= SIDE
    assert len(one.uri) < 8000


@pytest.fixture
def video() -> list[str]:
    frames = sorted((asset_directory(data_root()) / "video").rglob("*.png"))
    return [frame.relative_to(asset_directory(data_root())).as_posix() for frame in frames[:6]]


def test_a_video_shows_its_first_frames(tmp_path: Path, video: list[str]) -> None:
    found = thumbnails(
        tmp_path,
        f"""requests:
  v: {{chat: [{{video: {{frames: [{", ".join(video)}], fps: 2}}}}, {{text: What is this}}], max_tokens: 2}}
steps: [{{submit: v}}, run]
""",
    )
    assert [one.name for one in found] == [f"{video[i]}, frame {i + 1} of {len(video)}" for i in range(4)]
    assert all(one.uri for one in found)


def test_a_file_that_is_no_picture_has_no_thumbnail(tmp_path: Path) -> None:
    names = sorted(path.name for path in (asset_directory(data_root()) / "broken").iterdir())
    requests = "".join(
        f"  r{i}: {{chat: [{{image: broken/{name}}}, {{text: What is this}}], max_tokens: 2}}\n"
        for i, name in enumerate(names)
    )
    submitted = ", ".join(f"r{i}" for i in range(len(names)))
    found = thumbnails(tmp_path, f"requests:\n{requests}steps: [{{submit: [{submitted}]}}, run]\n")
    assert [one.name for one in found] == [f"broken/{name}" for name in names]
    assert [(one.size, one.uri) for one in found if not one.uri] != []
    assert all(one.size is None for one in found if not one.uri)
