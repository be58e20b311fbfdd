"""Routes of jobs: submit, look, cancel, pause and resume."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Header, Query, Response

from polar_proxy import api_models as m
from polar_proxy.api import serializers
from polar_proxy.api.context import ApiContext, Routers, not_found
from polar_proxy.client.errors import ApiError
from polar_proxy.errors import UsageError
from polar_proxy.rollout_spec import JobSpec
from polar_proxy.rollouts import cancel, check_job, submit
from polar_proxy.store.jobs import JobRow, JobStatus
from polar_proxy.tasks import Task
from polar_proxy.tasks.chosen import load_tasks, tasks_from_rows
from polar_proxy.types import Json

_LOOK_SECONDS = 0.1


def add(rooms: Routers, api: ApiContext) -> None:
    admin, trainer, store = rooms.admin, rooms.trainer, api.store

    @admin.post("/jobs", status_code=201, tags=["jobs"])
    async def submit_job(
        body: m.JobRequest,
        response: Response,
        idempotency_key: Annotated[str | None, Header(max_length=255)] = None,
    ) -> m.SubmittedJob:
        """Queue rollouts. 200 instead of 201: the idempotency key is known, and this is the job that it made."""
        tasks, refused = await asyncio.to_thread(_load_tasks, body)
        spec = _job_spec(api, body)
        if api.service is not None:
            row, new = await api.service.submit(tasks, spec, idempotency_key=idempotency_key)
        else:
            row, new = await submit(store, tasks, spec, idempotency_key=idempotency_key)
        response.status_code = 201 if new else 200
        return serializers.submitted(row, new, refused)

    @trainer.get("/jobs", tags=["jobs"])
    async def list_jobs(
        state: str | None = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 20,
        before: str | None = None,
    ) -> m.JobList:
        """Newest first. `state`: open, paused, done or cancelled; several are joined by commas."""
        states = None if state is None else [one.strip() for one in state.split(",")]
        known = ("open", "paused", "done", "cancelled")
        for one in states or ():
            if one not in known:
                raise UsageError(f"Jobs are {', '.join(known)}, never {one!r}.")
        rows = await store.jobs.find(statuses=states, limit=limit, before=before)
        return m.JobList(jobs=[serializers.job(row) for row in rows], feed=await store.feed.depth())

    @trainer.get("/jobs/{job_id}", tags=["jobs"])
    async def get_job(job_id: str) -> m.JobDetail:
        """A job with its groups."""
        return await serializers.job_detail(store, job_id)

    @trainer.get("/jobs/{job_id}/rollouts", tags=["jobs"])
    async def job_rollouts(job_id: str) -> m.RolloutList:
        """A job's rollouts, in the order of submission."""
        await _job(api, job_id)
        return m.RolloutList(rollouts=[serializers.rollout(row) for row in await store.rollouts.find(job_id=job_id)])

    @admin.post("/jobs/{job_id}/cancel", tags=["jobs"])
    async def cancel_job(job_id: str) -> m.CancelResponse:
        """End a job, whatever stage its rollouts are in. When this answers nothing of it is left on this server."""
        await _job(api, job_id)
        return await _cancel(api, job_id)

    @admin.post("/groups/{group_id}/cancel", tags=["groups"])
    async def cancel_group(group_id: str) -> m.CancelResponse:
        """End what is left of a group."""
        if await store.groups.get(group_id) is None:
            raise not_found("group", group_id)
        return await _cancel(api, group_id)

    @admin.post("/rollouts/{rollout_id}/cancel", tags=["rollouts"])
    async def cancel_rollout(rollout_id: str) -> m.CancelResponse:
        """End one rollout."""
        if await store.rollouts.get(rollout_id) is None:
            raise not_found("rollout", rollout_id)
        return await _cancel(api, rollout_id)

    @trainer.post("/jobs/{job_id}/pause", tags=["jobs"])
    async def pause_job(job_id: str, body: m.PauseRequest = m.PauseRequest()) -> m.Job:
        """Begin nothing new of a job; what runs goes on. With `wait_idle`, answered when nothing of it runs; where
        that takes longer, 409 `pause_timed_out`, and the job is as it was before."""
        before = await _job(api, job_id)
        if before.status in ("done", "cancelled"):
            raise ApiError(f"The job {job_id} is {before.status}.", status=409, code="conflict")
        await _pause(api, before, body)
        return serializers.job(await _job(api, job_id))

    @trainer.post("/jobs/{job_id}/resume", tags=["jobs"])
    async def resume_job(job_id: str) -> m.Job:
        """Go on. Of a job that has ended nothing changes."""
        await _job(api, job_id)
        await store.jobs.set_status(job_id, "open")
        api.wake()
        return serializers.job(await _job(api, job_id))


async def until(idle: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    """Whether it came true in time; asked once at least."""
    deadline = time.monotonic() + seconds
    while not await idle():
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        await asyncio.sleep(min(_LOOK_SECONDS, left))
    return True


async def _job(api: ApiContext, job_id: str) -> JobRow:
    row = await api.store.jobs.get(job_id)
    if row is None:
        raise not_found("job", job_id)
    return row


async def _cancel(api: ApiContext, what: str) -> m.CancelResponse:
    ending = api.service.cancel(what) if api.service is not None else cancel(api.store, what)
    return m.CancelResponse(cancelled=what, in_flight=await ending)


async def _pause(api: ApiContext, before: JobRow, body: m.PauseRequest) -> None:
    job_id, store = before.job_id, api.store
    if body.wait_idle is not None:
        # A pause that ends by itself if this process is killed while it waits; and only this one is undone.
        provisional = time.time() + body.wait_idle + 60.0

        async def idle() -> bool:
            return await store.jobs.in_flight(job_id) == 0

        await store.jobs.set_status(job_id, "paused", paused_until=provisional)
        mine: tuple[JobStatus, float] = ("paused", provisional)
        done = False
        try:
            done = await until(idle, body.wait_idle)
        finally:
            if not done:
                await store.jobs.set_status(job_id, before.status, paused_until=before.paused_until, only_if=mine)
                api.wake()
        if not done:
            left = await store.jobs.in_flight(job_id)
            message = f"After {body.wait_idle:g} s {left} rollouts of {job_id} still run: nothing stays paused."
            raise ApiError(message, status=409, code="pause_timed_out", detail={"in_flight": left})
    ends = None if body.seconds is None else time.time() + body.seconds
    await store.jobs.set_status(job_id, "paused", paused_until=ends)


def _load_tasks(body: m.JobRequest) -> tuple[list[Task], list[Json]]:
    """Return the tasks, and those that cannot be used. Reads files, so call it in a thread.

    Raises UsageError, and ApiError if no task is left."""
    if body.task_specs is not None:
        tasks, found = tasks_from_rows("task_specs", body.task_specs, body.instances)
        refused = [asdict(task) for task in found]
    else:
        tasks, in_file = load_tasks(str(body.task), body.seed, body.instances)
        refused = [asdict(task) for task in in_file or ()]
    if not tasks:
        message = f"There is no task that can be run ({len(refused)} refused)."
        raise ApiError(message, status=400, code="bad_request", detail=refused)
    return tasks, refused


def _job_spec(api: ApiContext, body: m.JobRequest) -> JobSpec:
    """Return the job as requested, on top of the server's settings. Raises UsageError."""
    given = body.model_dump(include=body.model_fields_set & JobSpec.model_fields.keys())
    spec = api.settings.run.job_spec(**given)
    check_job(spec)
    if spec.callback_url is not None:
        _check_url(spec.callback_url)
    return spec


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        parts, host = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(f"callback_url must be http://... or https://..., not {url!r}.")
    if parts.username is not None or parts.password is not None:
        raise UsageError("callback_url must hold no password: it is kept in the database. Callbacks are signed.")
