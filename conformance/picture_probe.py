"""Swaps the pictures of a request: another one of the same size must change what the model says, and
the same one must not, whatever came before. The prompt ids stay as they are.

An engine that merges no embeddings, or merges them elsewhere, says the same to any picture. One whose
caches leave the pixels out of their keys says to the second picture what it said to the first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image, ImageChops, ImageOps

from conformance.adapters.base import EngineAdapter, EngineOutput, EngineRequest, Media
from conformance.adapters.received import received
from conformance.verdicts import Verdict

__all__ = ["AGAIN", "ANOTHER", "COLD", "PICTURES", "can_swap", "swap_pictures", "write_other_picture"]

#: What the swaps ask; what they add to running alone, and where to look when they break.
ANOTHER, AGAIN, COLD = "image=another", "image=again", "image=another, cold"
PICTURES: Mapping[str, str] = {
    COLD: "with another picture: nothing of the pixels reaches the answer; look at merging of embeddings",
    ANOTHER: "with another picture after the first: prefix-cache or encoder-cache keys without the pixels",
    AGAIN: "with the same picture after another: caches that mix up pictures",
}


def can_swap(request: EngineRequest) -> bool:
    """Whether the request has pictures, and the engine gets their pixels."""
    return bool(request.media) and all(one.embeddings is None and one.paths for one in request.media)


def swap_pictures(
    request: EngineRequest, make: Callable[[], EngineAdapter], band: float
) -> dict[str, Verdict]:
    """What each of the swaps shows; WEAK where nothing but equal tokens could be compared.

    Args:
        make: makes the adapter, not yet entered.
        band: how far two right logprobs of one answer may lie apart.

    Raises:
        ValueError: the request has no pictures that can be swapped.
    """
    if not can_swap(request):
        raise ValueError(f"{request.request_id} has no pictures whose pixels the engine gets")
    with TemporaryDirectory() as directory:
        media = tuple(_other(one, Path(directory), i) for i, one in enumerate(request.media))
        named = {
            name: replace(request, request_id=f"probe-{name}", media=media if name == "another" else found)
            for name, found in (("first", request.media), ("another", ()), ("again", request.media))
        }
        with make() as adapter:
            cold = _answer(adapter, named["another"])
        with make() as adapter:
            first, another, again = (_answer(adapter, named[n]) for n in ("first", "another", "again"))
    verdicts = {COLD: _must_differ(first, cold, band)}
    # What is the same even cold says nothing about caches.
    wrong = verdicts[COLD] is not Verdict.PASS
    verdicts[ANOTHER] = Verdict.SKIP if wrong else _must_differ(first, another, band)
    verdicts[AGAIN] = Verdict.FAIL if _differ(first, again, band) else Verdict.PASS
    return verdicts


def write_other_picture(path: Path, to: Path) -> Path:
    """Write a picture of the same size in which no value is as it was, upside down as well."""
    with Image.open(path) as file:
        seen = ImageOps.exif_transpose(file).convert("RGB")
    # Half a turn of the values: inverting would leave a mid grey as it is.
    turned = ImageChops.add_modulo(seen, Image.new("RGB", seen.size, (96, 128, 160)))
    ImageOps.flip(turned).save(to)
    return to


def _other(one: Media, directory: Path, number: int) -> Media:
    paths = tuple(
        write_other_picture(path, directory / f"{number}-{i}.png") for i, path in enumerate(one.paths)
    )
    return replace(one, paths=paths)


def _answer(adapter: EngineAdapter, request: EngineRequest) -> EngineOutput:
    name = request.request_id
    output = received(adapter.generate([request]), [name], "generate()")[name]
    if output.error is not None:
        raise RuntimeError(f"{name}: {output.error.type}: {output.error.message}")
    return output


def _must_differ(one: EngineOutput, other: EngineOutput, band: float) -> Verdict:
    if _differ(one, other, band):
        return Verdict.PASS
    # Another picture need not change a greedy token; only numbers tell that nothing of it was seen.
    return Verdict.FAIL if one.logprobs is not None and other.logprobs is not None else Verdict.WEAK


def _differ(one: EngineOutput, other: EngineOutput, band: float) -> bool:
    """Whether the texts, the tokens or the logprobs of a token differ by more than rounding."""
    if one.token_ids is None or other.token_ids is None:
        return one.text != other.text
    for at, (mine, theirs) in enumerate(zip(one.token_ids, other.token_ids, strict=False)):
        listed, others = _numbers(one, at), _numbers(other, at)
        if any(abs(value - others[token]) > band for token, value in listed.items() if token in others):
            return True
        if mine != theirs:
            # Two tokens nearly as likely as each other: what follows has another context.
            near = mine in listed and theirs in listed and abs(listed[mine] - listed[theirs]) <= 2 * band
            return not near
    return len(one.token_ids) != len(other.token_ids)


def _numbers(output: EngineOutput, at: int) -> dict[int, float]:
    rows = output.logprobs or ()
    return {entry.token_id: entry.logprob for entry in rows[at]} if at < len(rows) else {}
