"""Advice for a machine on which the docker sandbox does not work: how to start its engine, or how to install one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

BUILD_IMAGE = "python -m sandboxes.images.build"


def docker_remedy(
    run_folder: Path = Path("/run"),
    find_program: Callable[[str], str | None] = shutil.which,
    *,
    engine_answers: bool = False,
) -> str:
    """Return what to do so that the docker sandbox works here. `engine_answers`: the engine works, only the image is
    missing.

    Podman serves Docker's API on a socket. The socket is off by default, and DOCKER_HOST must name it.
    """
    if engine_answers:
        return BUILD_IMAGE
    rootless = run_folder / "user" / str(os.getuid()) / "podman" / "podman.sock"
    rootful = run_folder / "podman" / "podman.sock"
    for socket in (rootless, rootful):
        if _is_socket(socket) and os.access(socket, os.W_OK):
            return f"use Podman's engine: export DOCKER_HOST=unix://{socket}, then: {BUILD_IMAGE}"
    if find_program("podman") is not None:
        if (run_folder / "systemd" / "system").is_dir():
            start, address = "systemctl --user enable --now podman.socket;", f"unix://{rootless}"
        else:
            address = "unix://$HOME/podman.sock"
            start = f"podman system service --time 0 {address} &"
        return f"start Podman's engine: {start} export DOCKER_HOST={address}, then: {BUILD_IMAGE}"
    socket = run_folder / "docker.sock"
    if _is_socket(socket) and not os.access(socket, os.W_OK):
        return f"let your user use {socket}: sudo usermod -aG docker $USER, and log in again; then: {BUILD_IMAGE}"
    if find_program("dockerd") is not None or _is_socket(socket):
        return f"start the Docker engine: sudo systemctl start docker, then: {BUILD_IMAGE}"
    return f"install a Docker engine, or Podman, then: {BUILD_IMAGE}"


def _is_socket(path: Path) -> bool:
    try:
        return path.is_socket()
    except PermissionError:  # in a folder of another user, such as Podman's of root
        return False
