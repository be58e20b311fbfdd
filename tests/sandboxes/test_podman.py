"""Podman serves Docker's API with differences."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sandboxes import docker_engine, seccomp
from sandboxes.base import SandboxUnavailable
from sandboxes.docker_engine import describe_engine, find_runtime, ignored_limits, remove_container, seccomp_option

DOCKER = {"Runtimes": {"runc": {}}, "DefaultRuntime": "runc", "SecurityOptions": ["name=seccomp,profile=default"]}
PODMAN = DOCKER | {"Runtimes": {"crun": {}, "runc": {}, "runsc": {}}, "BuildahVersion": "1.28.2", "Rootless": True}
"""What Podman 4.3.1 reports without gVisor: it lists every runtime that it could use."""


async def test_podman_reads_the_filter_of_system_calls_from_a_file(tmp_path: Path) -> None:
    option = await seccomp_option(PODMAN, tmp_path / "sandbox")
    name, _, path = option.partition("=")
    assert name == "seccomp"
    assert json.loads(Path(path).read_text()) == seccomp.docker_profile()


async def test_docker_gets_the_filter_itself(tmp_path: Path) -> None:
    option = await seccomp_option(DOCKER, tmp_path)
    assert json.loads(option.removeprefix("seccomp=")) == seccomp.docker_profile()
    assert list(tmp_path.iterdir()) == []


def test_a_runtime_that_podman_only_lists_is_not_taken() -> None:
    """The self-test would otherwise not try the system calls, which gVisor keeps from the host's kernel."""
    assert find_runtime(PODMAN, "auto") == "runc"
    assert find_runtime(PODMAN | {"DefaultRuntime": "runsc"}, "auto") == "runsc"
    with pytest.raises(SandboxUnavailable, match="install gVisor"):
        find_runtime(PODMAN, "runsc")


@pytest.mark.parametrize(
    ("info", "described"), [(PODMAN, "an ordinary user outside"), (DOCKER, "root inside is root outside")]
)
async def test_the_user_of_rootless_podman_is_described(
    monkeypatch: pytest.MonkeyPatch, info: dict[str, Any], described: str
) -> None:
    @asynccontextmanager
    async def client() -> AsyncIterator[Any]:
        yield SimpleNamespace(system=SimpleNamespace(info=lambda: _value(info)))

    monkeypatch.setattr(docker_engine, "docker_client", client)
    assert described in await describe_engine()


async def _value(value: Any) -> Any:
    return value


def test_limits_that_the_engine_ignores_are_named() -> None:
    wanted = {"Memory": 1 << 30, "PidsLimit": 100, "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}]}
    assert ignored_limits(wanted, wanted) == ()
    ignored = ignored_limits(wanted, {"Memory": 0, "NanoCpus": 0, "PidsLimit": 0, "Ulimits": []})
    assert [line.partition(":")[0] for line in ignored] == ["memory_mb", "pids", "file_mb", "open_files"]


async def test_a_container_that_ends_while_podman_kills_it_is_removed() -> None:
    """Podman 4.3.1 fails to remove it, and also the container whose network it shares."""

    class EndingContainer:
        attempts = 0
        ended = False

        async def delete(self, **options: bool) -> None:
            self.attempts += 1
            if not self.ended:
                message = "it could not be stopped: sending SIGKILL: container state improper: stopped"
                raise docker_engine.require_aiodocker().DockerError(500, message)

        async def wait(self) -> None:
            self.ended = True

    container = EndingContainer()
    engine: Any = SimpleNamespace(containers=SimpleNamespace(container=lambda name: container))
    assert await remove_container(engine, "polar-x-net")
    assert container.attempts == 2


async def test_sizes_are_asked_for_again_if_another_container_is_removed_meanwhile() -> None:
    class CountingEngine:
        failures = 2

        async def _query_json(self, path: str, **options: Any) -> dict[str, Any]:
            if path == "containers/polar-x/json":
                return {"SizeRw": 5, "Mounts": [{"Type": "volume", "Name": "home"}]}
            if self.failures:
                self.failures -= 1
                message = "failed to get state of container 437e: no such container"
                raise docker_engine.require_aiodocker().DockerError(500, message)
            return {"Volumes": [{"Name": "home", "UsageData": {"Size": 10}}, {"Name": "x", "UsageData": {"Size": 99}}]}

    engine: Any = CountingEngine()
    assert await docker_engine.container_bytes(engine, "polar-x") == 15
