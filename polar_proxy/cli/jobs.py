"""`polar submit`, `status`, `results`, `cancel`, `pause`, `resume`, `reward`: jobs of a server, or of a database."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import orjson
import typer
from pydantic import ValidationError
from rich.markup import escape
from rich.table import Table

from polar_proxy.cli import common, connect
from polar_proxy.cli.common import DbOption, JsonOption
from polar_proxy.cli.connect import UrlOption
from polar_proxy.cli.options import model_options
from polar_proxy.errors import UsageError
from polar_proxy.rollout_spec import JobSpec
from polar_proxy.store.jobs import JobStatus
from polar_proxy.types import Json

if TYPE_CHECKING:
    from polar_proxy.api_models import Group, Job, RefusedTask

JobArgument = Annotated[str, typer.Argument(help="A job's id, as `polar submit` prints it.")]


@model_options(JobSpec)
def submit(
    task: Annotated[str, typer.Argument(help="As for `polar run`. A file is read where the server runs.")],
    *,
    seed: Annotated[int | None, typer.Option(min=0, help="Run this one instance; of a file: by its position.")] = None,
    instances: Annotated[
        int | None, typer.Option(min=1, help="Run the first N. Default: one of a family, all of a file or folder.")
    ] = None,
    options: Json,
    key: Annotated[str | None, typer.Option(help="Idempotency key: one key makes one job.")] = None,
    url: UrlOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Queue rollouts, and print the job's id. `polar serve --work` on the same database runs them."""
    from polar_proxy.api_models import JobRequest, RefusedTask
    from polar_proxy.client import BadRequestError

    chosen = {"seed": seed, "instances": instances}
    given = {name: value for name, value in chosen.items() if value is not None}
    settings = connect.load_settings(url, db)
    request = _request(JobRequest, task=_absolute(task, settings.url), **given, **options)
    try:
        job = connect.call(settings, lambda client: client.submit(request, idempotency_key=key), create=True)
    except BadRequestError as error:
        if error.code == "bad_request" and isinstance(error.detail, list):  # none of the tasks is one
            _refused([RefusedTask.model_validate(one) for one in error.detail])
        raise
    if as_json:
        common.print_json(job.model_dump())
        return
    _refused(job.refused)
    known = "" if job.new else " (known already)"
    common.err.print(f"[dim]{job.groups} groups, {sum(job.rollouts.values())} rollouts{known}[/]", highlight=False)
    typer.echo(job.job_id)


def status(
    job: Annotated[str | None, typer.Argument(help="A job's id; without it, the newest jobs.")] = None,
    state: Annotated[str | None, typer.Option(help="Only jobs that are open, paused, done or cancelled.")] = None,
    limit: Annotated[int, typer.Option(min=1)] = 20,
    url: UrlOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """How far jobs are."""
    if state is not None and state not in get_args(JobStatus):
        raise UsageError(f"Jobs are {', '.join(get_args(JobStatus))}, never {state!r}.")
    settings = connect.load_settings(url, db)
    if job is None:
        found = connect.call(settings, lambda client: client.jobs(state=state, limit=limit))
        if as_json:
            common.print_json({"jobs": [job_json(one) for one in found.jobs], "feed": found.feed})
        else:
            _table(found.jobs, [])
        return
    one = connect.call(settings, lambda client: client.job(job))
    if as_json:
        common.print_json({**job_json(one), "groups": [group.model_dump() for group in one.group_list]})
    else:
        _table([one], one.group_list)


def results(job: JobArgument, url: UrlOption = None, db: DbOption = None, as_json: JsonOption = False) -> None:
    """A job's rollouts, as `polar run` prints them."""
    settings = connect.load_settings(url, db)
    rollouts = connect.call(settings, lambda client: client.job_rollouts(job)).rollouts
    if as_json:
        common.print_json({"job_id": job, "rollouts": [rollout.model_dump() for rollout in rollouts]})
        return
    for row in rollouts:
        reward = "-" if row.reward is None else f"{row.reward:g}"
        words = (row.rollout_id, row.task_id, row.status, reward, row.cause or "")
        common.out.print("  ".join(words), highlight=False, markup=False, soft_wrap=True)


def cancel(
    what: Annotated[str, typer.Argument(help="Id of a job, a group or a rollout.")],
    url: UrlOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel what is queued at once; what a service has in hand ends within its next look at the queue."""
    from polar_proxy.client import NotFoundError

    try:
        done = connect.call(connect.load_settings(url, db), lambda client: client.cancel(what))
    except NotFoundError as error:
        raise UsageError(f"There is no job, group or rollout {what}.") from error
    if as_json:
        common.print_json(done.model_dump())
    else:
        common.err.print(f"[dim]{len(done.in_flight)} rollouts were under way and are being ended[/]", highlight=False)


def pause(
    job: JobArgument,
    seconds: Annotated[float | None, typer.Option("--for", help="Resume by itself after so many seconds.")] = None,
    wait_idle: Annotated[
        float | None, typer.Option(help="Wait so many seconds until nothing of it runs; else it is not paused.")
    ] = None,
    url: UrlOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Begin nothing new of a job; what runs goes on."""
    settings = connect.load_settings(url, db)
    _told(connect.call(settings, lambda client: client.pause(job, seconds=seconds, wait_idle=wait_idle)), as_json)


def resume(job: JobArgument, url: UrlOption = None, db: DbOption = None, as_json: JsonOption = False) -> None:
    """Go on with a job that was paused."""
    settings = connect.load_settings(url, db)
    _told(connect.call(settings, lambda client: client.resume(job)), as_json)


def reward(
    rollout: Annotated[str, typer.Argument(help="A rollout's id.")],
    value: Annotated[str, typer.Argument(help="A number, or `none`: whoever judged could not say.")],
    source: Annotated[str, typer.Option(help="Who says so: human:anna, ci, ...")],
    call: Annotated[str | None, typer.Option(help="Of this call alone.")] = None,
    trace: Annotated[str | None, typer.Option(help="Of this trace alone.")] = None,
    detail: Annotated[str | None, typer.Option(help="A JSON object that goes with it.")] = None,
    url: UrlOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a reward from outside. Earlier ones stay; the newest of the rollout itself is its reward."""
    from polar_proxy.api_models import RewardRequest

    try:
        number = None if value == "none" else float(value)
        given = {} if detail is None else orjson.loads(detail)
    except ValueError as error:  # JSONDecodeError is one, too
        raise UsageError(f"A reward is a number or `none`, its detail a JSON object: {error}.") from error
    request = _request(
        RewardRequest, rollout_id=rollout, value=number, source=source, call_id=call, trace_id=trace, detail=given
    )
    found = connect.call(connect.load_settings(url, db), lambda client: client.reward(request))
    if as_json:
        common.print_json(found.model_dump())
    else:
        typer.echo(found.reward_id)


def job_json(job: Job) -> Json:
    """A job as `--json` prints it."""
    return job.model_dump(exclude={"group_list"})


def _request(kind: type[Any], **fields: Any) -> Any:
    """Raises UsageError with the first thing that is wrong."""
    try:
        return kind(**fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"{where}: {message}" if where else f"{message[:1].upper()}{message[1:]}.") from error


def _refused(refused: list[RefusedTask]) -> None:
    for refusal in refused:
        named = f" ({refusal.name})" if refusal.name else ""
        told = f"[yellow]refused[/] {escape(f'{refusal.where}{named}: {refusal.reason}')}"
        common.err.print(told, highlight=False, soft_wrap=True)


def _absolute(task: str, url: str | None) -> str:
    """A file of here as the server finds it that runs here too, in a folder of its own."""
    path = Path(task).expanduser()
    there = url is not None and not connect.is_here(url)
    return task if there or not path.exists() else str(path.absolute())


def _told(job: Job, as_json: bool) -> None:
    if as_json:
        common.print_json(job_json(job))
    else:
        _table([job], [])


def _table(jobs: list[Job] | list[Any], groups: list[Group]) -> None:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("job", "status", "groups", "rollouts", "label"):
        table.add_column(name, no_wrap=True)
    for row in jobs:
        stands = ", ".join(f"{count} {name}" for name, count in sorted(row.rollouts.items()))
        table.add_row(row.job_id, row.status, str(row.groups), stands, row.label or "")
    common.out.print(table)
    for group in groups:
        why = f" ({group.reason})" if group.reason else ""
        common.out.print(f"{group.group_id} {group.task_id}: {group.status}{why}", highlight=False, markup=False)
