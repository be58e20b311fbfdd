"""What bubblewrap isolates, beyond the contract."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sandboxes.base import ResourceLimits, SandboxSpec
from sandboxes.choice import open_sandbox

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)]

ROOT = Path(__file__).parents[2]


async def look(state_dir: Path, script: str) -> str:
    async with await open_sandbox("bubblewrap", state_dir=state_dir) as sandbox:
        done = await sandbox.exec(["sh", "-c", script], timeout=120)
        return (done.stdout + done.stderr).decode()


async def test_host_files_are_invisible(kind: str, state_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    seen = await look(state_dir, f"ls -A / /run /tmp /var /home; ls {tmp_path} {ROOT} {Path.home()}; cat /etc/shadow")
    for name in ("root\n", "srv\n", "secret", "pyproject.toml", "docker.sock", "root:"):
        assert name not in seen


async def test_no_privileges_and_no_way_to_gain_them(kind: str, state_dir: Path) -> None:
    seen = await look(
        state_dir, "grep -E '^(Cap|NoNewPrivs)' /proc/self/status; unshare -U true || echo no user namespace"
    )
    for line in (
        "CapEff:\t0000000000000000",
        "CapBnd:\t0000000000000000",
        "CapPrm:\t0000000000000000",
        "NoNewPrivs:\t1",
    ):
        assert line in seen
    assert "no user namespace" in seen


async def test_system_is_read_only(kind: str, state_dir: Path) -> None:
    for place in ("/", "/usr", "/etc", "/usr/local/bin"):
        assert "touched" not in await look(state_dir, f"touch {place}/x && echo touched")


async def test_other_processes_and_the_supervisor_are_invisible(kind: str, state_dir: Path) -> None:
    seen = await look(state_dir, "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; echo; done")
    assert "supervisor" not in seen
    assert "python" not in seen
    assert str(state_dir) not in seen


async def test_killing_every_python_inside_ends_no_command(kind: str, state_dir: Path) -> None:
    """Agents do that, and the shim of their command is a Python process as well."""
    script = "pkill -9 python; pkill -9 -f python; pkill -9 -f supervisor; sleep 0.2; echo survived\n"
    async with await open_sandbox("bubblewrap", state_dir=state_dir) as sandbox:
        await sandbox.write("script", script.encode())  # a file: given by -c, pkill would find its own shell
        done = await sandbox.exec(["sh", "script"], timeout=120)
        assert (done.exit_code, done.stdout) == (0, b"survived\n")


async def test_links_do_not_lead_outside(kind: str, state_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    async with await open_sandbox("bubblewrap", state_dir=state_dir) as sandbox:
        await sandbox.exec(["ln", "-s", str(tmp_path), "out"])
        with pytest.raises(FileNotFoundError):
            await sandbox.read("out/secret")
        with pytest.raises(OSError):
            await sandbox.write("out/new", b"x")
    assert [p.name for p in tmp_path.iterdir() if p != state_dir] == ["secret"]


async def test_locked_folders_are_removed(kind: str, state_dir: Path) -> None:
    await look(state_dir, "mkdir -p a/b/c; touch a/b/c/d; chmod 0 a/b/c a/b a")
    assert [p for p in state_dir.rglob("*") if p.name != "records"] == []


async def test_memory_limit_covers_all_processes_together(kind: str, state_dir: Path) -> None:
    spec = SandboxSpec(limits=ResourceLimits(memory_mb=100, pids=50))
    async with await open_sandbox("bubblewrap", spec, state_dir=state_dir) as sandbox:
        if sandbox.unenforced:
            assert any(line.startswith("memory_mb") for line in sandbox.unenforced)
            pytest.skip(f"this user may not make control groups (run as root to test them): {sandbox.unenforced}")
        # Each process takes about 40 MB until all have, or were killed: four do not fit.
        taken = "(head -c 40000000 /dev/zero; touch end$i) | tail -c 40000000"
        one = f"{taken} | {{ until [ -e go ]; do sleep 0.1; done; wc -c; }}"
        every = "until [ -e end1 ] && [ -e end2 ] && [ -e end3 ] && [ -e end4 ]; do sleep 0.1; done; touch go; wait"
        done = await sandbox.exec(["sh", "-c", f"for i in 1 2 3 4; do ({one}) & done; {every}"], timeout=120)
        assert not done.timed_out
        assert done.stdout.count(b"40000000") < 4
        assert (await sandbox.exec(["true"])).exit_code == 0


async def test_programs_that_fill_the_memory_end_and_the_sandbox_stays(kind: str, state_dir: Path) -> None:
    spec = SandboxSpec(limits=ResourceLimits(memory_mb=100, pids=80))
    async with await open_sandbox("bubblewrap", spec, state_dir=state_dir) as sandbox:
        if sandbox.unenforced:
            pytest.skip(f"this user may not make control groups (run as root to test them): {sandbox.unenforced}")
        fill = "for d in /tmp /var/tmp /dev/shm; do for i in $(seq 12); do cat /dev/zero >$d/$i & done; done; wait"
        await sandbox.exec(["sh", "-c", f"touch work; {fill}"], timeout=60)
        tree = await sandbox.read_tree()
        assert list(tree.entries) == [b"work"]


SCRIPT = """
import asyncio, sys
from pathlib import Path
from sandboxes import process
from sandboxes.base import ResourceLimits, SandboxEnded, SandboxSpec
from sandboxes.choice import open_sandbox

process.END_SECONDS = 2.0

async def ends(script):
    # It ends as any killed program does, its files can be read, and nothing more runs.
    async with await open_sandbox("bubblewrap", state_dir=Path(sys.argv[1])) as sandbox:
        await sandbox.write("script", script.encode())
        done = await sandbox.exec(["sh", "script"], timeout=5)
        tree = await sandbox.read_tree()
        try:
            await sandbox.exec(["true"])
        except SandboxEnded:
            print(done.exit_code, done.timed_out, sorted(tree.entries))

async def main():
    spec = SandboxSpec(limits=ResourceLimits(memory_mb=200, pids=30))
    async with await open_sandbox("bubblewrap", spec, state_dir=Path(sys.argv[1])) as sandbox:
        print((await sandbox.exec(["id", "-u"])).stdout.decode().strip())
        print((await sandbox.exec(["sh", "-c", "sleep 60 & sleep 60"], timeout=0.2)).timed_out)
        with await sandbox.listen() as listening:
            print(listening.getsockname()[0])
        many = await sandbox.exec(["sh", "-c", "for i in $(seq 60); do sleep 1000 & done; echo all"], timeout=120)
        print(many.exit_code != 0)
        await sandbox.write("a/b", b"data")
        print(await sandbox.read("a/b"))
        await sandbox.exec(["sh", "-c", "mkdir -p d/e; chmod 0 d/e d"])
        await sandbox.kill_all()
    await ends("touch work; sleep 1000 & kill -9 -1; sleep 1000")
    await ends("touch work; setsid sh -c 'while touch work; do :; done' & kill -9 $PPID; sleep 1000")
    await ends("touch work; kill -STOP $PPID; sleep 1000")

asyncio.run(main())
print(sorted(p.name for p in Path(sys.argv[1]).iterdir()))
"""


def test_works_without_root(kind: str, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("not root: every other test here runs without root already")
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin") or ""
    version = subprocess.run([python or "false", "-c", "import asyncio; asyncio.timeout"], check=False)
    if version.returncode != 0:
        pytest.skip("needs a Python 3.11 that every user may run, in /usr/bin or /usr/local/bin")
    uid, home = 65534, Path("/var/tmp") / f"polar-test-{os.getpid()}"
    home.mkdir(mode=0o755)
    try:
        shutil.copytree(ROOT / "sandboxes", home / "sandboxes", ignore=shutil.ignore_patterns("__pycache__"))
        subprocess.run(["chmod", "-R", "a+rX", str(home)], check=True)
        state = home / "state"
        state.mkdir()
        os.chown(state, uid, uid)
        done = subprocess.run(
            [python, "-B", "-c", SCRIPT, str(state)],
            cwd=home,
            env={"PATH": os.defpath + ":/usr/sbin:/sbin"},
            user=uid,
            group=uid,
            extra_groups=[],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    finally:
        shutil.rmtree(home)
    assert done.stderr == ""
    killed, resisted = "137 False [b'script', b'work']", "137 True [b'script', b'work']"
    assert done.stdout.splitlines() == [
        *(str(uid), "True", "127.0.0.1", "True", "b'data'"),
        *(killed, killed, resisted, "['records']"),
    ]


async def test_owners_descriptors_do_not_leak(kind: str, state_dir: Path) -> None:
    with (state_dir.parent / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        assert (await look(state_dir, "ls /proc/self/fd")).split() == ["0", "1", "2", "3"]  # 3 is ls's own
