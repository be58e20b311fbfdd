"""A real Ray cluster of several nodes on this machine, for `benchmarks/chaos.py`: nodes are killed."""

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

from benchmarks._stacks.kill_targets import START_SECONDS, ServiceProcess, alive, descendants, spawn
from benchmarks._stacks.stacks import StackError, free_port, tail

# Nodes of one machine must not choose the same ports.
SMALL = ["--min-worker-port", "0", "--max-worker-port", "0", "--object-store-memory", str(80 << 20)]
_RAYS = ("raylet", "ray::", "ray/_private", "ray.scripts", "polar_proxy.cli")


class Cluster:
    """A Ray head that takes no work, nodes that do, and `polar serve --executor ray` over them. As a victim: a node."""

    name = "node"

    def __init__(self, service: ServiceProcess, folder: Path, nodes: int, places: int, choose: random.Random) -> None:
        """`service` is told of the cluster, and not started."""
        if importlib.util.find_spec("ray") is None:
            raise StackError("Ray is not installed: pip install 'polar-proxy[ray]'")
        self.service, self._folder, self._places, self._random = service, folder, places, choose
        # Ray's sockets have long names of their own, and a socket's name may have 107 characters in all.
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

    def begin(self) -> None:
        """Everything up to a service whose nodes work. Raises Unavailable."""
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
        size = ["--num-cpus", "0", "--include-dashboard", "false", *SMALL]
        where = ["--port", self.address.rpartition(":")[2], "--temp-dir", str(self._own)]
        self._head = self._spawn("ray-head", [*ray, *size, *where], "Ray runtime started")
        while len(self.nodes) < self._wanted:
            self.start()
        self.service.start()
        log = self.service.log
        until(lambda: log.read_text().count("agents at a time, gateway") >= self._wanted, log, "the nodes do not work")

    def start(self) -> None:
        """One more node; the service finds it by itself. On a busy machine Ray's own patience with a start may be too
        short: it is started up to three times."""
        program = [sys.executable, "-c", "import sys; from polar_proxy.cli import main; sys.exit(main())", "node"]
        room = ["--ray-address", self.address, "--sandboxes", str(self._places), "--scoring", "2", "--", *SMALL]
        for left in (2, 1, 0):
            self._count += 1
            try:
                self.nodes.append(self._spawn(f"node-{self._count}", [*program, *room], "Ray runtime started"))
                return
            except StackError:
                if not left:
                    raise

    def kill(self) -> bool:
        """All Ray processes of one node; its sandboxes are left, as those of a killed service are."""
        node = self.nodes.pop(self._random.randrange(len(self.nodes)))
        doomed = [node.pid, *(pid for pid in descendants(node.pid) if any(mark in command(pid) for mark in _RAYS))]
        for pid in doomed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()
        return True

    def stop(self) -> None:
        """Nodes as their owner would stop them, then the head with all that it started."""
        for node in self.nodes:
            node.terminate()
        for node in self.nodes:
            with suppress(subprocess.TimeoutExpired):
                node.wait(60)
        for process in (*self.nodes, *([self._head] if self._head else [])):
            doomed = [*descendants(process.pid), process.pid] if process.poll() is None else []
            for pid in doomed:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        deadline = time.monotonic() + 20  # Ray's own processes end by themselves when their head is gone
        while time.monotonic() < deadline and ours(str(self._own)):
            time.sleep(0.2)
        self.nodes, self._head = [], None
        shutil.rmtree(self._own, ignore_errors=True)

    def _spawn(self, name: str, words: list[str], ready: str) -> subprocess.Popen[bytes]:
        log = self._folder / f"{name}.log"
        log.unlink(missing_ok=True)  # what a start before this one said must not count
        process = spawn(words, log, self._environment)
        until(lambda: ready in log.read_text() or process.poll() is not None, log, f"{name} is not ready")
        if process.poll() is not None:
            raise StackError(f"{name} ended at its start: {tail(log)}")
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
