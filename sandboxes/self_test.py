"""Test a kind of sandbox for ways out, before it is used: open one and try from inside to get out.

The isolation depends on the kernel, on a container around Polar, and on version and settings of bwrap or the Docker
engine. So a sandbox that opens may still let programs out. A `process` sandbox isolates nothing and is not tested.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import platform
import secrets
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from sandboxes import docker_engine, images, seccomp
from sandboxes.base import DockerRuntime, SandboxError, SandboxKind, SandboxSpec, SandboxUnavailable
from sandboxes.choice import KINDS
from sandboxes.docker import DockerSandbox
from sandboxes.orphans import SandboxRegistry, default_state_dir

log = logging.getLogger(__name__)

SelfTestPolicy = Literal["refuse", "warn", "off"]
PROBE = (Path(__file__).parent / "probe.py").read_text()
SECONDS = 30.0
HOW_TO_GO_ON = (
    "Use another kind (--sandbox), correct the engine's or the system's settings, or set sandboxes.self_test to warn"
)


class SandboxLeaks(SandboxUnavailable):
    """On this machine, programs can break out of this kind of sandbox."""


class SelfTests:
    """Tests each kind of sandbox for ways out, once per process. Callers that need the same kind share one test."""

    def __init__(self, policy: SelfTestPolicy = "refuse", runtime: DockerRuntime = "auto") -> None:
        self._policy = policy
        self._runtime: DockerRuntime = runtime
        self._running: dict[SandboxKind, asyncio.Task[list[str] | None]] = {}

    def start(self, kind: SandboxKind, image: str | None = None) -> None:
        """Start the test in the background, unless it was started before."""
        if self._policy != "off" and kind != "process" and kind not in self._running:
            self._running[kind] = asyncio.create_task(find_leaks(kind, image, self._runtime))

    async def require(self, kind: SandboxKind, image: str | None = None) -> None:
        """Start the test if necessary, and wait for it.

        Raise `SandboxLeaks` if there is a way out and the policy is `refuse`, `SandboxError` if no sandbox opens.
        """
        self.start(kind, image)
        if kind not in self._running:
            return
        test = self._running[kind]
        try:
            opened = await asyncio.shield(test)
        except SandboxError:
            self._running.pop(kind, None)  # no sandbox opened: the next caller tests again
            raise
        if opened and self._policy == "refuse":
            raise SandboxLeaks(f"{describe_leaks(kind, opened)}. {HOW_TO_GO_ON}.")
        if opened or opened is None:
            untested = f"The {kind} sandbox is not tested for ways out, because its image has no python3"
            log.warning("%s", describe_leaks(kind, opened) if opened else untested)

    async def close(self) -> None:
        for test in self._running.values():
            test.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)


def describe_leaks(kind: SandboxKind, opened: list[str]) -> str:
    return f"The {kind} sandbox fails its self-test on this machine: {'; '.join(opened)}"


async def find_leaks(
    kind: SandboxKind, image: str | None = None, runtime: DockerRuntime = "auto", state_dir: Path | None = None
) -> list[str] | None:
    """Open a sandbox of this kind, run a Python probe in it, and return the ways out that the probe found.

    Return None if the sandbox has no Python. For docker, the default image is used if this machine has it: the ways
    out do not depend on the image. Raise `SandboxError` if the sandbox does not open or the probe fails.
    """
    if kind == "docker" and image is not None:
        async with docker_engine.docker_client() as engine:
            if await docker_engine.inspect_image(engine, images.tag()) is not None:
                image = None
    if state_dir is None:
        state_dir = await asyncio.to_thread(default_state_dir)
    registry = SandboxRegistry(state_dir)
    async with await KINDS[kind].open(SandboxSpec(image=image, runtime=runtime), registry) as sandbox:
        own_kernel = isinstance(sandbox, DockerSandbox) and sandbox.runtime == "runsc"
        listener = await sandbox.listen()
        assert listener is not None
        with listener, _bait(listener.getsockname()[1]) as bait:
            bait["hidden"].append(str(state_dir))
            given = json.dumps(probe_input(kind, own_kernel=own_kernel) | bait).encode()
            done = await sandbox.exec(["python3", "-I", "-S", "-c", PROBE], stdin=given, cwd="/", timeout=SECONDS)
    if done.exit_code == 127:
        return None
    try:
        return [str(line) for line in json.loads(done.stdout)]
    except ValueError:
        end = (done.stdout + done.stderr).decode(errors="replace")[-500:].strip()
        raise SandboxError(f"the test of the {kind} sandbox failed: {end}") from None


@contextlib.contextmanager
def _bait(gateway_port: int) -> Iterator[dict[str, Any]]:
    """Open sockets and a file on the host that programs inside must not reach. Yield their names, for `probe.py`.

    `gateway_port`: the port that programs inside must reach; it is passed on to the probe.
    """
    name = f"polar-probe-{secrets.token_hex(8)}"
    with (
        _listen_besides(gateway_port) as loopback,
        socket.socket(socket.AF_UNIX) as abstract,
        tempfile.NamedTemporaryFile(prefix=name) as file,
    ):
        abstract.bind(f"\0{name}")
        abstract.listen()
        ports = {"port": loopback.getsockname()[1], "gateway_port": gateway_port}
        yield {**ports, "abstract": name, "hidden": [file.name], "token": name}


def _listen_besides(port: int) -> socket.socket:
    """Return a socket that listens on the host's loopback interface, at a free port other than `port`."""
    first = socket.create_server(("127.0.0.1", 0))
    if first.getsockname()[1] != port:
        return first
    with first:
        return socket.create_server(("127.0.0.1", 0))


def probe_input(kind: SandboxKind, *, own_kernel: bool = False) -> dict[str, Any]:
    """Return the input of `probe.py`: what to try (system calls, sockets) and what to check.

    With `own_kernel` (gVisor), the probe tries no system calls and no sockets, because these do not reach the host's
    kernel.
    """
    spaces = [name for name in ("pid", "net", "ipc", "uts", "mnt") if os.path.exists(f"/proc/self/ns/{name}")]
    return {
        "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in spaces},
        "calls": refused_calls(),
        "families": REFUSED_SOCKETS,
        "own_kernel": own_kernel,
        # In docker, root is the host's root without capabilities, unless the engine has user namespaces. If Polar does
        # not run as root, programs cannot be the host's root, but seem so: bwrap nests two user namespaces for them.
        "not_root": kind == "bubblewrap" and os.geteuid() == 0,
        "read_only": ["/", "/usr", "/usr/bin", "/etc"] if kind == "bubblewrap" else [],
    }


REFUSED_SOCKETS = [
    ("AF_VSOCK", 40, 1, 0),
    ("AF_PACKET", 17, 3, 768),
    ("AF_ALG", 38, 5, 0),
    ("AF_NETLINK (not for routes)", 16, 3, 12),
    ("AF_KEY", 15, 3, 2),
    ("AF_INET (raw)", 2, 3, 1),
    ("AF_XDP", 44, 3, 0),
]
"""Sockets that every sandbox refuses: (name, family, type, protocol)."""


def refused_calls(machine: str | None = None) -> dict[str, list[int]]:
    """Return the system calls that every sandbox refuses.

    Key: the name of the system call. Value: its number and its arguments.
    """
    machine = machine or platform.machine()
    if machine not in seccomp.ARCHITECTURES:
        return {}
    column = list(seccomp.ARCHITECTURES).index(machine)
    numbers = {name: pair[column] for name, pair in seccomp.REFUSED.items()}
    calls = {name: [number, 0, 0, 0, 0, 0] for name, number in numbers.items() if number is not None}
    calls |= {f"unshare({flag:#x})": [seccomp.UNSHARE[column], flag] for flag in seccomp.NAMESPACE_FLAGS}
    calls["clone3"] = [seccomp.CLONE3[column], 0, 0]
    calls["ioctl(TIOCSTI)"] = [seccomp.IOCTL[column], 0, seccomp.TERMINAL_INJECTION[0], 0]
    return calls
