"""A real `polar serve` with rollout workers and a scripted engine, for attacks by the agent of a real rollout."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks._stacks.deployed import containers_of, python_inside
from benchmarks._stacks.kill_targets import EngineProcess, ServiceProcess
from benchmarks._stacks.reconcile import left_behind
from polar_proxy.rollouts import JobSpec, submit
from polar_proxy.store import RolloutRow, Store, open_store
from polar_proxy.tasks import Task
from sandboxes.base import SandboxKind

SECONDS = 300.0
"""Limit from the submission of a rollout to its final status."""


class Deployment:
    """A running service and its store. Use `deploy`."""

    def __init__(self, folder: Path, engine: EngineProcess, service: ServiceProcess, store: Store) -> None:
        self.folder, self.engine, self.service, self.store = folder, engine, service, store
        self._programs = 0

    def mount(self, name: str, text: str) -> str:
        """Write a file on the host and return the placeholder by which a `shell:` harness mounts and names it."""
        self._programs += 1
        file = self.folder / "mounted" / str(self._programs) / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
        return f"{{mount:{file}}}"

    async def rollout(self, kind: SandboxKind, task: Task, program: Path, *arguments: str, **spec: Any) -> RolloutRow:
        """Run a Python program as the agent of a rollout, and return the final row."""
        _, rollout_id = await self.queue(kind, task, program, *arguments, **spec)
        return await self.until_final(rollout_id)

    async def queue(
        self, kind: SandboxKind, task: Task, program: Path, *arguments: str, **spec: Any
    ) -> tuple[str, str]:
        """Queue a rollout and return the ids of its job and of itself."""
        harness = " ".join([f"shell:{python_inside()}", f"{{mount:{program}}}", *arguments])
        job, _ = await submit(self.store, [task], JobSpec(harness=harness, sandbox=kind, **{"timeout": 240.0} | spec))
        (row,) = await self.store.rollouts.find(job_id=job.job_id)
        return job.job_id, row.rollout_id

    async def row(self, rollout_id: str) -> RolloutRow:
        row = await self.store.rollouts.get(rollout_id)
        assert row is not None
        return row

    async def until_final(self, rollout_id: str) -> RolloutRow:
        async with asyncio.timeout(SECONDS):
            while not (row := await self.row(rollout_id)).final:  # noqa: ASYNC110 (another process ends it)
                await asyncio.sleep(0.1)
        return row

    async def agent_log(self, row: RolloutRow) -> str:
        (log,) = [item for item in await self.store.artifacts.of_rollout(row.rollout_id) if item.name == "agent.log"]
        return log.path.read_text()

    async def logged(self, row: RolloutRow) -> list[dict[str, Any]]:
        """Return the JSON lines that the agent printed."""
        lines = []
        for line in (await self.agent_log(row)).splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
        return lines

    async def describe(self, row: RolloutRow) -> str:
        """Return status, reward, error and signs of a rollout in one line."""
        reward = "none" if row.reward is None else f"{row.reward:g}"
        text = f"{row.status}, reward {reward}" + (f" ({row.error})" if row.error else "")
        rewards = await self.store.rewards.of_rollout(row.rollout_id)
        signs = [sign for given in rewards for sign in given.detail.get("signs", ())]
        return text + (f"; signs: {', '.join(signs)}" if signs else "")

    async def stop(self) -> list[str]:
        """Stop the service normally and return what it left on the machine."""
        await asyncio.to_thread(self.service.stop)
        assert self.service.process is not None
        return [*left_behind(self.folder), *containers_of(self.service.process.pid)]


@contextlib.asynccontextmanager
async def deploy(folder: Path, workers: int = 4) -> AsyncIterator[Deployment]:
    """Run a service with default settings; its database and temporary files are in `folder`."""
    with ExitStack() as stack:
        engine = EngineProcess(folder, "echo", delay=0.0)
        stack.callback(engine.stop)
        engine.start()
        db = str(folder / "home" / "polar.db")
        service = ServiceProcess(folder, db, engine.url, engine.model, workers, closed=False)
        stack.callback(service.stop)
        service.start()
        async with open_store(db) as store:
            yield Deployment(folder, engine, service, store)
