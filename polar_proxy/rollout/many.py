"""Many rollouts: groups of samples over instances of a task family, a few at a time, in this process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass

from harness_adapters.base import HarnessError, get_adapter, split_version
from polar_proxy.config import Settings
from polar_proxy.engines.base import Engine
from polar_proxy.errors import UsageError
from polar_proxy.gateway import Gateway
from polar_proxy.rollout.runner import Listener, Rollout, RolloutRunner
from polar_proxy.store import Store
from polar_proxy.tasks.base import TaskSource
from sandboxes import choose
from sandboxes.base import Kind


@dataclass(frozen=True, slots=True)
class Job:
    """What `polar run` was asked for."""

    source: TaskSource
    seeds: Sequence[int]
    samples: int


@contextlib.asynccontextmanager
async def serving(settings: Settings, engine: Engine, store: Store) -> AsyncIterator[Gateway]:
    """A gateway of our own on a free loopback port, closed to all keys but the rollouts'."""
    own = settings.gateway.model_copy(update={"host": "127.0.0.1", "port": 0, "closed": True})
    async with Gateway(engine, store, own) as gateway:
        yield gateway


async def run_job(
    job: Job,
    settings: Settings,
    engine: Engine,
    store: Store,
    gateway: Gateway,
    listener: Listener,
    note: Callable[[str], None],
) -> list[str]:
    """Run every sample of every seed; returns the rollout ids in order. `note` gets lines for people.

    Rollouts that fail are results. A cancellation cancels those under way, marks those not begun, and comes out.
    """
    run = settings.run
    choice = await asyncio.to_thread(choose, run.sandbox)
    kind: Kind = choice.kind
    note(f"sandbox: {choice.reason}")
    try:
        name, version = split_version(run.harness)
        adapter = get_adapter(name)
        if not await asyncio.to_thread(adapter.is_installed, settings.harness_cache, version):
            note(f"installing {adapter.name} {version or adapter.default_version} (once; a minute or two)")
        installed = await asyncio.to_thread(adapter.install, settings.harness_cache, version)
    except HarnessError as error:
        raise UsageError(str(error)) from error
    note(f"harness: {installed.name} {installed.version}")
    info = engine.info
    runner = RolloutRunner(store, gateway, adapter, installed, kind, info, run, listener)
    rollouts = []
    for seed in job.seeds:
        task = job.source.task(seed)
        await store.put_task(
            task.task_id, task.family, task.seed, task.instruction, {**asdict(task), "metadata": dict(task.metadata)}
        )
        config = {"temperature": run.temperature, "timeout": run.timeout, "max_tokens": run.max_tokens}
        group_id = await store.create_group(task.task_id, job.samples, config)
        for index in range(job.samples):
            rollout_id = await store.create_rollout(
                group_id=group_id,
                task_id=task.task_id,
                index=index,
                harness=f"{installed.name} {installed.version}",
                sandbox=kind,
                engine=f"{info.engine} {info.version}",
                model=info.model,
                seed=task.seed,
                config=config,
            )
            rollouts.append(Rollout(rollout_id, task))
            listener.stage(rollout_id, "queued", task.task_id)
    await _run_all(runner, rollouts, run.concurrency, store)
    return [rollout.rollout_id for rollout in rollouts]


async def _run_all(runner: RolloutRunner, rollouts: Sequence[Rollout], concurrency: int, store: Store) -> None:
    waiting = asyncio.Semaphore(concurrency)
    begun: set[str] = set()

    async def one(rollout: Rollout) -> None:
        async with waiting:
            begun.add(rollout.rollout_id)
            await runner.run(rollout)

    tasks = [asyncio.create_task(one(rollout)) for rollout in rollouts]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for rollout in rollouts:
            if rollout.rollout_id not in begun:
                await store.set_rollout(rollout.rollout_id, status="cancelled", error="cancelled before it began")
        raise


__all__ = ["Job", "run_job", "serving"]
