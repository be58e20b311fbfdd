"""A real Ray cluster of several nodes on this machine, each with its own processes, which tests may kill."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from polar_proxy.engines.scripted import ScriptedAnswer, ScriptedEngine
from polar_proxy.errors import RequestError
from polar_proxy.types import EngineRequest
from sandboxes.supervisor.shim import descendants
from tests.fakes.player import play
from tests.fakes.tiny_agent import TINY_AGENTS

ROOT = Path(__file__).resolve().parents[3]
POLAR = str(Path(sys.executable).with_name("polar"))


# Nodes of one machine must not choose the same ports.
SMALL = ("--min-worker-port", "0", "--max-worker-port", "0", "--object-store-memory", str(80 << 20))


def talk(request: EngineRequest) -> ScriptedAnswer:
    """Answer like the expert player, and with a text where it has no answer."""
    reply = play(request)
    return "I have no opinion." if isinstance(reply, RequestError) else reply


class SlowPlayer(ScriptedEngine):
    """An engine whose calls take about a second: `--engine tests.rollouts.cluster.machines:SlowPlayer`."""

    def __init__(self) -> None:
        super().__init__(talk, pace=0.01, tokens_per_event=1)


def environment(home: Path, scratch: Path) -> dict[str, str]:
    """Return the environment of one cluster, with its own Polar home and register of sandboxes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("POLAR_", "RAY_"))}
    return {
        **kept,
        "POLAR_HOME": str(home),
        "TMPDIR": str(scratch),
        "PYTHONPATH": str(ROOT),
        "NO_COLOR": "1",
        "COLUMNS": "200",
        "RAY_USAGE_STATS_ENABLED": "0",
        "POLAR_ALLOWED_CODE": json.dumps(sorted(TINY_AGENTS)),
        "POLAR_ADMISSION__MEMORY_MB": "0",  # no check of the machine's load, so that nodes fill their capacity
    }


def wait_for(what: Callable[[], Any], seconds: float, why: Callable[[], str]) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds:g} s: {why()}")


def command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


class Program:
    """A running program whose output goes to a file."""

    def __init__(self, env: dict[str, str], folder: Path, name: str, *arguments: str) -> None:
        self.log = folder / f"{name}.log"
        self._file = self.log.open("w")
        self.process = subprocess.Popen(
            arguments, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=self._file, start_new_session=True
        )

    def ready(self) -> Any:
        """Return the JSON document that `polar serve --json` prints."""
        assert self.process.stdout is not None
        text = b""
        while not text.rstrip().endswith(b"}"):
            line = self.process.stdout.readline()
            assert line, self.log.read_text()
            text += line
        return orjson.loads(text)

    def until(self, words: str, seconds: float = 180) -> None:
        """Wait until the program's log contains these words."""
        wait_for(lambda: words in self.log.read_text(), seconds, self.log.read_text)

    def stop(self, number: int = signal.SIGTERM, seconds: float = 120) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(seconds)

    def end(self) -> None:
        """Kill all processes of the program that are left."""
        left = descendants(self.process.pid)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._file.close()


class Node(Program):
    """A running `polar node` with all of its Ray processes."""

    def __init__(self, env: dict[str, str], folder: Path, name: str, address: str, sandboxes: int) -> None:
        room = ("--sandboxes", str(sandboxes), "--scoring", "2")
        super().__init__(env, folder, name, POLAR, "node", "--ray-address", address, *room, "--", *SMALL)

    def rays(self) -> list[int]:
        """Return the processes of its raylet with its workers, and of its polar and ray commands, without sandboxes."""
        mine = descendants(self.process.pid)
        marks = ("raylet", "ray::", "ray/_private", "ray.scripts", "polar node")
        return [self.process.pid, *(pid for pid in mine if any(mark in command(pid) for mark in marks))]

    def workers(self) -> list[int]:
        """Return the processes of its node actors."""
        return [pid for pid in descendants(self.process.pid) if command(pid).startswith("ray::NodeActor")]

    def kill(self) -> None:
        """Kill everything as a power failure would, except the programs in sandboxes."""
        for pid in self.rays():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


class Serving(Program):
    """A running `polar serve --executor ray`."""

    def __init__(self, env: dict[str, str], folder: Path, name: str, address: str, url: str) -> None:
        engine = ("--engine", "tests.rollouts.cluster.machines:SlowPlayer")
        ray = ("--executor", "ray", "--ray-address", address)
        super().__init__(env, folder, name, POLAR, "serve", "--port", "0", "--db", url, *engine, *ray, "--json")

    def gateways(self) -> list[str]:
        """Return the nodes that the server reports."""
        return re.findall(r"agents at a time, gateway (http\S+)", self.log.read_text())


class RayHead(Program):
    """A running `ray start --head` without processors, so that no actor and no scoring task is placed there."""

    def __init__(self, env: dict[str, str], folder: Path, port: int) -> None:
        self.address = f"127.0.0.1:{port}"
        ray = (sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats")
        size = ("--num-cpus", "0", "--include-dashboard", "false", *SMALL)
        where = ("--port", str(port), "--temp-dir", f"{env['TMPDIR']}/ray")
        super().__init__(env, folder, "ray-head", "sh", "-c", 'exec "$@" >&2', "sh", *ray, *size, *where)
