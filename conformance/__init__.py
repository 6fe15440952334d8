"""conformance: judges any inference engine against golden files recorded from Hugging Face eager."""

from __future__ import annotations

__all__ = ["EDITION", "SCENARIO_SCHEMA", "RECORD_SCHEMA", "HISTORY_SCHEMA", "REPORT_SCHEMA"]

#: Version of the suite (SemVer): a verdict is meaningful only together with it.
EDITION = "0.1.0"

#: Versions of the four file formats. A file of another version is refused, never guessed at.
SCENARIO_SCHEMA = 1
RECORD_SCHEMA = 1
HISTORY_SCHEMA = 1
REPORT_SCHEMA = 1
