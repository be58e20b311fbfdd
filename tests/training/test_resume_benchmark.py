"""`benchmarks/resume.py`: a process of its own, killed and taken up, ends where the one left alone ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_a_run_killed_again_and_again_is_the_run_left_alone() -> None:
    program = [sys.executable, "benchmarks/resume.py", "--kills", "3", "--steps", "5", "--seeds", "2", "--killed", "1"]
    done = subprocess.run([*program, "--samples", "64", "--json"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout, done.stderr
    told = json.loads(done.stdout)
    counts = {name: told[name] for name in ("kills", "steps", "trained_twice", "skipped", "unacknowledged")}
    assert counts == {"kills": 3, "steps": 5, "trained_twice": 0, "skipped": 0, "unacknowledged": 0}
    assert told["groups_trained"] == 10
    # Rounding, as against what was learned: a group missed or doubled would move as much as a step does.
    assert told["weights_apart"] < told["weights_moved"] / 50
    assert told["seeds"][0]["reward_killed"] > told["reward_begun"]
