"""A listening socket inside another network namespace, served by this process.

The namespace of a sandbox has a loopback interface and nothing else. A socket keeps the namespace it was made in, so a
thread visits the namespace for the moment of `bind`; afterwards the owner accepts on it like on any other socket.
Nothing runs inside for it, and no firewall rule is needed. The socket keeps the namespace alive: close it.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
from pathlib import Path

from .base import MARKER, SandboxError

CLONE_NEWNET = 0x40000000


def listen(pid: int, ident: str, port: int) -> socket.socket:
    """Bind 127.0.0.1:`port` in the network namespace of `pid`, a process of sandbox `ident`. Blocking; needs root."""
    _check(pid, ident)
    result: list[socket.socket | OSError] = []

    def visit() -> None:
        # A thread of its own, which ends: setns changes the calling thread alone, for good.
        try:
            result.append(_bind(pid, port))
        except OSError as error:
            result.append(error)

    thread = threading.Thread(target=visit, name=f"netns-{ident}")
    thread.start()
    thread.join()
    if isinstance(result[0], PermissionError):
        raise SandboxError(
            "entering a container's network needs root (CAP_SYS_ADMIN): run as root, or use the bubblewrap sandbox"
        ) from result[0]
    if isinstance(result[0], OSError):
        raise result[0]
    return result[0]


def _check(pid: int, ident: str) -> None:
    """The engine may live in another machine or process namespace, where its pid means some other process."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except PermissionError as error:
        raise SandboxError(
            "entering a container's network needs root: run as root, or use the bubblewrap sandbox"
        ) from error
    except (FileNotFoundError, ProcessLookupError):
        environment = []
    if f"{MARKER}={ident}".encode() not in environment:
        raise SandboxError(
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
