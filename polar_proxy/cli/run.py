"""`polar run`: run an agent on tasks, record its calls and score its work."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from polar_proxy.cli.common import (
    DbOption,
    EngineOption,
    EngineUrlOption,
    JsonOption,
    ModelOption,
    PastReasoningOption,
    PromptModeOption,
    database_url,
    load_settings,
    open_or_create,
    run_async,
)
from polar_proxy.cli.options import model_options
from polar_proxy.cli.output import (
    RolloutProgressView,
    format_number,
    make_table,
    out,
    print_json,
    print_note,
    print_refused_task,
)
from polar_proxy.config import Settings
from polar_proxy.errors import UsageError
from polar_proxy.rollout_spec import RolloutSpec
from polar_proxy.types import Json

if TYPE_CHECKING:
    from polar_proxy.store import RolloutRow
    from polar_proxy.tasks import Task

SeedOption = Annotated[
    int | None, typer.Option(min=0, help="Run only this instance; in a file: the task at this position.")
]
InstancesOption = Annotated[
    int | None, typer.Option(min=1, help="Run the first N tasks. Default: one of a family, all of a file or folder.")
]


@model_options(RolloutSpec, parameter="rollout_options")
def run(
    task: Annotated[
        str,
        typer.Argument(
            help="Task family (swe-task), a JSONL file of tasks or SWE-bench rows, a Harbor task folder "
            "or a folder of those, module:Class or module:function."
        ),
    ],
    *,
    seed: SeedOption = None,
    instances: InstancesOption = None,
    rollout_options: Json,
    samples: Annotated[int | None, typer.Option(min=1, help="Rollouts of each task (a group).")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Rollouts at a time.")] = None,
    engine: EngineOption = None,
    engine_url: EngineUrlOption = None,
    model: ModelOption = None,
    prompt_mode: PromptModeOption = None,
    past_reasoning: PastReasoningOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run an agent on tasks; record its model calls, score its work and build training sequences.

    The exit code is 0 if every rollout reached a final status, whatever its reward.
    """
    from polar_proxy.store import display_url

    settings = load_settings(
        db,
        engine={"kind": engine, "url": engine_url, "model": model},
        gateway={"prompt_mode": prompt_mode, "past_reasoning": past_reasoning},
        run={"samples": samples, "concurrency": concurrency, **rollout_options},
    )
    tasks, refused = _load_tasks(task, seed, instances)
    rows = run_async(_run(settings, tasks, quiet=as_json))
    url = display_url(database_url(settings))
    if as_json:
        document: Json = {"rollouts": [summary(row) for row in rows], "db": url}
        if refused is not None:
            document["refused"] = refused
        print_json(document)
    else:
        _print_summary(rows, url)


def _load_tasks(task: str, seed: int | None, instances: int | None) -> tuple[list[Task], list[Json] | None]:
    """Return the tasks, and the refused tasks of a file or folder (None for a family), which are printed.

    Raises UsageError if no task can be run.
    """
    from polar_proxy.tasks import load_tasks

    tasks, refused = load_tasks(task, seed, instances)
    for refusal in refused or ():
        print_refused_task(str(refusal))
    if not tasks:
        raise UsageError(f"{task} contains no task that can be run ({len(refused or ())} refused).")
    return tasks, None if refused is None else [asdict(refusal) for refusal in refused]


async def _run(settings: Settings, tasks: list[Task], *, quiet: bool) -> list[RolloutRow]:
    from polar_proxy.engines.factory import make_engine
    from polar_proxy.rollouts import local_gateway, recover, run_job

    view = RolloutProgressView(quiet=quiet)
    async with open_or_create(settings) as store:
        for line in await recover(store):
            print_note(line)
        print_note(f"database: {store.display_url}")
        async with make_engine(settings.engine) as engine:
            print_note(f"engine: {engine.info.engine} {engine.info.version}, model {engine.info.model}")
            async with local_gateway(settings, engine, store) as gateway:
                gateway.observe(view.call)
                with view.show():
                    spec = settings.run.job_spec()
                    ids = await run_job(tasks, spec, settings, engine, store, gateway, view, print_note)
        rows = {row.rollout_id: row for row in await store.rollouts.find(rollout_ids=ids)}
        return [rows[rollout_id] for rollout_id in ids]


def summary(row: RolloutRow) -> Json:
    """Return a rollout as `--json` prints it."""
    return {
        "rollout_id": row.rollout_id,
        "task_id": row.task_id,
        "group_id": row.group_id,
        "seed": row.seed,
        "status": row.status,
        "cause": row.cause,
        "attempt": row.attempt,
        "masked": row.masked,
        "reward": row.reward,
        "calls": row.calls,
        "traces": row.traces,
        "prompt_tokens": row.prompt_tokens,
        "completion_tokens": row.completion_tokens,
        "trained_tokens": row.trained_tokens,
        "wall_seconds": row.wall_seconds,
        "exit_code": row.exit_code,
        "session_id": row.session_id,
        "error": row.error,
    }


def _print_summary(rows: list[RolloutRow], url: str) -> None:
    columns = ("rollout", "task", "status", "reward", "calls", "trained", "s")
    table = make_table(*columns, right=("reward", "calls", "trained", "s"))
    for row in rows:
        seconds = format_number(row.wall_seconds, ".1f")
        numbers = (format_number(row.reward), str(row.calls), str(row.trained_tokens), seconds)
        table.add_row(row.rollout_id, row.task_id, row.status, *numbers)
    out.print(table)
    scored = [row.reward for row in rows if row.reward is not None]
    solved = sum(reward >= 1 for reward in scored)
    out.print(f"solved {solved} of {len(scored)} scored rollouts ({len(rows)} in all)")
    for row in rows:
        if row.error:
            out.print(f"[yellow]{row.rollout_id}: {escape(row.error)}[/]")
    out.print(f"database: {url}", soft_wrap=True)
    if rows:
        out.print(f"next:  polar show {rows[0].rollout_id}", soft_wrap=True)
        out.print("       polar export --format tokens-jsonl --where 'reward>=1' --out train.jsonl")
