"""The process that stands between the owner and the programs of one `process` or `bubblewrap` sandbox.

Run as a script by the owner's Python (`-I -S`, standard library only, single-threaded). It never runs inside a
bubblewrap sandbox as a file: it starts bwrap, then enters its namespaces and gives up every privilege, so nothing has
to be installed inside. It stays outside the process namespace, where a program inside can neither see nor signal it.

* The control socket is the lifeline: when it closes (the owner closed it, or died, even by `kill -9`), all ends.
* Each command runs below a *shim*: a fork of this process that is the subreaper of the command's whole tree. Whatever
  the command detaches (double fork, setsid, cleaned environment) is still the shim's, so that a kill finds it.

Messages are JSON after an 8-byte header (length, number of file descriptors), descriptors travel with the header.
"""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import json
import os
import resource
import selectors
import signal
import socket
import stat
import struct
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any, NoReturn

HEADER = struct.Struct("!II")
MAX_MESSAGE = 64 << 20
MAX_FDS = 16
LINUX = sys.platform == "linux"

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME = 1, 4, 15
PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 24, 36, 38
PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
NS_GET_USERNS = 0xB701
CLONE_NEWUSER = 0x10000000

libc = ctypes.CDLL(None, use_errno=True)


def frame(message: dict[str, Any], fds: Sequence[int] = ()) -> tuple[bytes, list[tuple[int, int, Any]]]:
    """A message as the arguments of `sendmsg`."""
    body = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    return HEADER.pack(len(body), len(fds)) + body, rights


class Channel:
    """Framed messages with file descriptors over a Unix stream socket; the blocking half of `supervised.py`."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()
        self._fds: deque[int] = deque()

    def send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        data, ancillary = frame(message, fds)
        sent = self.sock.sendmsg([data], ancillary)
        self.sock.sendall(data[sent:])

    def feed(self) -> bool:
        """Read once; False at the end of the stream."""
        data, ancillary, _flags, _addr = self.sock.recvmsg(1 << 16, socket.CMSG_SPACE(4 * MAX_FDS))
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
                for fd in fds:
                    os.set_inheritable(fd, False)
                self._fds.extend(fds)
        self._buffer += data
        return bool(data)

    def next(self) -> tuple[dict[str, Any], list[int]] | None:
        """The next whole message, if there is one. Its descriptors are the receiver's to close."""
        if len(self._buffer) < HEADER.size:
            return None
        length, count = HEADER.unpack_from(self._buffer)
        if length > MAX_MESSAGE or count > MAX_FDS:
            raise ValueError("malformed message on the control socket")
        if len(self._buffer) < HEADER.size + length or len(self._fds) < count:
            return None
        body = bytes(self._buffer[HEADER.size : HEADER.size + length])
        del self._buffer[: HEADER.size + length]
        return json.loads(body), [self._fds.popleft() for _ in range(count)]


def prctl(option: int, value: int = 0, third: int = 0) -> int:
    return int(libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(third), 0, 0))


def check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def rename_process(name: bytes) -> None:
    """Change comm and command line, so that an agent's `pkill python` does not end the shim of its own command."""
    libc.prctl(PR_SET_NAME, ctypes.c_char_p(name), 0, 0, 0)
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if end > start > 0:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, name, min(len(name), end - start - 1))


def enter_namespaces(pid: int) -> None:
    """Join all namespaces of a process, as root or as the user who made them.

    bwrap nests two user namespaces: the outer one owns the others, the inner one holds the processes. Joining needs
    the privileges of the outer one, so: outer, then the rest, then inner.
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
    if os.fstat(inner).st_ino not in (own, os.fstat(outer).st_ino):
        check(libc.setns(inner, CLONE_NEWUSER), "setns(inner user)")
    for fd in (*fds.values(), inner, outer):
        os.close(fd)
    os.chdir("/")


def drop_privileges() -> None:
    """No capability now or ever, and no reading of this process's memory or descriptors from inside."""
    for capability in range(64):
        if prctl(PR_CAPBSET_DROP, capability) != 0:
            if ctypes.get_errno() != errno.EINVAL:
                check(-1, "dropping a capability")
            break
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    check(libc.capset(header, b"\0" * 24), "capset")
    check(prctl(PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")
    prctl(PR_SET_DUMPABLE, 0)


# ---------------------------------------------------------------- the shim and the command


def descendants(root: int) -> set[int]:
    """All living processes below `root`."""
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
    todo = [root]
    while todo:
        for pid in children.get(todo.pop(), ()):
            if pid not in found:
                found.add(pid)
                todo.append(pid)
    return found


def kill_tree(root: int, group: int) -> None:
    """End everything below `root`: first stop it all, so that nothing can fork away, then kill."""
    if not LINUX:  # no /proc and no subreaper: the command's process group is what can be found
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
        return  # gone, or a set-user-id program in a `process` sandbox, which isolates nothing


def run_command(message: dict[str, Any], fds: list[int], cgroups: list[int], errors: int) -> NoReturn:
    """In the command's own process: set it up and become the program."""
    try:
        os.setsid()
        if LINUX:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for fd in cgroups:
            os.write(fd, b"0")
        for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        for name, value in message["rlimits"].items():
            which = getattr(resource, name)
            hard = resource.getrlimit(which)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (value, value))
        os.umask(0o022)
        os.chdir(message["cwd"])
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        argv, env = message["argv"], message["env"]
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        code = 127 if error.errno == errno.ENOENT and not missing_cwd(message) else 126
        where = message["cwd"] if missing_cwd(message) else message["argv"][0]
        os.write(errors, json.dumps([code, f"{where}: {os.strerror(error.errno or 0)}"]).encode())
    except BaseException as error:  # noqa: BLE001 - the last thing this process says
        os.write(errors, json.dumps([126, repr(error)]).encode())
    os._exit(126)


def missing_cwd(message: dict[str, Any]) -> bool:
    return not os.path.isdir(message["cwd"])


def shim(message: dict[str, Any], fds: list[int], cgroups: list[int], orders: int, status: int) -> None:
    """Parent and reaper of one command; ends when its tree is empty, when told so, or without the supervisor."""
    first = 3
    for fd in sorted([orders, status, *fds, *cgroups]):  # above all not the control socket: it is the lifeline
        os.closerange(first, fd)
        first = fd + 1
    os.closerange(first, 4096)
    os.setsid()
    if LINUX:
        rename_process(b"polar-init")
        prctl(PR_SET_DUMPABLE, 0)
        check(prctl(PR_SET_CHILD_SUBREAPER, 1), "subreaper")
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    failed_read, failed_write = os.pipe()
    command = os.fork()
    if command == 0:
        run_command(message, fds, cgroups, failed_write)
    os.close(failed_write)
    for fd in (*fds, *cgroups):
        os.close(fd)
    failure = os.read(failed_read, 1 << 16)
    os.close(failed_read)
    selector = selectors.DefaultSelector()
    selector.register(orders, selectors.EVENT_READ)
    selector.register(wake_read, selectors.EVENT_READ)
    killing = False
    while True:
        while True:
            try:
                pid, code = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                break
            if pid == command:
                exit_code = os.waitstatus_to_exitcode(code)
                exit_code = 128 - exit_code if exit_code < 0 else exit_code
                note = None
                if failure:
                    exit_code, note = json.loads(failure)
                report = json.dumps({"exit": exit_code, "note": note})
                os.write(status, report.encode() + b"\n")
        if killing:
            kill_tree(os.getpid(), command)
        for key, _events in selector.select(0.01 if killing else None):
            data = os.read(key.fd, 4096)
            if key.fd == orders:  # an order or the end of the supervisor: both mean kill
                killing = True
                kill_tree(os.getpid(), command)
                if not data:
                    selector.unregister(orders)


# ---------------------------------------------------------------- the supervisor


class Server:
    def __init__(self, control: Channel) -> None:
        self.control = control
        self.selector = selectors.DefaultSelector()
        self.orders: dict[int, int] = {}  # command id -> pipe to its shim
        self.shims: dict[int, tuple[int, int, bytearray]] = {}  # status fd -> command id, shim pid, text
        self.cgroups: list[int] = []
        self.init = 0
        self.init_fds: tuple[int, int] | None = None

    def start(self, config: dict[str, Any]) -> None:
        """Open the limits, start bwrap if asked to and move into its namespaces."""
        self.cgroups = [os.open(path, os.O_WRONLY) for path in config["cgroup_procs"]]
        if config["bwrap"]:
            inner = self.start_bwrap(config["bwrap"])
            enter_namespaces(inner)
            drop_privileges()
        self.control.send({"id": config["id"], "init": self.init})

    def start_bwrap(self, argv: list[str]) -> int:
        """Start bwrap around `cat`, the sandbox's init, and return the pid of its first process inside.

        cat's echo tells that all mounts stand; it ends with this process, because its stdin closes.
        """
        stdin_read, stdin_write = os.pipe()
        stdout_read, stdout_write = os.pipe()
        info_read, info_write = os.pipe()
        self.init = os.fork()
        if self.init == 0:
            try:
                for fd in self.cgroups:
                    os.write(fd, b"0")
                os.dup2(stdin_read, 0)
                os.dup2(stdout_write, 1)
                options = os.memfd_create("options", 0)  # not on the command line: programs inside could read that
                os.write(options, "\0".join(["--info-fd", str(info_write), *argv[1:]]).encode())
                os.lseek(options, 0, os.SEEK_SET)
                os.set_inheritable(info_write, True)
                os.execve(argv[0], ["bwrap", "--args", str(options), "--", "cat"], {"PATH": os.environ["PATH"]})
            finally:
                os._exit(127)
        for fd in (stdin_read, stdout_write, info_write):
            os.close(fd)
        os.write(stdin_write, b"\n")
        if os.read(stdout_read, 1) != b"\n":
            raise OSError(f"bwrap did not start the sandbox (see the lines above); exit {os.waitpid(self.init, 0)[1]}")
        with os.fdopen(info_read, "rb") as info:
            pid = int(json.loads(info.read())["child-pid"])
        self.init_fds = (stdin_write, stdout_read)
        self.selector.register(stdout_read, selectors.EVENT_READ)
        return pid

    def serve(self) -> None:
        self.selector.register(self.control.sock, selectors.EVENT_READ)
        while True:
            for key, _events in self.selector.select():
                if key.fileobj is self.control.sock:
                    if not self.control.feed():
                        return
                    while (request := self.control.next()) is not None:
                        self.answer(*request)
                elif self.init_fds and key.fd == self.init_fds[1]:
                    return  # init is gone, and all other processes inside with it
                else:
                    self.shim_says(key.fd)

    def answer(self, message: dict[str, Any], fds: list[int]) -> None:
        reply: dict[str, Any] = {"id": message["id"]}
        out: list[int] = []
        try:
            if message["op"] == "exec":
                self.exec(message, fds)
                return  # answered when it ends
            if message["op"] == "kill":
                self.kill(message["target"])
            elif message["op"] == "running":
                reply["running"] = len(self.shims)
            elif message["op"] == "open":
                out.append(open_file(message))
            elif message["op"] == "listen":
                out.append(listen(message["port"]))
        except OSError as error:
            reply["error"], reply["errno"] = str(error), error.errno
        finally:
            for fd in fds:
                os.close(fd)
        self.control.send(reply, out)
        for fd in out:
            os.close(fd)

    def exec(self, message: dict[str, Any], fds: list[int]) -> None:
        orders_read, orders_write = os.pipe()
        status_read, status_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 0
            try:
                shim(message, fds, self.cgroups, orders_read, status_write)
            except BaseException as error:  # noqa: BLE001 - a fork must never return into the server
                os.write(2, f"shim: {error!r}\n".encode())
                code = 70
            finally:
                os._exit(code)
        os.close(orders_read)
        os.close(status_write)
        self.orders[message["id"]] = orders_write
        self.shims[status_read] = (message["id"], pid, bytearray())
        self.selector.register(status_read, selectors.EVENT_READ)

    def kill(self, target: int | None) -> None:
        for ident, fd in self.orders.items():
            if target in (None, ident):
                try:
                    os.write(fd, b"k")
                except BrokenPipeError:
                    continue  # its tree is empty already

    def shim_says(self, fd: int) -> None:
        ident, pid, text = self.shims[fd]
        data = os.read(fd, 1 << 16)
        text += data
        if b"\n" in text:
            line, _, rest = bytes(text).partition(b"\n")
            text[:] = rest
            self.control.send({"id": ident, **json.loads(line)})
        if not data:
            self.selector.unregister(fd)
            os.close(fd)
            os.close(self.orders.pop(ident))
            del self.shims[fd]
            os.waitpid(pid, 0)
            # The owner ignores this if it already knows the exit status.
            self.control.send({"id": ident, "gone": True})

    def end(self) -> None:
        """End bwrap (its process namespace dies with it), or tell every shim to kill its tree; wait for both."""
        if self.init:
            send_signal(self.init, signal.SIGKILL)
        self.kill(None)
        for _ident, pid, _text in self.shims.values():
            os.waitpid(pid, 0)
        if self.init:
            try:
                os.waitpid(self.init, 0)
            except ChildProcessError:
                return


def open_file(message: dict[str, Any]) -> int:
    """Open a regular file for the owner, with this process's own (inside) view of paths."""
    path = message["path"]
    if not message["write"]:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            os.close(fd)
            code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(code, "not a regular file", path)
        return fd
    os.umask(0o022)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    # O_NONBLOCK: a FIFO without a reader fails instead of blocking the supervisor.
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o600)
    os.fchmod(fd, message["mode"])
    return fd


def listen(port: int) -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))
        sock.listen(1024)
        return sock.detach()


def main() -> int:
    # A daemon of the owner: Ctrl-C in the owner's terminal is the owner's affair.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = Channel(socket.socket(fileno=int(sys.argv[1])))
    control.sock.set_inheritable(False)
    while (first := control.next()) is None:
        if not control.feed():
            return 0
    server = Server(control)
    try:
        server.start(first[0])
        server.serve()
    except BrokenPipeError:
        return 0  # the owner is gone in the middle of an answer
    finally:
        server.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
