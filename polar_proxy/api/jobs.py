"""Routes of jobs: submit, list, cancel, pause and resume them, and follow their events.

A client can continue a stream of events at any server that uses the same database. Format:
https://html.spec.whatwg.org/multipage/server-sent-events.html
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Annotated, get_args
from urllib.parse import urlsplit

from fastapi import Header, Path, Query, Response

from polar_proxy import api_models as m
from polar_proxy import records
from polar_proxy.allowed_code import AllowedCode
from polar_proxy.api.callback_transport import check_public_host
from polar_proxy.api.context import (
    HEARTBEAT_SECONDS,
    ApiContext,
    ApiStore,
    Context,
    StreamedResponse,
    event_stream,
    make_routers,
    pause_timed_out,
    require,
    wait_or_undo,
)
from polar_proxy.api.host_access import check_job, check_source, code_of_request
from polar_proxy.errors import ApiError, UsageError
from polar_proxy.records import convert
from polar_proxy.records.job_events import follow_events
from polar_proxy.rollout_spec import JobSpec
from polar_proxy.rollouts import Original, cancel, find_original, submit
from polar_proxy.store import json_codec
from polar_proxy.store.service.jobs import JobRow, JobStatus
from polar_proxy.tasks import Task, check_task, load_tasks, tasks_from_rows
from polar_proxy.types import Json

_GRACE_SECONDS = 60.0
"""If this process is killed during the wait of `wait_idle`, the pause ends by itself this many seconds after the
wait would have timed out."""

_STREAM: dict[int | str, Json] = {200: {"content": {"text/event-stream": {}}, "description": "Server-sent events."}}

JobId = Annotated[str, Path(description="The id of a job.")]

routers = make_routers()
admin, trainer = routers.admin, routers.trainer


@admin.post("/jobs", status_code=201, tags=["jobs"])
async def submit_job(
    context: Context,
    body: m.JobRequest,
    response: Response,
    idempotency_key: Annotated[
        str | None, Header(max_length=255, description="Submitting again under the same key returns the same job.")
    ] = None,
) -> m.SubmittedJob:
    """Queue a job: rollouts of each task.

    The status is 201 for a new job, and 200 if the idempotency key is known and the job exists already.
    """
    submitted = await _submit(context, body, idempotency_key)
    response.status_code = 201 if submitted.new else 200
    return submitted


@trainer.get("/jobs", tags=["jobs"])
async def list_jobs(
    store: ApiStore,
    state: Annotated[
        str | None,
        Query(description="Only jobs in these states, separated by commas: open, paused, done, cancelled."),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000, description="Maximum number of jobs to return.")] = 20,
    before: Annotated[str | None, Query(description="Only jobs submitted before the job with this id.")] = None,
) -> m.JobList:
    """List jobs, newest first."""
    states = None if state is None else _read_states(state)
    return await records.list_jobs(store, states=states, limit=limit, before=before)


@trainer.get("/jobs/{job_id}", tags=["jobs"])
async def get_job(store: ApiStore, job_id: JobId) -> m.JobDetail:
    """Return a job with its groups."""
    return await require("job", job_id, records.find_job(store, job_id))


@trainer.get("/jobs/{job_id}/rollouts", tags=["jobs"])
async def job_rollouts(store: ApiStore, job_id: JobId) -> m.RolloutList:
    """Return the rollouts of a job, in the order of submission."""
    return await require("job", job_id, records.rollouts_of_job(store, job_id))


@admin.post("/jobs/{job_id}/cancel", tags=["jobs"])
async def cancel_job(context: Context, job_id: JobId) -> m.CancelResponse:
    """Cancel a job, whatever stage its rollouts are in.

    When the response arrives, this server runs no rollout of the job any more. Other servers of the database end theirs
    soon.
    """
    await _require_job(context, job_id)
    return await _cancel(context, job_id)


@admin.post("/groups/{group_id}/cancel", tags=["groups"])
async def cancel_group(
    context: Context, store: ApiStore, group_id: Annotated[str, Path(description="The id of a group.")]
) -> m.CancelResponse:
    """Cancel every unfinished rollout of a group."""
    await require("group", group_id, store.groups.get(group_id))
    return await _cancel(context, group_id)


@admin.post("/rollouts/{rollout_id}/cancel", tags=["rollouts"])
async def cancel_rollout(
    context: Context, store: ApiStore, rollout_id: Annotated[str, Path(description="The id of a rollout.")]
) -> m.CancelResponse:
    """Cancel one rollout."""
    await require("rollout", rollout_id, store.rollouts.get(rollout_id))
    return await _cancel(context, rollout_id)


@trainer.post("/jobs/{job_id}/pause", tags=["jobs"])
async def pause_job(context: Context, job_id: JobId, body: m.PauseRequest = m.PauseRequest()) -> m.Job:
    """Start no more rollouts of a job; running rollouts continue.

    With `wait_idle`, the response comes when none of the job's rollouts runs any more. If some still run after
    `wait_idle` seconds, the status is 409 `pause_timed_out` and this pause is undone.
    """
    await _pause(context, await _require_job(context, job_id), body)
    return convert(m.Job, await _require_job(context, job_id))


@trainer.post("/jobs/{job_id}/resume", tags=["jobs"])
async def resume_job(context: Context, store: ApiStore, job_id: JobId) -> m.Job:
    """Resume a paused job. A job that has ended does not change."""
    await _require_job(context, job_id)
    await store.jobs.set_status(job_id, "open")
    context.wake()
    return convert(m.Job, await _require_job(context, job_id))


@trainer.get("/events", tags=["events"], response_class=StreamedResponse, responses=_STREAM)
async def events(
    context: Context,
    job: Annotated[
        str | None, Query(description="Send only events of this job, and end the stream when the job has ended.")
    ] = None,
    after: Annotated[str | None, Query(description="Continue after the event with this id.")] = None,
    last_event_id: Annotated[
        str | None, Header(description="Like `after`; browsers send it when they reconnect.")
    ] = None,
) -> StreamedResponse:
    """Stream events of the kinds `stage`, `group`, `job` and `feed`.

    With `job`, the stream has the events of this job from its start and ends with the event `end` once the job has
    ended. Without `job`, it has the events of all jobs from now on. A stream can be continued after any event, on
    any server of the same database.
    """
    if job is not None:
        await _require_job(context, job)
    new_events = await follow_events(context.store, job, last_event_id or after)
    return event_stream(_encode(context, new_events))


async def _submit(context: ApiContext, body: m.JobRequest, idempotency_key: str | None) -> m.SubmittedJob:
    original = None if body.repeat_of is None else await find_original(context.store, body.repeat_of)
    spec = _job_spec(context, body, original)
    code = code_of_request(context, body)
    tasks, refused = await asyncio.to_thread(_load_tasks, context, body, code, original)
    await asyncio.to_thread(check_job, context, spec, tasks)
    if context.service is not None:
        row, new = await context.service.submit(tasks, spec, idempotency_key=idempotency_key)
    else:
        cache = context.settings.harness_cache
        row, new = await submit(
            context.store, tasks, spec, idempotency_key=idempotency_key, code=code, harness_cache=cache
        )
    return convert(m.SubmittedJob, row, new=new, refused=refused)


def _read_states(text: str) -> list[str]:
    """Return the job states of a query, which are separated by commas. Raises UsageError for an unknown state."""
    states = [one.strip() for one in text.split(",")]
    known = get_args(JobStatus)
    for one in states:
        if one not in known:
            raise UsageError(f"There is no job state {one!r}: choose {', '.join(known)}.")
    return states


async def _require_job(context: ApiContext, job_id: str) -> JobRow:
    """Return the job. Raises ApiError 404 if it does not exist."""
    return await require("job", job_id, context.store.jobs.get(job_id))


async def _cancel(context: ApiContext, target: str) -> m.CancelResponse:
    cancelling = context.service.cancel(target) if context.service is not None else cancel(context.store, target)
    return m.CancelResponse(cancelled=target, in_flight=await cancelling)


async def _pause(context: ApiContext, before: JobRow, body: m.PauseRequest) -> None:
    """Pause a job. Raises ApiError `conflict` if the job has ended.

    If `wait_idle` is set, wait up to this many seconds until no rollout of the job runs. If a rollout still runs
    then, undo the pause and raise ApiError `pause_timed_out`.
    """
    job_id, store = before.job_id, context.store
    if before.status in ("done", "cancelled"):
        raise ApiError(f"The job {job_id} is {before.status}, so it cannot be paused.", status=409, code="conflict")
    if body.wait_idle is not None:
        # The provisional pause has an end, in case this process is killed while it waits. Only this pause is undone.
        until = time.time() + body.wait_idle + _GRACE_SECONDS
        mine: tuple[JobStatus, float] = ("paused", until)

        async def idle() -> bool:
            return await store.jobs.in_flight(job_id) == 0

        async def undo() -> None:
            await store.jobs.set_status(job_id, before.status, paused_until=before.paused_until, only_if=mine)
            context.wake()

        await store.jobs.set_status(job_id, "paused", paused_until=until)
        if not await wait_or_undo(idle, body.wait_idle, undo):
            raise pause_timed_out(body.wait_idle, await store.jobs.in_flight(job_id), f" of {job_id}")
    ends = None if body.seconds is None else time.time() + body.seconds
    await store.jobs.set_status(job_id, "paused", paused_until=ends)


def _load_tasks(
    context: ApiContext, body: m.JobRequest, code: AllowedCode, original: Original | None
) -> tuple[list[Task], list[Json]]:
    """Return the usable tasks and the refused ones (as RefusedTask's fields). Reads files, so call it in a thread.

    Raises UsageError for an invalid source of tasks, and ApiError if no task is usable.
    """
    if original is not None:
        check_task(original.task, code)
        return [original.task], []
    if body.task_specs is not None:
        tasks, unusable = tasks_from_rows("task_specs", body.task_specs, body.instances, code)
    else:
        check_source(context, str(body.task))
        tasks, in_file = load_tasks(str(body.task), body.seed, body.instances, code)
        unusable = in_file or ()
    refused = [asdict(task) for task in unusable]
    if not tasks:
        message = f"There is no task that can be run ({len(refused)} refused)."
        raise ApiError(message, status=400, code="bad_request", detail=refused)
    return tasks, refused


def _job_spec(context: ApiContext, body: m.JobRequest, original: Original | None) -> JobSpec:
    """Return the options of the job. Raises UsageError for an invalid option.

    Omitted options come from the settings. If the job repeats the rollout `original`, an omitted option comes from the
    rollout's record instead, if the record has the option. But an omitted `sandbox` comes from the settings."""
    given = body.model_dump(include=body.model_fields_set & JobSpec.model_fields.keys())
    if original is not None:
        given = original.job_options(given)
    spec = context.settings.run.job_spec(**given)
    if spec.callback_url is not None:
        _check_callback_url(spec.callback_url, context.settings.api.private_callbacks)
    return spec


def _check_callback_url(url: str, private: bool) -> None:
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError:
        parts, host = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not host:
        raise UsageError(f"callback_url must be http://... or https://..., not {url!r}.")
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            "callback_url must not contain a user name or password, because it is stored in the database. A receiver "
            "can check the signature of a callback instead."
        )
    if not private:
        check_public_host(host)


async def _encode(context: ApiContext, events: AsyncIterator[list[m.Event]]) -> AsyncIterator[bytes]:
    """Yield the bytes of the stream until it ends or the server stops. After HEARTBEAT_SECONDS without an event, yield
    a comment."""
    yield b": polar\n\n"
    last_sent = time.monotonic()
    async for new in events:
        if new:
            yield b"".join(map(_encode_event, new))
            last_sent = time.monotonic()
        elif time.monotonic() - last_sent >= HEARTBEAT_SECONDS:
            yield b":\n\n"
            last_sent = time.monotonic()
        if context.closing.is_set():
            return


def _encode_event(event: m.Event) -> bytes:
    return b"id: %s\nevent: %s\ndata: %s\n\n" % (event.id.encode(), event.event.encode(), json_codec.dumps(event.data))
