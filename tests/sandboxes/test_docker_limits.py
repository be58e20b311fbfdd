"""Which runtime containers use, and the limits of building a task's image."""

from __future__ import annotations

import contextlib
import json
import tarfile
import types
from collections.abc import AsyncIterator
from typing import Any

import pytest

from sandboxes import docker_engine, images
from sandboxes.base import SandboxError, SandboxUnavailable
from sandboxes.docker_engine import find_runtime
from sandboxes.images.from_folder import BuildLimits, build_image
from sandboxes.tree import TreeTooLarge


def test_gvisor_is_taken_if_the_engine_has_it() -> None:
    both = {"Runtimes": {"runc": {}, "runsc": {}}, "DefaultRuntime": "runc"}
    assert [find_runtime(both, wanted) for wanted in ("auto", "runc", "runsc")] == ["runsc", "runc", "runsc"]
    plain = {"Runtimes": {"runc": {}}, "DefaultRuntime": "runc"}
    assert find_runtime(plain, "auto") == "runc"
    with pytest.raises(SandboxUnavailable, match="install gVisor"):
        find_runtime(plain, "runsc")


async def test_a_list_of_changed_files_without_end_is_refused() -> None:
    class EndlessList:
        """The engine's list of the files that an agent made."""

        content = property(lambda self: self)
        closed = False

        async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
            yield b"["
            while True:
                yield b'{"Path":"/a","Kind":1},' * (size // 23)

        def close(self) -> None:
            self.closed = True

    answer = EndlessList()
    engine: Any = types.SimpleNamespace(_query=lambda *given, **more: contextlib.nullcontext(answer))
    with pytest.raises(TreeTooLarge, match="the list of changed files has more than"):
        await docker_engine.changed_names(engine, "container", "/workspace")
    assert answer.closed


def test_a_build_has_no_network_unless_it_is_granted() -> None:
    assert BuildLimits().parameters()["networkmode"] == "none"
    assert "networkmode" not in BuildLimits(network=True).parameters()


@pytest.mark.parametrize(
    ("podman", "limit"), [(False, {"Name": "fsize", "Soft": 1 << 20, "Hard": 1 << 20}), (True, "fsize=1048576:1048576")]
)
def test_the_size_of_a_file_of_a_build_is_limited_as_each_engine_reads_it(podman: bool, limit: object) -> None:
    assert json.loads(BuildLimits(file_mb=1).parameters(podman=podman)["ulimits"]) == [limit]


def context(command: str) -> bytes:
    dockerfile = f"FROM {images.tag()}\nRUN {command}\n"
    return docker_engine.pack_archive([(tarfile.TarInfo("Dockerfile"), dockerfile.encode())])


@pytest.mark.full
@pytest.mark.parametrize(
    ("command", "limits", "problem"),
    [
        ("test $(ls /sys/class/net) = lo", BuildLimits(), ""),
        ("test $(ls /sys/class/net) != lo", BuildLimits(), "The build has no network"),
        ("python3 -c 'bytearray(400 << 20)'", BuildLimits(memory_mb=128), "non-zero code: 137"),
        ("yes | head -c 100000000; sleep 60", BuildLimits(seconds=5), "not built within 5 s"),
    ],
)
async def test_a_build_is_limited(command: str, limits: BuildLimits, problem: str, reasons: dict[str, str]) -> None:
    if "docker" in reasons:
        pytest.skip(reasons["docker"])
    async with docker_engine.docker_client() as engine:
        info = await docker_engine.engine_info(engine)
        if info.get("Rootless") and info["CgroupVersion"] == "1":
            pytest.skip("rootless Podman can limit the memory of a build only with control groups v2")
        tag = "polar-build-test:latest"
        if not problem:
            await build_image(engine, context(command), tag, limits)
            await engine.images.delete(tag)
            return
        with pytest.raises(SandboxError) as raised:
            await build_image(engine, context(command), tag, limits)
    assert problem in str(raised.value)
    assert len(str(raised.value)) < 3000
