"""What an agent cannot ask of the kernel in a bubblewrap or docker sandbox."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from sandboxes import seccomp
from sandboxes.base import Sandbox, SandboxKind, SandboxSpec
from sandboxes.choice import open_sandbox

pytestmark = pytest.mark.slow

isolating = pytest.mark.parametrize(
    "kind", ["bubblewrap", pytest.param("docker", marks=pytest.mark.full)], indirect=True
)

# Makes each system call with arguments that would succeed or fail with another error; prints {name: errno}.
CALLS = """
import ctypes, json, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    ctypes.set_errno(0)
    result = libc.syscall(number, *[ctypes.c_long(a) for a in arguments])
    return 0 if result >= 0 else ctypes.get_errno()
print(json.dumps({name: call(*arguments) for name, arguments in json.load(sys.stdin).items()}))
"""

SOCKETS = """
import json, socket
found = {}
for family in range(1, 46):
    for protocol in (0, 12):
        try:
            socket.socket(family, socket.SOCK_RAW if family in (16, 17) else socket.SOCK_STREAM, protocol).close()
            found[f"{family} {protocol}"] = 0
        except OSError as error:
            found[f"{family} {protocol}"] = error.errno
print(json.dumps(found))
"""


async def run_python(sandbox: Sandbox, script: str, stdin: bytes = b"") -> dict[str, int]:
    done = await sandbox.exec(["python3", "-c", script], stdin=stdin, timeout=120)
    assert done.exit_code == 0, done.stderr
    return dict(json.loads(done.stdout))


@isolating
async def test_refused_system_calls_return_an_error(kind: str, state_dir: Path) -> None:
    column = list(seccomp.ARCHITECTURES).index(os.uname().machine)
    calls: dict[str, list[int]] = {}
    for name, numbers in seccomp.REFUSED.items():
        number = numbers[column]
        if number is not None:
            calls[name] = [number, 0, 0, 0, 0, 0]
    calls |= {f"unshare {flag:#x}": [seccomp.UNSHARE[column], flag] for flag in seccomp.NAMESPACE_FLAGS}
    calls |= {f"clone {flag:#x}": [seccomp.CLONE[column], flag | 17, 0, 0, 0, 0] for flag in seccomp.NAMESPACE_FLAGS}
    calls["TIOCSTI"] = [seccomp.IOCTL[column], 0, seccomp.TERMINAL_INJECTION[0], 0]
    async with await open_sandbox(kind, state_dir=state_dir) as sandbox:  # type: ignore[arg-type]
        found = await run_python(sandbox, CALLS, json.dumps(calls).encode())
        assert {name: error for name, error in found.items() if error != 1} == {}
        clone3 = await run_python(sandbox, CALLS, json.dumps({"clone3": [seccomp.CLONE3[column], 0, 0]}).encode())
        assert clone3 == {"clone3": 38}


@isolating
async def test_only_local_and_internet_sockets_open(kind: str, state_dir: Path) -> None:
    async with await open_sandbox(kind, state_dir=state_dir) as sandbox:  # type: ignore[arg-type]
        found = await run_python(sandbox, SOCKETS)
    assert {name for name, error in found.items() if error == 0} <= {"1 0", "2 0", "10 0", "16 0"}
    assert {found["1 0"], found["2 0"], found["16 0"]} == {0}
    assert found["40 0"] == found["16 12"] == 97  # AF_VSOCK; AF_NETLINK with another protocol than NETLINK_ROUTE


@isolating
async def test_kernel_settings_cannot_be_opened_for_writing(kind: str, state_dir: Path) -> None:
    script = (
        "find /proc/sys /proc/sysrq-trigger /proc/irq /proc/bus /sys -type f -writable 2>/dev/null | head; "
        "for f in /proc/sys/kernel/core_pattern /proc/sys/kernel/hostname /proc/sys/vm/overcommit_memory; do "
        "(exec 3>>$f) 2>/dev/null && echo opened $f; done; true"
    )
    async with await open_sandbox(kind, state_dir=state_dir) as sandbox:  # type: ignore[arg-type]
        done = await sandbox.exec(["sh", "-c", script], timeout=120)
    assert (done.exit_code, done.stdout) == (0, b"")


def command_of(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)
async def test_roots_sandbox_runs_as_an_ordinary_user_of_the_host(kind: str, state_dir: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("run as root: Polar of another user has no other user to run agents as")
    async with await open_sandbox("bubblewrap", SandboxSpec(), state_dir=state_dir) as sandbox:
        await sandbox.write("given", b"x")
        script = "id -u; whoami; touch $HOME/made made /tmp/made /dev/shm/made; stat -c %u made given; sleep 1000 &"
        done = await sandbox.exec(["sh", "-c", script])
        running = [pid for pid in Path("/proc").glob("[0-9]*") if command_of(pid) == b"sleep\x001000\0"]
        owners = {pid.stat().st_uid for pid in running}
    uid, name, *made = done.stdout.decode().splitlines()
    assert (done.exit_code, done.stderr, name) == (0, b"", "agent")
    assert made == [uid, uid]
    assert int(uid) in owners
    assert int(uid) >= 60_000


@pytest.mark.parametrize("kind", ["bubblewrap", "docker"], indirect=True)
async def test_killing_everything_ends_the_command_alone(kind: SandboxKind, state_dir: Path) -> None:
    if kind == "bubblewrap" and os.geteuid() != 0:
        pytest.skip("run as root: otherwise the sandbox's own processes belong to the agent's user")
    async with await open_sandbox(kind, state_dir=state_dir) as sandbox:
        done = await sandbox.exec(["python3", "-c", "import os; os.kill(-1, 9); os.kill(os.getpid(), 9)"], timeout=120)
        assert done.exit_code == 137
        assert (await sandbox.exec(["echo", "alive"])).stdout == b"alive\n"


def test_numbers_are_those_of_the_kernel_headers() -> None:
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("needs the kernel's headers: apt-get install linux-libc-dev")
    numbers = {m[1]: int(m[2]) for m in re.finditer(r"#define __NR_(\w+) (\d+)", header.read_text())}
    calls = {name: number for name, (number, _) in seccomp.REFUSED.items() if number is not None}
    calls |= {name: getattr(seccomp, name.upper())[0] for name in ("clone", "clone3", "unshare", "socket", "ioctl")}
    assert calls == {name: numbers[name] for name in calls}


def test_an_unknown_architecture_has_no_filter() -> None:
    assert seccomp.bpf_program("riscv64") is None
