"""A rollout in a docker sandbox whose image contains the agent, so that nothing of the agent is mounted."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from harness_adapters.base import Installation, LaunchPlan
from polar_proxy.allowed_code import AllowedCode
from polar_proxy.config import Settings
from polar_proxy.rollouts import JobSpec, RolloutService, ServiceLimits, local_gateway
from polar_proxy.rollouts.harnesses import PrebuiltImageCache
from polar_proxy.store import Store
from polar_proxy.tasks import get_source
from sandboxes import docker_engine
from sandboxes.base import Mount, Sandbox, SandboxKind, SandboxSpec
from sandboxes.choice import available, open_sandbox
from sandboxes.images.prebuilt import REPOSITORY, PrebuiltImage
from tests.fakes.player import PlayerEngine
from tests.fakes.tiny_agent import TinyAgent


class PrebuiltAgent(TinyAgent):
    """A program that exists only in its folder, and calls no model."""

    name = "prebuilt-agent"

    def install(self, cache_root: Path, version: str | None = None):  # type: ignore[no-untyped-def]
        folder = cache_root / self.name / "1"
        folder.mkdir(parents=True, exist_ok=True)
        program = folder / "agent"
        program.write_text("#!/bin/sh\necho the agent was here > note.txt; cat note.txt\n")
        program.chmod(0o755)
        return Installation(self.name, "1", folder, program, (folder,))

    def launch(self, installed, context):  # type: ignore[no-untyped-def]
        return LaunchPlan((str(installed.program),), {})


async def test_builds_one_image_for_each_base_and_agent(tmp_path: Path) -> None:
    asked: list[tuple[str | None, tuple[Path, ...]]] = []

    class Counted(PrebuiltImageCache):
        async def _prebuild(self, base: str | None, paths: tuple[Path, ...]) -> PrebuiltImage:
            asked.append((base, paths))
            await asyncio.sleep(0.01)
            return PrebuiltImage(f"prebuilt-{len(asked)}", base or "default", True, 0.01)

    images, agent, bundle = Counted(), tmp_path / "agent", tmp_path / "bundle"
    spec = SandboxSpec(mounts=(Mount(agent, str(agent)), Mount(bundle, str(bundle))))
    found = await asyncio.gather(*(images.spec(spec, (agent,)) for _ in range(5)))
    assert {one.image for one in found} == {"prebuilt-1"}
    assert found[0].mounts == (Mount(bundle, str(bundle)),)
    assert (await images.spec(replace(spec, image="task"), (agent,))).image == "prebuilt-2"
    assert (await images.spec(spec, (agent, bundle))).mounts == ()
    assert asked == [(None, (agent,)), ("task", (agent,)), (None, (agent, bundle))]
    assert await images.spec(spec, ()) == spec


@pytest.mark.full
@pytest.mark.timeout(1000)
async def test_runs_an_agent_from_its_image(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {one.kind: one.why_not for one in available() if not one.ok}
    if "docker" in reasons:
        pytest.skip(reasons["docker"])
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    opened: list[SandboxSpec] = []

    async def opener(kind: SandboxKind, spec: SandboxSpec) -> Sandbox:
        opened.append(spec)
        return await open_sandbox(kind, spec)

    engine, limits = PlayerEngine(), replace(ServiceLimits(prebuild=True), refill=False)
    harness = "tests.rollouts.test_prebuilt:PrebuiltAgent"
    spec, code = JobSpec(harness=harness, sandbox="docker", timeout=120.0, samples=2), AllowedCode(frozenset({harness}))
    async with (
        engine,
        local_gateway(Settings(), engine, store) as gateway,
        RolloutService(
            store, gateway, engine, tmp_path / "harnesses", limits=limits, opener=opener, code=code
        ) as service,
    ):
        job, _ = await service.submit([get_source("swe-task").task(3)], spec)
        await asyncio.wait_for(service.until_done(job.job_id), 600)
        counts = service.counts()
    rows = await store.rollouts.find()
    assert [(row.status, row.reward) for row in rows] == [("done", 0.0)] * 2
    for row in rows:
        artifacts = {artifact.name: artifact for artifact in await store.artifacts.of_rollout(row.rollout_id)}
        assert b"+the agent was here" in artifacts["patch.diff"].path.read_bytes()
    agents = [spec for spec in opened if "polar.role" not in spec.labels]
    assert len({spec.image for spec in agents}) == 1
    assert agents[0].image is not None
    assert agents[0].image.startswith(f"{REPOSITORY}:")
    assert [spec.mounts for spec in agents] == [()] * 2
    assert counts["prebuilt"]["found"] + counts["prebuilt"]["made"] == 1
    async with docker_engine.docker_client() as docker:
        await docker.images.delete(agents[0].image, force=True)
