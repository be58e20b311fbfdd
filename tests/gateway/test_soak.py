"""A short form of `benchmarks/soak.py`: faults of clients and engine, and every call recorded once."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from polar_proxy.types import Json

ROOT = Path(__file__).parents[2]
POSTGRES = shutil.which("initdb") or next(iter(Path("/usr/lib/postgresql").glob("*/bin/initdb")), None)
needs_postgres = pytest.mark.skipif(POSTGRES is None, reason="PostgreSQL is not installed: apt-get install postgresql")

SMALL_CACHES = ["--cache-mb", "4", "--calls-in-memory", "500", "--retry-window", "1"]
MAX_SLOPE_MB = 80.0
"""Growth per 10,000 calls while the caches without a setting still fill; 30 as measured."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


def test_records_every_call_once_and_holds_its_descriptors(tmp_path: Path) -> None:
    """With small caches, which are full soon: without a leak, memory does not grow."""
    check_calls(soak("--open", "40", *SMALL_CACHES, "--out", str(tmp_path / "soak.json")))
    assert not leak_shows(tmp_path / "soak.json")


@needs_postgres
def test_records_every_call_once_in_postgresql() -> None:
    check_calls(soak("--db", "postgresql", "--open", "40"))


def test_a_leak_shows_in_the_slope_of_memory(tmp_path: Path) -> None:
    soak("--open", "20", *SMALL_CACHES, "--leak-bytes", "20000", "--out", str(tmp_path / "soak.json"))
    assert leak_shows(tmp_path / "soak.json")


def check_calls(found: Json) -> None:
    # So short a run ends before the caches are full, and on a shared machine its times say nothing.
    assert [line for line in found["broken"] if not line.startswith(("memory", "p99"))] == []
    assert found["answered"] == found["stored"]["ok"] == 6000
    assert found["open_at_once"] == 40
    assert min(found["faults_of_clients"].values()) > 0
    assert found["failed_attempts"]
    assert found["rss_mb_at_share_of_calls"]["1.0"] < 400


def leak_shows(out: Path) -> bool:
    growth, error = json.loads(out.read_text())["slope_mb_per_10000_calls"]
    return bool(growth - 2 * error > MAX_SLOPE_MB)


def soak(*arguments: str) -> Json:
    """Return what a run of 6,000 calls prints. A test that is cut short leaves none of its processes behind."""
    command = [sys.executable, "benchmarks/soak.py", "--json", "--calls", "6000", "--sessions", "120", *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, start_new_session=True, **pipes) as process:
        try:
            printed, errors = process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode in (0, 1), errors  # 1: so short a run ends before the caches are full
    found: Json = json.loads(printed)
    return found
