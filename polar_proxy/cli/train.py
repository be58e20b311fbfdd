"""`polar train`: train a policy with GRPO, and show the progress of training runs."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polar_proxy.cli import options
from polar_proxy.cli.common import (
    api_key_for,
    given,
    import_named_code,
    load_settings,
    open_database,
    read_store_or_server,
    run_async,
)
from polar_proxy.cli.output import (
    format_number,
    format_seconds,
    format_time,
    make_table,
    out,
    print_note,
    print_result,
)
from polar_proxy.cli.views.training import TrainingProgressView, curve_table, left_out_lines, seconds_left
from polar_proxy.config import Settings
from polar_proxy.errors import UsageError
from polar_proxy.rollout_spec import RolloutSpec
from polar_proxy.types import Json

if TYPE_CHECKING:
    from polar_proxy.api_models import TrainingRunList
    from polar_proxy.store import Store
    from polar_proxy.training.config import GrpoConfig

app = typer.Typer(no_args_is_help=True, help="Train a policy on rollouts.")

_SHOWN_STEPS = 20


@app.command("grpo")
@options.model_options(RolloutSpec, exclude=("temperature", "train_timed_out"))  # settings of [grpo] replace these
def grpo(
    *,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with [grpo], and with [engine], [run], [gateway] as in polar.toml.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Name or folder of the run. An existing run is resumed. Default: a new run.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Task family, file or folder, as for `polar run`.")] = None,
    engine: options.Engine = None,
    engine_url: options.EngineUrl = None,
    model: options.Model = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Folder of the weights to start from. Required for vllm. Default for local: the weights "
            "that the engine serves."
        ),
    ] = None,
    rollout_options: Json,
    concurrency: options.Concurrency = None,
    feed: Annotated[
        str | None,
        typer.Option(
            help="URL of a server, where rollouts run. Training runs on this machine, on the groups of its feed."
        ),
    ] = None,
    submit_jobs: Annotated[
        bool | None, typer.Option("--submit-jobs", help="With --feed: also submit the rollout jobs to the server.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Number of steps.")] = None,
    groups: Annotated[int | None, typer.Option(min=1, help="Number of groups per step.")] = None,
    samples: Annotated[int | None, typer.Option(min=2, help="Number of rollouts per group.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    loss: Annotated[str | None, typer.Option(help="Name of the loss (docs/reference/algorithms.md).")] = None,
    advantage: Annotated[
        str | None, typer.Option(help="Name of the advantage function (docs/reference/algorithms.md).")
    ] = None,
    max_async_steps: Annotated[
        int | None,
        typer.Option(min=0, help="Start rollouts up to N steps ahead of the training; 0: synchronous."),
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(min=0, help="Evaluate on held-out tasks every N steps; 0: never.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the order of task instances.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE: any setting of [grpo], such as lora.rank=16. Repeatable."),
    ] = None,
    allow_code: options.AllowCode = None,
    db: options.Db = None,
    as_json: options.AsJson = False,
) -> None:
    """Train with GRPO: run rollouts, lease their groups, take steps, and send new weights to the engine.

    Options override the settings of the file. To resume a run that was stopped, give the same command again.
    """
    from polar_proxy.training.config import make_config, read_assignments

    import_named_code(task, rollout_options.get("harness"), engine, *(allow_code or ()))
    own, tables = _read_run_file(config)
    sections: dict[str, dict[str, Any]] = {
        "engine": {"kind": engine, "url": engine_url, "model": model},
        "run": {"concurrency": concurrency, **rollout_options},
        "gateway": {},
    }
    settings = load_settings(
        db,
        allow_code=allow_code,
        **{name: {**tables.get(name, {}), **given(own_flags)} for name, own_flags in sections.items()},
    )
    flags: Json = {"task": task, "weights": weights, "steps": steps, "groups": groups, "samples": samples}
    flags |= {"learning_rate": lr, "loss": loss, "advantage": advantage, "eval_every": eval_every}
    flags |= {"feed": feed, "submit_jobs": submit_jobs, "max_async_steps": max_async_steps, "seed": seed}
    grpo_config = make_config(own, flags, read_assignments(setting or ()))
    folder = _run_folder(settings, run or time.strftime("grpo-%Y%m%d-%H%M%S"))
    print_note(f"run: {folder}")
    run_async(_train(settings, grpo_config, folder, quiet=as_json))
    _print_run(folder, as_json=as_json)


def _read_run_file(path: Path | None) -> tuple[Json, Json]:
    """Return the table [grpo] of a run's file, and the file's other tables by name. Raises UsageError if the file
    cannot be read or has an unknown table."""
    from polar_proxy.training.config import read_toml

    if path is None:
        return {}, {}
    own, tables = read_toml(path)
    if unknown := tables.keys() - {"engine", "run", "gateway"}:
        raise UsageError(
            f"{path} has unknown tables: {', '.join(sorted(unknown))}. Choose from grpo, engine, run and gateway."
        )
    return own, tables


@app.command("status")
def status(
    run: Annotated[str, typer.Argument(help="Name or folder of a run.")],
    png: Annotated[Path | None, typer.Option(help="Draw the curves into this file (needs matplotlib).")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Show a run: its steps, rewards, counts of left-out data, and the time spent in each phase.

    --json also has `series`: every curve as a list with one value per step.
    """
    folder = _run_folder(load_settings(), run)
    if png is not None:
        _draw(folder, png)
    _print_run(folder, as_json=as_json)


@app.command("list")
def list_runs(url: options.Url = None, db: options.Db = None, as_json: options.AsJson = False) -> None:
    """List the training runs that were reported to the database or server, newest first."""

    async def read(store: Store, settings: Settings) -> TrainingRunList:
        from polar_proxy.records import list_training_runs

        return await list_training_runs(store)

    found = read_store_or_server(url, db, read, lambda client: client.training_runs())
    table = make_table(
        ("run", "name", "steps", "last report"),
        ((run.run_id, run.name, run.step, format_time(run.updated_at)) for run in found.runs),
    )
    print_result(found, table, as_json)


@app.command("adapter")
def write_adapter(
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    model: Annotated[str | None, typer.Option(help="Folder of the base model. Default: the bundled policy.")] = None,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapter: `lora.rank` of the training run.")] = 16,
) -> None:
    """Write a LoRA adapter that does not change the model.

    Start vLLM with this adapter before a training run that sends new versions of the adapter to vLLM.
    """
    from polar_proxy.engines.factory import POLAR_TINY
    from polar_proxy.training.config import LoraSettings
    from polar_proxy.training.policy import lora
    from polar_proxy.training.policy.model import load_model

    settings = LoraSettings(rank=rank)
    wrapped = lora.wrap(load_model(Path(model).expanduser() if model else POLAR_TINY), settings, seed=0)
    lora.save_adapter(lora.adapter(wrapped), settings, folder)
    print_note(f"{folder}: vllm serve ... --enable-lora --lora-modules NAME={folder}")


async def _train(settings: Settings, config: GrpoConfig, folder: Path, *, quiet: bool) -> None:
    view = TrainingProgressView(config.steps, quiet=quiet)

    def report(line: str) -> None:
        print_note(line)
        view.headline = line

    with view.show():
        from polar_proxy.training import metrics  # takes seconds
        from polar_proxy.training.run import train_locally, train_remotely

        view.resume(_step_lines(metrics.read_lines(folder)))
        if config.feed is not None:
            key = api_key_for(settings.model_copy(update={"url": config.feed}))
            await train_remotely(settings, config, folder, key, report, view)
            return
        async with open_database(settings, create=True) as store:
            await train_locally(settings, config, folder, store, report, view)


def _step_lines(lines: Iterable[Json]) -> list[Json]:
    return [line for line in lines if line["kind"] == "step"]


def _run_folder(settings: Settings, run: str) -> Path:
    """Return the folder of a run: `run` itself if it has a slash, else the folder of this name in the Polar home."""
    return Path(run).expanduser() if "/" in run else settings.home / "runs" / run


def _draw(folder: Path, png: Path) -> None:
    from polar_proxy.training import metrics

    picture = metrics.draw(metrics.run_summary(folder)["series"], folder.name)
    try:
        png.write_bytes(picture)
    except OSError as error:
        raise UsageError(f"Cannot write {png}: {error.strerror}.") from error


def _print_run(folder: Path, *, as_json: bool) -> None:
    from polar_proxy.training import metrics

    found = metrics.run_summary(folder)
    steps = _step_lines(metrics.read_lines(folder))
    planned = metrics.planned_steps(folder)
    left = None if planned is None or not steps else seconds_left(steps, planned)
    found |= {"planned_steps": planned, "seconds_left": left}
    print_result(found, lambda: _print_steps(steps, found), as_json)


def _print_steps(all_steps: list[Json], found: Json) -> None:
    steps = all_steps[-_SHOWN_STEPS:]
    names = ("reward", "reward_interval", "solved_share", "entropy", "approx_kl", "clipped_share", "mismatch_max")
    rows = (
        (
            line["step"],
            *(format_number(line.get(name), ".3g") for name in names),
            line["trained_tokens"],
            f"{line['waiting_seconds'] + line['training_seconds']:.1f}",
        )
        for line in steps
    )
    columns = ("step", "reward", "+-", "solved", "entropy", "kl", "clipped", "mismatch", "trained", "s")
    out.print(make_table(columns, rows, right=columns))
    if all_steps:
        out.print(curve_table(all_steps))
    for one in found["heldout"]:
        out.print(f"held-out reward after {one['step']} steps: {format_number(one['reward'], '.3g')}")
    total = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in found["seconds"].items())
    out.print(f"time: {total}")
    mean = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found["seconds_per_step"].items())
    share = found["engine_busy_share"]
    busy = "" if share is None else f"; engine busy {share:.0%} of the time"
    out.print(f"mean per step: {mean}{busy}")
    for line in left_out_lines(all_steps):
        out.print(line)
    if found["planned_steps"] is not None and found["seconds_left"]:
        left = format_seconds(found["seconds_left"])
        out.print(f"step {found['steps']} of {found['planned_steps']}, about {left} left")
    out.print(f"checkpoint: {found['checkpoint']}", soft_wrap=True)
