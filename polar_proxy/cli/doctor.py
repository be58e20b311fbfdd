"""`polar doctor` checks the installation; `polar doctor drift` explains prompts that differ from the sampled tokens."""

from __future__ import annotations

import asyncio
import importlib.metadata
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape

from polar_proxy.cli.common import (
    DbOption,
    EngineOption,
    EngineUrlOption,
    JsonOption,
    ModelOption,
    load_settings,
    open_existing,
    run_async,
)
from polar_proxy.cli.harness import require_sandbox_kind
from polar_proxy.cli.output import out, print_check, print_json
from polar_proxy.config import Settings
from polar_proxy.errors import PolarError, UsageError

if TYPE_CHECKING:
    from polar_proxy.conformance.fidelity import FidelityRow
    from polar_proxy.engines.base import Engine
    from polar_proxy.traces.drift import DriftCause
    from polar_proxy.types import EngineInfo, Json

app = typer.Typer(invoke_without_command=True)


@dataclass(frozen=True, slots=True)
class InstallCheck:
    """The result of one check of `polar doctor`."""

    name: str
    state: Literal["ok", "missing", "failed"]
    detail: str
    fix: str = ""
    needed: bool = False
    """The demo of Polar cannot run without it."""


@app.callback()
def doctor(
    context: typer.Context,
    engine_url: Annotated[str | None, typer.Option(help="Also check the vLLM server at this URL.")] = None,
    db: DbOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what is installed, what is missing and how to get it. The exit code is 1 if a required part is missing."""
    if context.invoked_subcommand is not None:
        return
    settings = load_settings(db, engine={"url": engine_url})
    checks = run_async(_checks(settings, engine_url))
    failed = [check for check in checks if check.needed and check.state != "ok"]
    if as_json:
        print_json({"ok": not failed, "checks": [asdict(check) for check in checks]})
    else:
        for check in checks:
            print_check(check.name, check.state, check.detail, check.fix)
    if failed:
        raise typer.Exit(1)


async def _checks(settings: Settings, engine_url: str | None) -> list[InstallCheck]:
    checks = [
        _python(),
        _program("git", "install git with your system's package manager", needed=True),
        _package("torch", "the local engine", "pip install 'polar-proxy[local]'"),
        _package("transformers", "the local engine", "pip install 'polar-proxy[local]'"),
        _package("aiodocker", "the docker sandbox", "pip install 'polar-proxy[docker]'"),
        _package("asyncpg", "PostgreSQL", "pip install 'polar-proxy[postgres]'"),
        _bundled_policy(),
        *_sandboxes(),
        *_harnesses(settings),
        await _database(settings),
    ]
    return checks + (await _engine(settings) if engine_url else [])


def _python() -> InstallCheck:
    version = ".".join(map(str, sys.version_info[:3]))
    state: Literal["ok", "failed"] = "ok" if sys.version_info >= (3, 11) else "failed"
    return InstallCheck("python", state, version, "Polar needs Python 3.11 or newer", needed=True)


def _program(name: str, fix: str, *, needed: bool = False) -> InstallCheck:
    path = shutil.which(name)
    return InstallCheck(name, "ok" if path else "missing", path or "not on PATH", fix, needed)


def _package(name: str, purpose: str, fix: str) -> InstallCheck:
    try:
        return InstallCheck(name, "ok", f"{importlib.metadata.version(name)} (for {purpose})")
    except importlib.metadata.PackageNotFoundError:
        return InstallCheck(name, "missing", f"not installed (for {purpose})", fix)


def _bundled_policy() -> InstallCheck:
    from polar_proxy.engines.factory import POLAR_TINY

    weights = POLAR_TINY / "model.safetensors"
    if weights.is_file():
        return InstallCheck("polar-tiny", "ok", f"bundled policy, {weights.stat().st_size / 1e6:.1f} MB")
    return InstallCheck("polar-tiny", "missing", f"no weights in {POLAR_TINY}", "reinstall Polar")


def _sandboxes() -> list[InstallCheck]:
    from sandboxes import available

    return [
        InstallCheck(
            f"sandbox {item.kind}", "ok" if item.ok else "missing", item.why_not or "usable", item.how_to_get or ""
        )
        for item in available()
    ]


def _harnesses(settings: Settings) -> list[InstallCheck]:
    from harness_adapters.base import get_adapter, list_adapters

    checks = []
    for name in list_adapters():
        adapter = get_adapter(name)
        ready = adapter.is_installed(settings.harness_cache)
        detail = f"{adapter.default_version} " + ("installed" if ready else "is installed at its first run")
        checks.append(
            InstallCheck(f"harness {name}", "ok" if ready else "missing", detail, "nothing to do: `polar run` does it")
        )
    return checks


async def _database(settings: Settings) -> InstallCheck:
    try:
        async with open_existing(settings) as store:
            return InstallCheck("database", "ok", f"{store.display_url}, schema {await store.schema_revision()}")
    except PolarError as error:
        fix = "`polar db upgrade` creates it, and so do `polar run` and `polar serve`"
        return InstallCheck("database", "missing", str(error), fix)


async def _engine(settings: Settings) -> list[InstallCheck]:
    from polar_proxy.engines.factory import make_engine

    try:
        async with make_engine(settings.engine.model_copy(update={"kind": "vllm"})) as engine:
            info = engine.info
            capabilities = ", ".join(sorted(info.capabilities))
            detail = f"{info.engine} {info.version}, {info.model}, {info.logprob_mode}: {capabilities}"
            problem = engine.continue_problem
    except PolarError as error:
        return [InstallCheck("engine", "failed", str(error), "start the server, or correct --engine-url")]
    if problem is None:
        continuation = InstallCheck("continue mode", "ok", "turns begin with the exact tokens of the turn before")
    else:
        continuation = InstallCheck("continue mode", "missing", problem)
    return [InstallCheck("engine", "ok", detail), continuation]


@app.command("drift")
def drift(
    harness: Annotated[str, typer.Option(help="NAME[@VERSION] or module:Class.")],
    model: ModelOption = None,
    engine: EngineOption = None,
    engine_url: EngineUrlOption = None,
    turns: Annotated[int, typer.Option(min=2, help="Stop the harness after N model calls.")] = 8,
    task: Annotated[
        str | None, typer.Option(help="The instruction for the agent. Default: a small task with several commands.")
    ] = None,
    awkward: Annotated[
        bool,
        typer.Option("--awkward", help="Prescribe awkward answers. With vllm: needs the plugin (scripts/fidelity.sh)."),
    ] = False,
    sandbox: Annotated[str, typer.Option(help="auto, docker, bubblewrap or process.")] = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that the agent may run.")] = 300.0,
    as_json: JsonOption = False,
) -> None:
    """Run a harness for some turns in render mode, and show where and why its prompts differ from the sampled tokens.

    Nothing is written to your database. The exit code is 0 with or without drift, and 1 if the harness called no model.
    """
    require_sandbox_kind(sandbox)
    settings = load_settings(None, engine={"kind": engine, "url": engine_url, "model": model})
    scripted = awkward or settings.engine.kind == "scripted"
    row, info = run_async(_watch_drift(settings, harness, turns, task, scripted, sandbox, timeout))
    if as_json:
        print_json(_drift_json(row, info))
    else:
        _print_drift(row, info)
    if row.fault is not None:
        raise typer.Exit(1)


async def _watch_drift(
    settings: Settings, harness: str, turns: int, task: str | None, scripted: bool, sandbox: str, timeout: float
) -> tuple[FidelityRow, EngineInfo]:
    from harness_adapters.base import HarnessError, get_adapter, split_version
    from polar_proxy.conformance import ScenarioRunner
    from polar_proxy.conformance.fidelity import TASK, measure_drift
    from polar_proxy.store import open_store
    from sandboxes import choose

    engine = _drift_engine(settings, scripted)
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
            ScenarioRunner(engine, store, choice.kind, prompt_mode="render") as runner,
        ):
            row = await measure_drift(
                runner,
                store,
                adapter,
                installed,
                turns=turns,
                task=task or TASK,
                scripted=scripted,
                seconds=timeout,
            )
            return row, engine.info


def _drift_engine(settings: Settings, scripted: bool) -> Engine:
    from polar_proxy.conformance.fidelity import ForcedVllmEngine
    from polar_proxy.engines.factory import make_engine

    if scripted and settings.engine.kind == "vllm":
        if not settings.engine.url:
            raise UsageError("--engine vllm needs --engine-url, such as http://127.0.0.1:8000.")
        return ForcedVllmEngine(settings.engine.url, model=settings.engine.model)
    if scripted and settings.engine.kind != "scripted":
        raise UsageError("--awkward needs --engine vllm (started by scripts/fidelity.sh) or scripted.")
    return make_engine(settings.engine)


def _drift_json(row: FidelityRow, info: EngineInfo) -> Json:
    from polar_proxy.traces.drift import CAUSE_FIXES

    verdict = "drift" if row.drifted else "no_drift" if row.bases else "nothing_to_compare"
    first = row.differences[0] if row.differences else None
    return {
        "harness": row.harness,
        "version": row.version,
        "engine": info.engine,
        "model": info.model,
        "can_continue": "continue" in info.capabilities,
        "verdict": verdict,
        "calls": row.calls,
        "bases": row.bases,
        "drifted": row.drifted,
        "causes": row.causes,
        "fixes": {cause: CAUSE_FIXES[cause] for cause in _drift_causes(row)},
        "first": None if first is None else {name: getattr(first, name) for name in first.__slots__},
        "outcomes": row.outcomes,
        "fault": row.fault,
    }


def _drift_causes(row: FidelityRow) -> list[DriftCause]:
    return list(dict.fromkeys(cause for difference in row.differences for cause in difference.causes))


def _print_drift(row: FidelityRow, info: EngineInfo) -> None:
    from polar_proxy.traces.drift import CAUSE_FIXES, CAUSE_MEANINGS

    if row.fault is not None:
        out.print(f"[red]{escape(row.harness)}[/]: {escape(row.fault)}")
        return
    out.print(
        f"[bold]{escape(row.harness)}[/] {row.version} with {escape(info.model)} on {info.engine}, render mode: "
        f"{row.calls} calls; {row.bases} continue an earlier answer, and {row.drifted} of these left its tokens."
    )
    if not row.bases:
        out.print("Nothing to compare: no call continued an answer. Try another --task, or a model that calls tools.")
        return
    if not row.differences:
        out.print("[green]No drift[/]: every prompt begins with exactly the sampled tokens.")
        return
    first = row.differences[0]
    position = "before the answer" if first.in_answer is None else f"token {first.in_answer} of the answer"
    out.print(f"\n[bold]the first difference[/]: token {first.position} of the prompt ({position})")
    out.print(f"  before   {escape(repr(first.before))}")
    out.print(f"  sampled  {escape(_token_texts(first.sampled))}")
    out.print(f"  rendered {escape(_token_texts(first.rendered))}")
    out.print("\n[bold]causes[/]")
    for causes, count in row.causes.items():
        out.print(f"  {count} x {causes}")
    out.print("\n[bold]what they mean, and how to fix them[/]")
    for cause in _drift_causes(row):
        out.print(f"  [bold]{cause}[/]: {CAUSE_MEANINGS[cause]}.")
        out.print(f"    -> {escape(CAUSE_FIXES[cause])}")
    if "continue" not in info.capabilities:
        out.print(f"\nThis engine ({info.engine}) cannot continue from tokens: `polar doctor --engine-url` says why.")


def _token_texts(texts: tuple[str, ...]) -> str:
    return " ".join(map(repr, texts)) or "(nothing)"
