"""A part of each family of `benchmarks/attacks.py`: no attack succeeds that is not known to, and honest work passes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks._attacks.rollout_escapes import ATTACKS
from tests.rewards.conftest import needs

ROOT = Path(__file__).parents[2]
IN_A_PROCESS = {
    *("internet", "host_loopback", "names", "engine", "other_key", "other_files", "other_processes", "database"),
    *("past_its_recorder", "admin_key", "metrics", "hidden_tests", "later_commits", "write_outside"),
}
"""Attacks that succeed in a process sandbox, which shows that they are real."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


def attack(family: str, *options: str) -> list[dict[str, Any]]:
    """Run attacks of a family and return their outcomes; fails if one pays or an honest control does not work."""
    command = [sys.executable, "benchmarks/attacks.py", "--families", family, "--json", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    outcomes: list[dict[str, Any]] = json.loads(done.stdout)["outcomes"]
    assert not [one for one in outcomes if "gave up" in one["got"]]
    return outcomes


PARTS = {
    "rewards": ("shadow_*", "*honest*"),
    "escapes": ("*_calls", "host_files", "write_kernel_settings", "other_sandbox_*", "reach_the_gateway"),
    "gateway": ("*header*",),
    "data": ("*archive*",),
}
"""Of each family some attacks, which take about half a minute."""


@pytest.mark.parametrize("kind", [needs("bubblewrap"), needs("docker"), needs("process")])
def test_agent_reaches_only_what_is_documented(kind: str) -> None:
    outcomes = attack("escapes", "--sandboxes", kind, "--only=rollout_*")
    reached = {one["attack"].removeprefix("rollout_") for one in outcomes if one["reached"]}
    if kind == "process":
        assert reached >= IN_A_PROCESS
    here = {one["attack"] for one in outcomes if one["where"] == kind}
    only_in_bubblewrap = {"write_harbors_reward_file"} if kind != "bubblewrap" else set()
    assert here == {f"rollout_{name}" for name in {*ATTACKS} - only_in_bubblewrap - {"left_behind"}}
    (forged,) = [one["got"] for one in outcomes if one["attack"] == "rollout_forge_the_test_runner"]
    assert "shadows_library" in forged


@pytest.mark.parametrize("kind", [needs("bubblewrap"), needs("docker")])
def test_nothing_leaves_a_sandbox(kind: str) -> None:
    outcomes = attack("escapes", "--sandboxes", kind, "--only=[!r]*", "--only=r[!o]*")  # without rollout_*
    assert len([one for one in outcomes if not one["control"]]) >= 70
    assert len([one for one in outcomes if one["control"]]) >= 9


@pytest.mark.parametrize("family", PARTS)
@pytest.mark.parametrize("kind", [needs("bubblewrap")])
def test_no_attack_of_a_part_of_each_family_pays(family: str, kind: str) -> None:
    outcomes = attack(family, "--sandboxes", kind, *(f"--only={pattern}" for pattern in PARTS[family]))
    assert len(outcomes) >= 3
    assert len({one["attack"] for one in outcomes if not one["control"]}) >= 2
