"""`polar train`: the attached trainer, and how its runs stand."""

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
from polar_proxy.types import Json

if TYPE_CHECKING:
    from polar_proxy.training.config import GrpoConfig

app = typer.Typer(no_args_is_help=True, help="Train a policy on rollouts of Polar's own.")


@app.command("grpo")
def grpo(
    config: Annotated[
        Path | None, typer.Option(help="TOML file with [grpo], and [engine], [run], [gateway] as in polar.toml.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Name or folder of the run; an existing one is taken up. Default: a new one.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Task family, file or folder, as `polar run` takes it.")] = None,
    engine: Annotated[str | None, typer.Option(help="local or vllm.")] = None,
    engine_url: Annotated[str | None, typer.Option(help="Where vLLM listens.")] = None,
    model: Annotated[str | None, typer.Option(help="local: a folder; vllm: the served name.")] = None,
    weights: Annotated[
        str | None, typer.Option(help="Folder of the weights to begin with (vllm; local: its own).")
    ] = None,
    harness: Annotated[str | None, typer.Option(help="The agent.")] = None,
    sandbox: Annotated[str | None, typer.Option(help="auto, docker, bubblewrap or process.")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Rollouts at a time.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds the agent may take.")] = None,
    feed: Annotated[
        str | None, typer.Option(help="Take groups from this server's feed; rollouts run there, steps here.")
    ] = None,
    ask: Annotated[bool | None, typer.Option("--ask", help="With --feed: submit the rounds' jobs there, too.")] = None,
    steps: Annotated[int | None, typer.Option(min=1)] = None,
    groups: Annotated[int | None, typer.Option(min=1, help="Groups per step.")] = None,
    samples: Annotated[int | None, typer.Option(min=2, help="Rollouts per group.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    loss: Annotated[str | None, typer.Option(help="By name (docs/algorithms.md).")] = None,
    advantage: Annotated[str | None, typer.Option(help="By name (docs/algorithms.md).")] = None,
    ahead: Annotated[int | None, typer.Option(min=0, help="Steps that rollouts may run ahead; 0: synchronous.")] = None,
    eval_every: Annotated[int | None, typer.Option(min=0, help="Evaluate every so many steps; 0: never.")] = None,
    seed: Annotated[int | None, typer.Option(help="Order of instances.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE: any setting of [grpo], such as kl=0.01 or lora.rank=16. Repeatable."),
    ] = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train by GRPO: rollouts, groups from the feed, steps, new weights into the engine.

    Every setting may stand in the file; flags win. A run that was killed goes on when the command is given again.
    """
    from polar_proxy.training.config import make_config, read_assignments, read_toml

    own, tables = read_toml(config) if config is not None else ({}, {})
    if unknown := tables.keys() - {"engine", "run", "gateway"}:
        raise UsageError(f"{config} has tables that are none: {', '.join(sorted(unknown))}.")
    sections: dict[str, dict[str, Any]] = {
        "engine": {"kind": engine, "url": engine_url, "model": model},
        "run": {"harness": harness, "sandbox": sandbox, "concurrency": concurrency, "timeout": timeout},
        "gateway": {},
    }
    settings = common.load_settings(
        db, **{name: {**tables.get(name, {}), **_given(flags)} for name, flags in sections.items()}
    )
    flags = {"task": task, "weights": weights, "steps": steps, "groups": groups, "samples": samples}
    more = {"learning_rate": lr, "loss": loss, "advantage": advantage, "ahead": ahead, "eval_every": eval_every}
    more |= {"feed": feed, "ask": ask}
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
    """How a run stands: steps, rewards, held-out rewards, what was left out, where the time went.

    --json has `series`: every curve as lists, one value a step.
    """
    folder = _folder(common.load_settings(), run)
    if png is not None:
        _draw(folder, png)
    _show(folder, as_json=as_json)


@app.command("list")
def listed(url: UrlOption = None, db: DbOption = None, as_json: JsonOption = False) -> None:
    """Training runs that the database, or a server, was told of: newest first."""
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
    folder: Annotated[Path, typer.Argument(help="Where to write it.")],
    model: Annotated[str | None, typer.Option(help="Folder of the base model; default: the bundled policy.")] = None,
    rank: Annotated[int, typer.Option(min=1, help="As in `lora = {rank = ...}`.")] = 16,
) -> None:
    """Write a LoRA adapter that changes nothing, for a vLLM whose adapter a run will reload."""
    from polar_proxy.engines.factory import POLAR_TINY
    from polar_proxy.training import lora
    from polar_proxy.training.config import LoraSettings
    from polar_proxy.training.model import load_model

    settings = LoraSettings(rank=rank)
    made = lora.wrap(load_model(Path(model).expanduser() if model else POLAR_TINY), settings, seed=0)
    lora.save_adapter(lora.adapter(made), settings, folder)
    common.err.print(
        f"{folder}: vllm serve ... --enable-lora --lora-modules NAME={folder}", highlight=False, soft_wrap=True
    )


async def _train(settings: Settings, config: GrpoConfig, folder: Path) -> None:
    from polar_proxy.cli.attached import train_grpo
    from polar_proxy.cli.fed import train_fed

    train = train_grpo if config.feed is None else train_fed
    await train(settings, config, folder, lambda line: common.err.print(escape(line), highlight=False, soft_wrap=True))


def _folder(settings: Settings, run: str) -> Path:
    """A name is a folder in the Polar home; anything with a slash is a path."""
    return Path(run).expanduser() if "/" in run else settings.home / "runs" / run


def _given(flags: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def summary(folder: Path) -> Json:
    """A run as `--json` prints it. Raises UsageError where there is none."""
    from polar_proxy.training import checkpoint, curves, metrics

    lines = list(metrics.read_lines(folder))
    if not lines:
        raise UsageError(f"There is no run in {folder}.")
    steps = [line for line in lines if line["kind"] == "step"]
    last = checkpoint.latest(folder)
    left_out: dict[str, int] = {}
    for step in steps:
        for reason, left in step["left_out"].items():
            left_out[reason] = left_out.get(reason, 0) + left["rollouts"]
    return {
        "run": str(folder),
        "steps": len(steps),
        "updates": sum(step["updated"] for step in steps),
        "rewards": [step["reward"] for step in steps],
        "heldout": [{"step": line["step"], "reward": line["reward"]} for line in lines if line["kind"] == "eval"],
        "rollouts": sum(step["rollouts"] for step in steps),
        "trained_tokens": sum(step["trained_tokens"] for step in steps),
        "left_out": left_out,
        "dropped_stale": sum(step["dropped_stale"] for step in steps),
        "mismatch_max": max((step["mismatch_max"] for step in steps if step["updated"]), default=None),
        **metrics.time_by_phase(lines),
        "checkpoint": None if last is None else str(last),
        "series": curves.series(lines),
    }


def _draw(folder: Path, png: Path) -> None:
    from polar_proxy.training import curves

    picture = curves.draw(summary(folder)["series"], folder.name)
    try:
        png.write_bytes(picture)
    except OSError as error:
        raise UsageError(f"Cannot write {png}: {error.strerror}.") from error


def _show(folder: Path, *, as_json: bool) -> None:
    from polar_proxy.training import metrics

    told = summary(folder)
    if as_json:
        common.print_json(told)
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
    for held in told["heldout"]:
        common.out.print(f"held out, after {held['step']} steps: {_number(held['reward'])}", highlight=False)
    spent = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in told["seconds"].items())
    common.out.print(f"time: {spent}", highlight=False, soft_wrap=True)
    mean = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in told["seconds_per_step"].items())
    share = told["engine_busy_share"]
    busy = "" if share is None else f"; engine busy {share:.0%} of the time"
    common.out.print(f"a step: {mean}{busy}", highlight=False, soft_wrap=True)
    if told["left_out"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in told["left_out"].items())
        common.out.print(f"rollouts left out: {reasons}", highlight=False)
    common.out.print(f"checkpoint: {told['checkpoint']}", highlight=False, soft_wrap=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
