"""The promises of `sandboxes/base.py`, one test each, for every kind of sandbox."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import venv
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from sandboxes.base import (
    ExecResult,
    FileTooLarge,
    Mount,
    ResourceLimits,
    Sandbox,
    SandboxEnded,
    SandboxError,
    SandboxSpec,
)
from tests.loop_watch import watched
from tests.sandboxes.engine_limits import require_limit

pytestmark = pytest.mark.slow

Opener = Callable[..., Awaitable[Sandbox]]


async def sh(sandbox: Sandbox, script: str, timeout: float | None = 120, **more: object) -> ExecResult:
    return await sandbox.exec(["sh", "-c", script], timeout=timeout, **more)  # type: ignore[arg-type]


async def running(sandbox: Sandbox, name: str) -> bool:
    """Return whether a process with this argument is alive inside. Zombies have no command line."""
    # The brackets keep the pattern from matching itself.
    pattern = f"sleep [{name[0]}]{name[1:]} "
    script = f"for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline; done 2>/dev/null | grep -c '{pattern}'"
    return (await sh(sandbox, script)).stdout.strip() != b"0"


# ---------------------------------------------------------------- commands


async def test_output_and_status_are_the_programs_own(sandbox: Sandbox) -> None:
    result = await sh(sandbox, "echo out; echo err >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    assert not result.timed_out
    assert not result.truncated
    assert 0 < result.seconds < 120


async def test_arguments_are_not_read_by_a_shell(sandbox: Sandbox) -> None:
    nasty = ["$HOME", "a b", "'\"", "*", "", "-n", "line\nbreak", "ü"]
    result = await sandbox.exec(["printf", "%s|", *nasty])
    assert result.stdout.decode() == "|".join(nasty) + "|"
    with pytest.raises(ValueError, match="argv"):
        await sandbox.exec("ls")


async def test_exit_status_of_a_signal_is_128_plus_its_number(sandbox: Sandbox) -> None:
    assert (await sh(sandbox, "kill -9 $$")).exit_code == 137
    assert (await sh(sandbox, "kill -15 $$")).exit_code == 143


async def test_program_that_cannot_start_reports_the_reason(sandbox: Sandbox) -> None:
    missing = await sandbox.exec(["no-such-program"])
    assert missing.exit_code == 127
    assert b"no-such-program" in missing.stderr
    assert (await sandbox.exec(["/etc"])).exit_code == 126
    nowhere = await sandbox.exec(["true"], cwd="/no/such/folder")
    assert nowhere.exit_code == 126
    assert b"/no/such/folder" in nowhere.stderr


async def test_stdin_ends(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(["cat"], timeout=120)).stdout == b""
    data = bytes(range(256)) * 4096
    assert (await sandbox.exec(["cat"], stdin=data, timeout=120)).stdout == data
    unread = await sandbox.exec(["true"], stdin=data, timeout=120)
    assert unread.exit_code == 0


async def test_environment_has_only_the_given_variables(opener: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_API_KEY", "x")
    sandbox = await opener(SandboxSpec(env={"A": "1", "B": "1"}))
    result = await sandbox.exec(["env"], env={"B": "2", "C": "a=b c"})
    env = dict(line.split("=", 1) for line in result.stdout.decode().splitlines())
    assert "SECRET_API_KEY" not in env
    assert (env["A"], env["B"], env["C"]) == ("1", "2", "a=b c")
    assert env["HOME"] == sandbox.home
    assert env["PATH"]


async def test_home_and_workdir_are_empty_writable_and_separate(opener: Opener) -> None:
    first, second = await opener(), await opener()
    script = 'pwd; ls -A . "$HOME"; touch here "$HOME/there"'
    result = await sh(first, script)
    assert result.exit_code == 0
    lines = result.stdout.decode().split()
    assert lines[0] == first.workdir
    assert set(lines[1:]) <= {".:", f"{first.home}:"}
    assert (await sh(second, "ls -A . ~ | grep -c here")).stdout == b"0\n"
    assert first.id != second.id


async def test_cwd_is_relative_to_workdir(sandbox: Sandbox) -> None:
    await sandbox.write("deep/er/x", b"")
    result = await sandbox.exec(["pwd"], cwd="deep/er")
    assert result.stdout.decode().strip() == f"{sandbox.workdir}/deep/er"


async def test_commands_share_files_and_background_processes(sandbox: Sandbox) -> None:
    assert (await sh(sandbox, "echo 1 >file; sleep 417 & true")).exit_code == 0
    assert (await sh(sandbox, "cat file")).stdout == b"1\n"
    assert await running(sandbox, "417")
    await sandbox.kill_all()
    assert not await running(sandbox, "417")
    assert (await sh(sandbox, "cat file")).stdout == b"1\n"


async def test_background_process_does_not_delay_a_command(sandbox: Sandbox) -> None:
    result = await sh(sandbox, "echo done; sleep 1000 &")
    assert result.stdout == b"done\n"
    assert not result.timed_out


async def test_output_arrives_while_the_command_runs(sandbox: Sandbox) -> None:
    pieces: list[bytes] = []
    seen = asyncio.Event()

    def on_output(data: bytes) -> None:
        pieces.append(data)
        seen.set()

    task = asyncio.ensure_future(
        sandbox.exec(["sh", "-c", "echo one; while [ ! -e go ]; do sleep 0.05; done; echo two"], on_output=on_output)
    )
    await asyncio.wait_for(seen.wait(), 120)
    assert b"".join(pieces) == b"one\n"
    await sandbox.write("go", b"")
    assert (await asyncio.wait_for(task, 120)).stdout == b"one\ntwo\n"
    assert b"".join(pieces) == b"one\ntwo\n"


async def test_callback_error_ends_the_command_and_is_raised(sandbox: Sandbox) -> None:
    def on_output(data: bytes) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await sandbox.exec(["sh", "-c", "echo x; sleep 418"], on_output=on_output, timeout=120)
    assert not await running(sandbox, "418")


async def test_long_output_keeps_its_tail(sandbox: Sandbox) -> None:
    result = await sh(sandbox, "seq 1 200000; echo end >&2", output_limit=1000)
    assert result.truncated
    assert len(result.stdout) == 1000
    assert result.stdout.endswith(b"\n199999\n200000\n")
    assert result.stderr == b"end\n"


# ---------------------------------------------------------------- ending things

# Everything by which programs get away from their parent: background, new session, double fork.
TREE = "sleep 421 & setsid sleep 422 & (setsid sh -c 'sleep 423 & sleep 424' &) ; trap '' TERM INT HUP; sleep 425; true"


async def assert_gone(sandbox: Sandbox) -> None:
    assert [n for n in ("421", "422", "423", "424", "425") if await running(sandbox, n)] == []


async def test_timeout_ends_the_whole_tree(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's clock advances by four minutes once the program runs."""
    loop = asyncio.get_running_loop()
    real, passed = loop.time, 0.0
    monkeypatch.setattr(loop, "time", lambda: real() + passed)

    def advance() -> None:
        nonlocal passed
        passed = 240.0

    def on_output(data: bytes) -> None:
        # Half a second later: the output may arrive before `exec` has set its timer.
        threading.Timer(0.5, loop.call_soon_threadsafe, (advance,)).start()

    result = await sh(sandbox, f"echo started; {TREE}", timeout=240, on_output=on_output)
    assert result.timed_out
    assert result.exit_code == 137
    assert result.stdout == b"started\n"
    assert result.seconds < 240
    await assert_gone(sandbox)


async def test_cancellation_ends_the_whole_tree(sandbox: Sandbox) -> None:
    started = asyncio.Event()
    task = asyncio.ensure_future(sandbox.exec(["sh", "-c", f"echo started; {TREE}"], on_output=lambda _: started.set()))
    await asyncio.wait_for(started.wait(), 120)
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await assert_gone(sandbox)
    assert (await sh(sandbox, "echo still usable")).stdout == b"still usable\n"


async def test_ending_one_command_leaves_the_others(sandbox: Sandbox) -> None:
    other = asyncio.ensure_future(sh(sandbox, "while [ ! -e go ]; do sleep 0.05; done; echo fine"))
    assert (await sh(sandbox, "sleep 60", timeout=0.5)).timed_out
    await sandbox.write("go", b"")
    assert (await other).stdout == b"fine\n"


async def test_cancellation_at_any_moment_leaves_a_usable_sandbox(sandbox: Sandbox) -> None:
    for step in range(8):
        task = asyncio.ensure_future(sandbox.exec(["sleep", "426"]))
        await asyncio.sleep(step * 0.002)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not await running(sandbox, "426")


async def test_close_removes_thousands_of_nested_folders(sandbox: Sandbox) -> None:
    path = "d/" * 1500
    assert (await sh(sandbox, f"mkdir -p {path} && cd -P {path} && mkdir -p {path}")).exit_code == 0
    await sandbox.close()


async def test_close_ends_running_commands_and_is_final(opener: Opener) -> None:
    sandbox = await opener()
    task = asyncio.ensure_future(sandbox.exec(["sleep", "60"]))
    await asyncio.sleep(0.3)
    await asyncio.gather(sandbox.close(), sandbox.close())
    with pytest.raises(SandboxEnded):
        await task
    with pytest.raises(SandboxEnded):
        await sandbox.exec(["true"])
    with pytest.raises(SandboxEnded):
        await sandbox.read("x")


async def test_many_commands_at_once(opener: Opener, kind: str) -> None:
    count = 6 if kind == "docker" else 24

    async def one(number: int) -> bytes:
        async with await opener() as sandbox:
            await sandbox.write("n", str(number).encode())
            results = await asyncio.gather(*(sandbox.exec(["cat", "n"]) for _ in range(3)))
            assert len({r.stdout for r in results}) == 1
            return results[0].stdout

    assert await asyncio.gather(*map(one, range(count))) == [str(n).encode() for n in range(count)]


async def test_opening_can_be_cancelled(opener: Opener, state_dir: Path) -> None:
    for step in range(4):
        task = asyncio.ensure_future(opener())
        await asyncio.sleep(0.015 * step)
        task.cancel()
        try:
            await (await task).close()
        except asyncio.CancelledError:
            continue
    assert not list(state_dir.glob("records/*"))


# ---------------------------------------------------------------- files


async def test_reads_and_writes_files(sandbox: Sandbox) -> None:
    data = bytes(range(256)) * 5000
    await sandbox.write("a/b/data.bin", data)
    assert await sandbox.read("a/b/data.bin") == data
    await sandbox.write("a/b/data.bin", b"short")
    assert await sandbox.read(f"{sandbox.workdir}/a/b/data.bin") == b"short"
    await sandbox.write("run.sh", b"#!/bin/sh\necho ran\n", mode=0o755)
    assert (await sandbox.exec(["./run.sh"])).stdout == b"ran\n"
    await sandbox.write(f"{sandbox.home}/.config/x", b"1")
    assert (await sh(sandbox, "cat ~/.config/x; stat -c %a run.sh ~/.config/x")).stdout == b"1755\n644\n"
    await sandbox.write("empty", b"")
    assert await sandbox.read("empty") == b""


async def test_read_rejects_other_than_files_and_large_files(sandbox: Sandbox) -> None:
    with pytest.raises(FileNotFoundError):
        await sandbox.read("missing")
    with pytest.raises(IsADirectoryError):
        await sandbox.read(".")
    await sandbox.write("big", b"x" * 1001)
    assert len(await sandbox.read("big", limit=1001)) == 1001
    with pytest.raises(FileTooLarge):
        await sandbox.read("big", limit=1000)
    await sandbox.exec(["mkfifo", "fifo"])
    with pytest.raises(OSError):
        await asyncio.wait_for(sandbox.read("fifo"), 120)


async def test_write_changes_no_device(sandbox: Sandbox) -> None:
    modes = "stat -c %a /dev/full /dev/zero"
    before = (await sh(sandbox, modes)).stdout
    await sh(sandbox, "ln -s /dev/full full; ln -s /dev/zero zero")
    for name in ("full", "zero", "/dev/full"):
        with pytest.raises(OSError, match="not a regular file"):
            await sandbox.write(name, b"")
    assert (await sh(sandbox, modes)).stdout == before == b"666\n666\n"


async def test_write_tree_stays_below_its_root(sandbox: Sandbox) -> None:
    await sandbox.write_tree({"a.py": b"1", "pkg/b.py": b"22", "pkg/deep/c.py": b""})
    await sandbox.write_tree({"d": b"4"}, root="pkg/other")
    found = (await sh(sandbox, "find . -type f | sort; cat pkg/b.py pkg/other/d")).stdout
    assert found == b"./a.py\n./pkg/b.py\n./pkg/deep/c.py\n./pkg/other/d\n224"
    for name in ("../x", "/etc/x", "a/../../x", "."):
        with pytest.raises(ValueError, match="relative path"):
            await sandbox.write_tree({"fine": b"", name: b""})


# ---------------------------------------------------------------- mounts and limits


async def test_mounts_are_read_only_or_the_log_says_that_they_are_not(
    opener: Opener, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "file").write_text("seen")
    target = str(shared) if kind == "process" else "/mnt/deep/shared"
    sandbox = await opener(SandboxSpec(mounts=(Mount(shared, target),)))
    assert (await sandbox.exec(["cat", f"{target}/file"])).stdout == b"seen"
    written = await sh(sandbox, f"echo x >{target}/other")
    if kind == "process":
        assert f"{sandbox.id} does not enforce read-only mounts" in caplog.text
    else:
        assert written.exit_code != 0
        assert not (shared / "other").exists()


async def test_further_folders(opener: Opener, kind: str) -> None:
    spec = SandboxSpec(workdir="/app", folders=("/tests", "/logs"))
    if kind == "process":
        with pytest.raises(SandboxError, match="no file system of its own"):
            await opener(spec)
        return
    async with await opener(spec) as sandbox:
        assert sandbox.workdir == "/app"
        done = await sh(sandbox, "pwd; ls -A /app /tests /logs; mkdir -p /logs/verifier && echo 1 >/logs/verifier/r")
        assert (done.exit_code, done.stdout) == (0, b"/app\n/app:\n\n/logs:\n\n/tests:\n")
        await sandbox.write_tree({"a/b": b"b"})
        assert await sandbox.read("/app/a/b") == b"b"
        assert await sandbox.read("/logs/verifier/r") == b"1\n"
    with pytest.raises(SandboxError, match="absolute"):
        await opener(SandboxSpec(workdir="app"))


async def test_rejects_impossible_mounts_before_the_start(opener: Opener, tmp_path: Path) -> None:
    for mount in (Mount(tmp_path / "missing", "/mnt"), Mount(tmp_path, "relative"), Mount(tmp_path, "/")):
        with pytest.raises(SandboxError, match="cannot mount"):
            await opener(SandboxSpec(mounts=(mount,)))


async def test_mounted_python_environment_of_the_host_runs(opener: Opener, tmp_path: Path) -> None:
    """The environment is made on the host and appears inside, read-only, at the same path, as for harnesses."""
    home = tmp_path / "venv"
    await asyncio.to_thread(venv.create, home, symlinks=True)
    base = Path(sys.base_prefix)
    mounts = [Mount(home, str(home))]
    if not base.is_relative_to("/usr"):
        mounts.append(Mount(base, str(base)))
    sandbox = await opener(SandboxSpec(mounts=tuple(mounts)))
    script = "import sys, ssl, sqlite3, ctypes, zlib, bz2, lzma, asyncio; print(sys.prefix, sys.version_info[:2])"
    result = await sandbox.exec([f"{home}/bin/python", "-c", script], timeout=240)
    assert result.stderr == b""
    assert result.stdout.decode().strip() == f"{home} {sys.version_info[:2]}"


async def test_git_works(sandbox: Sandbox) -> None:
    script = """
    git init -q . && git config --global user.email a@b && git config --global user.name n &&
    echo 1 >f && git add f && git commit -qm one && echo 2 >f && git diff --stat && git status --short
    """
    result = await sh(sandbox, script)
    assert result.exit_code == 0, result.stderr
    assert b" M f" in result.stdout


async def test_memory_limit(opener: Opener) -> None:
    sandbox = await opener(SandboxSpec(limits=ResourceLimits(memory_mb=64)))
    require_limit(sandbox, "memory_mb")
    hog = 'x="0123456789abcdef"; while :; do x="$x$x"; done'  # doubles until it is refused or killed
    result = await sh(sandbox, hog, timeout=240)
    assert result.exit_code != 0
    assert not result.timed_out
    assert (await sh(sandbox, "echo alive")).stdout == b"alive\n"


async def test_file_size_limit(opener: Opener) -> None:
    sandbox = await opener(SandboxSpec(limits=ResourceLimits(file_mb=1)))
    require_limit(sandbox, "file_mb")
    assert (await sh(sandbox, "head -c 3000000 /dev/zero >big")).exit_code != 0
    assert int((await sh(sandbox, "stat -c %s big")).stdout) <= 1 << 20


async def test_process_limit_is_enforced_or_reported(opener: Opener) -> None:
    sandbox = await opener(SandboxSpec(limits=ResourceLimits(pids=40)))
    if any(line.startswith("pids") for line in sandbox.unenforced):
        return
    # Forks 100 sleeps and counts the living ones. A refused fork ends the shell.
    await sh(sandbox, "i=0; while [ $i -lt 100 ]; do sleep 427 & i=$((i+1)); done", timeout=120)
    await sandbox.kill_all()
    result = await sh(sandbox, "i=0; while [ $i -lt 100 ]; do sleep 1000 & i=$((i+1)); done; echo all")
    assert not result.timed_out
    assert b"all" not in result.stdout
    await sandbox.kill_all()


# ---------------------------------------------------------------- network


async def test_network_has_only_the_listening_socket(opener: Opener, kind: str) -> None:
    sandbox, other = await opener(), await opener()
    listening = await sandbox.listen()
    if kind == "process":
        assert listening is None
        return
    assert listening is not None
    port = listening.getsockname()[1]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello " + await reader.readline())
        writer.close()

    ask = f"exec 3<>/dev/tcp/127.0.0.1/{port} && echo you >&3 && cat <&3"
    server = await asyncio.start_server(answer, sock=listening)
    async with server:
        assert (await sandbox.exec(["bash", "-c", ask], timeout=120)).stdout == b"hello you\n"
        assert (await other.exec(["bash", "-c", ask], timeout=120)).exit_code != 0
        # A server on the host's own network with the same port number is another server.
        host = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with host:
            other_port = host.sockets[0].getsockname()[1]
            denied = await sandbox.exec(["bash", "-c", ask.replace(str(port), str(other_port))], timeout=120)
            assert denied.exit_code != 0
    assert (await sh(sandbox, "cat /proc/net/route | wc -l")).stdout.strip() in (b"0", b"1")
    again = await sandbox.listen(port)
    assert again is not None
    assert again.getsockname()[1] == port
    again.close()


# ---------------------------------------------------------------- the event loop


async def test_does_not_block_the_event_loop(opener: Opener) -> None:
    """No iteration of the loop takes long while a sandbox is opened, used and closed."""
    with watched() as watch:
        async with await opener() as sandbox:
            await sandbox.write("x", b"x" * 5_000_000)
            await sandbox.read("x")
            await sh(sandbox, "seq 1 100000")
            await sh(sandbox, "sleep 1000", timeout=0.1)
    assert watch.turns > 10
    assert watch.worst < 0.5


async def test_states_its_kind(sandbox: Sandbox, kind: str) -> None:
    assert sandbox.kind == kind
