"""Waivers: failures an engine's owner knows about, kept in a file beside that engine.

::

    - scenario: prefix-cache/*            # an id, or a pattern of the shell's kind
      scope: {block_size: 1}              # optional: only where the point has these values
      reason: block size 1 is not supported with prefix caching
      issue: https://…
      expiry: 2027-01-31                  # the last day on which it holds

Nobody waives for ever: an expired waiver is an error until it is removed, or renewed with a reason.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, StringConstraints, TypeAdapter, ValidationError

from conformance.yaml_lines import YamlError, read_yaml

__all__ = ["Waiver", "WaiverError", "load_waivers"]

_Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]


class WaiverError(ValueError):
    """A waiver file is wrong or a waiver has expired; each line has file, line and reason."""


def _day(value: Any) -> Any:
    """A day as YAML reads it, or its text."""
    if isinstance(value, str):
        try:
            return datetime.date.fromisoformat(value)
        except ValueError as error:
            raise ValueError(f"write a day such as 2027-01-31, not {value!r}") from error
    return value


class _WaiverModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    scenario: _Text
    reason: _Text
    issue: _Text
    expiry: Annotated[datetime.date, BeforeValidator(_day)]
    scope: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Waiver:
    """One known failure: where, why, where it is tracked, and until when.

    Attributes:
        scenario: id or pattern.
        point: the file's `scope`: values that the matrix point (model, dtype and device among
            them) must have; empty covers every point.
        line: its line in the file.
    """

    scenario: str
    point: Mapping[str, Any]
    reason: str
    issue: str
    expiry: datetime.date
    line: int

    def covers(self, scenario: str, point: Mapping[str, Any]) -> bool:
        """Whether this waiver is about that scenario at that point."""
        return fnmatchcase(scenario, self.scenario) and all(
            name in point and str(point[name]) == str(value) for name, value in self.point.items()
        )

    def names(self, scenarios: Sequence[str]) -> bool:
        """Whether any of these ids is meant."""
        return any(fnmatchcase(scenario, self.scenario) for scenario in scenarios)


def load_waivers(path: Path, today: datetime.date | None = None) -> list[Waiver]:
    """Read a waiver file.

    Args:
        today: for expiry; the default is today's date.

    Raises:
        WaiverError: with file and line, for every problem at once: unreadable, a field missing or
            unknown, the same scope waived twice, or expired.
    """
    try:
        document = read_yaml(path)
    except (OSError, YamlError) as error:
        raise WaiverError(str(error)) from error
    try:
        models = TypeAdapter(list[_WaiverModel]).validate_python(document.data or [])
    except ValidationError as error:
        lines = [
            f"{path}:{document.line(e['loc'])}: {'.'.join(map(str, e['loc']))}: {e['msg']}"
            for e in error.errors()
        ]
        raise WaiverError("\n".join(lines)) from error
    waivers = [
        Waiver(m.scenario, m.scope, m.reason, m.issue, m.expiry, document.line((i,)))
        for i, m in enumerate(models)
    ]
    problems = _problems(waivers, today or datetime.date.today())
    if problems:
        raise WaiverError("\n".join(f"{path}:{line}: {text}" for line, text in problems))
    return waivers


def _problems(waivers: Sequence[Waiver], today: datetime.date) -> list[tuple[int, str]]:
    problems = []
    seen: dict[tuple[str, str], int] = {}
    for waiver in waivers:
        key = (waiver.scenario, repr(sorted(waiver.point.items())))
        if key in seen:
            problems.append((waiver.line, f"{waiver.scenario} is waived in line {seen[key]} already"))
        seen.setdefault(key, waiver.line)
        if waiver.expiry < today:
            text = f"the waiver of {waiver.scenario} expired on {waiver.expiry}: remove it, or renew it"
            problems.append((waiver.line, f"{text} with its reason ({waiver.issue})"))
    return problems
