"""`benchmarks/cancel.py`: rollouts, groups and jobs cancelled in each stage end and leave nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_cancels_in_each_stage() -> None:
    command = [sys.executable, "benchmarks/cancel.py", "--sandboxes", "process", "--repeat", "1", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert found["left_behind"] == []
    stages = {(row["stage"], row["what"]) for row in found["rows"]}
    whats = ("rollout", "group", "job")
    assert stages == {
        (stage, what) for stage in ("queued", "preparing", "running", "calling", "scoring") for what in whats
    }
    assert found["cancelled"] == len(found["rows"]) == 16
    assert all(0 < row["final"]["most"] <= row["nothing_left"]["most"] for row in found["rows"])
    assert done.returncode == 0
