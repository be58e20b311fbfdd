"""`polar submit`, `status`, `results`, `watch`, `events`, `cancel`, `pause`, `resume` and `reward`.

They talk to a server (--url), or to an API in this process on the database.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import orjson
import typer
from pydantic import BaseModel, ValidationError

from polar_proxy.cli.common import (
    DbOption,
    JsonOption,
    UrlOption,
    is_local_url,
    load_client_settings,
    with_client,
)
from polar_proxy.cli.options import model_options
from polar_proxy.cli.output import (
    JobProgressView,
    format_counts,
    format_number,
    make_table,
    out,
    print_json,
    print_note,
    print_refused_task,
)
from polar_proxy.cli.run import InstancesOption, SeedOption
from polar_proxy.errors import UsageError
from polar_proxy.rollout_spec import JobSpec
from polar_proxy.types import Json

if TYPE_CHECKING:
    from polar_proxy.api_models import Job, JobDetail, RefusedTask
    from polar_proxy.client import AsyncClient

M = TypeVar("M", bound=BaseModel)

JobArgument = Annotated[str, typer.Argument(help="A job's id, as `polar submit` prints it.")]
_STATES = ("open", "paused", "done", "cancelled")


@model_options(JobSpec)
def submit(
    task: Annotated[str, typer.Argument(help="As for `polar run`. A file is read where the server runs.")],
    *,
    seed: SeedOption = None,
    instances: InstancesOption = None,
    options: Json,
    key: Annotated[
        str | None, typer.Option(help="Idempotency key: submitting again under the same key returns the same job.")
    ] = None,
    url: UrlOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Queue rollouts and print the job's id.

    `polar serve --rollout-workers N` on the same database runs them.
    """
    from polar_proxy.api_models import JobRequest, RefusedTask
    from polar_proxy.client import BadRequestError

    settings = load_client_settings(url, db)
    chosen = {name: value for name, value in (("seed", seed), ("instances", instances)) if value is not None}
    request = _make_request(JobRequest, task=_absolute_task(task, settings.url), **chosen, **options)
    try:
        job = with_client(settings, lambda client: client.submit(request, idempotency_key=key), create=True)
    except BadRequestError as error:
        if error.code == "bad_request" and isinstance(error.detail, list):  # all tasks were refused
            _print_refused([RefusedTask.model_validate(one) for one in error.detail])
        raise
    if as_json:
        print_json(job.model_dump())
        return
    _print_refused(job.refused)
    known = "" if job.new else " (submitted before)"
    print_note(f"{job.groups} groups, {sum(job.rollouts.values())} rollouts{known}")
    typer.echo(job.job_id)


def status(
    job: Annotated[str | None, typer.Argument(help="A job's id. Default: list the newest jobs.")] = None,
    state: Annotated[str | None, typer.Option(help="Only jobs that are open, paused, done or cancelled.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="List at most N jobs.")] = 20,
    url: UrlOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the progress of jobs."""
    if state is not None and state not in _STATES:
        raise UsageError(f"There is no job state {state!r}: choose {', '.join(_STATES)}.")
    settings = load_client_settings(url, db)
    if job is not None:
        detail = with_client(settings, lambda client: client.job(job))
        if as_json:
            print_json(_job_detail_json(detail))
        else:
            _print_jobs([detail])
            for group in detail.group_list:
                reason = f" ({group.reason})" if group.reason else ""
                out.print(f"{group.group_id} {group.task_id}: {group.status}{reason}", markup=False)
        return
    page = with_client(settings, lambda client: client.jobs(state=state, limit=limit))
    if as_json:
        print_json({"jobs": [_job_json(one) for one in page.jobs], "feed": page.feed})
    else:
        _print_jobs(page.jobs)


def results(job: JobArgument, url: UrlOption = None, db: DbOption = None, as_json: JsonOption = False) -> None:
    """Show the rollouts of a job with their rewards."""
    rollouts = with_client(load_client_settings(url, db), lambda client: client.job_rollouts(job)).rollouts
    if as_json:
        print_json({"job_id": job, "rollouts": [rollout.model_dump() for rollout in rollouts]})
        return
    for row in rollouts:
        words = (row.rollout_id, row.task_id, row.status, format_number(row.reward), row.cause or "")
        out.print("  ".join(words), markup=False, soft_wrap=True)


def watch(job: JobArgument, url: UrlOption = None, db: DbOption = None, as_json: JsonOption = False) -> None:
    """Show the progress of a job until it has ended. The exit code is 0 if it is done, 1 if it was cancelled.

    If the server restarts meanwhile, this waits for it. Ctrl-C stops watching, not the job.
    """

    async def follow(client: AsyncClient) -> JobDetail:
        view = JobProgressView(await client.job(job), quiet=as_json)
        with view.show():
            async for event in client.events(job):  # from the start of the job, so that no event is missed
                view.update(event)
        return await client.job(job)

    ended = with_client(load_client_settings(url, db), follow, patient=True)
    if as_json:
        print_json(_job_detail_json(ended))
    else:
        out.print(f"{ended.job_id} is {ended.status}: {format_counts(ended.rollouts)}", markup=False)
    if ended.status != "done":
        raise typer.Exit(1)


def events(
    job: Annotated[
        str | None, typer.Argument(help="A job's id: print its events until it has ended. Default: all jobs, endless.")
    ] = None,
    after: Annotated[str | None, typer.Option(help="Continue after the event with this id.")] = None,
    url: UrlOption = None,
    db: DbOption = None,
) -> None:
    """Print events as they happen, one JSON object per line."""

    async def follow(client: AsyncClient) -> None:
        async for event in client.events(job, after=after):
            sys.stdout.write(orjson.dumps(event.model_dump()).decode() + "\n")
            sys.stdout.flush()

    with_client(load_client_settings(url, db), follow, patient=True)


def cancel(
    target: Annotated[str, typer.Argument(metavar="JOB|GROUP|ROLLOUT", help="The id of what to cancel.")],
    url: UrlOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel a job, a group or a rollout.

    Queued rollouts are cancelled at once; a server ends running ones when it next looks at the queue.
    """
    from polar_proxy.client import NotFoundError

    try:
        done = with_client(load_client_settings(url, db), lambda client: client.cancel(target))
    except NotFoundError as error:
        raise UsageError(f"There is no job, group or rollout {target}.") from error
    if as_json:
        print_json(done.model_dump())
    else:
        print_note(f"{len(done.in_flight)} rollouts were running and are now ended")


def pause(
    job: JobArgument,
    seconds: Annotated[float | None, typer.Option("--for", help="Resume automatically after N seconds.")] = None,
    wait_idle: Annotated[
        float | None,
        typer.Option(help="Wait up to N seconds until none of its rollouts runs; if some still run, do not pause."),
    ] = None,
    url: UrlOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start no more rollouts of a job; running rollouts continue."""
    settings = load_client_settings(url, db)
    _print_job(with_client(settings, lambda client: client.pause(job, seconds=seconds, wait_idle=wait_idle)), as_json)


def resume(job: JobArgument, url: UrlOption = None, db: DbOption = None, as_json: JsonOption = False) -> None:
    """Resume a paused job."""
    _print_job(with_client(load_client_settings(url, db), lambda client: client.resume(job)), as_json)


def reward(
    rollout: Annotated[str, typer.Argument(help="A rollout's id.")],
    value: Annotated[str, typer.Argument(help="A number, or `none` if the rollout could not be judged.")],
    source: Annotated[str, typer.Option(help="Who gives the reward, such as human:anna or ci.")],
    call: Annotated[str | None, typer.Option(help="Reward only this call.")] = None,
    trace: Annotated[str | None, typer.Option(help="Reward only this trace.")] = None,
    detail: Annotated[str | None, typer.Option(help="A JSON object to store with the reward.")] = None,
    url: UrlOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Add a reward to a rollout. Earlier rewards are kept; the newest one of the rollout as a whole is its reward."""
    from polar_proxy.api_models import RewardRequest

    try:
        number = None if value == "none" else float(value)
        given = {} if detail is None else orjson.loads(detail)
    except ValueError as error:  # includes JSONDecodeError
        raise UsageError(f"A reward is a number or `none`, and its detail a JSON object: {error}.") from error
    request = _make_request(
        RewardRequest, rollout_id=rollout, value=number, source=source, call_id=call, trace_id=trace, detail=given
    )
    stored = with_client(load_client_settings(url, db), lambda client: client.reward(request))
    if as_json:
        print_json(stored.model_dump())
    else:
        typer.echo(stored.reward_id)


def _make_request(model: type[M], **fields: Any) -> M:
    """Raises UsageError with the first problem."""
    try:
        return model(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"{where}: {message}" if where else f"{message[:1].upper()}{message[1:]}.") from error


def _absolute_task(task: str, url: str | None) -> str:
    """Return the absolute path of a local file of tasks, because the server may run in another folder."""
    path = Path(task).expanduser()
    is_remote = url is not None and not is_local_url(url)
    return task if is_remote or not path.exists() else str(path.absolute())


def _job_json(job: Job) -> Json:
    return job.model_dump(exclude={"group_list"})


def _job_detail_json(job: JobDetail) -> Json:
    return {**_job_json(job), "groups": [group.model_dump() for group in job.group_list]}


def _print_refused(refused: list[RefusedTask]) -> None:
    for task in refused:
        name = f" ({task.name})" if task.name else ""
        print_refused_task(f"{task.where}{name}: {task.reason}")


def _print_job(job: Job, as_json: bool) -> None:
    if as_json:
        print_json(_job_json(job))
    else:
        _print_jobs([job])


def _print_jobs(jobs: list[Any]) -> None:
    table = make_table("job", "status", "groups", "rollouts", "label")
    for job in jobs:
        table.add_row(job.job_id, job.status, str(job.groups), format_counts(job.rollouts), job.label or "")
    out.print(table)
