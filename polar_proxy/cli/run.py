"""`polar run`: rollouts of tasks, from nothing but Python to recorded, scored trajectories."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from polar_proxy.cli import common
from polar_proxy.cli.common import DbOption, JsonOption, PastReasoningOption, PromptModeOption
from polar_proxy.cli.live import RolloutProgressView
from polar_proxy.cli.options import model_options
from polar_proxy.config import Settings
from polar_proxy.errors import UsageError
from polar_proxy.rollout_spec import RolloutSpec
from polar_proxy.store import RolloutRow, display_url
from polar_proxy.tasks import Task, load_tasks
from polar_proxy.types import Json


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
    seed: Annotated[int | None, typer.Option(min=0, help="Run this one instance; of a file: by its position.")] = None,
    instances: Annotated[
        int | None, typer.Option(min=1, help="Run the first N. Default: one of a family, all of a file or folder.")
    ] = None,
    rollout_options: Json,
    samples: Annotated[int | None, typer.Option(min=1, help="Rollouts of each task (a group).")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Rollouts at a time.")] = None,
    engine: Annotated[str | None, typer.Option(help="local, vllm, openai, or module:Class.")] = None,
    engine_url: Annotated[str | None, typer.Option(help="Where the engine listens (vllm, openai).")] = None,
    model: Annotated[str | None, typer.Option(help="local: a folder; vllm, openai: the served name.")] = None,
    prompt_mode: PromptModeOption = None,
    past_reasoning: PastReasoningOption = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run an agent on tasks; record, score and join what it did.

    Exit code 0 when every rollout reached a final status, whatever its reward.
    """
    settings = common.load_settings(
        db,
        engine={"kind": engine, "url": engine_url, "model": model},
        gateway={"prompt_mode": prompt_mode, "past_reasoning": past_reasoning},
        run={"samples": samples, "concurrency": concurrency, **rollout_options},
    )
    tasks, refused = load_requested_tasks(task, seed, instances)
    rows = common.run_async(_run(settings, tasks, quiet=as_json))
    url = display_url(common.database_url(settings))
    if as_json:
        document: Json = {"rollouts": [summary(row) for row in rows], "db": url}
        if refused is not None:
            document["refused"] = refused
        common.print_json(document)
    else:
        _print_summary(rows, url)


def load_requested_tasks(task: str, seed: int | None, instances: int | None) -> tuple[list[Task], list[Json] | None]:
    """The tasks that were asked for, and those of a file or folder that were refused, which are told on stderr (None:
    not a file). Raises UsageError where nothing can be run."""
    tasks, refused = load_tasks(task, seed, instances)
    for refusal in refused or ():
        common.err.print(f"[yellow]refused[/] {escape(str(refusal))}", highlight=False, soft_wrap=True)
    if not tasks:
        raise UsageError(f"{task} holds no task that can be run ({len(refused or ())} refused).")
    return tasks, None if refused is None else [asdict(refusal) for refusal in refused]


async def _run(settings: Settings, tasks: list[Task], *, quiet: bool) -> list[RolloutRow]:
    # Loaded here: torch and the rest take seconds, which `polar --help` should not.
    from polar_proxy.engines.factory import make_engine
    from polar_proxy.rollouts import local_gateway, recover, run_job

    view = RolloutProgressView(common.err, interactive=not quiet)
    async with common.writer(settings) as store:
        for line in await recover(store):
            view.note(line)
        view.note(f"database: {store.display_url}")
        async with make_engine(settings.engine) as engine:
            view.note(f"engine: {engine.info.engine} {engine.info.version}, model {engine.info.model}")
            async with local_gateway(settings, engine, store) as gateway:
                gateway.observe(view.call)
                with view.shown():
                    ids = await run_job(
                        tasks, settings.run.job_spec(), settings, engine, store, gateway, view, view.note
                    )
        rows = []
        for rollout_id in ids:
            row = await store.rollouts.get(rollout_id)
            assert row is not None
            rows.append(row)
        return rows


def summary(row: RolloutRow) -> Json:
    """A rollout as `--json` prints it."""
    wall = None if row.started_at is None or row.ended_at is None else round(row.ended_at - row.started_at, 3)
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
        "wall_seconds": wall,
        "exit_code": row.exit_code,
        "session_id": row.session_id,
        "error": row.error,
    }


def _print_summary(rows: list[RolloutRow], url: str) -> None:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("rollout", "task", "status", "reward", "calls", "trained", "s"):
        left = name in ("rollout", "task", "status")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        wall = summary(row)["wall_seconds"]
        reward = "-" if row.reward is None else f"{row.reward:g}"
        seconds = "-" if wall is None else f"{wall:.1f}"
        table.add_row(row.rollout_id, row.task_id, row.status, reward, str(row.calls), str(row.trained_tokens), seconds)
    common.out.print(table)
    scored = [row.reward for row in rows if row.reward is not None]
    solved = sum(reward >= 1 for reward in scored)
    common.out.print(f"solved {solved} of {len(scored)} scored rollouts ({len(rows)} in all)", highlight=False)
    for row in rows:
        if row.error:
            common.out.print(f"[yellow]{row.rollout_id}: {escape(row.error)}[/]", highlight=False)
    common.out.print(f"database: {url}", highlight=False, soft_wrap=True)
    if rows:
        common.out.print(f"next:  polar show {rows[0].rollout_id}", highlight=False, soft_wrap=True)
        export = "polar export --format tokens-jsonl --where 'reward>=1' --out train.jsonl"
        common.out.print(f"       {export}", highlight=False)
