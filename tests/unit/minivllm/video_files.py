"""Small video files without loss, for tests; they need PyAV."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["FRAMES", "KINDS", "encoded", "sound_only"]

#: Noise, so that no codec can guess one pixel from another.
FRAMES = np.random.default_rng(0).integers(0, 256, (5, 56, 84, 3), dtype=np.uint8)

#: Container → its codec, the layout of its pixels, and what makes the codec lossless.
KINDS: dict[str, tuple[str, str, dict[str, str]]] = {
    "mp4": ("libx264rgb", "rgb24", {"qp": "0"}),
    "mov": ("png", "rgb24", {}),
    "webm": ("libvpx-vp9", "gbrp", {"lossless": "1"}),
    "avi": ("png", "rgb24", {}),
}


def encoded(kind: str, frames: Sequence[np.ndarray[Any, Any]] = FRAMES, fps: int = 2) -> bytes:
    """A file of these frames."""
    import av

    codec, layout, options = KINDS[kind]
    target = io.BytesIO()
    with av.open(target, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=fps, options=options)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = layout
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return target.getvalue()


def sound_only() -> bytes:
    """An mp4 of a moment's silence."""
    import av

    target = io.BytesIO()
    with av.open(target, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=48000)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        silence.sample_rate = 48000
        container.mux(stream.encode(silence))
        container.mux(stream.encode())
    return target.getvalue()
