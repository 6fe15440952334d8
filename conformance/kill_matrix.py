"""The kill matrix: which seeded fault is found by which check, with how little evidence.

Plain data, read without the engine: `conformance.faults` makes it, reports take their power from it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

__all__ = ["COMMITTED", "Outcome", "Row", "committed", "load", "save"]

#: The matrix that was last committed, of every fault.
COMMITTED = Path(__file__).parent / "faults" / "matrix.json"

#: killed: a check failed. equivalent: nothing can show it, by argument and by equal bits. survived:
#: it did something and nothing failed. not fired: it did nothing, so nothing was shown.
Outcome = Literal["killed", "equivalent", "survived", "not fired"]


@dataclass(frozen=True, slots=True)
class Row:
    """One fault.

    Attributes:
        id, about, origin, at: as of `conformance.faults.Fault`.
        fired: how often it did something wrong while it was judged.
        detected_by: checks that failed, the expected one first; "fuzz" for the fuzzer.
        shown_by: the scenario and point ("fuzz:…" for a fuzz target) that showed it.
        evidence: the smallest set of `conformance.evidence.EVIDENCE` with which a check still fails;
            "contract" for the fuzzer, which needs the allocator contract.
        dtype: what the engine computed in.
        needs: features without which the scenario cannot be run.
        message: what the first failed check said.
    """

    id: str
    about: str
    origin: str
    at: str
    outcome: Outcome
    fired: int
    detected_by: tuple[str, ...] = ()
    shown_by: str = ""
    evidence: str = ""
    dtype: str = ""
    needs: tuple[str, ...] = ()
    message: str = ""


_ROWS = TypeAdapter(tuple[Row, ...])


def save(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as JSON, in order of id."""
    ordered = sorted(rows, key=lambda row: row.id)
    text = json.dumps(_ROWS.dump_python(tuple(ordered), mode="json"), indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def load(path: Path) -> tuple[Row, ...]:
    """Read what `save` wrote."""
    return _ROWS.validate_json(path.read_text(encoding="utf-8"), strict=True)


@cache
def committed() -> tuple[Row, ...]:
    """The committed matrix."""
    return load(COMMITTED)
