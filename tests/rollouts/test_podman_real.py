"""`polar run` with the bundled policy and mini-swe-agent in rootless Podman: `make test-podman`.

Marked `by_command`, because Podman needs an ordinary user, the image and the agent, which takes minutes the first time.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from pathlib import Path

import psutil
import pytest

from sandboxes import orphans
from sandboxes.base import SandboxError
from sandboxes.docker_engine import docker_client, engine_info, is_podman
from tests.cli.process import POLAR, environment
from tests.until import until

pytestmark = [pytest.mark.by_command, pytest.mark.timeout(1200), pytest.mark.usefixtures("own_sandbox_register")]


@pytest.fixture(autouse=True)
async def rootless_podman() -> None:
    try:
        async with docker_client() as engine:
            info = await engine_info(engine)
    except SandboxError as error:
        pytest.skip(f"no rootless Podman ({error}): make test-podman")
    if not (is_podman(info) and info["Rootless"]):
        pytest.skip("the Docker engine is not rootless Podman: make test-podman")


async def containers() -> list[str]:
    async with docker_client() as engine:
        found = await engine.containers.list(all=True, filters=json.dumps({"label": [orphans.LABEL]}))
        return [container["Labels"][orphans.LABEL] for container in found]


async def volumes() -> set[str]:
    async with docker_client() as engine:
        return {volume["Name"] for volume in (await engine.volumes.list())["Volumes"]}


def monitors() -> list[str]:
    """Return the command lines of conmon, which Podman starts for each container and command of a sandbox."""
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if "conmon" in line and " -n polar-" in line]


async def test_rollouts_are_scored_and_leave_nothing(polar_home: Path, tmp_path: Path) -> None:
    before = await volumes()
    command = [POLAR, "run", "swe-task", "--sandbox", "docker", "--samples", "4", "--json"]
    cache = os.environ.get("POLAR_CACHE_DIR") or str(Path("~/.polar/harnesses").expanduser())
    env = environment() | {"POLAR_HARNESSES": cache}
    ended = await asyncio.to_thread(
        subprocess.run, command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=1000
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    rollouts = json.loads(ended.stdout)["rollouts"]
    assert len(rollouts) == 4
    assert all(row["status"] == "done" and row["reward"] in (0, 1) and row["calls"] for row in rollouts), rollouts
    assert await containers() == []
    assert await volumes() == before
    assert [file for file in (tmp_path / "tmp").rglob("polar-sandboxes-*/**/*") if file.is_file()] == []
    await until(lambda: not monitors(), "the end of Podman's processes (engine.exit_command_delay, by default 300 s)")
