"""Where the suite's data lies: golden/ and scenarios/."""

from __future__ import annotations

from pathlib import Path

__all__ = ["DataMissing", "data_root"]


class DataMissing(FileNotFoundError):
    """Neither a source checkout nor packaged data is where it should be."""


def data_root(package: Path | None = None) -> Path:
    """Return the directory that holds golden/ and scenarios/.

    In an installed wheel this is `conformance/_data`; in a source checkout (also an editable
    install) it is the directory the package lies in.

    Args:
        package: directory of the conformance package; the default is this one.

    Raises:
        DataMissing: the package stands alone, without data.
    """
    package = package or Path(__file__).resolve().parent
    packaged = package / "_data"
    if packaged.is_dir():
        return packaged
    checkout = package.parent
    if any((checkout / name).exists() for name in ("golden", "scenarios", "pyproject.toml")):
        return checkout
    raise DataMissing(
        f"no golden/ and scenarios/ in {packaged} (a wheel has them there) nor in {checkout} (a checkout "
        "has them there); reinstall minivllm, or run from a complete checkout"
    )
