"""`polar doctor drift`: does a harness, with a model, give back the tokens that were sampled? Where not, and why."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Annotated

import typer
from rich.markup import escape

from harness_adapters.base import HarnessError, get_adapter, split_version
from polar_proxy.cli import common
from polar_proxy.cli.common import JsonOption
from polar_proxy.config import Settings
from polar_proxy.conformance.fidelity import ExplainedDrift, FidelityRow, ForcedVllmEngine
from polar_proxy.conformance.fidelity.watch import TASK, watch
from polar_proxy.conformance.runner import ScenarioRunner
from polar_proxy.engines.base import Engine
from polar_proxy.engines.factory import make_engine
from polar_proxy.errors import UsageError
from polar_proxy.store import open_store
from polar_proxy.traces.drift_causes import CAUSE_FIXES, CAUSE_MEANINGS, DriftCause
from polar_proxy.types import EngineInfo, Json
from sandboxes import choose


def drift(
    harness: Annotated[str, typer.Option(help="NAME[@VERSION] or module:Class.")],
    model: Annotated[str | None, typer.Option(help="vllm: the served name; local: a folder.")] = None,
    engine: Annotated[str | None, typer.Option(help="vllm, local, scripted, or module:Class.")] = None,
    engine_url: Annotated[str | None, typer.Option(help="Where the engine listens (vllm).")] = None,
    turns: Annotated[int, typer.Option(min=2, help="Model calls after which the harness is stopped.")] = 8,
    task: Annotated[str, typer.Option(help="What the agent is asked to do.")] = TASK,
    awkward: Annotated[
        bool, typer.Option("--awkward", help="Given answers instead of the model's; vllm needs the plugin for it.")
    ] = False,
    sandbox: Annotated[str, typer.Option(help="auto, docker, bubblewrap or process.")] = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds the agent may take.")] = 300.0,
    as_json: JsonOption = False,
) -> None:
    """Run a harness for some turns in render mode and show where its prompts leave the sampled tokens, and why.

    Nothing is written to your database. Exit code 0 whether there is drift or not; 1 when the harness asked no model.
    """
    settings = common.load_settings(None, engine={"kind": engine, "url": engine_url, "model": model})
    if sandbox not in ("auto", "docker", "bubblewrap", "process"):
        raise UsageError(f"There is no sandbox {sandbox!r}: auto, docker, bubblewrap or process.")
    given = awkward or settings.engine.kind == "scripted"
    row, info = common.run_async(_run(settings, harness, turns, task, given, sandbox, timeout))
    if as_json:
        common.print_json(_document(row, info))
    else:
        _print(row, info)
    if row.fault is not None:
        raise typer.Exit(1)


async def _run(
    settings: Settings, harness: str, turns: int, task: str, given: bool, sandbox: str, timeout: float
) -> tuple[FidelityRow, EngineInfo]:
    engine = _engine(settings, given)
    name, version = split_version(harness)
    try:
        adapter = get_adapter(name)
        installed = await asyncio.to_thread(adapter.install, settings.harness_cache, version)
    except (HarnessError, TypeError) as error:
        raise UsageError(str(error)) from error
    choice = await asyncio.to_thread(choose, sandbox)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory(prefix="polar-drift-") as folder:
        async with (
            open_store(f"sqlite:///{folder}/drift.db") as store,
            ScenarioRunner(engine, store, choice.kind, prompt_mode="render") as bench,
        ):
            row = await watch(bench, store, adapter, installed, turns=turns, task=task, scripted=given, seconds=timeout)
            return row, engine.info


def _engine(settings: Settings, given: bool) -> Engine:
    if given and settings.engine.kind == "vllm":
        if not settings.engine.url:
            raise UsageError("--engine vllm needs --engine-url, such as http://127.0.0.1:8000.")
        return ForcedVllmEngine(settings.engine.url, model=settings.engine.model)
    if given and settings.engine.kind != "scripted":
        raise UsageError("--awkward needs --engine vllm (started by scripts/fidelity.sh) or scripted.")
    return make_engine(settings.engine)


def _verdict(row: FidelityRow) -> str:
    if row.drifted:
        return "drift"
    return "no_drift" if row.bases else "nothing_to_compare"


def _document(row: FidelityRow, info: EngineInfo) -> Json:
    first = row.differences[0] if row.differences else None
    return {
        "harness": row.harness,
        "version": row.version,
        "engine": info.engine,
        "model": info.model,
        "can_continue": "continue" in info.capabilities,
        "verdict": _verdict(row),
        "calls": row.calls,
        "bases": row.bases,
        "drifted": row.drifted,
        "causes": row.causes,
        "fixes": {cause: CAUSE_FIXES[cause] for cause in _causes(row)},
        "first": None if first is None else {name: getattr(first, name) for name in first.__slots__},
        "outcomes": row.outcomes,
        "fault": row.fault,
    }


def _causes(row: FidelityRow) -> list[DriftCause]:
    return list(dict.fromkeys(cause for difference in row.differences for cause in difference.causes))


def _print(row: FidelityRow, info: EngineInfo) -> None:
    say = common.out.print
    if row.fault is not None:
        say(f"[red]{escape(row.harness)}[/]: {escape(row.fault)}", highlight=False)
        return
    say(
        f"[bold]{escape(row.harness)}[/] {row.version} with {escape(info.model)} on {info.engine}, render mode: "
        f"{row.calls} calls, {row.bases} go on with an earlier answer, "
        f"{row.drifted} of these left its tokens.",
        highlight=False,
    )
    if not row.bases:
        say("Nothing to compare: no call went on with an answer. Try another --task, or a model that calls tools.")
        return
    if not row.differences:
        say("[green]No drift[/]: every prompt begins with exactly the tokens that were sampled.")
        return
    _print_first(row.differences[0])
    say("\n[bold]causes[/]", highlight=False)
    for named, number in row.causes.items():
        say(f"  {number} x {named}", highlight=False)
    say("\n[bold]what it means, and what fixes it[/]", highlight=False)
    for cause in _causes(row):
        say(f"  [bold]{cause}[/]: {CAUSE_MEANINGS[cause]}.", highlight=False)
        say(f"    -> {escape(CAUSE_FIXES[cause])}", highlight=False)
    if "continue" not in info.capabilities:
        say(f"\nThis engine ({info.engine}) cannot continue from tokens: `polar doctor --engine-url` says why.")


def _print_first(first: ExplainedDrift) -> None:
    say = common.out.print
    where = "before the answer" if first.in_answer is None else f"token {first.in_answer} of the answer"
    say(f"\n[bold]the first difference[/]: token {first.position} of the prompt ({where})", highlight=False)
    say(f"  before   {escape(repr(first.before))}", highlight=False)
    say(f"  sampled  {escape(_tokens(first.sampled))}", highlight=False)
    say(f"  rendered {escape(_tokens(first.rendered))}", highlight=False)


def _tokens(texts: tuple[str, ...]) -> str:
    return " ".join(map(repr, texts)) or "(nothing)"
