"""Linux calls that Python does not have: namespaces, capabilities, process attributes."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import sys
from collections.abc import Callable, Sequence

LINUX = sys.platform == "linux"

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME = 1, 4, 15
PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 24, 36, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
NS_GET_USERNS = 0xB701
CLONE_NEWUSER = 0x10000000
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
CLONE_NEWNS = 0x00020000
MS_NOSUID, MS_NODEV, MS_NOATIME, MS_REC, MS_PRIVATE = 2, 4, 1024, 0x4000, 1 << 18
LOOP_CONFIGURE, LOOP_CTL_GET_FREE = 0x4C0A, 0x4C82
LO_FLAGS_AUTOCLEAR, LO_FLAGS_DIRECT_IO = 4, 16
CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SETPCAP = 5, 6, 7, 8

libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int = 0, third: int = 0) -> int:
    return int(libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(third), 0, 0))


def check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def rename_process(name: bytes) -> None:
    """Change the process name and command line, so that an agent's `pkill python` does not end the agent's own shim."""
    libc.prctl(PR_SET_NAME, ctypes.c_char_p(name), 0, 0, 0)
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if end > start > 0:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, name, min(len(name), end - start - 1))


def enter_namespaces(pid: int, with_rights: Callable[[], None]) -> None:
    """Join all namespaces of a process, as root or as the user who made them.

    `with_rights` is called while this process has all rights over the network that it has joined.

    bwrap nests two user namespaces: the outer one owns the other namespaces, the inner one has the processes. Joining
    needs the privileges of the outer one, so the order is: outer, the other namespaces, inner.
    """
    fds = {name: os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in ("cgroup", "ipc", "net", "uts", "pid")}
    fds["mnt"] = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    inner = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    outer = fcntl.ioctl(fds["mnt"], NS_GET_USERNS)
    own = os.stat("/proc/self/ns/user").st_ino
    if os.fstat(outer).st_ino != own:
        check(libc.setns(outer, CLONE_NEWUSER), "setns(user)")
    for name, fd in fds.items():
        check(libc.setns(fd, 0), f"setns({name})")
    with_rights()
    if os.fstat(inner).st_ino not in (own, os.fstat(outer).st_ino):
        check(libc.setns(inner, CLONE_NEWUSER), "setns(inner user)")
    for fd in (*fds.values(), inner, outer):
        os.close(fd)
    os.chdir("/")


def mount_image(image: str, folder: str) -> None:
    """Mount the file `image`, which contains a file system, in a new mount namespace of this process. Raises OSError
    if a step fails.

    Nothing has to be unmounted: the file is released when the last process of the namespace ends.
    """
    check(libc.unshare(CLONE_NEWNS), "unshare(mnt)")
    check(libc.mount(None, b"/", None, ctypes.c_ulong(MS_REC | MS_PRIVATE), None), "mount(private)")
    device, loop = _attach_loop_device(image)
    try:
        flags = ctypes.c_ulong(MS_NOSUID | MS_NODEV | MS_NOATIME)
        arguments = (device.encode(), folder.encode(), b"ext4", flags, b"discard,nobarrier")
        check(libc.mount(*arguments), f"mount({device})")
    finally:
        os.close(loop)


def _attach_loop_device(image: str) -> tuple[str, int]:
    """Attach a file to a free loop device, and return the device's name and an open descriptor of it.

    The kernel detaches the device when it is no longer mounted or open.
    """
    control = os.open("/dev/loop-control", os.O_RDWR)
    backing = os.open(image, os.O_RDWR | os.O_DIRECT)
    try:
        while True:
            device = f"/dev/loop{fcntl.ioctl(control, LOOP_CTL_GET_FREE)}"
            loop = os.open(device, os.O_RDWR)
            # struct loop_config: fd, block size, struct loop_info64 (flags at offset 52 of 232 bytes), reserved
            flags = LO_FLAGS_AUTOCLEAR | LO_FLAGS_DIRECT_IO
            config = struct.pack("II52xI176x64x", backing, 4096, flags)
            try:
                fcntl.ioctl(loop, LOOP_CONFIGURE, config)
            except OSError as error:
                os.close(loop)
                if error.errno != errno.EBUSY:  # EBUSY: another process was faster
                    raise
            else:
                return device, loop
    finally:
        os.close(backing)
        os.close(control)


def drop_privileges(keep: Sequence[int]) -> None:
    """Permanently drop all capabilities except those in `keep`, and make this process undumpable, so that programs in
    the sandbox cannot read its memory or descriptors."""
    _drop_bounding_set(keep)
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    kept = sum(1 << capability for capability in keep)
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    check(libc.capset(header, struct.pack("6I", kept, kept, 0, 0, 0, 0)), "capset")
    check(prctl(PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")
    prctl(PR_SET_DUMPABLE, 0)


def _drop_bounding_set(keep: Sequence[int] = ()) -> None:
    for capability in range(64):
        if capability not in keep and prctl(PR_CAPBSET_DROP, capability) != 0:
            if ctypes.get_errno() != errno.EINVAL:
                check(-1, "dropping a capability")
            break


def become_user(uid: int) -> None:
    """Switch this process to the user and the group with the number `uid`, without capabilities."""
    _drop_bounding_set()
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)  # leaves no user id 0, so the kernel clears all capabilities


class FilterProgram(ctypes.Structure):
    """The C structure `sock_fprog`, which holds a BPF program."""

    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))


def filter_system_calls(program: bytes) -> None:
    """Apply a BPF program to the system calls of this process and of its children. Needs no_new_privs."""
    argument = FilterProgram(len(program) // 8, program)
    check(libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(argument), 0, 0), "seccomp")
