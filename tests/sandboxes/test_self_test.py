"""The self-test names what opens, and a kind of sandbox that lets programs out is refused."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandboxes import bubblewrap, docker_engine, self_test
from sandboxes.base import SandboxKind, SandboxUnavailable
from sandboxes.self_test import SandboxLeaks, SelfTests, find_leaks

pytestmark = pytest.mark.slow

isolating = pytest.mark.parametrize(
    "kind", ["bubblewrap", pytest.param("docker", marks=pytest.mark.full)], indirect=True
)
bubblewrap_only = pytest.mark.parametrize("kind", ["bubblewrap"], indirect=True)


@isolating
async def test_nothing_opens(kind: SandboxKind, state_dir: Path) -> None:
    assert await find_leaks(kind, state_dir=state_dir) == []


@pytest.mark.full
async def test_nothing_opens_under_gvisor(reasons: dict[str, str], state_dir: Path) -> None:
    """Its kernel has devices of its own, which are no way out."""
    if "docker" in reasons:
        pytest.skip(reasons["docker"])
    async with docker_engine.docker_client() as engine:
        info = await docker_engine.engine_info(engine)
        try:
            docker_engine.find_runtime(info, "runsc")
        except SandboxUnavailable as error:
            pytest.skip(f"{error} (here: POLAR_GVISOR=1 scripts/with_services.sh ...)")
    assert await find_leaks("docker", runtime="runsc", state_dir=state_dir) == []


@bubblewrap_only
@pytest.mark.parametrize(
    ("removed", "added", "named"),
    [
        (["--unshare-net"], [], "the host's loopback interface answers"),
        (["--unshare-pid"], [], "the pid namespace is the host's"),
        ([], ["--bind", "/tmp", "/tmp"], "is visible"),
        ([], ["--dev-bind", "/dev", "/dev"], "the device /dev/"),
    ],
)
async def test_names_what_opens(
    kind: SandboxKind,
    state_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    removed: list[str],
    added: list[str],
    named: str,
) -> None:
    command = bubblewrap.bwrap_command
    open_command = [word for word in command() if word not in removed] + added
    monkeypatch.setattr(bubblewrap, "bwrap_command", lambda *given: open_command)
    assert named in "; ".join(await find_leaks(kind, state_dir=state_dir) or [])


@bubblewrap_only
async def test_names_system_calls_and_sockets_without_a_filter(
    kind: SandboxKind, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bubblewrap.seccomp, "bpf_program", lambda: None)
    found = "; ".join(await find_leaks(kind, state_dir=state_dir) or [])
    assert "the system call keyctl is not refused" in found
    assert "a socket of the family AF_VSOCK can be opened" in found


@bubblewrap_only
async def test_the_gateways_port_inside_is_not_taken_for_one_of_the_host(
    kind: SandboxKind, state_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have a network of their own, so the host may give out the same number."""
    listen = bubblewrap.BubblewrapSandbox.listen
    create_server = socket.create_server
    ports: list[int] = []

    async def listen_inside(sandbox: bubblewrap.BubblewrapSandbox, port: int = 0) -> socket.socket | None:
        listener = await listen(sandbox, port)
        assert listener is not None
        ports.append(listener.getsockname()[1])
        return listener

    def create_at_the_same_port(address: tuple[str, int]) -> socket.socket:
        return create_server((address[0], ports.pop() if ports else 0))

    monkeypatch.setattr(bubblewrap.BubblewrapSandbox, "listen", listen_inside)
    monkeypatch.setattr(socket, "create_server", create_at_the_same_port)
    assert await find_leaks(kind, state_dir=state_dir) == []


@pytest.mark.parametrize(("user", "tried"), [(0, True), (1000, False)])
def test_programs_of_an_ordinary_user_are_not_taken_for_root(
    user: int, tried: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user namespace that bwrap puts around theirs has a root, which is this user."""
    monkeypatch.setattr("os.geteuid", lambda: user)
    assert self_test.probe_input("bubblewrap")["not_root"] == tried


def test_a_socket_that_meets_itself_reaches_nothing() -> None:
    """The kernel may choose the port that nobody listens at as the socket's own."""

    class Unlucky(socket.socket):
        def connect(self, address: tuple[str, int]) -> None:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(address)
            super().connect(address)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()
        probe = probe_functions()
        assert probe["connects"](socket.AF_INET, socket.SOCK_STREAM, address)
    probe["socket"] = SimpleNamespace(**vars(socket) | {"socket": Unlucky})
    assert not probe["connects"](socket.AF_INET, socket.SOCK_STREAM, address)


def probe_functions() -> dict[str, Any]:
    functions: dict[str, Any] = {}
    exec(self_test.PROBE.removesuffix("main()\n"), functions)
    return functions


def use_leaks(monkeypatch: pytest.MonkeyPatch, found: list[str] | None) -> list[str]:
    """Replace the test by one with this result; return the list of tested kinds."""
    tested: list[str] = []

    async def fake(kind: SandboxKind, *given: object) -> list[str] | None:
        tested.append(kind)
        return found

    monkeypatch.setattr(self_test, "find_leaks", fake)
    return tested


async def test_a_kind_that_leaks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = use_leaks(monkeypatch, ["/proc/sys can be written"])
    tests = SelfTests("refuse")
    for _ in range(2):
        with pytest.raises(SandboxLeaks, match=r"bubblewrap sandbox fails its self-test.*/proc/sys.*self_test"):
            await tests.require("bubblewrap")
    assert tested == ["bubblewrap"]


async def test_the_setting_can_warn_or_skip(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tested = use_leaks(monkeypatch, ["/proc/sys can be written"])
    with caplog.at_level(logging.WARNING):
        await SelfTests("warn").require("docker")
    assert "/proc/sys can be written" in caplog.text
    await SelfTests("off").require("docker")
    await SelfTests("refuse").require("process")
    assert tested == ["docker"]


async def test_many_wait_for_one_test(monkeypatch: pytest.MonkeyPatch) -> None:
    tested = use_leaks(monkeypatch, [])
    tests = SelfTests()
    tests.start("bubblewrap")
    await asyncio.gather(*(tests.require("bubblewrap") for _ in range(5)))
    assert tested == ["bubblewrap"]
    await tests.close()


async def test_an_image_without_python_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    use_leaks(monkeypatch, None)
    await SelfTests().require("docker")
    assert "no python3" in caplog.text
