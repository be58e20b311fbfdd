"""Fixtures for the three kinds of sandbox. A kind that this machine lacks is skipped with the way to get it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from sandboxes import docker_engine, orphans
from sandboxes.base import Sandbox, SandboxSpec
from sandboxes.choice import available, open_sandbox

KINDS = ["process", "bubblewrap", pytest.param("docker", marks=pytest.mark.full)]

Opener = Callable[..., Awaitable[Sandbox]]


@pytest.fixture(scope="session")
def reasons() -> dict[str, str]:
    """Return kind -> why it cannot be used here, and how to get it."""
    return {a.kind: f"{a.why_not}; {a.how_to_get}" for a in available() if not a.ok}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, reasons: dict[str, str]) -> str:
    if request.param in reasons:
        pytest.skip(reasons[request.param])
    return str(request.param)


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture
async def opener(kind: str, state_dir: Path) -> AsyncIterator[Opener]:
    """Open sandboxes of the kind under test. Afterwards check that closing left nothing."""
    opened: list[Sandbox] = []

    async def one(spec: SandboxSpec | None = None) -> Sandbox:
        sandbox = await open_sandbox(kind, spec, state_dir=state_dir)  # type: ignore[arg-type]
        opened.append(sandbox)
        return sandbox

    yield one
    for sandbox in opened:
        await sandbox.close()
    assert not [p for p in state_dir.rglob("*") if p.name != "records"]
    if kind == "docker":
        assert await my_containers() == []


async def my_containers() -> list[str]:
    owner = json.dumps(asdict(orphans.OwnerProcess.me()))
    async with docker_engine.docker_client() as engine:
        label = {"label": [f"{orphans.OWNER_LABEL}={owner}"]}
        found = await engine.containers.list(all=True, filters=json.dumps(label))
        return [container["Labels"][orphans.LABEL] for container in found]


@pytest.fixture
async def sandbox(opener: Opener) -> Sandbox:
    return await opener()
