"""Podman serves Docker's API with differences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sandboxes import seccomp
from sandboxes.docker_engine import seccomp_option


class Engine:
    """The part of a client that tells which engine it is."""

    def __init__(self, *components: str) -> None:
        self._components = [{"Name": name} for name in components]

    async def version(self) -> dict[str, Any]:
        return {"Version": "4.3.1", "Components": self._components}


async def test_podman_reads_the_filter_of_system_calls_from_a_file(tmp_path: Path) -> None:
    option = await seccomp_option(Engine("Podman Engine", "Conmon"), tmp_path)  # type: ignore[arg-type]
    name, _, path = option.partition("=")
    assert name == "seccomp"
    assert json.loads(Path(path).read_text()) == seccomp.docker_profile()
    assert [file.name for file in tmp_path.iterdir()] == [Path(path).name]


@pytest.mark.parametrize("components", [("Engine", "containerd"), ()], ids=["docker", "no components"])
async def test_docker_gets_the_filter_itself(tmp_path: Path, components: tuple[str, ...]) -> None:
    option = await seccomp_option(Engine(*components), tmp_path)  # type: ignore[arg-type]
    assert json.loads(option.removeprefix("seccomp=")) == seccomp.docker_profile()
    assert list(tmp_path.iterdir()) == []
