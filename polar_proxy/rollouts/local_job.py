"""A job that this process submits and runs itself: `polar run`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from harness_adapters.base import HarnessError
from polar_proxy.config import Settings
from polar_proxy.engines.base import Engine
from polar_proxy.errors import UsageError
from polar_proxy.gateway import Gateway
from polar_proxy.rollout_spec import JobSpec
from polar_proxy.rollouts.attempt import ProgressReporter
from polar_proxy.rollouts.service import RolloutService, ServiceLimits, rollout_ids, submit
from polar_proxy.store import Store
from polar_proxy.tasks import Task
from sandboxes import choose
from sandboxes.base import uncancellable


@contextlib.asynccontextmanager
async def local_gateway(settings: Settings, engine: Engine, store: Store) -> AsyncIterator[Gateway]:
    """Serve a gateway on a free loopback port that accepts only the keys of rollouts."""
    own = settings.gateway.model_copy(update={"host": "127.0.0.1", "port": 0, "require_known_keys": True})
    async with Gateway(engine, store, own) as gateway:
        yield gateway


async def run_job(
    tasks: Sequence[Task],
    spec: JobSpec,
    settings: Settings,
    engine: Engine,
    store: Store,
    gateway: Gateway,
    reporter: ProgressReporter,
    note: Callable[[str], None],
) -> list[str]:
    """Run a job, `run.concurrency` rollouts at a time; return the rollout ids in order. `note` gets lines for people.

    A rollout that fails is a result, not an error. A cancellation cancels the job, leaves nothing running, and is
    passed on. The job belongs to this process: no service works on it, and if this process is killed, the next start
    marks its rollouts as interrupted.
    """
    choice = await asyncio.to_thread(choose, spec.sandbox)
    note(f"sandbox: {choice.reason}")
    spec = spec.model_copy(update={"sandbox": choice.kind})
    limits = replace(
        ServiceLimits.of(settings),
        refill=False,
        engine_patience=60.0,
    )
    async with RolloutService(
        store, gateway, engine, settings.harness_cache, limits=limits, reporter=reporter, note=note, job_id=""
    ) as service:
        try:
            harness = await service.harnesses.get(spec.harness)
        except HarnessError as error:
            raise UsageError(str(error)) from error
        note(f"harness: {harness.label}")
        job, _ = await submit(store, tasks, spec, engine.info, owned=True, harness=harness.label)
        try:
            ids = await rollout_ids(store, job.job_id)
            for row in await store.rollouts.find(rollout_ids=ids):
                reporter.stage(row.rollout_id, "queued", row.task_id)
            service.worker.work_on(job.job_id)
            await service.until_done(job.job_id)
        except BaseException:
            await uncancellable(service.cancel(job.job_id))
            raise
    return ids
