"""A cancelled command in a container is ended in the background, or by `close` if that comes first."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import pytest

from sandboxes.base import SandboxEnded
from sandboxes.choice import open_sandbox
from sandboxes.docker import DockerSandbox

on_docker = pytest.mark.parametrize("kind", [pytest.param("docker", marks=pytest.mark.full)], indirect=True)


async def cancelled(sandbox: DockerSandbox) -> asyncio.Task[None]:
    """Cancel a command and return the task that ends it."""
    started = asyncio.Event()
    command = ["sh", "-c", "echo started; sleep 427 & sleep 427"]
    task = asyncio.ensure_future(sandbox.exec(command, on_output=lambda _: started.set()))
    await asyncio.wait_for(started.wait(), 120)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (ending,) = sandbox._ending
    assert not ending.done()
    return ending


@on_docker
async def test_next_command_waits_for_its_end(kind: str, state_dir: Path) -> None:
    sandbox = await open_sandbox("docker", state_dir=state_dir)
    assert isinstance(sandbox, DockerSandbox)
    async with sandbox:
        ending = await cancelled(sandbox)
        processes = await sandbox.exec(["sh", "-c", "cat /proc/[0-9]*/cmdline | tr '\\0' ' '"])
        assert ending.done()
        assert b"sleep 427" not in processes.stdout.replace(b"sh -c", b"")
        assert not sandbox._ending


@on_docker
@pytest.mark.parametrize("cancel", [True, False])
async def test_unread_input_does_not_delay_close(kind: str, state_dir: Path, cancel: bool) -> None:
    """The container is removed while 64 MB of input are still being sent."""
    sandbox = await open_sandbox("docker", state_dir=state_dir)
    assert isinstance(sandbox, DockerSandbox)
    taking = asyncio.ensure_future(sandbox.exec(["sh", "-c", "sleep 427"], stdin=bytes(64 << 20)))
    while not sandbox._running:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    if cancel:
        taking.cancel()
    await asyncio.wait_for(sandbox.close(), 60)
    with pytest.raises(asyncio.CancelledError if cancel else SandboxEnded):
        await asyncio.wait_for(taking, 60)
    assert not sandbox._running


@on_docker
async def test_close_does_not_wait_for_its_end(kind: str, state_dir: Path) -> None:
    sandbox = await open_sandbox("docker", state_dir=state_dir)
    assert isinstance(sandbox, DockerSandbox)
    ending = await cancelled(sandbox)
    await sandbox.close()
    await asyncio.wait({ending}, timeout=5)
    assert ending.done()
    listed = await asyncio.to_thread(
        subprocess.run, ["docker", "ps", "-aq", "--filter", f"name={sandbox.id}"], capture_output=True, check=True
    )
    assert listed.stdout == b""
    assert not list(state_dir.glob("records/*"))
