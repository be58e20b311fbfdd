"""Attempts to leave a sandbox by system calls, host files, other sandboxes or networks, or to use more than its share.

First in a bare sandbox, then by the agent of a rollout (`rollout_escapes`).

The program inside (`escape_program`) knows what an agent would have to guess. What happens outside (a signal, a file, a
program that lives on, memory, disk) is judged here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._attacks import escape_program, rollout_escapes
from benchmarks._attacks.outcome import AttackOptions, Outcome
from benchmarks._stacks.reconcile import processes_of
from sandboxes.base import ResourceLimits, Sandbox, SandboxError, SandboxKind, SandboxSpec
from sandboxes.choice import open_sandbox
from sandboxes.self_test import refused_calls

FAMILY = "escapes"
PROGRAM = Path(escape_program.__file__).read_bytes()
LIMITS = ResourceLimits(memory_mb=256, pids=120, disk_mb=200, files=5_000, open_files=256)
SECRET = "the host's secret"
HARMLESS = {
    *("host_files", "other_sandbox_files", "other_sandbox_processes", "host_loopback"),
    *(
        "other_sandbox_gateway",
        "host_address",
        "host_ipv6",
        "host_abstract_socket",
        "service_sockets",
        "signal_outside",
    ),
    *("write_host_file", "leave_a_daemon", "open_descriptors", "vsock", "raw_socket", "packet_socket"),
}
"""Attempts that are also made in a `process` sandbox, because they do no harm there. Most succeed, which shows that the
attempts are real."""
STOPPED_EVERYWHERE = {
    *("open_descriptors", "leave_a_daemon", "print_without_end", "make_polar_wait", "leave_what_cannot_be_removed"),
    *("fill_inodes", "fill_disk", "fill_unreadable_folder"),
}
SECONDS = 120.0


class Host:
    """Files, sockets and processes of this machine that programs in a sandbox must not reach."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.token = secrets.token_hex(8)
        self.folder = folder / "host"
        self.folder.mkdir(mode=0o777)
        self.folder.chmod(0o777)
        self.secret_file = self.folder / "secret"
        self.secret_file.write_text(SECRET)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        tcp6 = stack.enter_context(socket.create_server(("::1", 0), family=socket.AF_INET6))
        abstract, plain = (stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(2))
        abstract.bind(f"\0polar-{self.token}")
        plain.bind(str(self.folder / "socket"))
        (self.folder / "socket").chmod(0o777)
        for listener in (abstract, plain):
            listener.listen()
        self.sleeper = stack.enter_context(subprocess.Popen(["sleep", "1000"]))
        stack.callback(self.sleeper.kill)
        disk = os.stat("/").st_dev
        self.known: dict[str, Any] = {
            "secret": SECRET,
            "host_file": str(self.secret_file),
            "host_folder": str(self.folder),
            "unix_socket": str(self.folder / "socket"),
            "abstract": f"polar-{self.token}",
            "port": tcp.getsockname()[1],
            "port6": tcp6.getsockname()[1],
            "host": host_address(),
            "host_pids": [self.sleeper.pid],
            "disk": [os.major(disk), os.minor(disk)],
            "daemon": f"daemon-{self.token}",
            "calls": refused_calls(),
            "limits": {"pids": LIMITS.pids, "open_files": LIMITS.open_files},
        }


class Escapes:
    """All attempts in one kind of sandbox."""

    def __init__(self, kind: SandboxKind, host: Host, options: AttackOptions) -> None:
        self.kind, self.host, self.options = kind, host, options
        limits = LIMITS if kind != "process" else replace(LIMITS, memory_mb=None)
        self.spec = SandboxSpec(limits=limits)
        self.outcomes: list[Outcome] = []

    async def run(self) -> list[Outcome]:
        await self.from_inside()
        judged: list[Callable[[], Awaitable[None]]] = [
            *(self.print_without_end, self.swap_links_while_polar_writes, self.make_polar_wait),
            *(self.leave_what_cannot_be_removed, self.fill_inodes, self.fill_disk, self.fill_unreadable_folder),
        ]
        if self.kind != "process":  # they would harm this machine
            judged += [self.take_memory, self.fork_many, self.fill_temporary_folders, self.forge_exit_status]
        for judge in judged:
            if self.options.selected(judge.__name__):
                self.options.report(f"{self.kind} {judge.__name__}")
                await judge()
        await self.honest_work()
        if self.options.selected("reach_the_gateway"):
            await self.reach_the_gateway()
        return self.outcomes

    def add(self, attack: str, reached: bool, got: str, *, control: bool = False) -> None:
        expected = self.kind == "process" and attack not in STOPPED_EVERYWHERE and not control
        outcome = Outcome(attack, FAMILY, self.kind, reached, got, control=control, expected=expected)
        self.outcomes.append(outcome)

    @contextlib.asynccontextmanager
    async def sandbox(self, spec: SandboxSpec | None = None) -> AsyncIterator[Sandbox]:
        state = self.options.folder / "state"
        async with await open_sandbox(self.kind, spec or self.spec, state_dir=state) as sandbox:
            yield sandbox

    async def from_inside(self) -> None:
        """Let the program inside make its attempts beside another sandbox, then look at what happened outside."""
        attempts = [name for name in escape_program.ATTEMPTS if self.options.selected(name)]
        if self.kind == "process":
            attempts = [name for name in attempts if name in HARMLESS]
        async with AsyncExitStack() as stack:
            sandbox, other = [await stack.enter_async_context(self.sandbox()) for _ in range(2)]
            port = await self.prepare_neighbour(other, stack)
            known = self.host.known | {
                "attempts": attempts,
                "neighbour_files": self.neighbour_files(other),
                "neighbour_command": f"neighbour-{self.host.token}",
                "neighbour_port": port,
                "own_system": self.kind == "docker",
            }
            await sandbox.write("escape_program.py", PROGRAM)
            argv = ["python3", "escape_program.py"]
            done = await sandbox.exec(argv, stdin=json.dumps(known).encode(), timeout=SECONDS)
            await sandbox.kill_all()
        found = {}
        for line in done.stdout.splitlines():
            with contextlib.suppress(ValueError):
                one = json.loads(line)
                found[one["attempt"]] = (one["reached"], one["got"])
        for name in attempts:
            self.add(name, *found.get(name, (False, f"gave up: {done.stderr.decode(errors='replace')[-200:]}")))
        if "signal_outside" in attempts:
            self.judged("signal_outside", self.host.sleeper.poll() is not None, "the host's process lives on")
        if "leave_a_daemon" in attempts:
            left = processes_of(self.host.known["daemon"])
            self.judged("leave_a_daemon", bool(left), f"{len(left)} still run after the sandbox was closed")
        if "write_host_file" in attempts:
            self.judged("write_host_file", (self.host.folder / "written").exists(), "no file on the host")

    def judged(self, attack: str, reached: bool, got: str) -> None:
        """Replace an attempt's outcome, as reported from inside, by one observed from outside."""
        self.outcomes = [one for one in self.outcomes if one.attack != attack]
        self.add(attack, reached, got)

    async def prepare_neighbour(self, other: Sandbox, stack: AsyncExitStack) -> int:
        await other.write("secret", SECRET.encode(), 0o666)
        sleeper = f"import time; time.sleep(600) # neighbour-{self.host.token}"
        await other.exec(["sh", "-c", 'python3 -c "$1" >/dev/null 2>&1 &', "sh", sleeper])
        listener = await other.listen() or socket.create_server(("127.0.0.1", 0))
        stack.enter_context(listener)
        return int(listener.getsockname()[1])

    def neighbour_files(self, other: Sandbox) -> list[str]:
        places = [other.host_folder / name for name in ("workspace", "disk/workspace")]
        return [f"{place}/secret" for place in places]

    # More than its share

    async def take_memory(self) -> None:
        """Take more memory than the sandbox may use, in four processes."""
        script = (
            "import glob, os, signal, time\n"
            "children = []\n"
            "for _ in range(4):\n"
            "    pid = os.fork()\n"
            "    if pid == 0:\n"
            "        held = bytearray(90 << 20)\n"
            "        for i in range(0, len(held), 4096): held[i] = 1\n"
            "        open(f'took-{os.getpid()}', 'w').close()\n"
            "        time.sleep(60)\n"
            "    children.append(pid)\n"
            "all_live = lambda: os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None\n"
            "while all_live() and len(glob.glob('took-*')) < 4: time.sleep(0.05)\n"
            "if all_live(): open('at-once', 'w').close()\n"
            "for pid in children: os.kill(pid, signal.SIGKILL)\n"
        )
        async with self.sandbox() as sandbox:
            await sandbox.exec(["python3", "-c", script], timeout=60)
            took = await number(sandbox, "ls | grep -c took")
            at_once = await number(sandbox, "ls | grep -c at-once") == 1
        got = f"{took} of 4 processes held 90 MiB each, of 256 MiB; all of them at once: {at_once}"
        self.add("take_memory", at_once, got)

    async def fork_many(self) -> None:
        script = "i=0; while [ $i -lt 400 ]; do sleep 30 & echo $i; i=$((i+1)); done"
        async with self.sandbox() as sandbox:
            done = await sandbox.exec(["sh", "-c", script], timeout=60)
            await sandbox.kill_all()
            works = (await sandbox.exec(["true"])).exit_code == 0
        started = len(done.stdout.split())
        self.add("fork_many", started > 200 or not works, f"{started} of 400 started; afterwards it works: {works}")

    async def fill_disk(self) -> None:
        fill = 'dd if=/dev/zero of=big bs=1M count=3000; dd if=/dev/zero of="$HOME/big" bs=1M count=3000'
        await self.fill("fill_disk", fill, total_mb('. "$HOME"'), most=300)

    async def fill_temporary_folders(self) -> None:
        fill = "for d in /tmp /var/tmp /dev/shm; do dd if=/dev/zero of=$d/big bs=1M count=3000; done"
        await self.fill("fill_temporary_folders", fill, total_mb("/tmp /var/tmp /dev/shm"), most=600)

    async def fill_inodes(self) -> None:
        fill = "mkdir many; cd many; i=0; while [ $i -lt 100000 ] && : >f$i; do i=$((i+1)); done"
        await self.fill("fill_inodes", fill, "ls many | wc -l", most=50_000)

    async def fill_unreadable_folder(self) -> None:
        fill = "mkdir h; cd h; for i in 1 2 3 4; do dd if=/dev/zero of=$i bs=1M count=190; done; cd ..; chmod 0300 h"
        await self.fill("fill_unreadable_folder", fill, f"chmod 700 h; {total_mb('h')}", most=300)

    async def fill(self, name: str, fill: str, measure: str, most: int) -> None:
        """Run the shell command `fill`, then wait for some seconds. The attack succeeds if the program runs on, and
        the number that `measure` prints is larger than `most`."""
        async with self.sandbox() as sandbox:
            done = await sandbox.exec(["sh", "-c", f"({fill}); sleep 5; echo went on"], timeout=90)
            kept = await number(sandbox, measure)
            stopped = sandbox.exceeded
        got = f"{kept} kept, {most} at most" if stopped is None else stopped
        self.add(name, kept > most and b"went on" in done.stdout, got)

    async def print_without_end(self) -> None:
        """Print 1.3 GB, of which Polar must keep only the end."""
        before = resident_mb()
        async with self.sandbox() as sandbox:
            done = await sandbox.exec(
                ["sh", "-c", "yes flooding | head -c 1000000000; yes | head -c 300000000 >&2"], timeout=60
            )
        grown = resident_mb() - before
        kept = len(done.stdout) + len(done.stderr)
        self.add("print_without_end", grown > 100 or kept > 16 << 20, f"{kept >> 20} MiB kept, memory +{grown:.0f} MiB")

    # Polar's own reads and writes

    async def swap_links_while_polar_writes(self) -> None:
        """Replace a folder by a link to the host's again and again while Polar reads and writes below it."""
        swap = (
            "import os\nwhile True:\n"
            " for target in ('real', HOST):\n"
            "  try:\n   os.symlink(target, 'new'); os.rename('new', 'swapped')\n  except OSError: pass\n"
        ).replace("HOST", repr(str(self.host.folder)))
        read = 0
        async with self.sandbox() as sandbox:
            await sandbox.exec(["sh", "-c", "mkdir real; echo own >real/secret; ln -s real swapped"])
            swapping = asyncio.create_task(sandbox.exec(["python3", "-c", swap], timeout=60))
            for number in range(40 if self.kind == "docker" else 300):
                with contextlib.suppress(OSError, SandboxError):
                    read += SECRET.encode() in await sandbox.read("swapped/secret")
                with contextlib.suppress(OSError, SandboxError):
                    await sandbox.write(f"swapped/written-{number}", b"x")
                with contextlib.suppress(OSError, SandboxError):
                    await sandbox.write_tree({f"swapped/tree-{number}": b"x"})
            await sandbox.kill_all()
            await swapping
        written = [path.name for path in self.host.folder.iterdir() if path.name.startswith(("written-", "tree-"))]
        got = f"{read} secrets read, {len(written)} files written on the host"
        self.add("swap_links_while_polar_writes", bool(read or written), got)

    async def make_polar_wait(self) -> None:
        """Put pipes and endless devices where Polar reads and writes."""
        began = time.monotonic()
        async with self.sandbox() as sandbox:
            await sandbox.exec(
                ["sh", "-c", "mkfifo pipe; ln -s /dev/zero endless; ln -s /dev/full full; ln -s loop loop"]
            )
            for name in ("pipe", "endless", "full", "loop", "/dev/tty", "/proc/self/fd/0"):
                for action in (sandbox.read(name, limit=1 << 20), sandbox.write(name, b"x")):
                    with contextlib.suppress(OSError, SandboxError, TimeoutError):
                        async with asyncio.timeout(30):
                            await action
        seconds = time.monotonic() - began
        self.add("make_polar_wait", seconds > 25, f"{seconds:.1f} s for twelve reads and writes")

    async def forge_exit_status(self) -> None:
        """Write a forged report of the supervisor, with exit code 0, to every visible descriptor. Then fail."""
        forged = json.dumps({"exit": 0, "id": 1, "note": None})
        script = f"for fd in /proc/[0-9]*/fd/*; do echo '{forged}' >>$fd; done 2>/dev/null; exit 3"
        async with self.sandbox() as sandbox:
            done = await sandbox.exec(["sh", "-c", script], timeout=60)
        self.add("forge_exit_status", done.exit_code != 3, f"exit code {done.exit_code} of a program that ends with 3")

    # What is left

    async def leave_what_cannot_be_removed(self) -> None:
        """Leave locked, immutable, nested, odd and many files: closing must remove them all, and never fail."""
        script = (
            "import os, socket\nos.chdir(os.environ['HOME'])\n"
            "for i in range(4000): open(f'file-{i}', 'w').close()\n"
            "for name in (b'\\xff\\xfe', b'new\\nline', b'-rf', b' '): os.mkdir(name); os.chmod(name, 0)\n"
            "socket.socket(socket.AF_UNIX).bind('socket'); os.mkfifo('pipe')\n"
            "for i in range(900): os.mkdir('d'); os.chdir('d')\n"
        )
        state = self.options.folder / "state"
        async with self.sandbox() as sandbox:
            await sandbox.exec(["python3", "-c", script], timeout=60)
            await sandbox.exec(["sh", "-c", 'chattr +i "$HOME/file-1"; chattr +a "$HOME"'])
        left = [path.name for path in state.iterdir() if path.name != "records"]
        self.add("leave_what_cannot_be_removed", bool(left), f"{len(left)} folders left")

    # Honest counterparts

    async def honest_work(self) -> None:
        """Use resources within the limits, which must work."""
        scripts = {
            "write_much": 'dd if=/dev/zero of=big bs=1M count=80 && dd if=/dev/zero of="$HOME/big" bs=1M count=60',
            "make_many_files": "mkdir many; i=0; while [ $i -lt 3000 ]; do : >many/f$i || exit 1; i=$((i+1)); done",
            "use_threads": PYTHON % "import threading as t; e = t.Event(); "
            "ts = [t.Thread(target=e.wait) for _ in range(60)]; [x.start() for x in ts]; e.set()",
            "use_memory": PYTHON % "b = bytearray(120 << 20); b[::4096] = b[::4096]",
            "use_git": "git init -q . && echo x >x && git add x && git -c user.name=a -c user.email=b commit -qm x",
            "run_own_program": "cp /bin/echo own && ./own hello | grep -q hello",
            "use_local_sockets": PYTHON % "import socket as s; l = s.create_server(('127.0.0.1', 0)); "
            "s.create_connection(l.getsockname()); u = s.socket(s.AF_UNIX); u.bind('u'); u.listen()",
            "use_temporary_folders": "dd if=/dev/zero of=/tmp/x bs=1M count=20 && cp /tmp/x /var/tmp",
        }
        for name, script in scripts.items():
            if self.options.selected(name):
                async with self.sandbox() as sandbox:
                    done = await sandbox.exec(["sh", "-c", script], timeout=60)
                end = (done.stdout + done.stderr).decode(errors="replace").strip()[-80:]
                self.add(name, done.exit_code == 0, "works" if done.exit_code == 0 else end, control=True)

    async def reach_the_gateway(self) -> None:
        """Reach the socket that Polar opened inside."""
        client = "import socket, sys; print(socket.create_connection(('127.0.0.1', int(sys.argv[1])), 5).recv(9))"
        async with self.sandbox() as sandbox:
            listener = await sandbox.listen() or socket.create_server(("127.0.0.1", 0))
            with listener:
                listener.setblocking(False)
                answering = asyncio.create_task(answer(listener))
                port = str(listener.getsockname()[1])
                done = await sandbox.exec(["python3", "-c", client, port], timeout=30)
                answering.cancel()
        self.add("reach_the_gateway", b"gateway" in done.stdout, done.stdout.decode().strip(), control=True)


PYTHON = 'python3 -c "%s"'


async def answer(listener: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    connection, _ = await loop.sock_accept(listener)
    with connection:
        await loop.sock_sendall(connection, b"gateway")


def total_mb(folders: str) -> str:
    """Return a shell command that prints the MiB that these folders take together."""
    return f"du -scm {folders} 2>/dev/null | tail -1 | cut -f1"


async def number(sandbox: Sandbox, script: str) -> int:
    done = await sandbox.exec(["sh", "-c", script], timeout=60)
    return int(done.stdout.split()[0]) if done.stdout.split() else 0


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


def host_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.connect(("192.0.2.1", 9))  # sends nothing; determines the address that packets would come from
        return str(link.getsockname()[0])


async def run(options: AttackOptions) -> list[Outcome]:
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        host = Host(options.folder, stack)
        for kind in options.sandboxes:
            options.report(f"{kind} ...")
            outcomes += await Escapes(kind, host, options).run()
    return outcomes + await rollout_escapes.run(options)
