"""What only docker has: hardening, images, peculiarities of the engine."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sandboxes import docker_engine, images, netns, orphans
from sandboxes.base import ResourceLimits, SandboxEnded, SandboxError, SandboxSpec, SandboxUnavailable
from sandboxes.choice import open_sandbox
from sandboxes.orphans import sweep
from tests.sandboxes.engine_limits import require_limit

full = pytest.mark.full
on_docker = pytest.mark.parametrize("kind", [pytest.param("docker", marks=full)], indirect=True)


@on_docker
async def test_no_privileges_and_no_way_to_gain_them(kind: str, state_dir: Path) -> None:
    async with await open_sandbox("docker", state_dir=state_dir) as sandbox:
        status = (await sandbox.exec(["cat", "/proc/self/status"])).stdout.decode()
        for line in ("CapEff:\t0000000000000000", "CapBnd:\t0000000000000000", "NoNewPrivs:\t1"):
            assert line in status


@on_docker
async def test_out_of_memory_kill_is_137_and_the_sandbox_stays_usable(kind: str, state_dir: Path) -> None:
    spec = SandboxSpec(limits=ResourceLimits(memory_mb=64))
    async with await open_sandbox("docker", spec, state_dir=state_dir) as sandbox:
        require_limit(sandbox, "memory_mb")
        done = await sandbox.exec(["python3", "-c", "x = bytearray(200 << 20)"], timeout=120)
        assert (done.exit_code, done.timed_out) == (137, False)
        assert (await sandbox.exec(["echo", "alive"])).stdout == b"alive\n"


@on_docker
async def test_container_killed_from_outside_ends_the_sandbox(kind: str, state_dir: Path) -> None:
    async with await open_sandbox("docker", state_dir=state_dir) as sandbox:
        started = asyncio.Event()
        command = ["sh", "-c", "echo started; sleep 1000"]
        task = asyncio.ensure_future(sandbox.exec(command, on_output=lambda _: started.set()))
        await asyncio.wait_for(started.wait(), 120)
        process = await asyncio.create_subprocess_exec("docker", "kill", sandbox.id, stdout=subprocess.DEVNULL)
        await process.wait()
        with pytest.raises(SandboxEnded):
            await task
        with pytest.raises(SandboxEnded):
            await sandbox.exec(["true"])
    assert orphans.SandboxRegistry(state_dir).all() == []


@on_docker
async def test_missing_image_names_the_remedy(kind: str, state_dir: Path) -> None:
    with pytest.raises(SandboxUnavailable, match="docker pull no-such-image:1"):
        await open_sandbox("docker", SandboxSpec(image="no-such-image:1"), state_dir=state_dir)
    assert orphans.SandboxRegistry(state_dir).all() == []


@on_docker
async def test_container_has_the_labels(kind: str, state_dir: Path) -> None:
    async with await open_sandbox("docker", SandboxSpec(labels={"task": "7"}), state_dir=state_dir) as sandbox:
        async with docker_engine.docker_client() as engine:
            labels = (await engine.containers.container(sandbox.id).show())["Config"]["Labels"]
        assert labels["task"] == "7"
        assert labels[orphans.LABEL] == sandbox.id


@on_docker
async def test_listening_socket_without_root(
    kind: str, state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member of the docker group may not enter namespaces: a helper container passes the socket out."""
    long_path = tmp_path / ("x" * 107)  # no Unix socket may have it
    long_path.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long_path))

    def denied(*_: object) -> None:
        raise netns.CannotEnterNamespace("needs root")

    monkeypatch.setattr(netns, "listen", denied)
    async with await open_sandbox("docker", state_dir=state_dir) as sandbox:
        listening = await sandbox.listen(8123)
        assert listening is not None
        assert listening.getsockname() == ("127.0.0.1", 8123)

        async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"hello\n")
            writer.close()

        async with await asyncio.start_server(answer, sock=listening):
            done = await sandbox.exec(["bash", "-c", "cat </dev/tcp/127.0.0.1/8123"], timeout=120)
        assert done.stdout == b"hello\n"
        with pytest.raises(SandboxError, match="helper"):
            await sandbox.listen(80_000)
        async with docker_engine.docker_client() as engine:
            names = [name for c in await engine.containers.list(all=True) for name in c["Names"]]
        assert f"/{sandbox.id}-net" not in names


@pytest.fixture
def unprivileged_image(kind: str, tmp_path: Path) -> Iterator[str]:
    """Build the default image with its own user, and files where home and working directory will be."""
    name = f"polar-test-user:{os.getpid()}"
    (tmp_path / "Dockerfile").write_text(
        f"FROM {images.tag()}\nRUN mkdir -p /workspace && touch /workspace/old && useradd -u 1234 -m other\n"
        'USER other\nENTRYPOINT ["false"]\n'
    )
    subprocess.run(["docker", "build", "--network=none", "-q", "-t", name, str(tmp_path)], check=True, timeout=240)
    yield name
    subprocess.run(["docker", "rmi", "-f", name], check=True, stdout=subprocess.DEVNULL, timeout=240)


@on_docker
async def test_image_with_its_own_user_and_entrypoint(kind: str, state_dir: Path, unprivileged_image: str) -> None:
    async with await open_sandbox("docker", SandboxSpec(image=unprivileged_image), state_dir=state_dir) as sandbox:
        done = await sandbox.exec(["sh", "-c", "id -u; ls -A . ~; touch x ~/y && echo written"])
        assert done.stdout.split() == [b"1234", b".:", f"{sandbox.home}:".encode(), b"written"]
        await sandbox.write_tree({"a/b": b"1"})
        assert await sandbox.read("a/b") == b"1"
        result = await sandbox.exec(["sh", "-c", "sleep 60 & sleep 60"], timeout=0.3)
        assert result.timed_out


# ---------------------------------------------------------------- without an engine


async def test_container_records_stay_until_an_engine_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    dead = replace(orphans.OwnerProcess.me(), started="1")
    registry = orphans.SandboxRegistry(tmp_path)
    registry.write(orphans.SandboxRecord("polar-x", "docker", dead, container="polar-x"))
    assert await sweep(tmp_path) == []
    assert [record.id for record in registry.all()] == ["polar-x"]


def test_does_not_enter_the_network_of_another_process() -> None:
    with pytest.raises(SandboxError, match="same Linux"):
        netns.listen(os.getpid(), "polar-other", 0)


FORK_UNTIL_KILLED = """
import os, time
while True:
    try:
        os.fork() or time.sleep(1000)
    except OSError:
        time.sleep(0.01)
"""
FILL_MEMORY = "for i in $(seq 36); do cat /dev/zero >/dev/shm/$i & done; wait"


@on_docker
@pytest.mark.parametrize("argv", [("python3", "-c", FORK_UNTIL_KILLED), ("sh", "-c", FILL_MEMORY)])
async def test_the_files_of_programs_that_end_their_container_are_read(
    kind: str, state_dir: Path, argv: tuple[str, ...]
) -> None:
    """It is no fault of the machine, and their work is scored as they left it."""
    spec = SandboxSpec(limits=ResourceLimits(memory_mb=150, pids=60))
    async with await open_sandbox("docker", spec, state_dir=state_dir) as sandbox:
        require_limit(sandbox, "pids")
        await sandbox.write("work", b"")
        assert (await sandbox.exec(argv, timeout=10)).exit_code == 137
        tree = await sandbox.read_tree()
        assert list(tree.entries) == [b"work"]
        tree.close()
