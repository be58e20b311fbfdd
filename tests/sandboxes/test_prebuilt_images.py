"""Prebuilt images: named by their content, built once, with the same files as on this machine."""

from __future__ import annotations

import contextlib
import io
import os
import tarfile
import uuid
from pathlib import Path

import pytest

from sandboxes import docker_engine
from sandboxes.base import SandboxSpec, SandboxUnavailable
from sandboxes.choice import open_sandbox
from sandboxes.images.prebuilt import prebuild, prebuilt_tag, prune_prebuilt, write_context


def program(folder: Path, text: str = "hello") -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "run").write_text(f"#!/bin/sh\necho {text}\n")
    (folder / "bin" / "run").chmod(0o700)
    (folder / "data").write_text(text)
    (folder / "data").chmod(0o600)
    (folder / "bin" / "link").symlink_to("../data")
    os.mkfifo(folder / "pipe")
    return folder


def test_name_depends_on_the_content(tmp_path: Path) -> None:
    one = program(tmp_path / "one")
    name = prebuilt_tag("sha256:base", [one])
    assert prebuilt_tag("sha256:base", [one, one]) == name
    assert prebuilt_tag("sha256:other", [one]) != name
    os.utime(one / "data", (1, 1))
    assert prebuilt_tag("sha256:base", [one]) == name  # of no particular time
    assert (
        len(
            {
                prebuilt_tag("sha256:base", [one]),
                prebuilt_tag("sha256:base", [one / "data"]),
                prebuilt_tag("sha256:base", []),
            }
        )
        == 3
    )


def test_every_change_changes_the_name(tmp_path: Path) -> None:
    one = program(tmp_path / "one")
    names = [prebuilt_tag("sha256:base", [one])]
    (one / "data").write_text("other")
    names.append(prebuilt_tag("sha256:base", [one]))
    (one / "data").chmod(0o644)
    names.append(prebuilt_tag("sha256:base", [one]))
    (one / "new").touch()
    names.append(prebuilt_tag("sha256:base", [one]))
    (one / "new").rename(one / "newer")
    names.append(prebuilt_tag("sha256:base", [one]))
    (one / "bin" / "link").unlink()
    (one / "bin" / "link").symlink_to("../newer")
    names.append(prebuilt_tag("sha256:base", [one]))
    assert len(set(names)) == len(names)


def test_build_context(tmp_path: Path) -> None:
    one = program(tmp_path / "one")
    file = io.BytesIO()
    write_context(file, "sha256:base", [one])
    with tarfile.open(fileobj=file) as context:
        dockerfile, root = context.getmembers()
        assert context.extractfile(dockerfile).read() == b"FROM sha256:base\nADD root.tar /\n"  # type: ignore[union-attr]
        with tarfile.open(fileobj=context.extractfile(root)) as inner:
            found = {entry.name: entry for entry in inner.getmembers()}
    at = str(one).lstrip("/")
    assert set(found) == {at, f"{at}/bin", f"{at}/bin/run", f"{at}/bin/link", f"{at}/data"}
    assert (found[f"{at}/bin/run"].mode, found[f"{at}/data"].mode) == (0o755, 0o644)
    assert found[f"{at}/bin/link"].linkname == "../data"
    assert {(entry.uid, entry.gid, entry.mtime) for entry in found.values()} == {(0, 0, 0)}


@pytest.mark.full
async def test_built_once_with_the_files_inside(tmp_path: Path, reasons: dict[str, str]) -> None:
    if "docker" in reasons:
        pytest.skip(reasons["docker"])
    text = uuid.uuid4().hex
    one = program(tmp_path / "one", text)
    async with docker_engine.docker_client() as engine:
        first = await prebuild(engine, None, [one])
        try:
            again = await prebuild(engine, None, [one])
            assert (first.made, again.made, first.image) == (True, False, again.image)
            spec = SandboxSpec(image=first.image)
            async with await open_sandbox("docker", spec, state_dir=tmp_path / "state") as sandbox:
                ran = await sandbox.exec([str(one / "bin" / "run")])
                assert (ran.exit_code, ran.stdout.decode().strip()) == (0, text)
                assert (await sandbox.read(str(one / "bin" / "link"))).decode() == text
                assert (await sandbox.exec(["ls", "-A"])).stdout == b""
        finally:
            await engine.images.delete(first.image, force=True)
        with pytest.raises(SandboxUnavailable, match="docker pull"):
            await prebuild(engine, "no-such-image:ever", [one])


@pytest.mark.full
async def test_prune_removes_unused_images(tmp_path: Path, reasons: dict[str, str]) -> None:
    if "docker" in reasons:
        pytest.skip(reasons["docker"])
    agents = [program(tmp_path / name, uuid.uuid4().hex) for name in ("changed", "installed", "used")]
    base = f"polar-prune-test:{uuid.uuid4().hex[:12]}"  # a separate base, to ignore other images
    async with docker_engine.docker_client() as engine:
        await engine.images.tag(await docker_engine.find_image(engine, None), base.partition(":")[0], tag=base[17:])
        changed, installed, used = [(await prebuild(engine, base, [one])).image for one in agents]
        container = await engine.containers.create({"Image": used, "Cmd": ["true"]})
        try:
            (agents[0] / "data").write_text("a new version")
            found = {one.image: one for one in await prune_prebuilt(engine, [[agents[0]], [agents[1]]], base=base)}
            ends = {name: (found[name].removed, found[name].why) for name in (changed, installed, used)}
            assert ends == {
                changed: (True, "out of date"),
                installed: (False, "an installed agent uses it"),
                used: (False, "a container uses it"),
            }
            assert 0 < found[changed].bytes < 1_000_000  # the base's own are shared
            images = await engine.images.list()
            here = {name.rpartition("/")[2] for image in images for name in image["RepoTags"] or []}
            assert here & {changed, installed, used} == {installed, used}
            assert (await prebuild(engine, base, [agents[1]])).made is False
        finally:
            await container.delete(force=True)
            for name in (changed, installed, used, base):
                with contextlib.suppress(docker_engine.require_aiodocker().DockerError):  # it is gone
                    await engine.images.delete(name, force=True)
