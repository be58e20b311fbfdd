"""The `polar` console script in a separate process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
POLAR = str(Path(sys.executable).with_name("polar"))


def environment() -> dict[str, str]:
    """Return this process's environment, with the repository on the path for engines and agents of the tests."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "200"}
