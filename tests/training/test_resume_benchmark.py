"""`benchmarks/resume.py`: a run that is killed and resumed ends with the weights of an undisturbed run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_killed_run_ends_like_the_undisturbed_run() -> None:
    program = [sys.executable, "benchmarks/resume.py", "--kills", "3", "--steps", "5", "--seeds", "2", "--killed", "1"]
    done = subprocess.run([*program, "--samples", "64", "--json"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    counts = {name: report[name] for name in ("kills", "steps", "trained_twice", "skipped", "unacknowledged")}
    assert counts == {"kills": 3, "steps": 5, "trained_twice": 0, "skipped": 0, "unacknowledged": 0}
    assert report["groups_trained"] == 10
    # Only rounding: a group that was skipped or trained twice would move the weights as much as a step does.
    assert report["weights_difference"] < report["weights_moved"] / 50
    assert report["seeds"][0]["reward_killed"] > report["reward_initial"]
