"""Every checkpoint that is trained: unlike random ones it is not rebuilt to the bit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance.recipes import meaning, recall, visual_recall
from conformance.recipes.phases import Report

__all__ = ["TRAINED", "Trained"]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One checkpoint.

    Attributes:
        summary: what it is there to show, in one line.
        train: trains it and writes the directory. Takes the directory, a seed, the number of steps of
            the longest phase (the others keep their share of it; None: as committed), and whom to
            report to.
    """

    summary: str
    train: Callable[[Path, int, int | None, Report], None]


def _recall(directory: Path, seed: int, steps: int | None, report: Report) -> None:
    from conformance.recipes.recall_training import Settings, make_recall_model, train, write_recall

    settings = Settings(seed=seed) if steps is None else Settings(seed=seed, steps=steps)
    model = make_recall_model(seed)
    losses = train(model, settings, lambda step, loss: report("recall", step, loss))
    write_recall(directory, model, settings, losses)


def _visual_recall(directory: Path, seed: int, steps: int | None, report: Report) -> None:
    from conformance.recipes.visual_recall_training import (
        GridSettings,
        make_visual_recall_model,
        train_visual_recall,
        write_visual_recall,
    )

    settings = GridSettings(seed=seed)
    if steps is not None:
        settings = GridSettings(
            seed=seed,
            decoder_steps=steps,
            tower_steps=_share(steps, settings.tower_steps, settings.decoder_steps),
            joint_steps=_share(steps, settings.joint_steps, settings.decoder_steps),
        )
    model = make_visual_recall_model(seed)
    losses = train_visual_recall(model, settings, report)
    write_visual_recall(directory, model, settings, losses)


def _meaning(directory: Path, seed: int, steps: int | None, report: Report) -> None:
    from conformance.recipes.meaning_training import Settings, make_meaning_model, train, write_meaning

    settings = Settings(seed=seed)
    if steps is not None:
        settings = Settings(
            seed=seed,
            decoder_steps=steps,
            tower_steps=_share(steps, settings.tower_steps, settings.decoder_steps),
            joint_steps=_share(steps, settings.joint_steps, settings.decoder_steps),
        )
    model = make_meaning_model(seed)
    losses = train(model, settings, report)
    write_meaning(directory, model, settings, losses)


def _share(steps: int, part: int, whole: int) -> int:
    return max(1, steps * part // whole)


#: Every trained checkpoint by name.
TRAINED: Mapping[str, Trained] = {
    recall.NAME: Trained(summary=recall.SUMMARY, train=_recall),
    visual_recall.NAME: Trained(summary=visual_recall.SUMMARY, train=_visual_recall),
    meaning.NAME: Trained(summary=meaning.SUMMARY, train=_meaning),
}
