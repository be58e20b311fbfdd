"""`polar submit`, `status`, `results`, `cancel`: jobs in a database, for `polar serve --work`."""

from __future__ import annotations

from typing import Annotated, get_args

import typer
from rich.table import Table

from polar_proxy.cli import common
from polar_proxy.cli.common import DbOption, JsonOption
from polar_proxy.cli.run import chosen_tasks, summary
from polar_proxy.errors import UsageError
from polar_proxy.store.jobs import GroupRow, JobRow, JobStatus
from polar_proxy.types import Json

JobArgument = Annotated[str, typer.Argument(help="A job's id, as `polar submit` prints it.")]


def submit(
    task: Annotated[str, typer.Argument(help="As for `polar run`.")],
    seed: Annotated[int | None, typer.Option(min=0, help="Run this one instance; of a file: by its position.")] = None,
    instances: Annotated[
        int | None, typer.Option(min=1, help="Run the first N. Default: one of a family, all of a file or folder.")
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Rollouts that are started of each instance.")] = None,
    wanted: Annotated[
        int | None, typer.Option(min=1, help="How many of them decide a group, with --decided-by. Default: all.")
    ] = None,
    decided_by: Annotated[
        str, typer.Option(help="When a group needs no more: wait_for_all, first_n or no_spread_left.")
    ] = "wait_for_all",
    harness: Annotated[
        str | None, typer.Option(help="The agent: NAME[@VERSION], module:Class, or shell:COMMAND.")
    ] = None,
    sandbox: Annotated[str | None, typer.Option(help="auto, docker, bubblewrap or process.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds the agent may take.")] = None,
    offered: Annotated[bool, typer.Option("--offered", help="Finished groups go to the trainer feed.")] = False,
    priority: Annotated[int, typer.Option(help="Higher goes first.")] = 0,
    label: Annotated[str | None, typer.Option(help="A name to find it by.")] = None,
    key: Annotated[str | None, typer.Option(help="Idempotency key: said twice, there is one job.")] = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Queue rollouts, and print the job's id. `polar serve --work` on the same database runs them."""
    given = {
        "samples": samples,
        "harness": harness,
        "sandbox": sandbox,
        "temperature": temperature,
        "timeout": timeout,
    }
    settings = common.load_settings(db, run=given)
    tasks, refused = chosen_tasks(task, seed, instances)

    async def queue() -> tuple[JobRow, bool]:
        from polar_proxy.rollout import Recipe, Submission
        from polar_proxy.rollout import submit as queue_job

        run = settings.run
        submission = Submission(
            tasks, Recipe.of(run), run.samples, wanted, decided_by, offered, priority, label, idempotency_key=key
        )
        async with common.writer(settings) as store:
            return await queue_job(store, submission)

    job, is_new = common.run_async(queue())
    if as_json:
        common.print_json({**job_json(job), "new": is_new, "refused": refused})
    else:
        common.err.print(f"[dim]{_told(job)}{'' if is_new else ' (known already)'}[/]", highlight=False)
        typer.echo(job.job_id)


def status(
    job: Annotated[str | None, typer.Argument(help="A job's id; without it, the newest jobs.")] = None,
    state: Annotated[str | None, typer.Option(help="Only jobs that are open, paused, done or cancelled.")] = None,
    limit: Annotated[int, typer.Option(min=1)] = 20,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """How far jobs are."""
    if state is not None and state not in get_args(JobStatus):
        raise UsageError(f"Jobs are {', '.join(get_args(JobStatus))}, never {state!r}.")
    settings = common.load_settings(db)

    async def look() -> tuple[list[JobRow], list[GroupRow], dict[str, int]]:
        async with common.reader(settings) as store:
            if job is None:
                rows = await store.jobs(statuses=None if state is None else [state], limit=limit)
                return rows, [], await store.feed_depth()
            one = await store.job(job)
            if one is None:
                raise UsageError(f"There is no job {job}.")
            return [one], await store.groups(job), {}

    jobs, groups, depth = common.run_async(look())
    if as_json:
        found: list[Json] = [job_json(row) for row in jobs]
        common.print_json({"jobs": found, "feed": depth} if job is None else {**found[0], "groups": _groups(groups)})
        return
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


def results(job: JobArgument, db: DbOption = None, as_json: JsonOption = False) -> None:
    """A job's rollouts, as `polar run` prints them."""
    settings = common.load_settings(db)

    async def look() -> list[Json]:
        from polar_proxy.rollout import rollouts_of

        async with common.reader(settings) as store:
            if await store.job(job) is None:
                raise UsageError(f"There is no job {job}.")
            ids = await rollouts_of(store, job)
            rows = {row.rollout_id: row for row in await store.rollouts(rollout_ids=ids)}
            return [summary(rows[rollout_id]) for rollout_id in ids]

    rows = common.run_async(look())
    if as_json:
        common.print_json({"job_id": job, "rollouts": rows})
        return
    for row in rows:
        reward = "-" if row["reward"] is None else f"{row['reward']:g}"
        words = (row["rollout_id"], row["task_id"], row["status"], reward, row["cause"] or "")
        common.out.print("  ".join(words), highlight=False, markup=False, soft_wrap=True)


def cancel(
    what: Annotated[str, typer.Argument(help="Id of a job, a group or a rollout.")],
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel what is queued at once; what a service has in hand ends within its next look at the queue."""
    settings = common.load_settings(db)

    async def ask() -> list[str]:
        from polar_proxy.rollout import cancel as cancel_queued

        async with common.writer(settings) as store:
            return await cancel_queued(store, what)

    in_hand = common.run_async(ask())
    if as_json:
        common.print_json({"cancelled": what, "in_hand": in_hand})
    else:
        common.err.print(f"[dim]{len(in_hand)} rollouts were under way and are being ended[/]", highlight=False)


def job_json(job: JobRow) -> Json:
    """A job as `--json` prints it."""
    return {
        "job_id": job.job_id,
        "status": job.status,
        "label": job.label,
        "priority": job.priority,
        "groups": job.groups,
        "rollouts": job.rollouts,
        "created_at": job.created_at,
        "ended_at": job.ended_at,
    }


def _groups(groups: list[GroupRow]) -> list[Json]:
    names = ("group_id", "task_id", "size", "wanted", "status", "reason", "delivery")
    return [{name: getattr(group, name) for name in names} for group in groups]


def _told(job: JobRow) -> str:
    return f"{job.groups} groups, {sum(job.rollouts.values())} rollouts"
