"""Control groups are made in the right folders with the right contents, on imitated hierarchies of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandboxes import cgroups
from sandboxes.base import ResourceLimits, SandboxError

LIMITS = ResourceLimits(memory_mb=100, cpus=1.5, pids=20)


def test_version_2_group_is_below_the_root(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("cpuset cpu io memory pids\n")
    folders = cgroups.group_folders("polar-x", LIMITS, tmp_path, "0::/user.slice/session-1.scope\n")
    assert folders == [tmp_path / "polar-x"]


def test_version_2_without_delegation_gives_none(tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("pids\n")
    assert cgroups.group_folders("polar-x", LIMITS, tmp_path, "0::/\n") is None
    assert cgroups.group_folders("polar-x", ResourceLimits(None, None, 20, None), tmp_path, "0::/\n") is not None


def test_version_1_group_is_below_the_own_group_of_each_controller(tmp_path: Path) -> None:
    for name in ("memory/jobs/7", "cpu", "pids"):
        (tmp_path / name).mkdir(parents=True)
    own = "5:pids:/elsewhere\n4:memory:/jobs/7\n1:cpu,cpuacct:/\n0::/\n"
    folders = cgroups.group_folders("polar-x", LIMITS, tmp_path, own)
    # The mount does not show the path (another group's namespace): the mount's root is the own group.
    assert folders == [tmp_path / "cpu/polar-x", tmp_path / "memory/jobs/7/polar-x", tmp_path / "pids/polar-x"]
    assert cgroups.group_folders("polar-x", LIMITS, tmp_path, "5:pids:/\n") is None


def test_no_limits_need_no_group(tmp_path: Path) -> None:
    assert cgroups.group_folders("polar-x", ResourceLimits(None, None, None, 5), tmp_path, "") is None


def test_limit_values() -> None:
    assert cgroups.settings(LIMITS, 2) == {
        "memory": [("memory.max", "104857600", True), ("memory.swap.max", "0", False)],
        "pids": [("pids.max", "20", True)],
        "cpu": [("cpu.max", "150000 100000", True)],
    }
    assert cgroups.settings(LIMITS, 1)["cpu"] == [
        ("cpu.cfs_period_us", "100000", True),
        ("cpu.cfs_quota_us", "150000", True),
    ]


def test_user_without_permission_gets_none(tmp_path: Path) -> None:
    assert cgroups.create([tmp_path / "a", tmp_path / "missing" / "b"], LIMITS) is None
    assert list(tmp_path.iterdir()) == []


def test_group_that_keeps_processes_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "process").touch()
    with pytest.raises(SandboxError, match="still holds"):
        cgroups.remove(tmp_path / "g", seconds=0.02)
    cgroups.remove(tmp_path / "missing")
