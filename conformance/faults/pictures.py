"""Faults of pictures and videos: their identity, their pixels, the towers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from conformance.faults.base import GREEDY, VLLM, Seam, Table
from minivllm import processor as processor_module
from minivllm.cache import PrefixChain
from minivllm.models import internvl as internvl_module
from minivllm.models import llava as llava_module
from minivllm.models.vision import qwen2_5_vl as windows_module
from minivllm.models.vision import qwen2_vl as tower_module
from minivllm.models.vision import qwen3_vl as deepstack_module
from minivllm.multimodal import hashing as hashing_module
from minivllm.multimodal import load as load_module
from minivllm.multimodal import qwen_vl as qwen_module
from minivllm.multimodal.image_processor import ImageProcessor

__all__ = ["IDENTITY", "PICTURES", "TOWERS", "hash_fault", "one"]

IDENTITY = Table("picture-identity")
PICTURES = Table("pixels")
TOWERS = Table("towers")


def one(model: str) -> str:
    """The scenario of one picture, for one model."""
    return f"vision/one-image[model={model}]"


# --- identity ------------------------------------------------------------------------------------


@IDENTITY.add(
    "not-in-the-key",
    "vision/same-text-another-image[model=tiny-qwen2-vl]",
    origin="https://github.com/sgl-project/sglang-omni/pull/260",
    at="PrefixChain._tags: media",
    detector="cached_tokens",
)
def _no_media(seam: Seam) -> None:
    """Keys of blocks hold token ids only, and every picture has the same placeholder."""

    def tags(self: PrefixChain, start: int, media: Any) -> Iterator[Any]:
        seam.fire(media)
        yield from genuine(self, start, ())

    genuine = seam.set(PrefixChain, "_tags", tags)


@IDENTITY.add(
    "rows-not-in-the-key",
    "fuzz:allocator",
    origin=f"{VLLM}/pull/36708",
    at="PrefixChain._tags: offset of the item",
    detector="fuzz",
)
def _no_offset(seam: Seam) -> None:
    """Keys name the picture, not which of its rows a block holds, nor where."""

    def tags(self: PrefixChain, start: int, media: Any) -> Iterator[Any]:
        for tag in genuine(self, start, media):
            seam.fire(tag[0] == "media")
            yield tag[:2]

    genuine = seam.set(PrefixChain, "_tags", tags)


def hash_fault(seam: Seam, change: Callable[[Any], Any]) -> None:
    """Hash other parts: `change((kind, mode, size, pixels, settings))` → the same, changed."""

    def content_hash(kind: Any, mode: Any, size: Any, pixels: Any, settings: Any) -> Any:
        pieces = [pixels] if isinstance(pixels, bytes) else list(pixels)
        seam.fire()
        return genuine(*change((kind, mode, size, pieces, settings)))

    genuine = seam.set(hashing_module, "content_hash", content_hash)


@IDENTITY.add(
    "hash-without-shape",
    "vision/same-bytes-another-shape[model=tiny-llava]",
    origin="https://github.com/ai-dynamo/dynamo/pull/8341",
    at="content_hash: size",
    detector=GREEDY,
)
def _no_shape(seam: Seam) -> None:
    """A picture's hash is of its bytes, whatever its shape."""
    hash_fault(seam, lambda p: (p[0], p[1], (), p[3], p[4]))


@IDENTITY.add(
    "hash-of-the-beginning",
    "vision/same-text-another-image[model=tiny-qwen2-vl]",
    origin="https://github.com/waybarrios/vllm-mlx/pull/206",
    at="content_hash: pixels",
    detector=GREEDY,
)
def _beginning(seam: Seam) -> None:
    """A picture's hash is of its first bytes."""
    hash_fault(seam, lambda p: (p[0], p[1], p[2], [piece[:64] for piece in p[3]], p[4]))


@IDENTITY.add(
    "supplied-embeddings-by-their-shape",
    "vision/other-image-embeddings[model=tiny-llava]",
    origin="https://github.com/InternLM/lmdeploy/issues/4933",
    at="content_hash: values of supplied tensors",
    detector=GREEDY,
)
def _no_values(seam: Seam) -> None:
    """Supplied embeddings are told apart by name, type and shape, not by what is in them."""

    def content_hash(kind: Any, mode: Any, size: Any, pixels: Any, settings: Any) -> Any:
        if mode == "tensors":
            seam.fire()
            pixels = [b"" if i % 4 == 3 else piece for i, piece in enumerate(pixels)]
        return genuine(kind, mode, size, pixels, settings)

    genuine = seam.set(hashing_module, "content_hash", content_hash)


@IDENTITY.add(
    "hash-without-settings",
    "vision/settings-are-part-of-the-identity[model=tiny-qwen2-vl]",
    origin=f"{VLLM}/pull/49975",
    at="content_hash: settings",
    detector=GREEDY,
)
def _no_settings(seam: Seam) -> None:
    """A picture's hash is the same however it is processed."""
    hash_fault(seam, lambda p: (p[0], p[1], p[2], p[3], {}))


@IDENTITY.add(
    "video-without-its-times",
    "vision/video-rates[model=tiny-qwen2-5-vl]",
    origin=f"{VLLM}/pull/47736 (metadata of a video dropped)",
    at="content_hash: times of a video",
    detector="cached_tokens",
)
def _no_times(seam: Seam) -> None:
    """A video's hash is of its frames, not of when they were taken."""
    hash_fault(seam, lambda p: (*p[:3], p[3][:-1] if p[0] == "video" else p[3], p[4]))


@IDENTITY.add(
    "one-hash-for-all-pictures-of-a-prompt",
    "vision/text-then-second-image[model=tiny-qwen2-vl]",
    origin="https://github.com/sgl-project/sglang/issues/11785",
    at="Qwen2VLProcessor.expand: hash over the list",
    detector="happened",
)
def _list_hash(seam: Seam) -> None:
    """Pictures of a prompt are hashed together, so the first is another one when a second follows."""

    def expand(self: Any, modality: str, media: Any, settings: Any) -> Any:
        found = genuine(self, modality, media, settings)
        seam.fire(len(found) > 1)
        together = "+".join(e.item.content_hash[:20] for e in found)
        return [replace(e, item=replace(e.item, content_hash=f"{i}:{together}")) for i, e in enumerate(found)]

    genuine = seam.set(qwen_module.Qwen2VLProcessor, "expand", expand)


# --- pixels --------------------------------------------------------------------------------------


@PICTURES.add(
    "orientation-ignored",
    "vision/exif-orientations[model=tiny-internvl]",
    origin="https://github.com/InternLM/lmdeploy/issues/4933 (a picture that is not what it seems)",
    at="load._decoded: EXIF orientation",
    detector=GREEDY,
)
def _no_exif(seam: Seam) -> None:
    """Pictures are not turned upright as their EXIF data asks."""

    class Plain:
        @staticmethod
        def exif_transpose(image: Any) -> Any:
            seam.fire(image.getexif().get(0x0112, 1) != 1)
            return image

    seam.set(load_module, "ImageOps", Plain)


@PICTURES.add(
    "alpha-dropped",
    "vision/colour-modes[model=tiny-qwen2-vl]",
    origin=f"{VLLM}/pull/18569",
    at="load._decoded: transparency",
    detector=GREEDY,
)
def _no_alpha(seam: Seam) -> None:
    """Transparent pictures are laid on black before the processor sees them."""

    def decoded(image: Any, what: str) -> Any:
        found = genuine(image, what)
        if "A" not in found.mode:
            return found
        seam.fire()
        rgba = found.convert("RGBA")
        ground = rgba.copy()
        ground.paste((0, 0, 0, 255), (0, 0, *rgba.size))
        ground.alpha_composite(rgba)
        return ground.convert("RGB")

    genuine = seam.set(load_module, "_decoded", decoded)


def _pixel_fault(seam: Seam, change: Callable[[Any], Any]) -> None:
    """Other pixel values: `change(tensor)` → a tensor of its shape."""

    def call(self: ImageProcessor, images: Any, **settings: Any) -> Any:
        made = genuine(self, images, **settings)
        seam.fire()
        return {
            name: change(value) if name.startswith("pixel_values") else value for name, value in made.items()
        }

    genuine = seam.set(ImageProcessor, "__call__", call)


@PICTURES.add(
    "channels-in-reverse",
    one("tiny-llava"),
    origin="first principles: BGR for RGB",
    at="ImageProcessor.__call__: channels",
    detector=GREEDY,
)
def _bgr(seam: Seam) -> None:
    """Blue is taken for red."""
    _pixel_fault(seam, lambda pixels: pixels.flip(-3))


@PICTURES.add(
    "pixels-in-bfloat16",
    one("tiny-llava"),
    origin="https://github.com/huggingface/transformers/pull/39591 (small differences of pixels)",
    at="ImageProcessor.__call__: dtype",
    detector="logits_within_yardstick",
)
def _pixel_dtype(seam: Seam) -> None:
    """Pixel values have been through bfloat16."""
    _pixel_fault(seam, lambda pixels: pixels.bfloat16().float())


@PICTURES.add(
    "resampled-otherwise",
    one("tiny-llava"),
    "vision/one-image[model=tiny-smolvlm]",
    origin="https://github.com/huggingface/transformers/pull/39591",
    at="ImageProcessor.__call__: resample",
    detector=GREEDY,
)
def _resample(seam: Seam) -> None:
    """Pictures are resized with another filter."""

    def call(self: ImageProcessor, images: Any, **settings: Any) -> Any:
        seam.fire()
        return genuine(self, images, **{**settings, "resample": 2})

    genuine = seam.set(ImageProcessor, "__call__", call)


@PICTURES.add(
    "limits-of-a-request-ignored",
    "vision/pixel-limits[model=tiny-qwen2-vl]",
    origin="https://github.com/QwenLM/Qwen3-VL/pull/1145",
    at="Qwen2VLProcessor._with_size: max_pixels",
    detector=GREEDY,
)
def _no_limits(seam: Seam) -> None:
    """The most and fewest pixels that a request allows are not looked at."""

    def with_size(self: Any, settings: Any) -> Any:
        seam.fire({"min_pixels", "max_pixels"} & set(settings))
        kept = {k: v for k, v in settings.items() if k not in ("min_pixels", "max_pixels")}
        return genuine(self, kept)

    genuine = seam.set(qwen_module.Qwen2VLProcessor, "_with_size", with_size)


@PICTURES.add(
    "number-of-pictures-not-limited",
    "vision/too-many-images[model=tiny-qwen2-vl]",
    origin=f"{VLLM}/pull/38253 (what a client may send is not checked)",
    at="read_media: limits",
    detector="error",
)
def _no_count(seam: Seam) -> None:
    """A prompt may hold any number of pictures, whatever limit_mm_per_prompt says."""

    def read(data: Any, hidden_size: int, limits: Any) -> Any:
        seam.fire(limits)
        return genuine(data, hidden_size, {})

    genuine = seam.set(processor_module, "read_media", read)


# --- towers --------------------------------------------------------------------------------------


@TOWERS.add(
    "no-rope",
    one("tiny-qwen2-vl"),
    origin="first principles: patches without places",
    at="qwen2_vl.axial_rope: angles",
    detector=GREEDY,
)
def _still(seam: Seam) -> None:
    """Patches are not turned by their places."""

    def rope(positions: Any, head_dim: int, theta: float) -> Any:
        seam.fire()
        cos, sin = genuine(positions, head_dim, theta)
        return torch.ones_like(cos), torch.zeros_like(sin)

    genuine = seam.set(tower_module, "axial_rope", rope)


@TOWERS.add(
    "frames-see-one-another",
    "vision/video[model=tiny-qwen2-vl]",
    origin="https://github.com/EricLBuehler/mistral.rs/issues/2323 (attention over what is not one sequence)",
    at="qwen2_vl.frame_lengths: runs",
    detector=GREEDY,
)
def _frames(seam: Seam) -> None:
    """The patches of a video see those of other moments."""

    def lengths(grid: Any) -> Any:
        found = genuine(grid)
        seam.fire(len(found) > 1)
        return [sum(found)]

    genuine = seam.set(tower_module, "frame_lengths", lengths)


@TOWERS.add(
    "windows-ignored",
    one("tiny-qwen2-5-vl"),
    origin="first principles: attention over the whole picture in every layer",
    at="qwen2_5_vl.windows: runs",
    detector=GREEDY,
)
def _no_windows(seam: Seam) -> None:
    """Every layer of the tower sees the whole picture."""

    def windows(grid: Any, merge: int, side: int) -> Any:
        order, lengths = genuine(grid, merge, side)
        seam.fire(len(lengths) > 1)
        return order, [sum(lengths)]

    genuine = seam.set(windows_module, "windows", windows)


@TOWERS.add(
    "learned-positions-by-pixel-centres",
    one("tiny-qwen3-vl"),
    origin="https://github.com/ggml-org/llama.cpp/issues/16776 (resizing done another way)",
    at="qwen3_vl.bilinear_taps: corners",
    detector=GREEDY,
)
def _taps(seam: Seam) -> None:
    """The table of learned positions is stretched by centres instead of by corners."""

    def taps(places: Any, size: int, side: int) -> Any:
        seam.fire()
        exact = (places.float() + 0.5) * side / size - 0.5
        lower = exact.floor()
        step = torch.arange(2)
        weights = 1 - (exact[:, None] - lower[:, None] - step).abs()
        return (lower.long()[:, None] + step).clamp(0, side - 1), weights

    seam.set(deepstack_module, "bilinear_taps", taps)


@TOWERS.add(
    "last-layer-read",
    one("tiny-llava"),
    origin="https://github.com/huggingface/transformers/pull/35262 (features of another place)",
    at="TowerFeatures.project: feature layer",
    detector=GREEDY,
)
def _last_layer(seam: Seam) -> None:
    """The tower's last layer is read instead of the one before it."""

    def project(self: Any, pixels: Any) -> Any:
        seam.fire()
        kept = self._features
        self._features = replace(kept, feature_layers=(kept.tower.num_hidden_layers,))
        try:
            return genuine(self, pixels)
        finally:
            self._features = kept

    genuine = seam.set(llava_module.TowerFeatures, "project", project)


@TOWERS.add(
    "class-row-kept",
    one("tiny-llava"),
    origin="https://github.com/huggingface/transformers/issues/32395",
    at="TowerFeatures.project: first row",
    detector="history",
)
def _class_row(seam: Seam) -> None:
    """The row of the class token stays among the features."""

    def project(self: Any, pixels: Any) -> Any:
        seam.fire(self._features.drop_first)
        kept = self._features
        self._features = replace(kept, drop_first=False)
        try:
            return genuine(self, pixels)
        finally:
            self._features = kept

    genuine = seam.set(llava_module.TowerFeatures, "project", project)


@TOWERS.add(
    "shuffle-with-axes-exchanged",
    one("tiny-internvl"),
    origin="https://github.com/OpenGVLab/InternVL/issues/927",
    at="internvl.pixel_shuffle: axes",
    detector=GREEDY,
)
def _shuffle(seam: Seam) -> None:
    """The pixel shuffle leaves rows and columns exchanged."""

    def shuffle(features: Any, factor: int) -> Any:
        seam.fire()
        return genuine(features, factor).transpose(1, 2)

    genuine = seam.set(internvl_module, "pixel_shuffle", shuffle)
