"""The advice for docker and podman, with sockets and programs that the tests make. No podman runs here."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sandboxes.docker_remedy import docker_remedy

Listen = Callable[[str], Path]


@pytest.fixture
def listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Listen]:
    """Make a Unix socket in the folder that stands for /run."""
    monkeypatch.chdir(tmp_path)  # the path of a socket may have 107 characters only
    with ExitStack() as stack:

        def make(name: str) -> Path:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(name)
            return tmp_path / name

        yield make


def programs(*names: str) -> Callable[[str], str | None]:
    return lambda name: f"/usr/bin/{name}" if name in names else None


def test_the_socket_of_rootless_podman_is_advised(listen: Listen, tmp_path: Path) -> None:
    path = listen(f"user/{os.getuid()}/podman/podman.sock")
    listen("docker.sock")
    assert f"export DOCKER_HOST=unix://{path}" in docker_remedy(tmp_path, programs("podman", "dockerd"))


def test_podman_without_a_socket_is_started_first(tmp_path: Path) -> None:
    (tmp_path / "systemd" / "system").mkdir(parents=True)
    advice = docker_remedy(tmp_path, programs("podman"))
    assert advice.startswith("start Podman's engine: systemctl --user enable --now podman.socket")
    assert f"DOCKER_HOST=unix://{tmp_path}/user/{os.getuid()}/podman/podman.sock" in advice


def test_without_systemd_podman_is_started_in_the_background(tmp_path: Path) -> None:
    address = "unix://$HOME/podman.sock"
    advice = docker_remedy(tmp_path, programs("podman"))
    assert f"podman system service --time 0 {address} & export DOCKER_HOST={address}, then" in advice


def test_a_docker_engine_that_is_off_is_started(tmp_path: Path) -> None:
    assert "systemctl start docker" in docker_remedy(tmp_path, programs("dockerd"))


def test_without_an_engine_one_is_installed(tmp_path: Path) -> None:
    assert docker_remedy(tmp_path, programs()).startswith("install a Docker engine, or Podman")


def test_an_engine_that_answers_needs_only_the_image(listen: Listen, tmp_path: Path) -> None:
    listen("docker.sock")
    assert docker_remedy(tmp_path, programs("dockerd"), engine_answers=True) == "python -m sandboxes.images.build"


def test_a_folder_of_another_user_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "is_socket", refuse)
    assert docker_remedy(tmp_path, programs()).startswith("install a Docker engine, or Podman")
