"""The command that builds the default image, with programs in place of the engines'."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandboxes.images import build, tag

ADDRESS = "unix:///run/user/1000/podman/podman.sock"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder that alone is on PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def install(folder: Path, name: str) -> None:
    """Write a program that logs its arguments, and that finds no image."""
    program = folder / name
    program.write_text(f'#!/bin/sh\necho "{name} $*" >>{folder}/log\ncase "$*" in *inspect*) exit 1;; esac\n')
    program.chmod(0o755)


def test_podman_builds_the_image_where_docker_is_not_installed(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(programs, "podman")
    monkeypatch.setenv("DOCKER_HOST", ADDRESS)
    assert build.build() == tag()
    inspected, built = (programs / "log").read_text().splitlines()
    assert inspected == f"podman --url {ADDRESS} image inspect {tag()}"
    assert built.startswith(f"podman --url {ADDRESS} build --tag {tag()} ")


def test_docker_builds_the_image_where_both_are_installed(programs: Path) -> None:
    install(programs, "podman")
    install(programs, "docker")
    build.build()
    assert [line.split()[0] for line in (programs / "log").read_text().splitlines()] == ["docker", "docker"]


def test_without_an_engines_command_the_build_says_which_to_install(programs: Path) -> None:
    with pytest.raises(build.BuildFailed, match="neither docker nor podman is installed"):
        build.build()
