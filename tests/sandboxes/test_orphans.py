"""After `kill -9` of an owner the sweep removes everything, and it never touches the sandboxes of a living owner."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes import docker_engine, orphans
from sandboxes.base import Sandbox
from sandboxes.orphans import sweep
from tests.until import until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

# An owner: opens a sandbox, leaves a background process and runs another, prints their ids, and waits to be killed.
OWNER = """
import asyncio, os, sys
from pathlib import Path
from sandboxes.choice import open_sandbox

async def main(kind, state_dir):
    sandbox = await open_sandbox(kind, state_dir=Path(state_dir))
    span = f"9{os.getpid()}"
    await sandbox.exec(["sh", "-c", f"(setsid sleep {span} & env -i sleep {span} &) >/dev/null 2>&1"])
    running = asyncio.ensure_future(sandbox.exec(["sh", "-c", f"sleep {span}; true"]))
    print(sandbox.id, flush=True)
    await running

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
async def owner(kind: str, state_dir: Path) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, kind, str(state_dir), cwd=ROOT, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    sandbox_id = (await asyncio.wait_for(process.stdout.readline(), 120)).decode().strip()
    assert sandbox_id
    await until(lambda: alive(process) == 3, "the start of the three programs")
    yield process, sandbox_id
    if process.returncode is None:
        process.kill()
        await process.wait()
    await sweep(state_dir)


def supervisors(sandbox_id: str, state_dir: Path) -> list[int]:
    record = json.loads((state_dir / "records" / f"{sandbox_id}.json").read_text())
    return [pid for pid, _start in record["processes"]]


def alive(process: asyncio.subprocess.Process) -> int:
    """Return how many of the three programs of this owner are alive, seen from the host."""
    count = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                count += (entry / "cmdline").read_bytes() == f"sleep\0009{process.pid}\0".encode()
    return count


async def containers(sandbox_id: str) -> int:
    async with docker_engine.docker_client() as engine:
        label = json.dumps({"label": [f"{orphans.LABEL}={sandbox_id}"]})
        return len(await engine.containers.list(all=True, filters=label))


async def test_sweep_removes_what_a_killed_owner_left(
    owner: tuple[asyncio.subprocess.Process, str], kind: str, state_dir: Path
) -> None:
    process, sandbox_id = owner
    assert list(orphans.marked_processes({sandbox_id}))
    assert alive(process) == 3
    process.kill()
    await process.wait()
    if kind != "docker":
        # The control socket is closed, so everything ends at once, without a sweep.
        await until(lambda: not list(orphans.marked_processes({sandbox_id})) and not alive(process))
    removed = await sweep(state_dir)
    assert not list(orphans.marked_processes({sandbox_id}))
    assert alive(process) == 0
    assert [p for p in state_dir.rglob("*") if p.name != "records"] == []
    kinds = {r.what for r in removed if r.sandbox == sandbox_id}
    assert kinds >= ({"container", "record"} if kind == "docker" else {"directory", "record"})
    if kind == "docker":
        assert await containers(sandbox_id) == 0
    assert await sweep(state_dir) == []


@pytest.mark.parametrize("kind", ["process", "bubblewrap"], indirect=True)  # a container has no supervisor
async def test_sweep_kills_processes_without_a_supervisor(
    owner: tuple[asyncio.subprocess.Process, str], kind: str, state_dir: Path
) -> None:
    process, sandbox_id = owner
    process.send_signal(signal.SIGSTOP)  # so that it cannot clean up after its supervisor
    for pid in supervisors(sandbox_id, state_dir)[:1]:
        os.kill(pid, signal.SIGKILL)
    process.kill()
    await process.wait()
    await sweep(state_dir)
    assert not list(orphans.marked_processes({sandbox_id}))
    assert alive(process) == 0
    assert [p for p in state_dir.rglob("*") if p.name != "records"] == []


async def test_sweep_spares_living_owners(
    owner: tuple[asyncio.subprocess.Process, str], kind: str, state_dir: Path
) -> None:
    process, sandbox_id = owner
    assert alive(process) == 3
    assert await sweep(state_dir) == []
    assert alive(process) == 3
    assert [record.id for record in orphans.SandboxRegistry(state_dir).all()] == [sandbox_id]
    assert process.returncode is None


@pytest.mark.parametrize("kind", [pytest.param("docker", marks=pytest.mark.full)], indirect=True)
async def test_sweep_finds_a_container_by_its_label(
    owner: tuple[asyncio.subprocess.Process, str], kind: str, state_dir: Path
) -> None:
    process, sandbox_id = owner
    (state_dir / "records" / f"{sandbox_id}.json").unlink()
    process.kill()
    await process.wait()
    removed = await sweep(state_dir)
    assert [r for r in removed if r.sandbox == sandbox_id and r.what == "container"]
    assert await containers(sandbox_id) == 0


# ---------------------------------------------------------------- who is dead


def test_owner_is_dead_only_if_certain() -> None:
    me = orphans.OwnerProcess.me()
    assert not me.dead()
    assert replace(me, started="1").dead()  # the pid was given to another process
    assert replace(me, boot="before").dead()
    assert not replace(me, machine="another", pid=2**22 + 1).dead()
    assert not replace(me, pid_namespace="pid:[1]", pid=2**22 + 1).dead()


def test_zombie_owner_is_dead() -> None:
    process = subprocess.Popen(["sleep", "1000"])
    owner = replace(orphans.OwnerProcess.me(), pid=process.pid, started=orphans.start_time(process.pid) or "")
    assert not owner.dead()
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and not reaped
    assert owner.dead()
    process.wait()


def test_process_with_a_reused_pid_is_not_killed(tmp_path: Path) -> None:
    process = subprocess.Popen(["sleep", "1000"])
    dead = replace(orphans.OwnerProcess.me(), started="1")
    record = orphans.SandboxRecord("polar-x", "process", dead, processes=[(process.pid, "1")])
    registry = orphans.SandboxRegistry(tmp_path)
    registry.write(record)
    asyncio.run(sweep(tmp_path))
    assert process.poll() is None
    process.kill()
    process.wait()
    assert registry.all() == []


@pytest.mark.parametrize(
    "content", ['{"version": 2}', "", "[]", '{"version": 1}'], ids=["newer", "cut", "list", "part"]
)
def test_sweep_names_and_leaves_a_record_that_it_cannot_read(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry = orphans.SandboxRegistry(tmp_path)
    dead = replace(orphans.OwnerProcess.me(), started="1")
    registry.write(orphans.SandboxRecord("polar-x", "process", dead))
    path = tmp_path / "records" / "polar-a.json"
    path.write_text(content)
    removed = asyncio.run(sweep(tmp_path))
    assert [item.sandbox for item in removed if item.what == "record"] == ["polar-x"]
    assert str(path) in caplog.text
    assert path.read_text() == content


def test_sweep_goes_on_after_a_folder_that_it_cannot_remove(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry = orphans.SandboxRegistry(tmp_path)
    dead = replace(orphans.OwnerProcess.me(), started="1")
    (tmp_path / "file").write_text("a file where a folder is expected")
    (tmp_path / "folder").mkdir()
    registry.write(orphans.SandboxRecord("polar-a", "process", dead, dirs=[str(tmp_path / "file")]))
    registry.write(orphans.SandboxRecord("polar-b", "process", dead, dirs=[str(tmp_path / "folder")]))
    asyncio.run(sweep(tmp_path))
    assert not (tmp_path / "folder").exists()
    assert "polar-a" in caplog.text
    assert [record.id for record in registry.all()] == ["polar-a"]


def test_sweep_of_an_empty_folder(tmp_path: Path) -> None:
    assert [r for r in asyncio.run(sweep(tmp_path / "none")) if r.what != "container"] == []


async def test_many_sandboxes_close_while_another_process_sweeps(
    kind: str, state_dir: Path, opener: Callable[[], Awaitable[Sandbox]]
) -> None:
    async def life() -> None:
        for _ in range(3):
            async with await opener() as sandbox:
                assert (await sandbox.exec(["true"])).exit_code == 0

    async def sweeper(done: asyncio.Event) -> None:
        while not done.is_set():
            assert [r for r in await sweep(state_dir) if r.what != "container"] == []
            await asyncio.sleep(0.01)

    done = asyncio.Event()
    task = asyncio.ensure_future(sweeper(done))
    await asyncio.gather(*(life() for _ in range(3)))
    done.set()
    await task
