"""A listening socket inside another network namespace, on which this process accepts connections.

The namespace of a sandbox has only a loopback interface. A socket stays in the namespace in which it was made, so a
thread enters the namespace only for `bind`; afterwards the owner accepts connections on the socket like on any other.
This needs no process inside and no firewall rule. The socket keeps the namespace alive until it is closed.

Entering needs root. A user who may only use the Docker engine gets the socket from a helper container that shares the
sandbox's network. The helper binds the socket and passes it out through a Unix socket in a shared folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sandboxes.base import SANDBOX_ID_VARIABLE, SandboxError, uncancellable
from sandboxes.docker_engine import find_image, remove_container, translate_errors

if TYPE_CHECKING:
    import aiodocker

CLONE_NEWNET = 0x40000000


class CannotEnterNamespace(SandboxError):
    """This process cannot enter the network namespace, so the socket must come from a helper container."""


def listen(pid: int, sandbox_id: str, port: int) -> socket.socket:
    """Return a socket that listens on 127.0.0.1:`port` in the network namespace of `pid`, a process of this sandbox.
    Blocking; needs root."""
    _check(pid, sandbox_id)
    try:
        # In a new thread, which then ends: setns changes the calling thread permanently.
        with ThreadPoolExecutor(1, f"netns-{sandbox_id}") as pool:
            return pool.submit(_bind, pid, port).result()
    except PermissionError as error:
        raise CannotEnterNamespace("entering a container's network needs root (CAP_SYS_ADMIN)") from error


def _check(pid: int, sandbox_id: str) -> None:
    """Raise `CannotEnterNamespace` if no process of the sandbox has this pid on this machine, or if the environment of
    the process cannot be read.

    If the Docker engine runs on another machine or in another process namespace, this pid belongs to some other process
    here.
    """
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except PermissionError as error:
        raise CannotEnterNamespace("entering a container's network needs root") from error
    except (FileNotFoundError, ProcessLookupError):
        environment = []
    if f"{SANDBOX_ID_VARIABLE}={sandbox_id}".encode() not in environment:
        raise CannotEnterNamespace(
            f"process {pid} of the container is not a process of this machine: the Docker engine has to run on the "
            "same Linux, not in a virtual machine or on another host"
        )


def _bind(pid: int, port: int) -> socket.socket:
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if libc.setns(namespace, CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"setns: {os.strerror(code)}")
    finally:
        os.close(namespace)
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", port))
        listening.listen(1024)
        listening.setblocking(False)
    except OSError:
        listening.close()
        raise
    return listening


HELPER = """
import socket, sys
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(("127.0.0.1", int(sys.argv[1])))
s.listen(1024)
out = socket.socket(socket.AF_UNIX)
out.connect("/handover/socket")
socket.send_fds(out, [b"x"], [s.fileno()])
out.recv(1)
"""
HELPER_SECONDS = 30.0


async def listen_by_helper(
    engine: aiodocker.Docker, sandbox: str, port: int, labels: dict[str, str], why: CannotEnterNamespace
) -> socket.socket:
    """Return the same kind of socket as `listen`, without root: a helper container opens it and passes it out.

    The container runs the default image, because that image has Python. `why`: why `listen` failed.
    """
    image = await find_image(engine, None)
    name = f"{sandbox}-net"
    loop = asyncio.get_running_loop()
    with (
        tempfile.TemporaryDirectory(prefix="polar-net-") as outer,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as door,
        contextlib.ExitStack() as connections,
    ):
        # The outer folder is private, so the inner one may be open.
        inner = Path(outer) / "s"
        inner.mkdir()
        inner.chmod(0o777)
        folder = os.open(inner, os.O_PATH)
        try:
            door.bind(f"/proc/self/fd/{folder}/socket")  # the path of a Unix socket has at most 107 bytes
        finally:
            os.close(folder)
        (inner / "socket").chmod(0o777)
        door.listen(1)
        config: dict[str, Any] = {
            "Image": image,
            "Entrypoint": ["python3", "-c", HELPER, str(port)],
            "Labels": labels,
            "HostConfig": {
                "NetworkMode": f"container:{sandbox}",
                "Binds": [f"{inner}:/handover"],
                "CapDrop": ["ALL"],
                "CapAdd": ["NET_BIND_SERVICE"] if 0 < port < 1024 else [],
                "SecurityOpt": ["no-new-privileges"],
            },
        }
        try:
            with translate_errors():
                container = await uncancellable(engine.containers.create(config, name=name))
                await uncancellable(container.start())
                ended = asyncio.ensure_future(container.wait())
                handover = asyncio.ensure_future(loop.sock_accept(door))
                await asyncio.wait({ended, handover}, timeout=HELPER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
                for task in (ended, handover):
                    task.cancel()
                if not handover.done() or handover.cancelled():
                    log = "".join(await container.log(stdout=True, stderr=True)).strip()
                    raise SandboxError(
                        f"no socket in the container's network: {why}; the helper container failed: {log}"
                    )
            # Closed after the helper was removed, which ends with it: Podman cannot remove a container that is ending.
            connection = connections.enter_context(handover.result()[0])
            connection.setblocking(True)
            fds = (await uncancellable(asyncio.to_thread(socket.recv_fds, connection, 1, 1)))[1]
        finally:
            await uncancellable(remove_container(engine, name))
    listening = socket.socket(fileno=fds[0])
    listening.setblocking(False)
    return listening
