"""`polar train`: train a policy, and report on training runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from polar_proxy.cli import common, connect
from polar_proxy.cli.common import DbOption, JsonOption
from polar_proxy.cli.connect import UrlOption
from polar_proxy.config import Settings
from polar_proxy.errors import UsageError

if TYPE_CHECKING:
    from polar_proxy.training.config import GrpoConfig

app = typer.Typer(no_args_is_help=True, help="Train a policy on rollouts that Polar runs.")


@app.command("grpo")
def grpo(
    config: Annotated[
        Path | None, typer.Option(help="TOML file with [grpo], and [engine], [run], [gateway] as in polar.toml.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Name or folder of the run; an existing run is resumed. Default: a new run.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Task family, file or folder, as for `polar run`.")] = None,
    engine: Annotated[str | None, typer.Option(help="local or vllm.")] = None,
    engine_url: Annotated[str | None, typer.Option(help="Address of vLLM.")] = None,
    model: Annotated[str | None, typer.Option(help="local: a folder; vllm: the served name.")] = None,
    weights: Annotated[str | None, typer.Option(help="Folder of the initial weights (needed for vllm).")] = None,
    harness: Annotated[str | None, typer.Option(help="Harness of the agent.")] = None,
    sandbox: Annotated[str | None, typer.Option(help="auto, docker, bubblewrap or process.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Number of rollouts at a time.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Time limit of the agent in seconds.")] = None,
    feed: Annotated[
        str | None,
        typer.Option(help="Lease groups from the feed of this server; rollouts run there, steps here."),
    ] = None,
    submit_jobs: Annotated[
        bool | None, typer.Option("--submit-jobs", help="With --feed: also submit the rollout jobs to the server.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
    groups: Annotated[int | None, typer.Option(min=1, help="Groups per step.")] = None,
    samples: Annotated[int | None, typer.Option(min=2, help="Rollouts per group.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    loss: Annotated[str | None, typer.Option(help="By name (docs/reference/algorithms.md).")] = None,
    advantage: Annotated[str | None, typer.Option(help="By name (docs/reference/algorithms.md).")] = None,
    max_async_steps: Annotated[
        int | None, typer.Option(min=0, help="Steps that rollouts may run ahead of training; 0: synchronous.")
    ] = None,
    eval_every: Annotated[
        int | None, typer.Option(min=0, help="Evaluate on held-out instances every N steps; 0: never.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the order of instances.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE: any setting of [grpo], such as lora.rank=16. Repeatable."),
    ] = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a policy with GRPO.

    Flags override the settings of the file. Run the command again to resume a run that was killed.
    """
    from polar_proxy.training.config import make_config, read_assignments, read_toml

    own, tables = read_toml(config) if config is not None else ({}, {})
    if unknown := tables.keys() - {"engine", "run", "gateway"}:
        raise UsageError(
            f"{config} has unknown tables: {', '.join(sorted(unknown))}. Known are grpo, engine, run and gateway."
        )
    sections: dict[str, dict[str, Any]] = {
        "engine": {"kind": engine, "url": engine_url, "model": model},
        "run": {"harness": harness, "sandbox": sandbox, "concurrency": concurrency, "timeout": timeout},
        "gateway": {},
    }
    settings = common.load_settings(
        db, **{name: {**tables.get(name, {}), **_given(flags)} for name, flags in sections.items()}
    )
    flags = {"task": task, "weights": weights, "steps": steps, "groups": groups, "samples": samples}
    more = {"learning_rate": lr, "loss": loss, "advantage": advantage, "eval_every": eval_every}
    more |= {"feed": feed, "submit_jobs": submit_jobs, "max_async_steps": max_async_steps}
    chosen = make_config(own, flags, more, {"seed": seed}, read_assignments(setting or ()))
    folder = _folder(settings, run or time.strftime("grpo-%Y%m%d-%H%M%S"))
    common.err.print(f"run: {folder}", highlight=False, soft_wrap=True)
    common.run_async(_train(settings, chosen, folder))
    _show(folder, as_json=as_json)


@app.command("status")
def status(
    run: Annotated[str, typer.Argument(help="Name or folder of a run.")],
    png: Annotated[Path | None, typer.Option(help="Draw the curves into this file (needs matplotlib).")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the steps, rewards, held-out rewards, skipped rollouts and time of a run.

    With --json, `series` holds every curve as lists with one value per step.
    """
    folder = _folder(common.load_settings(), run)
    if png is not None:
        _draw(folder, png)
    _show(folder, as_json=as_json)


@app.command("list")
def listed(url: UrlOption = None, db: DbOption = None, as_json: JsonOption = False) -> None:
    """List the training runs of the database or a server, newest first."""
    found = connect.call(connect.load_settings(url, db), lambda client: client.training_runs())
    if as_json:
        common.print_json(found.model_dump())
        return
    table = Table("run", "name", "steps", "last line", box=None)
    for run in found.runs:
        at = "-" if run.updated_at is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.updated_at))
        table.add_row(run.run_id, escape(run.name), str(run.step), at)
    common.out.print(table)


@app.command("adapter")
def adapter(
    folder: Annotated[Path, typer.Argument(help="Folder to write.")],
    model: Annotated[str | None, typer.Option(help="Folder of the base model; default: the bundled policy.")] = None,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapter, as in `lora = {rank = ...}`.")] = 16,
) -> None:
    """Write an initial LoRA adapter (equal to the base model) for vLLM to serve and a run to reload."""
    from polar_proxy.engines.factory import POLAR_TINY
    from polar_proxy.training import lora
    from polar_proxy.training.config import LoraSettings
    from polar_proxy.training.model import load_model

    settings = LoraSettings(rank=rank)
    policy = lora.wrap(load_model(Path(model).expanduser() if model else POLAR_TINY), settings, seed=0)
    lora.save_adapter(lora.adapter(policy), settings, folder)
    common.err.print(
        f"{folder}: vllm serve ... --enable-lora --lora-modules NAME={folder}", highlight=False, soft_wrap=True
    )


async def _train(settings: Settings, config: GrpoConfig, folder: Path) -> None:
    from polar_proxy.training.remote import train_remotely
    from polar_proxy.training.run import train_locally

    def report(line: str) -> None:
        common.err.print(escape(line), highlight=False, soft_wrap=True)

    if config.feed is not None:
        key = connect.key_for(settings.model_copy(update={"url": config.feed}))
        await train_remotely(settings, config, folder, key, report)
        return
    async with common.writer(settings) as store:
        await train_locally(settings, config, folder, store, report)


def _folder(settings: Settings, run: str) -> Path:
    """Return the folder of a run: in the Polar home for a name, else the given path (anything with a slash)."""
    return Path(run).expanduser() if "/" in run else settings.home / "runs" / run


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def _draw(folder: Path, png: Path) -> None:
    from polar_proxy.training import curves, metrics

    picture = curves.draw(metrics.run_summary(folder)["series"], folder.name)
    try:
        png.write_bytes(picture)
    except OSError as error:
        raise UsageError(f"Cannot write {png}: {error.strerror}.") from error


def _show(folder: Path, *, as_json: bool) -> None:
    from polar_proxy.training import metrics

    summary = metrics.run_summary(folder)
    if as_json:
        common.print_json(summary)
        return
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for name in ("step", "reward", "+-", "solved", "entropy", "kl", "clipped", "mismatch", "trained", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in [line for line in metrics.read_lines(folder) if line["kind"] == "step"][-20:]:
        names = ("reward", "reward_interval", "solved_share", "entropy", "approx_kl", "clipped_share", "mismatch_max")
        seconds = line["waiting_seconds"] + line["training_seconds"]
        values = [_number(line.get(name)) for name in names]
        table.add_row(str(line["step"]), *values, str(line["trained_tokens"]), f"{seconds:.1f}")
    common.out.print(table)
    for line in summary["heldout"]:
        common.out.print(f"held-out reward after {line['step']} steps: {_number(line['reward'])}", highlight=False)
    totals = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in summary["seconds"].items())
    common.out.print(f"time: {totals}", highlight=False, soft_wrap=True)
    means = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in summary["seconds_per_step"].items())
    share = summary["engine_busy_share"]
    busy = "" if share is None else f"; engine busy {share:.0%} of the time"
    common.out.print(f"per step: {means}{busy}", highlight=False, soft_wrap=True)
    if summary["skipped"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in summary["skipped"].items())
        common.out.print(f"rollouts skipped: {reasons}", highlight=False)
    common.out.print(f"checkpoint: {summary['checkpoint']}", highlight=False, soft_wrap=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
