"""The disk quota: hard where root mounts a file system, watched elsewhere; files and their number are bounded."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sandboxes import disk
from sandboxes.base import ResourceLimits, Sandbox, SandboxSpec
from sandboxes.choice import open_sandbox
from sandboxes.disk import DiskUsage, describe_excess, measure
from sandboxes.remove_tree import remove_tree
from tests.sandboxes.engine_limits import require_limit
from tests.sandboxes.test_remove_tree import nest
from tests.until import until

pytestmark = pytest.mark.slow

SMALL = ResourceLimits(memory_mb=None, disk_mb=100, files=3000)
isolating = pytest.mark.parametrize(
    "kind", ["bubblewrap", pytest.param("docker", marks=pytest.mark.full)], indirect=True
)


async def open_small(kind: str, state_dir: Path) -> Sandbox:
    return await open_sandbox(kind, SandboxSpec(limits=SMALL), state_dir=state_dir)  # type: ignore[arg-type]


async def test_an_agent_cannot_keep_more_than_its_quota(kind: str, state_dir: Path) -> None:
    fill = 'for i in 1 2 3; do dd if=/dev/zero of="$HOME/$i" bs=1M count=60 || exit; done; sleep 20'
    async with await open_small(kind, state_dir) as sandbox:
        done = await sandbox.exec(["sh", "-c", fill], timeout=120)
        hard = b"No space left" in done.stderr
        assert hard or (done.exit_code == 137 and "100 MiB" in (sandbox.exceeded or ""))
        assert (await sandbox.exec(["echo", "works"])).stdout == b"works\n"


async def test_the_number_of_files_is_bounded(kind: str, state_dir: Path) -> None:
    fill = "i=0; while [ $i -lt 20000 ] && : >f$i; do i=$((i+1)); done; sleep 20"
    async with await open_small(kind, state_dir) as sandbox:
        require_limit(sandbox, "files")
        done = await sandbox.exec(["sh", "-c", fill], timeout=120)
        hard = b"No space left" in done.stderr
        assert hard or (done.exit_code == 137 and "3000 files" in (sandbox.exceeded or ""))


async def test_work_below_the_quota_goes_on(kind: str, state_dir: Path) -> None:
    script = "dd if=/dev/zero of=big bs=1M count=60 && sleep 3 && rm big && dd if=/dev/zero of=big bs=1M count=60"
    async with await open_small(kind, state_dir) as sandbox:
        done = await sandbox.exec(["sh", "-c", script], timeout=120)
        assert (done.exit_code, sandbox.exceeded) == (0, None)


async def test_open_files_are_bounded(kind: str, state_dir: Path) -> None:
    spec = SandboxSpec(limits=ResourceLimits(memory_mb=None, open_files=100))
    async with await open_sandbox(kind, spec, state_dir=state_dir) as sandbox:  # type: ignore[arg-type]
        require_limit(sandbox, "open_files")
        assert (await sandbox.exec(["sh", "-c", "ulimit -n; ulimit -Hn"])).stdout == b"100\n100\n"


@isolating
async def test_memory_and_processes_are_bounded(kind: str, state_dir: Path) -> None:
    spec = SandboxSpec(limits=ResourceLimits(memory_mb=128, pids=40))
    async with await open_sandbox(kind, spec, state_dir=state_dir) as sandbox:  # type: ignore[arg-type]
        require_limit(sandbox, "memory_mb")
        memory = await sandbox.exec(["python3", "-c", "b = bytearray(300 << 20); print('took')"], timeout=120)
        assert memory.stdout == b""
        many = await sandbox.exec(["sh", "-c", "for i in $(seq 80); do sleep 100 & done; echo all"], timeout=120)
        assert b"all" not in many.stdout
        await sandbox.kill_all()
        assert (await sandbox.exec(["true"])).exit_code == 0


@pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)
async def test_temporary_folders_are_bounded(kind: str, state_dir: Path) -> None:
    spec = SandboxSpec(limits=ResourceLimits(memory_mb=64, disk_mb=400))
    async with await open_sandbox("bubblewrap", spec, state_dir=state_dir) as sandbox:
        done = await sandbox.exec(["sh", "-c", "df -m --output=size /tmp /var/tmp /dev/shm | tail -3"], timeout=120)
        assert sum(int(size) for size in done.stdout.split()) <= 66  # df rounds up


@pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)
async def test_without_a_file_system_of_its_own_a_sandbox_is_watched(
    kind: str, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "make_image", lambda *given: False)
    async with await open_small("bubblewrap", state_dir) as sandbox:
        fill = "for i in 1 2 3; do dd if=/dev/zero of=$i bs=1M count=60; done; sleep 60"
        done = await sandbox.exec(["sh", "-c", fill], timeout=120)
        assert (done.exit_code, done.timed_out) == (137, False)
        assert "more than the 100 MiB" in (sandbox.exceeded or "")


OWNER = """
import asyncio, sys
from pathlib import Path
from sandboxes.choice import open_sandbox

async def main():
    sandbox = await open_sandbox("bubblewrap", state_dir=Path(sys.argv[1]))
    print(sandbox.id, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""


def loop_files() -> str:
    found = ""
    for path in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):  # the device was released meanwhile
            found += path.read_text()
    return found


@pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)
async def test_a_killed_owner_leaves_no_mount(kind: str, state_dir: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("run as root: nobody else can mount a file system")
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(state_dir)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    sandbox_id = owner.stdout.readline().strip()
    assert sandbox_id in loop_files() or not Path("/dev/loop-control").exists()
    owner.kill()
    owner.wait()
    owner.stdout.close()
    await until(lambda: sandbox_id not in loop_files())


# ---------------------------------------------------------------- measuring


def test_measures_real_use_and_counts_links_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 1_000_000)
    os.link(tmp_path / "file", tmp_path / "again")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    (tmp_path / "outside").symlink_to("/usr")
    found = measure([tmp_path], SMALL)
    assert 1_000_000 <= found.size < 1_100_000
    assert found.files == 3


def test_finds_files_in_an_unreadable_folder(tmp_path: Path) -> None:
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "file").write_bytes(b"x" * 1_000_000)
    (tmp_path / "hidden").chmod(0o300)
    assert measure([tmp_path], SMALL).size >= 1_000_000


def test_measures_deeply_nested_folders_with_few_descriptors(tmp_path: Path) -> None:
    nest(tmp_path, 2_000)
    (tmp_path / "d" / "file").write_bytes(b"x" * 1_000_000)
    before = len(os.listdir("/proc/self/fd"))
    found = measure([tmp_path], SMALL)
    assert (found.files, found.size >= 1_000_000) == (2_001, True)
    assert len(os.listdir("/proc/self/fd")) == before
    remove_tree(tmp_path)


def test_describes_no_excess_below_the_quota() -> None:
    assert describe_excess(DiskUsage(100 << 20, 3000), SMALL) is None
    assert "3000 files" in (describe_excess(DiskUsage(0, 3001), SMALL) or "")


def test_missing_folders_hold_nothing(tmp_path: Path) -> None:
    assert measure([tmp_path / "none"], SMALL) == DiskUsage()
