"""A real Ray cluster of several nodes on this machine, whose nodes `benchmarks/chaos.py` kills."""

from __future__ import annotations

import importlib.util
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from benchmarks._stacks.kill_targets import DOWN_SECONDS, START_SECONDS, ServiceProcess, alive, descendants, spawn
from benchmarks._stacks.stacks import StackError, free_port, tail

# Nodes on one machine must not choose the same ports.
RAY_OPTIONS = ["--min-worker-port", "0", "--max-worker-port", "0", "--object-store-memory", str(80 << 20)]
_RAY_PROCESSES = ("raylet", "ray::", "ray/_private", "ray.scripts", "polar_proxy.cli")


class RayCluster:
    """A Ray head without work, nodes that work, and `polar serve --executor ray` on them. Its target is a node."""

    name = "node"
    down = DOWN_SECONDS

    def __init__(
        self, service: ServiceProcess, folder: Path, nodes: int, places: int, random_source: random.Random
    ) -> None:
        """Add the cluster to the command of `service`, without starting it."""
        if importlib.util.find_spec("ray") is None:
            raise StackError("Ray is not installed: pip install 'polar-proxy[ray]'")
        self.service, self._folder, self._places, self._random = service, folder, places, random_source
        # Ray's socket names are long, and the path of a socket may have at most 107 characters.
        self._own = Path(tempfile.mkdtemp(prefix="pr-", dir="/tmp"))
        self.address = f"127.0.0.1:{free_port()}"
        service.command += ["--executor", "ray", "--ray-address", self.address]
        workers = service.command.index("--rollout-workers")  # the nodes run the rollouts
        del service.command[workers : workers + 2]
        key = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(24)}
        self._environment = service.environment | key | {"RAY_USAGE_STATS_ENABLED": "0"}
        service.environment = self._environment
        self._count = 0
        self._head: subprocess.Popen[bytes] | None = None
        self.nodes: list[subprocess.Popen[bytes]] = []
        self._wanted = nodes

    def start_all(self) -> None:
        """Start head, nodes and service, and wait until the nodes work. Raises StackError."""
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
        size = ["--num-cpus", "0", "--include-dashboard", "false", *RAY_OPTIONS]
        where = ["--port", self.address.rpartition(":")[2], "--temp-dir", str(self._own)]
        self._head = self._spawn("ray-head", [*ray, *size, *where], "Ray runtime started")
        while len(self.nodes) < self._wanted:
            self.start()
        self.service.start()
        log = self.service.log
        until(lambda: log.read_text().count("agents at a time, gateway") >= self._wanted, log, "the nodes do not work")

    def start(self) -> None:
        """Start one more node, which the service finds by itself. Makes up to three attempts, because Ray's own timeout
        may be too short on a busy machine."""
        program = [sys.executable, "-c", "import sys; from polar_proxy.cli import main; sys.exit(main())", "node"]
        options = [
            "--ray-address",
            self.address,
            "--sandboxes",
            str(self._places),
            "--scoring",
            "2",
            "--",
            *RAY_OPTIONS,
        ]
        for left in (2, 1, 0):
            self._count += 1
            try:
                self.nodes.append(self._spawn(f"node-{self._count}", [*program, *options], "Ray runtime started"))
                return
            except StackError:
                if not left:
                    raise

    def kill(self) -> bool:
        """Kill all Ray processes of one node; its sandboxes stay, like those of a killed service."""
        node = self.nodes.pop(self._random.randrange(len(self.nodes)))
        pids = [
            node.pid,
            *(pid for pid in descendants(node.pid) if any(mark in command(pid) for mark in _RAY_PROCESSES)),
        ]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()
        return True

    def stop(self) -> None:
        """Stop the nodes normally, then kill the head with all its processes."""
        for node in self.nodes:
            node.terminate()
        for node in self.nodes:
            with suppress(subprocess.TimeoutExpired):
                node.wait(60)
        for process in (*self.nodes, *([self._head] if self._head else [])):
            pids = [*descendants(process.pid), process.pid] if process.poll() is None else []
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        deadline = time.monotonic() + 20  # Ray's other processes end by themselves without their head
        while time.monotonic() < deadline and ours(str(self._own)):
            time.sleep(0.2)
        self.nodes, self._head = [], None
        shutil.rmtree(self._own, ignore_errors=True)

    def _spawn(self, name: str, words: list[str], ready: str) -> subprocess.Popen[bytes]:
        log = self._folder / f"{name}.log"
        log.unlink(missing_ok=True)  # an earlier start must not look like this one
        process = spawn(words, log, self._environment)
        until(lambda: ready in log.read_text() or process.poll() is not None, log, f"{name} is not ready")
        if process.poll() is not None:
            raise StackError(f"{name} ended while starting: {tail(log)}")
        return process


def until(what: Callable[[], bool], log: Path, otherwise: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not what():
        if time.monotonic() > deadline:
            raise StackError(f"{otherwise} within {START_SECONDS:g} s: {tail(log)}")
        time.sleep(0.1)


def command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def ours(word: str) -> bool:
    return any(alive(int(entry)) and word in command(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())
