"""The measured proxies: how each is installed, started and stopped. Each is one process on one core."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks._stacks.traffic import MODEL

ROOT = Path(__file__).parents[2]
START_SECONDS = 120
# Newer LiteLLMs need newer certificates than some package mirrors have; the version does not affect the measurement.
PEERS = {"litellm": ("1.106.0", "litellm[proxy]"), "rllm-model-gateway": ("0.1.0", "rllm-model-gateway")}


class StackError(Exception):
    """A stack cannot run here; the message says why."""


@dataclass
class RunningStack:
    name: str
    version: str
    port: int
    path: str = "/v1/chat/completions"
    process: subprocess.Popen[bytes] | None = None
    log: Path | None = None

    def rss_mb(self) -> float | None:
        if self.process is None:
            return None
        with suppress(OSError):
            for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    return round(int(line.split()[1]) / 1024, 1)
        return None

    def cpu_seconds(self) -> float:
        """Return the processor time of all its threads so far, a measure of cost that holds on a busy machine."""
        if self.process is None:
            return 0.0
        with suppress(OSError):
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def stop(self) -> None:
        """Terminate it, so that it finishes its writes; kill it if it does not end."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pinned(core: int | None) -> Callable[[], None] | None:
    """Return a function that a child process runs to stay on one core."""
    return None if core is None else lambda: os.sched_setaffinity(0, {core})


def spawn(
    name: str, command: list[str], core: int | None, folder: Path, **environment: str
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a process on a core with a minimal environment, without the caller's keys and proxies."""
    log = folder / f"{name}.log"
    keep = {key: os.environ[key] for key in ("PATH", "HOME", "LANG", "TMPDIR", "VIRTUAL_ENV") if key in os.environ}
    environment = keep | {"PYTHONPATH": str(ROOT), "NO_PROXY": "127.0.0.1"} | environment
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, preexec_fn=pinned(core)
        )
    return process, log


def wait_ready(stack: RunningStack, url: str) -> RunningStack:
    """Wait until the address answers with any status."""
    assert stack.process is not None
    assert stack.log is not None
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if stack.process.poll() is not None:
            raise StackError(f"it ended while starting: {tail(stack.log)}")
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return stack
        except urllib.error.HTTPError:
            return stack
        except OSError:
            time.sleep(0.2)
    stack.stop()
    raise StackError(f"it was not ready within {START_SECONDS} s: {tail(stack.log)}")


def tail(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-500:]


def environment_for(name: str, cache: Path) -> tuple[Path, str]:
    """Return the Python of a peer's environment, and the peer's version. On first use, pip installs the peer there."""
    version, package = PEERS[name]
    folder = cache / f"{name}-{version}"
    python = folder / "bin" / "python"
    if not (folder / ".complete").exists():
        made = subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], capture_output=True, text=True)
        if made.returncode:
            raise StackError(f"no virtual environment: {made.stderr.strip()[-300:]}")
        command = [str(python), "-m", "pip", "install", "-q", f"{package}=={version}"]
        try:
            made = subprocess.run(command, capture_output=True, text=True, timeout=900)
        except subprocess.TimeoutExpired as error:
            raise StackError(f"`pip install {package}=={version}` took more than 15 minutes") from error
        if made.returncode:
            errors = [line for line in made.stderr.splitlines() if line.startswith("ERROR")]
            reason = (errors or made.stderr.strip().splitlines())[-1][-300:]
            raise StackError(f"`pip install {package}=={version}` failed: {reason}")
        (folder / ".complete").touch()
    return python, version


def start_passthrough(upstream: str, core: int | None, folder: Path) -> RunningStack:
    port = free_port()
    command = [sys.executable, "-m", "benchmarks._stacks.passthrough", str(port), upstream]
    process, log = spawn("passthrough", command, core, folder)
    return wait_ready(
        RunningStack("passthrough", "starlette+aiohttp", port, process=process, log=log), f"http://127.0.0.1:{port}/"
    )


def start_polar(
    upstream: str, core: int | None, folder: Path, name: str = "polar", mode: str = "render"
) -> RunningStack:
    """Start `polar serve` in one prompt mode. Its database is `name`.db."""
    from importlib.metadata import version

    port = free_port()
    command = [sys.executable, "-m", "polar_proxy", "serve"]
    if not (ROOT / "polar_proxy" / "__main__.py").exists():
        command = [str(Path(sys.executable).with_name("polar")), "serve"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--db", f"sqlite:///{folder}/{name}.db"]
    command += ["--engine", "vllm", "--engine-url", upstream, "--model", MODEL, "--prompt-mode", mode]
    process, log = spawn(name, command, core, folder)
    stack = RunningStack(name, version("polar-proxy"), port, process=process, log=log)
    return wait_ready(stack, f"http://127.0.0.1:{port}/healthz")


def start_litellm(upstream: str, core: int | None, folder: Path, cache: Path) -> RunningStack:
    python, version = environment_for("litellm", cache)
    port = free_port()
    config = folder / "litellm.yaml"
    config.write_text(
        "model_list:\n"
        f"  - model_name: {MODEL}\n"
        f"    litellm_params: {{model: hosted_vllm/{MODEL}, api_base: {upstream}/v1, api_key: none}}\n"
        "litellm_settings: {telemetry: false, num_retries: 0}\n"
    )
    command = [str(python.with_name("litellm")), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    settings = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        # It listens on loopback for these minutes only.
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    process, log = spawn("litellm", command, core, folder, **settings)
    return wait_ready(
        RunningStack("litellm", version, port, process=process, log=log), f"http://127.0.0.1:{port}/health/liveliness"
    )


def start_rllm(upstream: str, core: int | None, folder: Path, cache: Path) -> RunningStack:
    python, version = environment_for("rllm-model-gateway", cache)
    port = free_port()
    command = [str(python), "-m", "rllm_model_gateway", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--worker", f"{upstream}/v1", "--store", "sqlite", "--db-path", str(folder / "rllm.db")]
    command += ["--log-level", "warning"]
    process, log = spawn("rllm", command, core, folder)
    stack = RunningStack(
        "rllm-model-gateway", version, port, "/sessions/{key}/v1/chat/completions", process=process, log=log
    )
    return wait_ready(stack, f"http://127.0.0.1:{port}/health")
