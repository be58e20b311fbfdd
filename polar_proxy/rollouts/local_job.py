"""A job of this process's own, from submission to its end: `polar run`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from harness_adapters.base import HarnessError
from polar_proxy.config import Settings
from polar_proxy.engines.base import Engine
from polar_proxy.errors import UsageError
from polar_proxy.gateway import Gateway
from polar_proxy.rollouts.attempt import ProgressReporter
from polar_proxy.rollouts.service import JobSpec, RolloutService, ServiceLimits, rollout_ids, submit
from polar_proxy.store import Store
from sandboxes import choose
from sandboxes.base import uncancellable


async def run_job(
    submission: JobSpec,
    settings: Settings,
    engine: Engine,
    store: Store,
    gateway: Gateway,
    listener: ProgressReporter,
    note: Callable[[str], None],
) -> list[str]:
    """Run it, `run.concurrency` agents at a time; returns the rollout ids in order. `note` gets lines for people.

    Rollouts that fail are results. A cancellation cancels the job, leaves nothing behind, and comes out. The job is
    this process's own: no service takes it up, and what a kill leaves of it the next start marks as interrupted.
    """
    choice = await asyncio.to_thread(choose, settings.run.sandbox)
    note(f"sandbox: {choice.reason}")
    submission = replace(submission, recipe=replace(submission.recipe, sandbox=choice.kind))
    limits = replace(
        ServiceLimits.of(settings.run.concurrency, settings.admission, bake=settings.run.bake),
        refill=False,
        engine_patience=60.0,
    )
    async with RolloutService(
        store, gateway, engine, settings.harness_cache, limits=limits, listener=listener, note=note, job_id=""
    ) as service:
        try:
            harness = await service.harnesses.get(submission.recipe.harness)
        except HarnessError as error:
            raise UsageError(str(error)) from error
        note(f"harness: {harness.label}")
        job, _ = await submit(store, submission, engine.info, owned=True, harness=harness.label)
        try:
            ids = await rollout_ids(store, job.job_id)
            for row in await store.rollouts.find(rollout_ids=ids):
                listener.stage(row.rollout_id, "queued", row.task_id)
            service.scheduler.work_on(job.job_id)
            await service.until_done(job.job_id)
        except BaseException:
            await uncancellable(service.cancel(job.job_id))
            raise
    return ids
