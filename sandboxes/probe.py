"""Try the ways out of a sandbox from inside it. `self_test` runs the text of this file in the sandbox, with the
sandbox's Python 3.7 or newer.

Reads one JSON document from stdin, which `self_test.probe_input` describes. Prints a JSON list of texts: one for each
way out that is open, and one if the gateway cannot be reached from inside.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import stat
import sys
from collections.abc import Iterator
from typing import Any

Input = Any  # a JSON document

WRITABLE = (
    *("/proc/sys/kernel/core_pattern", "/proc/sys/kernel/hostname", "/proc/sys/kernel/modprobe"),
    *("/proc/sys/vm/overcommit_memory", "/proc/sys/fs/binfmt_misc/register", "/proc/sysrq-trigger"),
    *("/sys/kernel/uevent_helper", "/sys/power/state", "/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/release_agent"),
    *("/sys/fs/cgroup/memory/release_agent", "/sys/fs/cgroup/pids/release_agent"),
)
READABLE = ("/dev/mem", "/dev/kmem", "/dev/kmsg", "/proc/kcore", "/proc/kmsg", "/sys/kernel/debug/sched")
SOCKETS = (
    *("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", "/run/podman/podman.sock"),
    *("/run/dbus/system_bus_socket", "/run/systemd/private", "/var/run/crio/crio.sock"),
)
DEVICES = {
    *("null", "zero", "full", "random", "urandom", "tty", "console", "ptmx", "pts", "shm", "mqueue", "fd", "core"),
    *("stdin", "stdout", "stderr"),
}


def opens(path: str, flags: int) -> bool:
    try:
        os.close(os.open(path, flags | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def connects(family: int, kind: int, address: Any) -> bool:
    try:
        with socket.socket(family, kind) as link:
            link.settimeout(2)
            link.connect(address)
            # On loopback, the kernel may choose the target port as the socket's own, and then connect it to itself.
            return kind != socket.SOCK_STREAM or family == socket.AF_UNIX or link.getsockname() != link.getpeername()
    except OSError:
        return False


def files(given: Input) -> Iterator[str]:
    for path in WRITABLE:
        if opens(path, os.O_WRONLY):
            yield f"{path} can be opened for writing"
    for path in given["read_only"]:
        if os.access(path, os.W_OK):
            yield f"files can be made in the host's {path}"
    for path in READABLE:
        if opens(path, os.O_RDONLY):
            yield f"{path} can be read"
    for path in given["hidden"]:
        if os.path.exists(path):
            yield f"the host's {path} is visible"
    for path in SOCKETS:
        if connects(socket.AF_UNIX, socket.SOCK_STREAM, path):
            yield f"the host's socket {path} answers"
    emulated = {"fuse"} if given["own_kernel"] else set()  # gVisor's own, which does not lead to the host's kernel
    for name in sorted(set(os.listdir("/dev")) - DEVICES - emulated):
        if stat.S_ISBLK(os.lstat("/dev/" + name).st_mode) or opens("/dev/" + name, os.O_RDONLY):
            yield f"the device /dev/{name} can be opened"


def network(given: Input) -> Iterator[str]:
    if connects(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", given["port"])):
        yield "the host's loopback interface answers"
    if connects(socket.AF_UNIX, socket.SOCK_STREAM, "\0" + given["abstract"]):
        yield "the host's abstract Unix sockets answer"
    if not connects(socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", given["gateway_port"])):
        yield "the gateway cannot be reached from inside (gVisor needs the runtime argument --network=host)"
    # Connecting a datagram socket sends nothing; it succeeds if there is a route.
    if connects(socket.AF_INET, socket.SOCK_DGRAM, ("192.0.2.1", 9)):
        yield "there is a route to other networks (IPv4)"
    if connects(socket.AF_INET6, socket.SOCK_DGRAM, ("2001:db8::1", 9)):
        yield "there is a route to other networks (IPv6)"


def sockets(given: Input) -> Iterator[str]:
    for name, family, kind, protocol in given["families"]:
        try:
            socket.socket(family, kind, protocol).close()
        except OSError:
            continue
        yield f"a socket of the family {name} can be opened"


def calls(given: Input) -> Iterator[str]:
    libc = ctypes.CDLL(None, use_errno=True)
    for name, numbers in given["calls"].items():
        ctypes.set_errno(0)
        result = libc.syscall(*[ctypes.c_long(number) for number in numbers])
        if result >= 0 or ctypes.get_errno() not in (1, 38):  # EPERM, ENOSYS
            yield f"the system call {name} is not refused"


def identity(given: Input) -> Iterator[str]:
    with open("/proc/self/status") as file:
        status = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    for name in ("CapEff", "CapPrm", "CapBnd"):
        if int(status[name], 16):
            yield f"programs have capabilities: {name} {status[name]}"
    if status.get("NoNewPrivs", "1") != "1":
        yield "programs can gain privileges by set-user-id files"
    for name, link in given["namespaces"].items():
        if os.path.exists("/proc/self/ns/" + name) and os.readlink("/proc/self/ns/" + name) == link:
            yield f"the {name} namespace is the host's"
    if given["not_root"]:
        with open("/proc/self/uid_map") as file:
            ranges = [list(map(int, line.split())) for line in file]
        uid = os.getuid()
        if any(inside <= uid < inside + count and outside + uid == inside for inside, outside, count in ranges):
            yield "programs run as the host's root"


def others(given: Input) -> Iterator[str]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/environ", "rb") as file:
                    visible = given["token"].encode() in file.read()
            except OSError:
                continue
            if visible:
                yield "the processes of Polar are visible"
    for path in given["hidden"]:
        if os.path.exists("/proc/1/root" + path):
            yield f"the host's {path} is visible through /proc/1/root"


def main() -> None:
    given = json.load(sys.stdin)
    checks = [files, network, identity, others] + ([] if given["own_kernel"] else [sockets, calls])
    opened: list[str] = []
    for check in checks:
        opened += check(given)
    print(json.dumps(opened))


main()
