"""Attacks by an agent in each kind of sandbox (`benchmarks/attacks.py`): which must fail, and which succeed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rewards.conftest import needs

ROOT = Path(__file__).parents[2]
FORGED = {"forge_the_test_runner"}
"""Tests import the agent's code, which can then print anything (docs/security.md)."""
STOPPED_EVERYWHERE = {"other_session", "admin_api", "reward_api", "stay_behind"}
CONTROLS = {
    *("internet", "host_loopback", "names", "engine", "other_key", "other_files", "other_processes", "database"),
    *("past_its_recorder", "admin_key", "metrics", "hidden_tests", "later_commits", "write_outside"),
}
"""Attacks that succeed in a process sandbox, which shows that they are real."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(1000)]


@pytest.mark.parametrize("kind", [needs("bubblewrap"), needs("docker"), needs("process")])
def test_only_known_attacks_succeed(kind: str) -> None:
    command = [sys.executable, "benchmarks/attacks.py", "--sandboxes", kind, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    attempts = found["attempts"][kind]
    assert found["remains"] == []
    assert not [name for name, one in attempts.items() if "gave up" in one["got"]], attempts
    reached = {name for name, one in attempts.items() if one["reached"]}
    if kind == "process":
        assert reached >= CONTROLS | FORGED, attempts
        assert not reached & STOPPED_EVERYWHERE, attempts
    else:
        assert reached == FORGED, {name: attempts[name] for name in reached}
        assert len(attempts) >= 20
    assert "shadows_library" in attempts["forge_the_test_runner"]["got"]
