"""The shim: parent and reaper of one command and of all processes that the command detaches."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import selectors
import signal
from collections.abc import Iterator
from typing import Any, NoReturn

from . import kernel


class Identity:
    """The user that commands run as, and the filter of their system calls.

    `uid` is set if Polar runs as root. Commands then run as this user, so they cannot signal the supervisor and the
    shims, which stay root. Of root's capabilities, the supervisor and the shims keep only the few that they need
    to start and end processes of another user.
    """

    def __init__(self, uid: int | None = None, program: bytes = b"") -> None:
        self.uid = uid
        self.program = program

    @property
    def supervisor_capabilities(self) -> tuple[int, ...]:
        if self.uid is None:
            return ()
        return (kernel.CAP_KILL, kernel.CAP_SETGID, kernel.CAP_SETUID, kernel.CAP_SETPCAP)

    @contextlib.contextmanager
    def files(self) -> Iterator[None]:
        """Access files with the rights of the user that commands run as, until the block ends."""
        if self.uid is not None:
            os.setegid(self.uid)
            os.seteuid(self.uid)
        try:
            yield
        finally:
            if self.uid is not None:
                os.seteuid(0)
                os.setegid(0)

    def assume(self) -> None:
        """Switch this process to the user `uid`, if it is set. Irreversible: only for the command's own process."""
        if self.uid is not None:
            kernel.become_user(self.uid)

    def filter_system_calls(self) -> None:
        if self.program:
            kernel.filter_system_calls(self.program)


def descendants(*roots: int) -> set[int]:
    """Return all living descendants of these processes."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    state, ppid = file.read().rpartition(b")")[2].split()[:2]
            except (FileNotFoundError, ProcessLookupError):
                continue
            if state not in (b"Z", b"X"):
                parents[int(entry)] = int(ppid)
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found: set[int] = set()
    todo = list(roots)
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in found:
                found.add(pid)
                todo.append(pid)
    return found


def kill_tree(root: int, group: int) -> None:
    """Kill all descendants of `root`. They are stopped first, so that none can fork away."""
    if not kernel.LINUX:  # no /proc and no subreaper: only the command's process group can be found
        try:
            os.killpg(group, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return
        return
    seen: set[int] = set()
    while fresh := descendants(root) - seen:
        for pid in fresh:
            send_signal(pid, signal.SIGSTOP)
        seen |= fresh
    for pid in seen:
        send_signal(pid, signal.SIGKILL)


def send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        return  # it ended, or is a set-user-id program in a `process` sandbox, which isolates nothing


def run_command(
    message: dict[str, Any], fds: list[int], cgroups: list[int], identity: Identity, errors: int
) -> NoReturn:
    """Apply the command's limits, identity, folder and files to this forked process, and execute its program in it."""
    try:
        os.setsid()
        for fd in cgroups:
            os.write(fd, b"0")
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        for name, value in message["rlimits"].items():
            which = getattr(resource, name)
            hard = resource.getrlimit(which)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (value, value))
        identity.assume()
        if kernel.LINUX:
            kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which clears it
        os.umask(0o022)
        os.chdir(message["cwd"])
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        argv, env = message["argv"], message["env"]
        identity.filter_system_calls()
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        code = 127 if error.errno == errno.ENOENT and not missing_cwd(message) else 126
        where = message["cwd"] if missing_cwd(message) else message["argv"][0]
        os.write(errors, json.dumps([code, f"{where}: {os.strerror(error.errno or 0)}"]).encode())
    except BaseException as error:  # noqa: BLE001 - the last report of this process
        os.write(errors, json.dumps([126, repr(error)]).encode())
    os._exit(126)


def missing_cwd(message: dict[str, Any]) -> bool:
    return not os.path.isdir(message["cwd"])


def start_command(message: dict[str, Any], fds: list[int], cgroups: list[int], identity: Identity) -> tuple[int, bytes]:
    """Start the command. Return its pid, and the error of `run_command` if the program could not be executed."""
    failed_read, failed_write = os.pipe()
    command = os.fork()
    if command == 0:
        run_command(message, fds, cgroups, identity, failed_write)
    os.close(failed_write)
    for fd in (*fds, *cgroups):
        os.close(fd)
    failure = os.read(failed_read, 1 << 16)
    os.close(failed_read)
    return command, failure


def exit_report(wait_status: int, failure: bytes) -> bytes:
    exit_code, note = os.waitstatus_to_exitcode(wait_status), None
    if exit_code < 0:
        exit_code = 128 - exit_code
    if failure:
        exit_code, note = json.loads(failure)
    return json.dumps({"exit": exit_code, "note": note}).encode() + b"\n"


def shim(
    message: dict[str, Any], fds: list[int], cgroups: list[int], identity: Identity, orders: int, status: int
) -> None:
    """Run one command and reap its processes until none is left. If the supervisor orders it, or ends, kill them."""
    first = 3
    # Close everything else. Above all the control socket, whose end ends the sandbox, must not stay open here.
    for fd in sorted([orders, status, *fds, *cgroups]):
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, 4096)
    os.setsid()
    if kernel.LINUX:
        kernel.rename_process(b"polar-init")
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        kernel.check(kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1), "subreaper")
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    command, failure = start_command(message, fds, cgroups, identity)
    selector = selectors.DefaultSelector()
    selector.register(orders, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)
    killing = False
    while True:
        try:
            pid, wait_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return  # no process is left
        if pid == command:
            os.write(status, exit_report(wait_status, failure))
        if pid != 0:
            continue
        if killing:
            kill_tree(os.getpid(), command)
        for key, _events in selector.select(0.01 if killing else None):
            data = os.read(key.fd, 4096)
            if key.fd == orders:  # an order, or the end of the supervisor: both mean kill
                killing = True
                if not data:
                    selector.unregister(orders)
