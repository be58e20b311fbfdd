"""`polar run` runs an agent on tasks here. The other verbs use the API of a server (--url). Without a URL, `status`,
`results`, `watch` and `events` read the database, and `submit`, `cancel`, `pause` and `resume` use the same API in this
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import orjson
import typer
from rich.table import Table

from polar_proxy.allowed_code import AllowedCode, is_code
from polar_proxy.cli import options
from polar_proxy.cli.common import (
    database_url,
    given,
    import_named_code,
    is_local_url,
    load_client_settings,
    load_settings,
    make_request,
    observe_warnings,
    open_database,
    read_store_or_server,
    run_async,
    with_client,
    with_store,
)
from polar_proxy.cli.output import (
    format_counts,
    format_number,
    make_table,
    out,
    print_note,
    print_refused_task,
    print_result,
)
from polar_proxy.cli.views.progress import JobProgressView, RolloutProgressView
from polar_proxy.cli.views.run_summary import print_run
from polar_proxy.config import Settings
from polar_proxy.documented import field_descriptions
from polar_proxy.errors import UsageError
from polar_proxy.rollout_spec import JobSpec, RolloutSpec
from polar_proxy.terminal import configure_logging, escape_json_controls, one_line
from polar_proxy.types import Json

if TYPE_CHECKING:
    from polar_proxy.api_models import (
        Event,
        Job,
        JobDetail,
        JobList,
        RefusedTask,
        Rollout,
        RolloutDetail,
        RolloutList,
    )
    from polar_proxy.client import AsyncClient
    from polar_proxy.store import RolloutRow, Store
    from polar_proxy.tasks import Task, TaskRefusal

T = TypeVar("T")

_SUMMARY = (
    *("rollout_id", "task_id", "group_id", "seed", "status", "cause", "attempt", "masked", "reward", "calls", "traces"),
    *("prompt_tokens", "completion_tokens", "trained_tokens", "wall_seconds", "exit_code", "session_id", "error"),
)
"""Fields of a rollout that `--json` prints."""


@options.model_options(RolloutSpec)
def run(
    task: Annotated[
        str | None,
        typer.Argument(
            help="Task family (swe-task), a JSONL file of tasks or SWE-bench rows, a Harbor task folder, "
            "a folder of Harbor task folders, module:Class or module:function. Not with --repeat-of."
        ),
    ] = None,
    *,
    seed: options.Seed = None,
    instances: options.Instances = None,
    rollout_options: Json,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Number of rollouts of each task. They form a group.")
    ] = None,
    repeat_of: Annotated[
        str | None, typer.Option(metavar="ROLLOUT", help=field_descriptions(JobSpec)["repeat_of"])
    ] = None,
    concurrency: options.Concurrency = None,
    engine: options.Engine = None,
    engine_url: options.EngineUrl = None,
    model: options.Model = None,
    prompt_mode: options.PromptMode = None,
    past_reasoning: options.PastReasoning = None,
    hooks: options.Hooks = None,
    allow_code: options.AllowCode = None,
    log_level: options.LogLevel = None,
    log_format: options.LogFormat = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Run an agent on tasks; record its model calls, score its work and build training sequences.

    The exit code is 0 if every rollout reached a final status, whatever its reward. After Ctrl-C, the finished
    rollouts are printed and the exit code is 130.
    """
    from polar_proxy.rollouts import find_original
    from polar_proxy.store import display_url
    from polar_proxy.tasks import check_task

    import_named_code(task, rollout_options.get("harness"), engine, hooks, *(allow_code or ()))
    settings = load_settings(
        db,
        allow_code=allow_code,
        engine={"kind": engine, "url": engine_url, "model": model},
        gateway={"prompt_mode": prompt_mode, "past_reasoning": past_reasoning, "hooks": hooks},
        run={"samples": samples, "concurrency": concurrency, **rollout_options},
        log={"level": log_level, "format": log_format},
    )
    configure_logging(settings.log.level or "warning", settings.log.format)
    if task is not None and repeat_of is None:
        spec = settings.run.job_spec()
        tasks, refused, code = _load_tasks(settings, task, seed, instances)
    elif repeat_of is not None and (task, seed, instances) == (None, None, None):
        original = with_store(settings, lambda store: find_original(store, repeat_of))
        spec = settings.run.job_spec(**original.job_options(rollout_options))
        tasks, refused, code = [original.task], None, settings.code()
        check_task(original.task, code)
        print_note(f"repeats {original.row.rollout_id} of {original.row.engine}, model {original.row.model}")
    else:
        raise UsageError("Give TASK or --repeat-of, not both. --seed and --instances need TASK.")
    url = display_url(database_url(settings))

    def report(rows: list[RolloutRow]) -> None:
        document: Json = {"rollouts": [{name: getattr(row, name) for name in _SUMMARY} for row in rows], "db": url}
        if refused is not None:
            document["refused"] = refused
        print_result(document, lambda: print_run(rows, task, url, db), as_json)

    run_async(_run(settings, tasks, spec, code, report, quiet=as_json))


def _load_tasks(
    settings: Settings, task: str, seed: int | None, instances: int | None
) -> tuple[list[Task], tuple[TaskRefusal, ...] | None, AllowedCode]:
    """Return the tasks that can be run, the refused tasks, and the code to which the tasks may refer. Raises UsageError
    if no task can be run."""
    from polar_proxy.tasks import load_tasks

    code = settings.code(task)
    tasks, refused = load_tasks(task, seed, instances, code)
    if is_code(task):  # tasks that the user's own code made may refer to more of it
        code = code.including(*(name for one in tasks for name in one.code_names))
    for refusal in refused or ():
        print_refused_task(str(refusal))
    if not tasks:
        raise UsageError(f"{task} contains no task that can be run ({len(refused or ())} refused).")
    return tasks, refused, code


async def _run(
    settings: Settings,
    tasks: list[Task],
    spec: JobSpec,
    code: AllowedCode,
    report: Callable[[list[RolloutRow]], None],
    *,
    quiet: bool,
) -> None:
    """Run the tasks and report their rollouts; if the run is cancelled, report the finished ones."""
    from polar_proxy.engines.factory import make_engine
    from polar_proxy.rollouts import local_gateway, recover, run_job
    from polar_proxy.telemetry import traced

    view = RolloutProgressView(quiet=quiet)
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(open_database(settings, create=True))
        for line in await recover(store):
            print_note(line)
        print_note(f"database: {store.display_url}")
        engine = await stack.enter_async_context(make_engine(settings.engine))
        print_note(f"engine: {engine.info.engine} {engine.info.version}, model {engine.info.model}")
        gateway = await stack.enter_async_context(local_gateway(settings, engine, store))
        gateway.observe(view.call)
        observe_warnings(gateway, settings, print_note)
        tracing = traced(settings.telemetry, store, gateway.observe, gateway.sessions.rollout_of)
        try:
            async with tracing as on_rollout_end:
                with view.show():
                    rows = await run_job(
                        tasks, spec, settings, engine, store, gateway, view, view.note, code, on_rollout_end
                    )
        except asyncio.CancelledError:
            known = [await store.rollouts.get(rollout_id) for rollout_id in view.rollout_ids]
            report([row for row in known if row is not None and row.final and row.status != "cancelled"])
            raise
    report(rows)


# Jobs of a server

JobId = Annotated[str, typer.Argument(help="A job's id, as `polar submit` prints it.")]


@options.model_options(JobSpec)
def submit(
    task: Annotated[
        str | None,
        typer.Argument(
            help="Like TASK of `polar run`, but a server reads only files in the folders of its setting api.folders."
        ),
    ] = None,
    *,
    seed: options.Seed = None,
    instances: options.Instances = None,
    rollout_options: Json,
    key: Annotated[
        str | None, typer.Option(help="Idempotency key: submitting again with the same key returns the same job.")
    ] = None,
    url: options.Url = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Queue rollouts and print the job's id.

    `polar serve --rollout-workers N` on the same database runs them.
    """
    from polar_proxy.api_models import JobRequest, RefusedTask
    from polar_proxy.client import BadRequestError

    chosen = given({"seed": seed, "instances": instances}) | rollout_options
    server = load_client_settings(url, db).url
    if server is None:
        import_named_code(task, rollout_options.get("harness"))
    task = None if task is None else _absolute_task(task, server)
    request = make_request(JobRequest, task=task, **chosen)
    try:
        job = with_client(url, db, lambda client: client.submit(request, idempotency_key=key), create=True)
    except BadRequestError as error:
        if error.code == "bad_request" and isinstance(error.detail, list):  # all tasks were refused
            _print_refused([RefusedTask.model_validate(one) for one in error.detail])
        raise
    if not as_json:
        _print_refused(job.refused)
        known = "" if job.new else " (submitted before)"
        print_note(f"{job.groups} groups, {sum(job.rollouts.values())} rollouts{known}")
    print_result(job, job.job_id, as_json)


def status(
    job: Annotated[str | None, typer.Argument(help="A job's id. Default: list the newest jobs.")] = None,
    state: Annotated[
        str | None, typer.Option(help="List only jobs in this state: open, paused, done or cancelled.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="List at most N jobs.")] = 20,
    url: options.Url = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Show the progress of jobs."""
    if state is not None:
        options.require_choice("job state", state, ("open", "paused", "done", "cancelled"))
    if job is None:

        async def read_jobs(store: Store, settings: Settings) -> JobList:
            from polar_proxy.records import list_jobs

            return await list_jobs(store, states=None if state is None else [state], limit=limit)

        page = read_store_or_server(url, db, read_jobs, lambda client: client.jobs(state=state, limit=limit))
        found = {"jobs": [_job_json(one) for one in page.jobs], "feed": page.feed}
        print_result(found, _job_table(page.jobs), as_json)
    else:

        async def read_job(store: Store, settings: Settings) -> JobDetail:
            from polar_proxy.records import find_job

            return _required(job, await find_job(store, job))

        detail = read_store_or_server(url, db, read_job, lambda client: client.job(job))
        print_result(_job_detail_json(detail), lambda: _print_groups(detail), as_json)


def _required(job_id: str, found: T | None) -> T:
    """Return `found`. Raises UsageError if it is None, that is, if there is no such job."""
    if found is None:
        raise UsageError(f"There is no job {job_id}.")
    return found


def _print_groups(job: JobDetail) -> None:
    out.print(_job_table([job]))
    for group in job.group_list:
        reason = f" ({group.reason})" if group.reason else ""
        out.print(one_line(f"{group.group_id} {group.task_id}: {group.status}{reason}"), soft_wrap=True)


def results(job: JobId, url: options.Url = None, db: options.Db = None, as_json: options.AsJson = False) -> None:
    """Show the rollouts of a job with their rewards."""

    async def read(store: Store, settings: Settings) -> RolloutList:
        from polar_proxy.records import rollouts_of_job

        return _required(job, await rollouts_of_job(store, job))

    rollouts = read_store_or_server(url, db, read, lambda client: client.job_rollouts(job)).rollouts

    def show() -> None:
        for row in rollouts:
            words = (row.rollout_id, row.task_id, row.status, format_number(row.reward), row.cause or "")
            out.print(one_line("  ".join(words)), soft_wrap=True)

    print_result({"job_id": job, "rollouts": rollouts}, show, as_json)


def watch(job: JobId, url: options.Url = None, db: options.Db = None, as_json: options.AsJson = False) -> None:
    """Show the progress of a job until it has ended. The exit code is 0 if it is done, 1 if it was cancelled.

    Each rollout is shown with its stage, times and reward. If the server restarts meanwhile, the command waits for it.
    Ctrl-C ends this command, not the job.
    """

    async def from_store(store: Store, settings: Settings) -> JobDetail:
        from polar_proxy.records import find_job, find_rollout, rollouts_of_job
        from polar_proxy.records.job_events import follow_events

        rollouts = _required(job, await rollouts_of_job(store, job)).rollouts
        new_events = await follow_events(store, job, None)
        events = (event async for new in new_events for event in new)
        await _watch(rollouts, events, lambda rollout_id: find_rollout(store, rollout_id), quiet=as_json)
        return _required(job, await find_job(store, job))

    async def from_server(client: AsyncClient) -> JobDetail:
        rollouts = (await client.job_rollouts(job)).rollouts
        # From the start of the job, so that no event is missed.
        await _watch(rollouts, client.events(job), client.rollout, quiet=as_json)
        return await client.job(job)

    ended = read_store_or_server(url, db, from_store, from_server, patient=True)
    text = f"{ended.job_id} is {ended.status}: {format_counts(ended.rollouts)}"
    print_result(_job_detail_json(ended), text, as_json, good=ended.status == "done")


async def _watch(
    rollouts: Sequence[Rollout],
    events: AsyncIterator[Event],
    find_rollout: Callable[[str], Awaitable[RolloutDetail | None]],
    *,
    quiet: bool,
) -> None:
    """Show the events of a job until the last one. `rollouts`: the job's rollouts when watching begins."""
    view = JobProgressView(rollouts, quiet=quiet)
    with view.show():
        async for event in events:
            view.update(event, await find_rollout(event.data["rollout_id"]) if view.has_ended(event) else None)


def events(
    job: Annotated[
        str | None,
        typer.Argument(
            help="A job's id: print its events until it has ended. Default: print the events of all jobs until Ctrl-C."
        ),
    ] = None,
    after: Annotated[str | None, typer.Option(help="Continue after the event with this id.")] = None,
    url: options.Url = None,
    db: options.Db = None,
) -> None:
    """Print events as they happen, one JSON object per line."""

    def show(event: Event) -> None:
        sys.stdout.write(escape_json_controls(orjson.dumps(event.model_dump()).decode()) + "\n")
        sys.stdout.flush()

    async def from_store(store: Store, settings: Settings) -> None:
        from polar_proxy.records.job_events import follow_events

        if job is not None:
            _required(job, await store.jobs.get(job))
        async for new in await follow_events(store, job, after):
            for event in new:
                show(event)

    async def from_server(client: AsyncClient) -> None:
        async for event in client.events(job, after=after):
            show(event)

    read_store_or_server(url, db, from_store, from_server, patient=True)


def cancel(
    target: Annotated[str, typer.Argument(metavar="JOB|GROUP|ROLLOUT", help="Id of a job, group or rollout.")],
    url: options.Url = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Cancel a job, a group or a rollout.

    Queued rollouts are cancelled at once. Each running rollout ends when its server next polls the queue.
    """
    from polar_proxy.client import NotFoundError

    try:
        done = with_client(url, db, lambda client: client.cancel(target))
    except NotFoundError as error:
        raise UsageError(f"There is no job, group or rollout {target}.") from error
    note = f"{len(done.in_flight)} running rollouts are being ended"
    print_result(done, lambda: print_note(note), as_json)


def pause(
    job: JobId,
    seconds: options.PauseFor = None,
    wait_idle: Annotated[
        float | None,
        typer.Option(
            help="Wait up to N seconds until no rollout of the job runs. If a rollout still runs then, undo the pause."
        ),
    ] = None,
    url: options.Url = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Pause a job: start no more of its rollouts. Running rollouts continue."""
    paused = with_client(url, db, lambda client: client.pause(job, seconds=seconds, wait_idle=wait_idle))
    print_result(_job_json(paused), _job_table([paused]), as_json)


def resume(job: JobId, url: options.Url = None, db: options.Db = None, as_json: options.AsJson = False) -> None:
    """Resume a paused job."""
    resumed = with_client(url, db, lambda client: client.resume(job))
    print_result(_job_json(resumed), _job_table([resumed]), as_json)


def _absolute_task(task: str, url: str | None) -> str:
    """Return `task`, or its absolute path if it is a local path, because the server may run in another folder."""
    path = os.path.expanduser(task)
    is_remote = url is not None and not is_local_url(url)
    return task if is_remote or not os.path.exists(path) else os.path.abspath(path)


def _job_json(job: Job) -> Json:
    return job.model_dump(exclude={"group_list"})


def _job_detail_json(job: JobDetail) -> Json:
    return {**_job_json(job), "groups": job.group_list}


def _print_refused(refused: list[RefusedTask]) -> None:
    for task in refused:
        name = f" ({task.name})" if task.name else ""
        print_refused_task(f"{task.where}{name}: {task.reason}")


def _job_table(jobs: Sequence[Job]) -> Table:
    return make_table(
        ("job", "status", "groups", "rollouts", "label"),
        ((job.job_id, job.status, job.groups, format_counts(job.rollouts), job.label or "") for job in jobs),
    )
