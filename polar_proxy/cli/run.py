"""`polar run`: run an agent on tasks, record its calls and score its work."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from polar_proxy.cli import options
from polar_proxy.cli.common import database_url, load_settings, open_database, run_async
from polar_proxy.cli.output import (
    RolloutProgressView,
    format_number,
    make_table,
    out,
    print_note,
    print_refused_task,
    print_result,
)
from polar_proxy.config import Settings
from polar_proxy.errors import UsageError
from polar_proxy.rollout_spec import RolloutSpec
from polar_proxy.types import Json

if TYPE_CHECKING:
    from polar_proxy.store import RolloutRow
    from polar_proxy.tasks import Task

_SUMMARY = (
    *("rollout_id", "task_id", "group_id", "seed", "status", "cause", "attempt", "masked", "reward", "calls", "traces"),
    *("prompt_tokens", "completion_tokens", "trained_tokens", "wall_seconds", "exit_code", "session_id", "error"),
)
"""Fields of a rollout that `--json` prints."""


@options.model_options(RolloutSpec)
def run(
    task: Annotated[
        str,
        typer.Argument(
            help="Task family (swe-task), a JSONL file of tasks or SWE-bench rows, a Harbor task folder "
            "or a folder of those, module:Class or module:function."
        ),
    ],
    *,
    seed: options.Seed = None,
    instances: options.Instances = None,
    rollout_options: Json,
    samples: Annotated[int | None, typer.Option(min=1, help="Rollouts of each task (a group).")] = None,
    concurrency: options.Concurrency = None,
    engine: options.Engine = None,
    engine_url: options.EngineUrl = None,
    model: options.Model = None,
    prompt_mode: options.PromptMode = None,
    past_reasoning: options.PastReasoning = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
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
    document: Json = {"rollouts": [{name: getattr(row, name) for name in _SUMMARY} for row in rows], "db": url}
    if refused is not None:
        document["refused"] = refused
    print_result(document, lambda: _print_summary(rows, url), as_json)


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
    async with open_database(settings, create=True) as store:
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


def _print_summary(rows: list[RolloutRow], url: str) -> None:
    numbers = ("reward", "calls", "trained", "s")
    cells = (
        (
            row.rollout_id,
            row.task_id,
            row.status,
            format_number(row.reward),
            row.calls,
            row.trained_tokens,
            format_number(row.wall_seconds, ".1f"),
        )
        for row in rows
    )
    out.print(make_table(("rollout", "task", "status", *numbers), cells, right=numbers))
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
