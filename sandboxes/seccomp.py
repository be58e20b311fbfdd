"""The system calls that a sandbox refuses, because they reach rarely used parts of the kernel and no agent needs them.

The same list becomes a BPF program (bubblewrap; see seccomp(2)) and a profile of the Docker engine.

* A refused call returns EPERM. The call `socket` returns EAFNOSUPPORT for a family that is not allowed.
* `clone3` returns ENOSYS, because its flags lie in memory, where a filter cannot read them; programs then use `clone`.
* Debuggers (`ptrace`) do not work inside, because tested code could otherwise change the program that tests it.
"""

from __future__ import annotations

import errno
import platform
import struct
from typing import Any

# Numbers on (x86_64, aarch64); None: the architecture does not have the call.
REFUSED: dict[str, tuple[int | None, int | None]] = {
    # mounts, and files by handle
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "pivot_root": (155, 41),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "setns": (308, 268),
    "umount2": (166, 39),
    # other processes
    "kcmp": (312, 272),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "pidfd_getfd": (438, 438),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    # kernel facilities with a long history of faults
    "add_key": (248, 217),
    "bpf": (321, 280),
    "fanotify_init": (300, 262),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "keyctl": (250, 219),
    "lookup_dcookie": (212, 18),
    "mbind": (237, 235),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "request_key": (249, 218),
    "set_mempolicy": (238, 237),
    "set_mempolicy_home_node": (450, 450),
    "userfaultfd": (323, 282),
    # the machine as a whole
    "_sysctl": (156, None),
    "acct": (163, 89),
    "clock_adjtime": (305, 266),
    "clock_settime": (227, 112),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "init_module": (175, 105),
    "ioperm": (173, None),
    "iopl": (172, None),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "nfsservctl": (180, 42),
    "reboot": (169, 142),
    "setdomainname": (171, 162),
    "sethostname": (170, 161),
    "settimeofday": (164, 170),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "sysfs": (139, None),
    "syslog": (103, 116),
    "uselib": (134, None),
    "ustat": (136, None),
    "vhangup": (153, 58),
}
CLONE, CLONE3, UNSHARE, SOCKET, IOCTL = (56, 220), (435, 435), (272, 97), (41, 198), (16, 29)
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

NAMESPACE_FLAGS = (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000)
"""Flags that make new namespaces: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""
CLONE_NEWTIME = 0x80  # for `unshare` alone: in `clone` these bits are the exit signal
TERMINAL_INJECTION = (0x5412, 0x541C)
"""Refused requests of `ioctl`: TIOCSTI and TIOCLINUX, which write input into a terminal."""
AF_NETLINK, NETLINK_ROUTE = 16, 0
SOCKET_FAMILIES = (1, 2, 10, AF_NETLINK)
"""Allowed families: AF_UNIX, AF_INET, AF_INET6 and AF_NETLINK. Of AF_NETLINK, only the protocol NETLINK_ROUTE is
allowed, which lists network interfaces."""

_LOAD, _RETURN = 0x20, 0x06
_JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT = 0x15, 0x35, 0x45
_ERRNO = 0x00050000
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in `struct seccomp_data`
_X32 = 0x40000000

Instruction = tuple[int, int, int, int]
"""A `struct sock_filter`: operation, number of instructions to skip if true, number to skip if false, operand."""
_ALLOW: Instruction = (_RETURN, 0, 0, 0x7FFF0000)


def _argument(index: int) -> int:
    """Return the offset of the low 32 bits of an argument (both architectures are little-endian)."""
    return 16 + 8 * index


def _load(offset: int) -> Instruction:
    return _LOAD, 0, 0, offset


def _refuse(code: int) -> Instruction:
    return _RETURN, 0, 0, _ERRNO | code


def _if(jump: int, value: int, action: Instruction) -> list[Instruction]:
    return [(jump, 0, 1, value), action]


def _unless(jump: int, value: int, action: Instruction) -> list[Instruction]:
    return [(jump, 1, 0, value), action]


def _only_for(call: int, checks: list[Instruction]) -> list[Instruction]:
    """Return instructions that run `checks` for this system call only, and allow the call if no check refuses it."""
    return [(_JUMP_EQUAL, 0, len(checks) + 1, call), *checks, _ALLOW]


def bpf_program(machine: str | None = None) -> bytes | None:
    """Return the filter as an array of `struct sock_filter`, or None if the architecture is not in `ARCHITECTURES`.

    `machine`: as `platform.machine()` names it; None: this machine.
    """
    machine = machine or platform.machine()
    if machine not in ARCHITECTURES:
        return None
    column = list(ARCHITECTURES).index(machine)
    refuse, unknown, no_family = _refuse(errno.EPERM), _refuse(errno.ENOSYS), _refuse(errno.EAFNOSUPPORT)
    program = [
        _load(_ARCHITECTURE),
        *_unless(_JUMP_EQUAL, ARCHITECTURES[machine], unknown),  # programs of 32 bits have other numbers
        _load(_NUMBER),
        *_if(_JUMP_GREATER_EQUAL, _X32, unknown),
        *_if(_JUMP_EQUAL, CLONE3[column], unknown),
    ]
    for numbers in REFUSED.values():
        if (number := numbers[column]) is not None:
            program += _if(_JUMP_EQUAL, number, refuse)
    flags = sum(NAMESPACE_FLAGS)
    program += _only_for(CLONE[column], [_load(_argument(0)), *_if(_JUMP_ANY_BIT, flags, refuse)])
    program += _only_for(UNSHARE[column], [_load(_argument(0)), *_if(_JUMP_ANY_BIT, flags | CLONE_NEWTIME, refuse)])
    injections = [line for request in TERMINAL_INJECTION for line in _if(_JUMP_EQUAL, request, refuse)]
    program += _only_for(IOCTL[column], [_load(_argument(1)), *injections])
    families = [line for family in SOCKET_FAMILIES[:-1] for line in _if(_JUMP_EQUAL, family, _ALLOW)]
    netlink = _unless(_JUMP_EQUAL, AF_NETLINK, no_family)
    routes = [_load(_argument(2)), *_unless(_JUMP_EQUAL, NETLINK_ROUTE, no_family)]
    program += _only_for(SOCKET[column], [_load(_argument(0)), *families, *netlink, *routes])
    program.append(_ALLOW)
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def docker_profile() -> dict[str, Any]:
    """Return the filter of `bpf_program` as a profile for the Docker engine (`--security-opt seccomp=`)."""

    def rule(names: list[str], code: int, *conditions: dict[str, Any]) -> dict[str, Any]:
        return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": code, "args": list(conditions)}

    def condition(index: int, operator: str, value: int, second: int = 0) -> dict[str, Any]:
        return {"index": index, "op": f"SCMP_CMP_{operator}", "value": value, "valueTwo": second}

    rules = [rule(sorted(REFUSED), errno.EPERM), rule(["clone3"], errno.ENOSYS)]
    for flag in NAMESPACE_FLAGS:
        rules.append(rule(["clone", "unshare"], errno.EPERM, condition(0, "MASKED_EQ", flag, flag)))
    rules.append(rule(["unshare"], errno.EPERM, condition(0, "MASKED_EQ", CLONE_NEWTIME, CLONE_NEWTIME)))
    rules += [rule(["ioctl"], errno.EPERM, condition(1, "EQ", value)) for value in TERMINAL_INJECTION]
    refused_families = set(range(max(SOCKET_FAMILIES))) - set(SOCKET_FAMILIES)
    rules += [rule(["socket"], errno.EAFNOSUPPORT, condition(0, "EQ", family)) for family in sorted(refused_families)]
    rules.append(rule(["socket"], errno.EAFNOSUPPORT, condition(0, "GT", max(SOCKET_FAMILIES))))
    other_protocol = (condition(0, "EQ", AF_NETLINK), condition(2, "NE", NETLINK_ROUTE))
    rules.append(rule(["socket"], errno.EAFNOSUPPORT, *other_protocol))
    return {
        "defaultAction": "SCMP_ACT_ALLOW",
        "architectures": ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"],
        "syscalls": rules,
    }
