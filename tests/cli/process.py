"""The real `polar` console script as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson

ROOT = Path(__file__).resolve().parents[2]
POLAR = str(Path(sys.executable).with_name("polar"))


def environment() -> dict[str, str]:
    """This process's environment (with the test's POLAR_HOME) and the repository on the path, for the fake engine."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "200"}


def polar(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [POLAR, *arguments], env=environment(), cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )


def polar_json(*arguments: str, cwd: Path) -> Any:
    """The one JSON document that a command printed."""
    done = polar(*arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return orjson.loads(done.stdout)


def error_text(done: subprocess.CompletedProcess[str]) -> str:
    """The error of a command that failed as it should: something on standard error, no traceback, nothing printed."""
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.stderr
