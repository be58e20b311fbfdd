"""Polar: a flight recorder for coding agents (see docs/architecture.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polar_proxy.reading.recording import Recording

__version__ = "0.1.0"


def read(db: str | None = None) -> Recording:
    """Return a `Recording`, which reads a database:
    `polar_proxy.read("polar.db").rollouts(where="reward>=1").to_pandas()`.

    `db`: file or URL of the database. Default: the database that the settings name.
    """
    from polar_proxy.reading.recording import Recording

    return Recording(db)
