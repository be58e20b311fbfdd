"""`polar conformance`: run the real agents against the real gateway, measure what arrives, and write the tables."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from polar_proxy.cli.common import EngineUrlOption, JsonOption, ModelOption, load_settings, run_async
from polar_proxy.cli.harness import require_sandbox_kind
from polar_proxy.cli.output import err, make_table, out, print_json
from polar_proxy.config import Settings
from polar_proxy.errors import UsageError
from polar_proxy.types import Json

if TYPE_CHECKING:
    from harness_adapters.base import HarnessAdapter
    from polar_proxy.conformance import HarnessRow, ScenarioRunner
    from polar_proxy.conformance.fidelity import FidelityJob
    from polar_proxy.engines.base import Engine

_COLOURS = {"ok": "green", "failed": "red", "n/a": "dim", "gives up": "cyan", "not run": "yellow"}


@dataclass(frozen=True, slots=True)
class ConformanceOptions:
    """The options of both measurements."""

    adapters: list[tuple[HarnessAdapter, str | None]]
    """Each adapter with the requested version, if any."""
    sandbox: str
    patience: float
    out_dir: Path | None


def conformance(
    harness: Annotated[
        list[str] | None, typer.Option(help="NAME[@VERSION] or module:Class. Repeatable. Default: all harnesses.")
    ] = None,
    engine: Annotated[str, typer.Option(help="scripted, local, vllm, or module:Class.")] = "scripted",
    engine_url: EngineUrlOption = None,
    model: ModelOption = None,
    check: Annotated[list[str] | None, typer.Option(help="Make only this check; write no file. Repeatable.")] = None,
    sandbox: Annotated[str, typer.Option(help="auto, docker, bubblewrap or process.")] = "auto",
    slow: Annotated[float, typer.Option(min=0, help="Delay of a slow first byte, in seconds.")] = 20.0,
    patience: Annotated[float, typer.Option(min=0.1, help="Factor for all time limits.")] = 1.0,
    out_dir: Annotated[
        Path | None,
        typer.Option(help="Folder of conformance.md and .json. Default with the scripted engine: benchmarks/results."),
    ] = None,
    fidelity: Annotated[
        bool, typer.Option("--fidelity", help="Measure token drift instead. With vllm: see scripts/fidelity.sh.")
    ] = False,
    template: Annotated[
        list[str] | None, typer.Option(help="With --fidelity: keeps or strips. Repeatable. Default: both.")
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="With --fidelity: agents at a time.")] = 1,
    as_json: JsonOption = False,
) -> None:
    """Run the real agents through Polar and measure what arrives: calls, edges, retries, losses.

    Writes conformance.md and conformance.json; harnesses that are not run keep their rows there. Most checks need the
    scripted engine. The exit code is 0 if no check failed and no call was lost or doubled.

    --fidelity plays other answers, in both prompt modes, counts the training sequences that drift splits, and writes
    fidelity.md and fidelity.json. The exit code is 0 if drift split no sequence in continue mode.
    """
    from polar_proxy.conformance import CHECK_NAMES, is_good
    from polar_proxy.conformance.fidelity import is_good as is_faithful

    checks = check or list(CHECK_NAMES)
    if unknown := [name for name in checks if name not in CHECK_NAMES]:
        raise UsageError(f"There is no check {unknown[0]!r}: choose {', '.join(CHECK_NAMES)}.")
    require_sandbox_kind(sandbox)
    settings = load_settings(None, engine={"kind": engine, "url": engine_url, "model": model})
    adapters = _get_adapters(harness or ["all"])
    if fidelity:
        options = ConformanceOptions(adapters, sandbox, patience, out_dir)
        found = run_async(_measure_fidelity(settings, options, template, concurrency))
        good = is_faithful(found)
        show: Callable[[Json], None] = _print_fidelity
        files = "fidelity"
    else:
        if check:
            out_dir = None
        elif out_dir is None and engine == "scripted":
            out_dir = Path("benchmarks/results")
        options = ConformanceOptions(adapters, sandbox, patience, out_dir)
        found = run_async(_measure(settings, options, checks, slow))
        good = all(is_good(row) for row in found["harnesses"])
        show, files = _print_table, "conformance"
    if as_json:
        print_json(found)
    else:
        show(found)
        if out_dir is not None:
            out.print(f"written: {out_dir}/{files}.md, {out_dir}/{files}.json")
    if not good:
        raise typer.Exit(1)


def _get_adapters(names: list[str]) -> list[tuple[HarnessAdapter, str | None]]:
    from harness_adapters.base import HarnessError, get_adapter, list_adapters, split_version
    from polar_proxy.conformance import PROFILES

    if "all" in names:
        names = [name for name in PROFILES if name in list_adapters()]
    try:
        return [(get_adapter(bare), version) for bare, version in map(split_version, names)]
    except (HarnessError, TypeError) as error:
        raise UsageError(str(error)) from error


# Conformance


async def _measure(settings: Settings, options: ConformanceOptions, checks: list[str], slow: float) -> Json:
    """Run one harness at a time. The files are written after each, so that an interruption keeps the rows so far."""
    from polar_proxy.conformance import ScenarioRunner, document, merged, save
    from polar_proxy.engines.factory import make_engine
    from polar_proxy.store import open_store
    from sandboxes import choose

    choice = await asyncio.to_thread(choose, options.sandbox)  # type: ignore[arg-type]
    engine = make_engine(settings.engine)
    found: Json = {"schema": 1, "harnesses": []}
    with tempfile.TemporaryDirectory(prefix="polar-conformance-") as folder:
        async with (
            open_store(f"sqlite:///{folder}/conformance.db") as store,
            ScenarioRunner(engine, store, choice.kind, patience=options.patience) as runner,
        ):
            for number, (adapter, version) in enumerate(options.adapters, 1):
                title = f"{number}/{len(options.adapters)} {adapter.name}"
                row = await _measure_harness(runner, settings, adapter, version, checks, slow, title)
                new = document([row], engine=engine.info, sandbox=choice.kind, slow=slow)
                found = merged(found, new)
                if options.out_dir is not None:
                    await asyncio.to_thread(save, options.out_dir, new)
    return found


async def _measure_harness(
    runner: ScenarioRunner,
    settings: Settings,
    adapter: HarnessAdapter,
    version: str | None,
    checks: list[str],
    slow: float,
    title: str,
) -> HarnessRow:
    from polar_proxy.conformance import install_and_measure

    with err.status(escape(title)) as status:

        def progress(text: str) -> None:
            status.update(escape(f"{title}: {text}"))
            if not err.is_terminal:
                err.print(f"{title}: {text}", markup=False)

        row = await install_and_measure(
            runner, adapter, version, checks, cache=settings.harness_cache, slow=slow, progress=progress
        )
    state = "[green]ok[/]" if row.good else "[red]failed[/]"
    counts = f"{row.calls} calls, {row.lost} lost, {row.doubled} doubled, {row.seconds:.0f} s"
    err.print(f"{escape(title)} {escape(row.version)}: {state} ({counts})")
    return row


def _print_table(found: Json) -> None:
    for row in found["harnesses"]:
        counts = f"{row['calls']} calls, {row['lost']} lost, {row['doubled']} doubled"
        heading = f"({row['dialect']}, streamed: {row['streamed']}, {counts})"
        out.print(f"[bold]{escape(row['name'])}[/] {row['version']} {heading}")
        table = make_table("", "check", "result", "detail", wrap=("detail",))
        table.show_header = False
        for name, result in row["checks"].items():
            colour = _COLOURS[result["status"]]
            table.add_row("", name, f"[{colour}]{result['status']}[/]", escape(result["detail"]))
        out.print(table)


# Fidelity


async def _measure_fidelity(
    settings: Settings, options: ConformanceOptions, templates: list[str] | None, concurrency: int
) -> Json:
    """Play all jobs. The files are written after each, so that an interruption keeps the rows so far."""
    from polar_proxy.conformance.fidelity import (
        CUT_EVERY,
        TEMPLATES,
        ForcedVllmEngine,
        document,
        merged,
        play,
        save,
    )
    from polar_proxy.engines.scripted import ScriptedEngine
    from sandboxes import choose

    kind, url = settings.engine.kind, settings.engine.url
    if kind not in ("vllm", "scripted"):
        raise UsageError(
            "--fidelity needs an engine whose answers can be prescribed: vllm (scripts/fidelity.sh) or scripted."
        )
    if kind == "vllm" and not url:
        raise UsageError("--engine vllm needs --engine-url; scripts/fidelity.sh starts a server and runs this.")
    if unknown := [name for name in templates or () if name not in TEMPLATES]:
        raise UsageError(f"There is no template {unknown[0]!r}: choose {', '.join(TEMPLATES)}.")
    choice = await asyncio.to_thread(choose, options.sandbox)  # type: ignore[arg-type]
    jobs = await _fidelity_jobs(settings, options, templates or list(TEMPLATES))

    def make_fidelity_engine(template: str) -> Engine:
        if kind == "scripted":
            return ScriptedEngine()
        path = TEMPLATES[template]
        text = None if path is None else path.read_text()
        return ForcedVllmEngine(str(url), model=settings.engine.model, template=text)

    def started(job: FidelityJob) -> None:
        err.print(f"{job.adapter.name}, {job.template}, {job.mode}", markup=False)

    found: Json = {"schema": 1, "rows": []}
    async for played in play(
        jobs, make_fidelity_engine, choice.kind, concurrency=concurrency, patience=options.patience, on_start=started
    ):
        row = played.row
        outcome = (
            row.fault or f"{row.calls} calls, {row.drifted} splits by drift, {row.traces} traces, {row.seconds:.0f} s"
        )
        err.print(f"{row.harness}, {row.template}, {row.mode}: {outcome}", markup=False)
        cut_every = CUT_EVERY if kind == "vllm" else 0
        new = document([row], engine=played.engine, sandbox=choice.kind, cut_every=cut_every)
        found = merged(found, new)
        if options.out_dir is not None:
            await asyncio.to_thread(save, options.out_dir, new)
    return found


async def _fidelity_jobs(settings: Settings, options: ConformanceOptions, templates: list[str]) -> list[FidelityJob]:
    """Return the jobs of all harnesses that can be installed."""
    from harness_adapters.base import HarnessError
    from polar_proxy.conformance.fidelity import MODES, FidelityJob

    jobs = []
    for adapter, version in options.adapters:
        try:
            installed = await asyncio.to_thread(adapter.install, settings.harness_cache, version)
        except HarnessError as error:
            err.print(f"[red]{escape(adapter.name)}[/]: not run: {escape(str(error)[:300])}")
            continue
        jobs += [FidelityJob(adapter, installed, template, mode) for template in templates for mode in MODES]
    return jobs


def _print_fidelity(found: Json) -> None:
    table = make_table("harness", "template", "mode", "calls", "continued", "drift", "traces", "recorded", "trained")
    for row in found["rows"]:
        bad = row["mode"] == "continue" and row["drifted"]
        drift = f"[red]{row['drifted']}[/]" if bad else str(row["drifted"])
        numbers = [str(row[key]) for key in ("traces", "recorded", "trained")]
        table.add_row(
            row["harness"], row["template"], row["mode"], str(row["calls"]), str(row["bases"]), drift, *numbers
        )
    out.print(table)
